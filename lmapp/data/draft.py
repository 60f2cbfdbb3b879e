"""A text in a file of provisional ids, before it is known where its training split ends and what its alphabet is.

Shapes: P distinct characters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmapp.data.text import Reading
from lmapp.errors import LmappError
from lmapp.vocabulary import UnknownCharacterError, code_points

BLOCK = 1 << 20
"""Characters worked on at a time."""


class Draft:
    """The characters of a text, numbered in the order in which blocks bring new ones, and where its records begin.

    Final ids need the whole training split's alphabet, and where that ends is known only at the end of the text. An id
    is written in the smallest type that held all ids so far, so the file is a row of runs of growing types.

    Attributes:
        points: (P,) code point of each provisional id.
        counts: (P,) how often each occurs.
        length: Characters written.

    Args:
        directory: Where its two files are kept.
        as_bytes: The characters are bytes, U+0000 to U+00FF, and each is its own id.
    """

    def __init__(self, directory: Path, *, as_bytes: bool = False) -> None:
        self.path = directory / "draft.bin"
        self._starts_path = directory / "draft_starts.bin"
        self.as_bytes = as_bytes
        self.points = np.arange(256 if as_bytes else 0, dtype=np.uint32)
        self.counts: NDArray[np.int64] = np.zeros(len(self.points), dtype=np.int64)
        self.length = 0
        self._table = None if as_bytes else np.full(0x110000, -1, dtype=np.int32)
        self._runs: list[tuple[np.dtype, int]] = []

    def fill(self, pieces: Iterator[str], reading: Reading) -> Iterator[None]:
        """Write a text on, pausing after each block.

        Raises:
            LmappError: at a lone surrogate, which is no character.
        """
        with self.path.open("ab") as file, self._starts_path.open("ab") as starts:
            for text in _blocks(pieces):
                ids = self._numbered(text, reading)
                dtype = smallest_dtype(len(self.points))
                if self._runs and self._runs[-1][0] == dtype:
                    self._runs[-1] = (dtype, self._runs[-1][1] + len(ids))
                else:
                    self._runs.append((dtype, len(ids)))
                file.write(ids.astype(dtype, copy=False).data)
                self.length += len(ids)
                starts.write(reading.record_starts)
                del reading.record_starts[:]
                yield

    def _numbered(self, text: str, reading: Reading) -> NDArray[np.integer]:
        if self._table is None:
            values = np.frombuffer(text.encode("latin-1"), dtype=np.uint8)
            self.counts += np.bincount(values, minlength=256)
            return values
        try:
            points = code_points(text)
        except UnknownCharacterError as error:
            where = reading.locate(self.length + error.index)
            raise LmappError(f"{where} is a lone surrogate, not a character.") from error
        ids = self._table.take(points)
        if ids.min() < 0:
            new = np.unique(points[ids < 0])
            self._table[new] = np.arange(len(self.points), len(self.points) + len(new), dtype=np.int32)
            self.points = np.concatenate([self.points, new])
            self.counts = np.concatenate([self.counts, np.zeros(len(new), dtype=np.int64)])
            ids = self._table.take(points)
        self.counts += np.bincount(ids, minlength=len(self.points))
        return ids

    def blocks(self, begin: int, end: int) -> Iterator[NDArray[np.unsignedinteger]]:
        """The provisional ids of characters begin … end − 1, block by block."""
        with self.path.open("rb") as file:
            first, offset = 0, 0
            for dtype, length in self._runs:
                for place in range(max(begin, first), min(end, first + length), BLOCK):
                    file.seek(offset + (place - first) * dtype.itemsize)
                    yield np.fromfile(file, dtype, min(BLOCK, end - place, first + length - place))
                first, offset = first + length, offset + length * dtype.itemsize

    def count(self, begin: int, end: int) -> NDArray[np.int64]:
        """(P,): how often each provisional id occurs among characters begin … end − 1."""
        counts = np.zeros(len(self.points), dtype=np.int64)
        for block in self.blocks(begin, end):
            counts += np.bincount(block, minlength=len(self.points))
        return counts

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where the records begin: sorted positions, a memory map."""
        return map_file(self._starts_path, np.dtype(np.int64))

    def remove(self) -> None:
        """Delete its files."""
        self.path.unlink()
        self._starts_path.unlink()


def _blocks(pieces: Iterator[str]) -> Iterator[str]:
    """The same text in pieces of about `BLOCK` characters."""
    waiting: list[str] = []
    size = 0
    for piece in pieces:
        for begin in range(0, len(piece), BLOCK):
            waiting.append(piece[begin : begin + BLOCK])
            size += len(waiting[-1])
            if 2 * size >= BLOCK:
                yield "".join(waiting)
                waiting, size = [], 0
    if waiting:
        yield "".join(waiting)


def smallest_dtype(size: int) -> np.dtype:
    """The smallest unsigned type for ids 0 … size − 1; little-endian, so a cache can move."""
    return np.dtype("<u1" if size <= 1 << 8 else "<u2" if size <= 1 << 16 else "<u4")


def map_file(path: Path, dtype: np.dtype) -> NDArray:
    """A file of numbers as a read-only memory map; an empty one, which cannot be mapped, as an empty array."""
    if path.stat().st_size == 0:
        empty = np.empty(0, dtype=dtype)
        empty.flags.writeable = False
        return empty
    return np.memmap(path, dtype=dtype, mode="r")
