"""Where a model's gradients are measured, and what the losses of a task look back on.

Shapes as in `lmapp.gradients.decay`; P characters of a task's record, a of its answer.
"""

from __future__ import annotations

import math

import numpy as np

from lmapp.config import Config
from lmapp.data.tasks import Task
from lmapp.gradients.decay import ProbeShape, probe_shape, probe_windows
from lmapp.gradients.records import record_shape, record_windows
from lmapp.gradients.truncation import Truncation

SEED = 0
"""Of the choice of windows: one for all runs, so that runs of any seed on one text are measured on the same windows."""


def place(
    config: Config,
    truncation: Truncation,
    validation: np.ndarray,
    train: np.ndarray,
    *,
    task: Task | None,
    windows: int,
    max_lag: int | None,
) -> tuple[ProbeShape | None, str, np.ndarray | None]:
    """Where a model's gradients are measured.

    Args:
        config: of its run, whose kind of model counts.
        truncation: of its training.
        validation: ids of the text it is not trained on.
        train: ids of the text it is; of it the end is taken, where the other is too short.
        task: of whose records `validation` is made, if it is.
        windows: N.
        max_lag: K, if it is given.

    Returns:
        The windows' shape, in words what is not as asked for, and the windows; no shape and no windows where nothing
        can be measured.
    """
    if task is not None:
        shape, note = record_shape(
            task.record,
            len(validation) // task.record,
            min(4, task.answers),
            truncation_length=truncation.length,
            windows=windows,
            max_lag=max_lag,
            look_back=look_back(task, truncation),
        )
        return shape, note, record_windows(validation, shape, SEED)
    reach = truncation.look_back
    if config.model.kind == "window":
        reach = config.model.window, config.model.window
    fitted, note = probe_shape(
        len(validation),
        len(train),
        truncation_length=truncation.length,
        windows=windows,
        max_lag=max_lag,
        look_back=reach,
    )
    if fitted is None:
        return None, note, None
    ids = validation if fitted.source == "validation" else train
    return fitted, note, probe_windows(ids, fitted, SEED)


def look_back(task: Task, truncation: Truncation) -> tuple[int, int]:
    """The fewest and the most steps that the loss of an answer's character looks back.

    The states are initial where a record begins, so that nothing lies beyond. The numbers between count as equally
    frequent, which they are nearly.
    """
    if truncation.mode in ("full", "sliding"):
        return truncation.look_back
    reach = _reach(task, truncation)
    return min(reach), max(reach)


def bridged(task: Task, truncation: Truncation) -> float:
    """The share of the answers' characters whose loss looks back over the delay: 0 to 1."""
    if truncation.mode == "full":
        return 1.0
    if truncation.mode == "sliding":
        return float(truncation.look_back[1] > task.delay)
    reach = _reach(task, truncation)
    return sum(steps > task.delay for steps in reach) / len(reach)


def _reach(task: Task, truncation: Truncation) -> list[int]:
    """How many steps each character of an answer looks back, over as many records as it takes to repeat.

    A row is record after record. The gradient is cut where a window begins, and under "block" every τ steps of it;
    where a record begins there is nothing more.
    """
    window = truncation.window
    within = truncation.length if truncation.mode == "block" else window
    places = range(task.record - 1 - task.answers, task.record - 1)  # where the answer's characters are predicted
    return [
        min((record * task.record + step) % window % within, step) + 1
        for record in range(window // math.gcd(window, task.record))
        for step in places
    ]
