"""Synthetic long-range tasks as text: records of one length, whose last characters depend on what lies far back.

A record is a line: its line end comes first, then what bears on the answer, the delay, and the answer. The delay D is
defined once, for all tasks: the loss of the prediction made at step i looks back to the last input that bears on it,
read at step i − D. So D is the lag k = D of ∂J^(i)/∂S_{i−k} that a gradient has to bridge, and one cut every τ ≤ D
steps never does. Where inputs lie at random places, D is the smallest such lag.

Shapes: M records, P characters of a record, a characters of its answer, n symbols that copy repeats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmapp.config import TASKS, DataConfig
from lmapp.data.formats import Record
from lmapp.data.sources import Source
from lmapp.data.text import Reading, TextPolicy

SEEDS = {"text": 1, "validation": 2}
"""Of the records of the training and of the validation split, the same in all runs."""

BLOCK = 1 << 22
"""Characters made at a time."""

_SYMBOLS, _DIGITS, _DISTRACTORS, _MARKS, _CLASSES = b"abcdefgh", b"0123456789", b"abcd", b"XY", b"QRSU"
_OPENING, _CLOSING = b"([{<", b")]}>"
_BLANK, _MARK, _CUE = b".", b"+", b"="


@dataclass(frozen=True)
class Task:
    """A task: what its records are.

    - copy (Hochreiter & Schmidhuber 1997; Arjovsky et al. 2016, arXiv:1511.06464): n symbols, blanks, a cue, the same
      symbols. `abc.......=abc`
    - order (Hochreiter & Schmidhuber 1997; Pascanu et al. 2013, arXiv:1211.5063): a mark, X or Y, in the first and one
      in the second half of ten distractors, more distractors, a cue, one of four classes: that of the two marks in
      their order. `bdXacabYcd…=R`
    - adding (Hochreiter & Schmidhuber 1997, with characters): a digit that follows a + in the first and one in the
      second half of ten characters, more digits, a cue, the two digits' sum modulo 10. `41+2793+60…=8`
    - brackets: an opening bracket of one of four kinds, D distractors, the closing one. `{bdac…}`

    Attributes:
        kind: its name.
        delay: D.
        record: P.
        answers: a.
    """

    kind: str
    delay: int
    record: int
    answers: int

    @property
    def choices(self) -> int:
        """Symbols that an answer's character may be, each as often: chance is right in one of so many cases."""
        return {"copy": len(_SYMBOLS), "order": len(_CLASSES), "adding": len(_DIGITS), "brackets": len(_CLOSING)}[
            self.kind
        ]

    @property
    def alphabet(self) -> str:
        """Every character that its records may hold."""
        used = {
            "copy": _SYMBOLS + _BLANK + _CUE,
            "order": _DISTRACTORS + _MARKS + _CLASSES + _CUE,
            "adding": _DIGITS + _MARK + _CUE,
            "brackets": _OPENING + _DISTRACTORS + _CLOSING,
        }[self.kind]
        return "".join(sorted("\n" + used.decode()))

    @property
    def scored(self) -> NDArray[np.bool_]:
        """(P,): whether a character of a record is scored, which those of the answer are."""
        return np.arange(self.record) >= self.record - self.answers

    def fit_shape(self, characters: int, batch_size: int, sequence_length: int) -> tuple[int, int]:
        """The nearest (B, T) to what is asked for with rows of equally many whole records, no shorter than a window.

        Then row b goes on, batch after batch, through its own records, and a window of P steps is exactly one.

        Args:
            characters: M·P.
            batch_size: B asked for.
            sequence_length: T asked for.
        """
        a_row = -(-sequence_length // self.record)
        rows = max(1, min(batch_size, characters // self.record // a_row))
        return rows, min(sequence_length, characters)

    def records(self, count: int, rng: np.random.Generator) -> NDArray[np.uint8]:
        """(M, P) character codes of M = `count` records."""
        rows = np.full((count, self.record), ord("\n"), dtype=np.uint8)
        lead = 1 + TASKS[self.kind]  # where the delay begins
        answer = lead + self.delay
        if self.kind == "copy":
            symbols = _drawn(rng, _SYMBOLS, (count, self.answers))
            rows[:, 1:answer] = ord(_BLANK)
            rows[:, 1 : 1 + self.answers] = rows[:, answer:] = symbols
        elif self.kind == "brackets":
            kinds = rng.integers(len(_OPENING), size=count)
            rows[:, 1] = _codes(_OPENING)[kinds]
            rows[:, lead:answer] = _drawn(rng, _DISTRACTORS, (count, self.delay))
            rows[:, answer] = _codes(_CLOSING)[kinds]
            return rows
        else:
            distractors = _DISTRACTORS if self.kind == "order" else _DIGITS
            rows[:, 1:answer] = _drawn(rng, distractors, (count, answer - 1))
            half, width = TASKS[self.kind] // 2, 1 if self.kind == "order" else 2
            first, second = rng.integers(half - width + 1, size=(2, count)) + np.array([[1], [1 + half]])
            each = np.arange(count)
            if self.kind == "order":
                marks = rng.integers(len(_MARKS), size=(2, count))
                rows[each, first], rows[each, second] = _codes(_MARKS)[marks]
                rows[:, answer] = _codes(_CLASSES)[2 * marks[0] + marks[1]]
            else:
                rows[each, first] = rows[each, second] = ord(_MARK)
                digits = rows[each, first + 1] - ord("0") + rows[each, second + 1] - ord("0")
                rows[:, answer] = digits % 10 + ord("0")
        rows[:, answer - 1] = ord(_CUE)
        return rows


def task_of(config: DataConfig) -> Task | None:
    """The task that a configuration names; None if it names another text."""
    return None if config.task is None else Task(config.task, config.task_delay, config.record, config.answers)


class TaskText(Source):
    """Records of a task, made when they are read, always the same ones.

    Args:
        task: Whose.
        count: M.
        seed: Of what is drawn.
        split: What it is for.
    """

    def __init__(self, task: Task, count: int, seed: int, split: str) -> None:
        self.name = f"the task {task.kind}, {split}"
        self.task = task
        self.count = count
        self.seed = seed

    def size(self) -> int:
        """M·P bytes."""
        return self.count * self.task.record

    def stamp(self) -> None:
        """It does not change."""
        return None

    def identity(self) -> str:
        """By its content, so that it would not be taken for what another version of the generator draws."""
        digest = hashlib.blake2b(str(self.task.record).encode(), digest_size=32)
        for rows in self._blocks():
            digest.update(rows.tobytes())
        return digest.hexdigest()

    def records(self, policy: TextPolicy, column: str, reading: Reading) -> Iterator[Record]:
        """Its records, each a piece."""
        first = True
        for rows in self._blocks():
            text = rows.tobytes().decode("ascii")
            reading.bytes += len(text)
            for start in range(0, len(text), self.task.record):
                yield self.name, first, iter([text[start : start + self.task.record]])
                first = False

    def _blocks(self) -> Iterator[NDArray[np.uint8]]:
        rng = np.random.default_rng(self.seed)
        most = max(1, BLOCK // self.task.record)
        for start in range(0, self.count, most):
            yield self.task.records(min(most, self.count - start), rng)


def sources_of(config: DataConfig) -> dict[str, list[Source]]:
    """The text and the validation data of a configuration that names a task."""
    task, count = task_of(config), config.task_records
    assert task is not None
    validation = min(1000, max(100, count // 10))
    return {
        "text": [TaskText(task, count, SEEDS["text"], "training")],
        "validation": [TaskText(task, validation, SEEDS["validation"], "validation")],
        "test": [],
    }


def _codes(characters: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(characters, dtype=np.uint8)


def _drawn(rng: np.random.Generator, characters: bytes, shape: tuple[int, int]) -> NDArray[np.uint8]:
    return _codes(characters)[rng.integers(len(characters), size=shape)]
