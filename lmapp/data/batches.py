"""B contiguous rows of a text, T symbols a step: a sized loader with an exact, saveable position.

Shapes: B rows, T time steps, N ids, V symbols.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmapp.errors import LmappError


class Batch(NamedTuple):
    """One step's work.

    Attributes:
        inputs: (B, T) int64 ids.
        targets: (B, T) int64 ids, the symbol that follows each input; −1 is not scored.
        characters: How many characters the scored targets are.
    """

    inputs: Tensor
    targets: Tensor
    characters: int


class RowBatches:
    """The ids of a text as B contiguous rows, read T steps at a time.

    N ids have N − 1 targets. With q, r = divmod(N − 1, B) the first r rows have q + 1 of them and the others q, in the
    order of the text, so that each is used exactly once an epoch; row b of a batch continues row b of the batch before.
    The last batch is narrower if T does not divide the rows; where a shorter row has nothing left in its last column,
    the target is −1.

    Iterating yields the batches of one epoch. The position counts batches handed out in this epoch; a loaded one holds
    for the next epoch iterated over and is forgotten then.

    Attributes:
        longest: The steps of the longest row.

    Args:
        ids: (N,) unsigned integers, a memory map as a rule.
        batch_size: B.
        sequence_length: T; None reads a row's whole text in one step.
        starts_character: (V,) whether a symbol starts a character.

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
    ) -> None:
        if batch_size < 1 or (sequence_length is not None and sequence_length < 1):
            raise ValueError("batch_size and sequence_length must be at least 1")
        if len(ids) - 1 < batch_size:
            raise LmappError(
                f"{len(ids):,} symbols are too few for {batch_size:,} rows of at least one step.\n"
                "Use more text, or a lower --data.batch-size."
            )
        # A plain view of the same memory: slicing a np.memmap costs several times as much.
        self.ids = np.asarray(ids)
        self.batch_size = batch_size
        self.starts_character = starts_character
        shortest, longer_rows = divmod(len(ids) - 1, batch_size)
        rows = np.arange(batch_size)
        self._lengths = (shortest + (rows < longer_rows)).tolist()
        self.longest: int = self._lengths[0]
        self.sequence_length: int = self.longest if sequence_length is None else sequence_length
        self._starts = (rows * shortest + np.minimum(rows, longer_rows)).tolist()
        self._batch = self._loaded = 0

    def __len__(self) -> int:
        return -(-self._lengths[0] // self.sequence_length)

    def __iter__(self) -> Iterator[Batch]:
        # Lightning makes iterators that it never reads from, so the position is taken when the first batch is.
        start, self._loaded = self._loaded, 0
        for index in range(start, len(self)):
            batch = self.batch(index)
            self._batch = index + 1
            yield batch

    def batch(self, index: int) -> Batch:
        """Batch `index` of an epoch, wherever the position is."""
        begin = index * self.sequence_length
        width = min(self.sequence_length, self._lengths[0] - begin)
        inputs = np.empty((self.batch_size, width), dtype=np.int64)
        targets = np.empty((self.batch_size, width), dtype=np.int64)
        for row, start in enumerate(self._starts):
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
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), characters)

    def state_dict(self) -> dict[str, int]:
        """The position: how many batches of this epoch have been handed out."""
        return {"batch": self._batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position; at an epoch's end the next one starts at its beginning.

        Raises:
            LmappError: if an epoch has fewer batches than that.
        """
        if not 0 <= state["batch"] <= len(self):
            raise LmappError(
                f"The saved position, batch {state['batch']:,}, is outside an epoch of {len(self):,} batches."
            )
        self._batch = state["batch"]
        self._loaded = self._batch % len(self)


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
