"""Passages that a text holds more than once, by a sample of its windows of 64 symbols.

A window's own hash decides whether it is sampled, so equal windows are sampled together wherever they stand.

Shapes: N symbols, W = N − 63 windows, S distinct windows sampled.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

LENGTH = 64
"""Symbols of a window."""

_BLOCK = 1 << 18
"""Symbols worked on at a time."""

_MOST = 1 << 17
"""Distinct windows kept."""

# Odd, without a pattern: √2, √3, √5 … as 64 bits of a fraction.
_MULTIPLIERS = np.array(
    [
        0x6A09E667F3BCC909,
        0xBB67AE8584CAA73B,
        0x3C6EF372FE94F82B,
        0xA54FF53A5F1D36F1,
        0x510E527FADE682D1,
        0x9B05688C2B3E6C1F,
    ],
    dtype=np.uint64,
)


def window_hashes(values: NDArray[np.unsignedinteger]) -> NDArray[np.uint64]:
    """(W,): a hash of each window of (N,) symbols; none if N < 64."""
    if len(values) < LENGTH:
        return np.empty(0, dtype=np.uint64)
    hashes = values.astype(np.uint64) + np.uint64(1)
    width = 1
    for multiplier in _MULTIPLIERS:  # of windows of 1, 2, 4 … symbols to windows of twice as many
        first = hashes[:-width] * multiplier
        first += hashes[width:]
        hashes, width = first, 2 * width
    return hashes


class Passages:
    """How often each sampled window of a text occurs, and where it stands first.

    Attributes:
        limit: Windows with hashes up to this are sampled: all at first, half as many whenever it becomes too many.
        hashes: (S,) the distinct hashes, sorted.
        counts: (S,) how often each occurs.
        spots: (S, 2) where each stands first, in the numbers that `count` was given.
    """

    def __init__(self) -> None:
        self.limit = np.uint64(2**64 - 1)
        self.hashes = np.empty(0, dtype=np.uint64)
        self.counts = np.empty(0, dtype=np.int64)
        self.spots = np.empty((0, 2), dtype=np.int64)
        self._waiting: list[tuple[NDArray[np.uint64], NDArray[np.int64]]] = []

    def sample(self, values: NDArray[np.unsignedinteger]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """The hashes of the windows of (N,) symbols that are sampled, and where in `values` they begin."""
        hashes = window_hashes(values)
        at = np.flatnonzero(hashes <= self.limit)
        return hashes[at], at

    def count(self, hashes: NDArray[np.uint64], spots: NDArray[np.int64]) -> None:
        """Count sampled windows (n,) that stand at spots (n, 2), behind all that have been counted."""
        self._waiting.append((hashes, spots))
        if sum(len(waiting) for waiting, _ in self._waiting) >= _MOST:
            self.settle()

    def settle(self) -> None:
        """Bring the attributes up to date with all that has been counted."""
        hashes = np.concatenate([self.hashes, *(hashes for hashes, _ in self._waiting)])
        spots = np.concatenate([self.spots, *(spots for _, spots in self._waiting)])
        counts = np.concatenate([self.counts, np.ones(len(hashes) - len(self.counts), dtype=np.int64)])
        self._waiting = []
        order = np.argsort(hashes, kind="stable")  # the first of equal ones stays the first
        hashes = hashes[order]
        firsts = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]][: len(hashes)])
        self.hashes, self.spots = hashes[firsts], spots[order[firsts]]
        self.counts = np.add.reduceat(counts[order], firsts) if len(firsts) else counts
        while len(self.hashes) > _MOST:
            self.limit >>= np.uint64(1)
            kept = np.searchsorted(self.hashes, self.limit, side="right")
            self.hashes, self.counts, self.spots = self.hashes[:kept], self.counts[:kept], self.spots[:kept]

    @property
    def repeated(self) -> float:
        """The share of the sampled windows that an equal one comes before; 0 if there are none."""
        total = int(self.counts.sum())
        return (total - len(self.counts)) / total if total else 0.0

    @property
    def first_repeated(self) -> tuple[int, int] | None:
        """The spot of the first window that comes again."""
        spots = self.spots[self.counts > 1]
        if not len(spots):
            return None
        position, line = spots[np.argmin(spots[:, 0])]
        return int(position), int(line)


def shared(scored: NDArray[np.unsignedinteger], train: NDArray[np.unsignedinteger]) -> float:
    """The share of the windows of `scored` that stand in `train` too, both in one alphabet; 0 if there are none."""
    wanted = Passages()
    for block in _blocks(scored):
        hashes, at = wanted.sample(block)
        wanted.count(hashes, np.stack([at, at], axis=1))
    wanted.settle()
    if not len(wanted.hashes):
        return 0.0
    found = np.zeros(len(wanted.hashes), dtype=np.bool_)
    for block in _blocks(train):
        hashes, _ = wanted.sample(block)
        places = np.minimum(np.searchsorted(wanted.hashes, hashes), len(found) - 1)
        found[places[wanted.hashes[places] == hashes]] = True
    return float(wanted.counts[found].sum() / wanted.counts.sum())


def _blocks(ids: NDArray[np.unsignedinteger]) -> Iterator[NDArray[np.unsignedinteger]]:
    """Blocks that have every window once."""
    for begin in range(0, len(ids) - LENGTH + 1, _BLOCK):
        yield ids[begin : begin + _BLOCK + LENGTH - 1]
