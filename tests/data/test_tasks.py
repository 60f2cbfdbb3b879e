"""The tasks' records, read by what their rules say; what is scored of them; rows of whole records."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmapp.config import TASKS, build, merge
from lmapp.data import tasks
from lmapp.data.datamodule import TextDataModule
from lmapp.errors import LmappError, UsageError

KINDS = list(TASKS)
SIZE = {"copy": 3, "order": 1, "adding": 1, "brackets": 1}


def records(kind: str, delay: int, count: int = 400, seed: int = 0) -> list[str]:
    data = build({"data": {"task": kind, "task_delay": delay}}).data
    task = tasks.task_of(data)
    assert task is not None
    rows = task.records(count, np.random.default_rng(seed))
    assert rows.shape == (count, data.record)
    return [row.tobytes().decode("ascii") for row in rows]


def relevant(kind: str, record: str) -> list[list[int]]:
    """For each character of the answer the places that bear on it, found by the characters themselves."""
    if kind == "copy":
        return [[1], [2], [3]]
    if kind == "order":
        return [[i for i, c in enumerate(record) if c in "XY"]]
    if kind == "adding":
        return [[i + 1 for i, c in enumerate(record) if c == "+"]]
    return [[i for i, c in enumerate(record) if c in "([{<"]]


def answered(kind: str, record: str) -> str:
    """The answer by the task's rule."""
    places = [place for of_one in relevant(kind, record) for place in of_one]
    found = "".join(record[place] for place in places)
    if kind == "copy":
        return found
    if kind == "order":
        return {"XX": "Q", "XY": "R", "YX": "S", "YY": "U"}[found]
    if kind == "adding":
        return str(sum(map(int, found)) % 10)
    return dict(zip("([{<", ")]}>", strict=True))[found]


@pytest.mark.parametrize("delay", [3, 12, 57])
@pytest.mark.parametrize("kind", KINDS)
def test_the_delay_is_the_lag_from_the_prediction_to_the_last_input_that_bears_on_it(kind: str, delay: int) -> None:
    lags = Counter()
    for record in records(kind, delay):
        size = SIZE[kind]
        assert record[0] == "\n"
        assert "\n" not in record[1:]
        assert record[-size:] == answered(kind, record)
        for number, places in enumerate(relevant(kind, record)):
            assert len(places) == (1 if kind in ("copy", "brackets") else 2)
            step = len(record) - size + number - 1  # whose prediction it is
            lags[step - max(places)] += 1
    assert min(lags) == delay
    assert max(lags) == delay + (0 if kind in ("copy", "brackets") else 4 if kind == "order" else 3)


@pytest.mark.parametrize("kind", KINDS)
def test_each_answer_is_as_frequent_so_that_chance_is_known(kind: str) -> None:
    config = build({"data": {"task": kind, "task_delay": 5}})
    task = tasks.task_of(config.data)
    assert task is not None
    answers = Counter("".join(r[-SIZE[kind] :] for r in records(kind, 5, 4000)))
    assert len(answers) == task.choices == {"copy": 8, "order": 4, "adding": 10, "brackets": 4}[kind]
    mean = sum(answers.values()) / task.choices
    assert all(abs(n - mean) < 5 * math.sqrt(mean) for n in answers.values())
    assert set("".join(records(kind, 5))) == set(task.alphabet)


def test_marks_lie_at_random_places_one_in_each_half() -> None:
    for kind, sign in (("order", "XY"), ("adding", "+")):
        places = Counter()
        for record in records(kind, 9):
            first, second = (i for i, c in enumerate(record) if c in sign)
            assert 1 <= first <= 5 < second <= 10
            places[first] += 1
            places[second] += 1
        assert len(places) == (10 if kind == "order" else 8)


def test_records_depend_on_the_seed_alone_and_those_of_validation_are_others() -> None:
    assert records("order", 40, seed=3) == records("order", 40, seed=3)
    assert not set(records("order", 40, seed=3)) & set(records("order", 40, seed=4))
    for kind in ("order", "adding", "brackets"):
        own = tasks.sources_of(build({"data": {"task": kind, "task_delay": 40, "task_records": 2000}}).data)
        split = {name: {r.tobytes() for rows in source._blocks() for r in rows}  # type: ignore[attr-defined]
                 for name in ("text", "validation") for source in own[name]}  # fmt: skip
        assert len(split["text"]) == 2000
        assert len(split["validation"]) == 200
        assert not split["text"] & split["validation"]


@pytest.mark.parametrize(("count", "validation"), [(10, 100), (2500, 250), (50_000, 1000)])
def test_a_tenth_as_many_for_validation_within_bounds(count: int, validation: int) -> None:
    own = tasks.sources_of(build({"data": {"task": "copy", "task_records": count}}).data)
    sizes = [own[name][0].count for name in ("text", "validation")]  # type: ignore[attr-defined]
    assert sizes == [count, validation]


def opened(directory: Path, **data: Any) -> TextDataModule:
    config = build({"data": {"task": "copy", "task_delay": 6, "cache_dir": str(directory / "cache"), **data}})
    module = TextDataModule(config.data)
    module.setup()
    return module


def test_windows_are_records_and_only_answers_are_scored(tmp_path: Path) -> None:
    module = opened(tmp_path, task_records=44, batch_size=4)
    assert module.corpus_name == "copy-6"
    corpus, batches = module.corpus, module.train_dataloader()
    assert corpus is not None
    assert corpus.facts["train_records"] == 44
    assert corpus.facts["validation_records"] == 100
    assert corpus.facts["byte_fallback"] is False
    text = corpus.vocabulary.decode(corpus.train)
    assert (batches.batch_size, batches.sequence_length, len(batches)) == (4, 11, 11)
    seen = []
    for index, batch in enumerate(batches):
        for row in range(4):
            record = corpus.vocabulary.decode(batch.inputs[row].numpy())
            seen.append((row * 11 + index, record))
            scored = batch.targets[row] >= 0
            assert scored.nonzero().flatten().tolist() == [7, 8, 9]
            assert corpus.vocabulary.decode(batch.targets[row][scored].numpy()) == record[-3:] == record[1:4]
        assert batch.keep is not None
        assert (batch.keep[:, 0] == 0).all()
        assert (batch.keep[:, 1:] == 1).all()
        assert batch.answers == 12
        assert batch.characters == 44 - (index == 10)  # nothing follows the last character
    assert "".join(record for _, record in sorted(seen)) == text


@pytest.mark.parametrize(("length", "rows"), [(7, 5), (11, 5), (25, 5), (300, 1), (2000, 1)])
def test_whatever_the_window_each_answer_is_scored_once(tmp_path: Path, length: int, rows: int) -> None:
    said: list[str] = []
    config = build({"data": {"task": "copy", "task_delay": 6, "cache_dir": str(tmp_path), "task_records": 33,
                             "batch_size": 5, "sequence_length": length}})  # fmt: skip
    module = TextDataModule(config.data, say=said.append)
    module.setup()
    batches, corpus = module.train_dataloader(), module.corpus
    assert corpus is not None
    used = 33 // rows * rows
    assert batches.batch_size == rows
    assert any(note.startswith("3 of the 33 records are left out") for note in said) == (rows == 5)
    per_row: list[list[int]] = [[] for _ in range(rows)]
    for batch in batches:
        assert batch.answers == int((batch.targets >= 0).sum())
        for row in range(rows):
            per_row[row] += [t for t in batch.targets[row].tolist() if t >= 0]
    text = corpus.vocabulary.decode(corpus.train)
    expected = "".join(text[11 * r + 8 : 11 * r + 11] for r in range(used))
    assert corpus.vocabulary.decode([t for row in per_row for t in row]) == expected


def test_full_reads_a_record_at_a_time(tmp_path: Path) -> None:
    config = build({"data": {"task": "order", "task_delay": 6, "cache_dir": str(tmp_path), "task_records": 20,
                             "batch_size": 4, "sequence_length": 5}})  # fmt: skip
    module = TextDataModule(config.data, whole_rows=True)
    module.setup()
    batches = module.train_dataloader()
    assert (batches.batch_size, batches.sequence_length, len(batches)) == (4, 18, 5)


def test_too_few_records_are_refused_where_rows_may_not_shrink(tmp_path: Path) -> None:
    with pytest.raises(LmappError, match=r"too few for 8 rows of 11 characters\.\nSet --data\.batch-size 3"):
        opened(tmp_path, task_records=3, batch_size=8, shrink=False)
    assert opened(tmp_path, task_records=3, batch_size=8).train_dataloader().batch_size == 3


def test_the_same_task_is_found_in_the_cache_and_another_is_not(tmp_path: Path) -> None:
    one = opened(tmp_path).corpus
    again, other = opened(tmp_path).corpus, opened(tmp_path, task_delay=7).corpus
    assert one is not None and again is not None and other is not None
    assert one.directory == again.directory != other.directory
    saved = {"key": one.directory.name, "fingerprint": one.fingerprint}
    fresh = TextDataModule(build({"data": {"task": "copy", "task_delay": 6, "cache_dir": str(tmp_path / "b")}}).data)
    fresh.setup_from(saved)  # made again, the same
    assert fresh.corpus is not None
    assert (fresh.corpus.train == one.train).all()


# Options --------------------------------------------------------------------------------------------------------------


def test_a_record_is_a_window_and_starts_from_the_initial_state_unless_told_otherwise() -> None:
    data = build({"data": {"task": "adding", "task_delay": 20}}).data
    assert (data.record, data.sequence_length, data.reset_state) == (32, 32, True)
    assert build({"data": {"task": "adding", "task_delay": 20, "sequence-length": 9}}).data.sequence_length == 9
    config = build({"data": {"task": "copy"}})
    assert build(config.as_dict()) == config
    assert build({"data": {"task": "copy"}, "model": {"kind": "window"}}).data.reset_state is False


def test_another_text_takes_a_task_s_place_and_the_other_way_round() -> None:
    task = {"data": {"task": "order"}}
    assert build(merge(task, {"data": {"path": "a.txt"}})).data.task is None
    assert build(merge({"data": {"path": "a.txt", "hub": None}}, task)).data.path == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"data": {"task": "sort"}}, "--data.task is one of copy, order, adding, brackets, not 'sort'."),
        ({"data": {"task": "copy", "path": "a.txt"}}, "--data.path and --data.task exclude each other: a task's text "
         "is made, with an alphabet and a\nvalidation split of its own."),
        ({"data": {"task": "copy", "hub": "a/b"}}, "--data.hub and --data.task exclude each other"),
        ({"data": {"task": "copy", "corpus": "tiny_shakespeare"}}, "--data.corpus and --data.task exclude"),
        ({"data": {"task": "copy", "val_fraction": 0.5}}, "--data.val-fraction and --data.task exclude each other"),
        ({"data": {"task": "copy", "alphabet": "bytes"}}, "--data.alphabet and --data.task exclude each other"),
        ({"data": {"task": "copy", "streaming": True}}, "--data.streaming and --data.task exclude each other"),
        ({"data": {"task_delay": 5}}, "--data.task-delay is an option of --data.task, which names none."),
        ({"data": {"task": "order", "task_length": 5}},
         "--data.task-length is an option of --data.task copy, which is order."),
        ({"data": {"task": "copy", "task_delay": 2}}, "--data.task-delay 2 is shorter than what is to be copied, "
         "--data.task-length 3: the copy would begin before its end."),
        ({"data": {"task": "copy"}, "model": {"kind": "infill"}},
         "--data.task: an infill model reads past an answer. Use --model.kind recurrent or window."),
        ({"train": {"target_accuracy": 0.9}},
         "--train.target-accuracy is an option of --data.task: other texts have no answers."),
        ({"data": {"task": "copy"}, "train": {"target_accuracy": 0}},
         "--train.target-accuracy is a number more than 0 and at most 1, not 0."),
    ],
)  # fmt: skip
def test_refusals(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(options)
    assert str(caught.value).startswith(expected)
    assert len(str(caught.value).splitlines()) <= 3
