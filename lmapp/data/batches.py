"""B contiguous rows of a text, T symbols a step: a sized loader with an exact, saveable position.

Shapes: B rows, T time steps, N ids, V symbols, M starts of records, P symbols of a task's record.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmapp.errors import LmappError
from lmapp.resets import inner_starts, keep_mask


class Batch(NamedTuple):
    """One step's work.

    Attributes:
        inputs: (B, T) int64 ids.
        targets: (B, T) int64 ids, the symbol that follows each input; −1 is not scored.
        characters: How many characters the targets are; those of a task whether they are scored or not.
        keep: (B, T) float32, 0 where an input begins a record, else 1; None where nothing is ever reset.
        last: Whether the text ends with it, and cannot be read again.
        answers: How many of a task's characters are scored; None: all of them, as of any other text.
    """

    inputs: Tensor
    targets: Tensor
    characters: int
    keep: Tensor | None = None
    last: bool = False
    answers: int | None = None


class RowBatches:
    """The ids of a text as B contiguous rows, read T steps at a time.

    N ids have N − 1 targets. With q, r = divmod(N − 1, B) the first r rows have q + 1 of them and the others q, in the
    order of the text, so that each is used exactly once an epoch; row b of a batch continues row b of the batch before.
    The last batch is narrower if T does not divide the rows; where a shorter row has nothing left in its last column,
    the target is −1.

    With `shift` the first batch of an epoch may be narrower too, of another width each time, so that rows longer than a
    window are cut elsewhere. All epochs have equally many batches, at most one more than without. For that, rows of
    L = (n − 1)·T + r steps, 1 ≤ r ≤ T, in n batches have first ones of r to T columns, or, in n + 1, of 1 to r − 1:
    whichever are more. These are at least T/2 widths, each used before any comes again. So sooner or later a window has
    read T/2 symbols for every target, if its row has as many.

    Iterating yields the batches of one epoch. The position is the epoch and the number of its batches handed out; a
    loaded one holds for the next epoch iterated over and is forgotten then. An epoch that is not read to its end is the
    next one too, from its beginning.

    Attributes:
        longest: The steps of the longest row, L.
        resets: Whether batches have a `keep`: a record begins somewhere inside the text.

    Args:
        ids: (N,) unsigned integers, a memory map as a rule.
        batch_size: B.
        sequence_length: T; None reads a row's whole text in one step.
        starts_character: (V,) whether a symbol starts a character.
        starts: (M,) int64, in order, the symbols at which records begin, a memory map as a rule; None resets nothing.
        shift: Whether epochs are cut at different places.
        scored: (P,) which symbols of each P are scored, from the text's first on; None: all.

    Raises:
        LmappError: if a row would have no target: N − 1 < B (`fit_shape` gives a shape that fits).
    """

    def __init__(
        self,
        ids: NDArray[np.integer],
        *,
        batch_size: int,
        sequence_length: int | None,
        starts_character: NDArray[np.bool_],
        starts: NDArray[np.int64] | None = None,
        shift: bool = False,
        scored: NDArray[np.bool_] | None = None,
    ) -> None:
        if batch_size < 1 or (sequence_length is not None and sequence_length < 1):
            raise ValueError("batch_size and sequence_length must be at least 1")
        if shift and sequence_length is None:
            raise ValueError("a window that is the whole row cannot be cut elsewhere")
        if len(ids) - 1 < batch_size:
            raise LmappError(
                f"{len(ids):,} symbols are too few for {batch_size:,} rows of at least one step.\n"
                "Use more text, or a lower --data.batch-size."
            )
        # A plain view of the same memory: slicing a np.memmap costs several times as much.
        self.ids = np.asarray(ids)
        self.batch_size = batch_size
        self.starts_character = starts_character
        self._scored = scored
        self._records = inner_starts(starts, len(ids))
        self.resets = self._records is not None
        shortest, longer_rows = divmod(len(ids) - 1, batch_size)
        rows = np.arange(batch_size)
        self._lengths = (shortest + (rows < longer_rows)).tolist()
        self.longest: int = self._lengths[0]
        self.sequence_length: int = self.longest if sequence_length is None else sequence_length
        self._firsts = rows * shortest + np.minimum(rows, longer_rows)
        self._count, self._widths = _layout(self.longest, self.sequence_length, shift)
        self._epoch = self._batch = self._loaded = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        # Lightning makes iterators that it never reads from, so the position is taken when the first batch is.
        start, self._loaded = self._loaded, 0
        epoch = self._epoch + (self._batch == len(self))
        for index in range(start, len(self)):
            batch = self.batch(index, epoch)
            self._epoch, self._batch = epoch, index + 1
            yield batch

    def batch(self, index: int, epoch: int = 0) -> Batch:
        """Batch `index` of an epoch, wherever the position is."""
        end = _first_width(self._widths, epoch) + index * self.sequence_length
        begin = max(0, end - self.sequence_length)
        width = min(end, self.longest) - begin
        inputs = np.empty((self.batch_size, width), dtype=np.int64)
        targets = np.empty((self.batch_size, width), dtype=np.int64)
        for row, start in enumerate(self._firsts.tolist()):
            piece = self.ids[start + begin : start + begin + width + 1]
            inputs[row] = piece[:width]
            targets[row, : len(piece) - 1] = piece[1:]
        if self._lengths[-1] < begin + width:
            short = self._lengths.index(self._lengths[-1])
            targets[short:, -1] = -1
            scored = np.concatenate([targets[:short].ravel(), targets[short:, :-1].ravel()])
        else:
            scored = targets
        characters = int(np.count_nonzero(self.starts_character[scored]))
        keep = None if self._records is None else keep_mask(self._records, self._firsts + begin, width)
        answers = None
        if self._scored is not None:
            places = (self._firsts[:, None] + np.arange(begin + 1, begin + width + 1)) % len(self._scored)
            targets[~self._scored[places]] = -1
            answers = int(np.count_nonzero(targets >= 0))
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), characters, keep, answers=answers)

    def state_dict(self) -> dict[str, int]:
        """The position: the epoch, and how many of its batches have been handed out."""
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position; at an epoch's end the next one starts at its beginning.

        Raises:
            LmappError: if an epoch has fewer batches than that.
        """
        if not 0 <= state["batch"] <= len(self):
            raise LmappError(
                f"The saved position, batch {state['batch']:,}, is outside an epoch of {len(self):,} batches."
            )
        self._epoch, self._batch = state["epoch"], state["batch"]
        self._loaded = self._batch % len(self)


def _layout(steps: int, length: int, shift: bool) -> tuple[int, range]:
    """How many batches an epoch of L steps has in windows of T, and the widths that its first may have."""
    count = -(-steps // length)
    if not shift or count == 1:
        return count, range(length, length + 1)
    rest = steps - (count - 1) * length
    if rest - 1 > length - rest + 1:
        return count + 1, range(1, rest)
    return count, range(rest, length + 1)


def _first_width(widths: range, epoch: int) -> int:
    """The width of an epoch's first batch: neighbouring epochs' lie far apart, and each comes once in `len(widths)`."""
    golden = round(len(widths) * (math.sqrt(5) - 1) / 2)
    stride = next(s for s in itertools.count(golden) if math.gcd(s, len(widths)) == 1)
    return widths[-1 - epoch * stride % len(widths)]


def fit_shape(characters: int, batch_size: int, sequence_length: int) -> tuple[int, int]:
    """The nearest (B, T) for which every row of a text has at least one full window.

    Fewer rows first, then, with one row left, a shorter window.

    Args:
        characters: N, the number of ids.
        batch_size: B asked for.
        sequence_length: T asked for.

    Raises:
        ValueError: for N < 2, where nothing can be predicted.
    """
    if characters < 2:
        raise ValueError("a text of fewer than 2 symbols has nothing to predict")
    targets = characters - 1
    return max(1, min(batch_size, targets // sequence_length)), min(sequence_length, targets)
