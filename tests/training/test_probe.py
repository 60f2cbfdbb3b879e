"""What the losses of a task look back on, counted by hand, and where a run measures its gradients."""

import numpy as np
import pytest

from lmapp.config import build
from lmapp.data.tasks import Task
from lmapp.gradients.truncation import UNLIMITED, Truncation
from lmapp.training.probe import bridged, look_back, place

TASK = Task("copy", 10, 15, 3)  # 15 characters, the last three predicted at the steps 11, 12 and 13


def by_hand(task: Task, window: int, cut: int) -> list[int]:
    """For every answer in many records: walk back from its step until a window, a cut or a record begins."""
    found = []
    for record in range(window):
        for answer in range(task.record - 1 - task.answers, task.record - 1):
            step = record * task.record + answer
            steps = 1
            while step % task.record and step % window and step % window % cut:
                step, steps = step - 1, steps + 1
            found.append(steps)
    return found


@pytest.mark.parametrize("window", [15, 30, 7, 10, 20, 64])
@pytest.mark.parametrize("cut", [3, 7, 15, 64])
def test_a_block_cuts_where_it_says(window: int, cut: int) -> None:
    cut = min(cut, window)
    expected = by_hand(TASK, window, cut)
    truncation = Truncation(cut, "block", window)
    assert look_back(TASK, truncation) == (min(expected), max(expected))
    assert bridged(TASK, truncation) == pytest.approx(np.mean([steps > TASK.delay for steps in expected]))


def test_the_other_modes() -> None:
    assert look_back(TASK, Truncation(3, "randomised", 15, keep_probability=0.5)) == (12, 14)
    assert bridged(TASK, Truncation(3, "randomised", 15, keep_probability=0.5)) == 1
    assert look_back(TASK, Truncation(15, "full", 15)) == (UNLIMITED, UNLIMITED)
    assert bridged(TASK, Truncation(15, "full", 15)) == 1
    assert look_back(TASK, Truncation(10, "sliding", 15)) == (10, 10)
    assert bridged(TASK, Truncation(10, "sliding", 15)) == 0
    assert bridged(TASK, Truncation(11, "sliding", 15)) == 1


def test_a_task_is_measured_on_whole_records_and_knows_what_is_cut() -> None:
    config = build({"data": {"task": "copy", "task_delay": 10}})
    ids = np.arange(15 * 20)
    shape, note, windows = place(config, Truncation(15, "block", 15), ids, ids[:0], task=TASK, windows=4, max_lag=None)
    assert shape is not None and windows is not None
    assert note == ""
    assert shape.record
    assert shape.look_back == (12, 14)
    assert windows.shape == (4, 15)
    assert (windows[:, 0] % 15 == 0).all()


def test_too_little_validation_text_means_the_end_of_the_training_text() -> None:
    config, truncation = build({}), Truncation(8, "block", 8)
    train = np.arange(1000)
    shape, note, windows = place(config, truncation, train[:3], train, task=None, windows=2, max_lag=4)
    assert shape is not None and windows is not None
    assert shape.source == "train"
    assert "end of the training text" in note
    assert windows.min() >= 1000 - 2 * shape.length
    assert place(config, truncation, train[:3], train[:3], task=None, windows=2, max_lag=4)[::2] == (None, None)
