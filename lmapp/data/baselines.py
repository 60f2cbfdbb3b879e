"""What a corpus is worth to models that only count: unigram and bigram, the figures that a network is to beat.

Shapes: N and M symbols, V symbols of the alphabet.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 20
"""Ids worked on at a time."""

_DENSE_PAIRS = 1 << 20
"""Up to this many possible pairs are counted in a table of all of them."""


def baselines(
    train: NDArray[np.unsignedinteger], scored: NDArray[np.unsignedinteger], starts_character: NDArray[np.bool_]
) -> tuple[float, float]:
    """Bits per character of a unigram and of a bigram model counted on `train`, add-one smoothed.

    −Σ log₂ p over the symbols of `scored` but the first, as a model that starts cold is scored, divided by the
    characters they make up (at least 1): p(b) = (n_b + 1) / (n + V) and p(b | a) = (n_ab + 1) / (n_a + V), where n_a
    counts a's followed by a symbol.

    Args:
        train: (N,) ids, N ≥ 1.
        scored: (M,) ids, M ≥ 2 characters.
        starts_character: (V,) whether a symbol starts a character.
    """
    size = len(starts_character)
    counts = np.zeros(size, dtype=np.int64)
    for ids in _windows(train, 0):
        counts += np.bincount(ids, minlength=size)
    followed = counts.copy()
    followed[train[-1]] -= 1
    targets = np.zeros(size, dtype=np.int64)
    for ids in _windows(scored[1:], 0):
        targets += np.bincount(ids, minlength=size)
    unigram = targets @ (np.log2(len(train) + size) - np.log2(counts + 1))

    if size * size <= _DENSE_PAIRS:
        pairs = np.arange(size * size)
        weights = _count_dense(scored, size)
        seen = _count_dense(train, size)
    else:  # only pairs that are scored need counting
        pairs, weights = _count_sparse(scored, size)
        seen = _count_listed(train, size, pairs)
    bigram = weights @ (np.log2(followed[pairs // size] + size) - np.log2(seen + 1))
    characters = int(targets[starts_character].sum()) or 1
    return float(unigram) / characters, float(bigram) / characters


def _windows(ids: NDArray[np.unsignedinteger], overlap: int) -> Iterator[NDArray[np.unsignedinteger]]:
    for begin in range(0, len(ids) - overlap, BLOCK):
        yield ids[begin : begin + BLOCK + overlap]


def _pairs(ids: NDArray[np.unsignedinteger], size: int) -> Iterator[NDArray[np.int64]]:
    """The pairs (a, b) that follow one another as a·size + b, block by block."""
    for block in _windows(ids, 1):
        yield block[:-1].astype(np.int64) * size + block[1:]


def _count_dense(ids: NDArray[np.unsignedinteger], size: int) -> NDArray[np.int64]:
    """How often each pair of all size² occurs."""
    if ids.dtype.itemsize == 1:  # two neighbouring bytes are a number already
        table = np.zeros(1 << 16, dtype=np.int64)
        for block in _windows(ids, 1):
            for part in (block, block[1:]):
                table += np.bincount(part[: len(part) // 2 * 2].view("<u2"), minlength=1 << 16)
        return table.reshape(256, 256).T[:size, :size].ravel()
    counts = np.zeros(size * size, dtype=np.int64)
    for pairs in _pairs(ids, size):
        counts += np.bincount(pairs, minlength=size * size)
    return counts


def _count_sparse(ids: NDArray[np.unsignedinteger], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct pairs, sorted, and how often each occurs."""
    keys = counts = np.empty(0, dtype=np.int64)
    for pairs in _pairs(ids, size):
        block_keys, block_counts = np.unique(pairs, return_counts=True)
        merged = np.union1d(keys, block_keys)
        sums = np.zeros(len(merged), dtype=np.int64)
        sums[np.searchsorted(merged, keys)] += counts
        sums[np.searchsorted(merged, block_keys)] += block_counts
        keys, counts = merged, sums
    return keys, counts


def _count_listed(ids: NDArray[np.unsignedinteger], size: int, keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each of some distinct, sorted pairs occurs."""
    counts = np.zeros(len(keys), dtype=np.int64)
    for pairs in _pairs(ids, size):
        block_keys, block_counts = np.unique(pairs, return_counts=True)
        places = np.minimum(np.searchsorted(keys, block_keys), len(keys) - 1)
        found = keys[places] == block_keys
        counts[places[found]] += block_counts[found]
    return counts
