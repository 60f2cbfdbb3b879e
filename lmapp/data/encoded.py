"""One bounded-memory pass of text into memory-mapped files of ids, keyed by content and options.

Shapes: N symbols of a split, V symbols of the alphabet, P characters in the whole text.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmapp.data import sources
from lmapp.errors import LmappError, UsageError
from lmapp.vocabulary import UnknownCharacterError, Vocabulary, code_points, describe, utf8_lengths

BLOCK = 1 << 20
"""Characters, or ids, worked on at a time."""

FORMAT = 1
"""Part of every key: raised whenever the same text would give other files."""

SPLITS = ("train", "validation", "test")

_DENSE_PAIRS = 1 << 20
"""Up to this many possible pairs are counted in a table of all of them."""

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class EncodedCorpus:
    """A text as ids, in three splits that follow one another: train, validation, test.

    Attributes:
        directory: Where it lies.
        vocabulary: Its alphabet, of V symbols.
        train, validation, test: (N,) ids, read-only memory maps of the smallest unsigned type that holds V − 1; an
            empty array for an empty split.
        facts: What is known about the text, numbers and strings only:
            characters, bytes (of its UTF-8 form), files, boms_removed;
            train_characters, validation_characters, test_characters, and the same with …_symbols;
            alphabet (distinct characters), vocabulary_size, byte_fallback;
            unseen (the distinct characters that are not in the alphabet), unseen_train, unseen_validation, unseen_test
            (how often they occur; unseen_train can differ from 0 only if the vocabulary was given);
            validation_capped (the share asked for was more than the largest allowed validation split);
            unigram_bits, bigram_bits, baseline_split (see `baselines`).
        fingerprint: Of the contents and of the options that change the text (`sources.fingerprint`).
    """

    directory: Path
    vocabulary: Vocabulary
    train: NDArray[np.unsignedinteger]
    validation: NDArray[np.unsignedinteger]
    test: NDArray[np.unsignedinteger]
    facts: dict[str, Any]
    fingerprint: str


def encode(
    files: Sequence[Path],
    *,
    cache_dir: Path,
    encoding: str = "utf-8",
    separator: str | None = None,
    column: str = "text",
    val_fraction: float = 0.1,
    max_val_characters: int | None = 1_000_000,
    test_fraction: float = 0.0,
    byte_fallback: bool | None = None,
    progress: Progress | None = None,
    vocabulary: Vocabulary | None = None,
) -> EncodedCorpus:
    """The text of files as ids, from the cache if it has been encoded before.

    The splits are cut by characters: ⌊test_fraction · characters⌋ at the end, ⌊val_fraction · characters⌋ before them
    (at most `max_val_characters`), the rest for training. A validation or test split of a single character would have
    nothing to predict and is left to training.

    Args:
        files: See `sources.stream`, also for encoding, separator and column.
        cache_dir: Where `encoded/KEY/` is made.
        encoding: The files' encoding.
        separator: What stands between two records.
        column: The field of a JSON Lines row that holds its text.
        val_fraction: Share of the characters for validation.
        max_val_characters: The most characters that validation gets; None: no limit.
        test_fraction: Share of the characters for the test split.
        byte_fallback: Whether a character that does not occur in the training split is written as bytes: True, always
            possible; None, if there is such a character; False, such a character is an error.
        progress: Called with the bytes read so far and the bytes of all files.
        vocabulary: An alphabet to use in place of the training split's own; then `byte_fallback` is not looked at.

    Raises:
        UsageError: if the fractions leave no training split, or the encoding is unknown.
        LmappError: if the text is empty or a single character, has a character that cannot be written, changes while
            it is read, cannot be read (`sources.stream`), or the cache cannot be written.
    """
    _check_fractions(val_fraction, test_fraction)
    stamps = _stamps(files)
    fingerprint = sources.fingerprint(files, encoding, separator, column)
    options = [FORMAT, fingerprint, val_fraction, max_val_characters, test_fraction]
    alphabet = [byte_fallback] if vocabulary is None else [vocabulary.characters, vocabulary.byte_fallback]
    key = hashlib.blake2b(json.dumps([*options, *alphabet]).encode(), digest_size=16).hexdigest()
    directory = cache_dir / "encoded" / key
    cached = load(directory, fingerprint)
    if cached is not None:
        return cached

    with _writing(directory.parent) as temporary:
        draft = _Draft(temporary / "draft.bin")
        reading = sources.Reading()
        pieces = sources.stream(files, encoding=encoding, separator=separator, column=column, reading=reading)
        total = sum(size for size, _ in stamps)
        for _ in draft.fill(_blocks(pieces), reading):
            if progress is not None:
                progress(reading.bytes, total)
        if _stamps(files) != stamps:
            raise LmappError("The text changed while it was being read.\nTry again when nothing writes to its files.")

        name = str(files[0]) if len(files) == 1 else f"The text of {len(files):,} files"
        ends, capped = _split(draft.characters, val_fraction, max_val_characters, test_fraction, name)
        counts = _split_counts(draft, ends)
        if vocabulary is None:
            vocabulary = _alphabet(draft, counts, byte_fallback)
        facts: dict[str, Any] = {
            "characters": draft.characters,
            "bytes": int(draft.counts @ utf8_lengths(draft.points)),
            "files": len(files),
            "boms_removed": reading.boms,
            "alphabet": len(vocabulary.characters),
            "vocabulary_size": len(vocabulary),
            "byte_fallback": vocabulary.byte_fallback,
            "validation_capped": capped,
        }
        ids = vocabulary.ids_of(draft.points)
        unseen = np.sort(draft.points[ids < 0])
        facts["unseen"] = unseen.astype("<u4").tobytes().decode("utf-32-le")
        if len(unseen) and not vocabulary.byte_fallback:
            raise _unseen_error(draft, ids, ends, reading)
        dtype = _dtype(len(vocabulary))
        for row, (split, begin, end) in enumerate(zip(SPLITS, (0, *ends), (*ends, draft.characters), strict=True)):
            unseen_here = int(counts[row][ids < 0].sum())
            facts[f"{split}_characters"] = end - begin
            facts[f"{split}_symbols"] = _write(
                temporary / f"{split}.bin",
                draft.blocks(begin, end),
                vocabulary,
                ids,
                draft.points,
                spell=unseen_here > 0,
            )
            facts[f"unseen_{split}"] = unseen_here
        draft.path.unlink()

        train = _map(temporary / "train.bin", dtype)
        validation = _map(temporary / "validation.bin", dtype)
        facts["baseline_split"] = "validation" if len(validation) else "train"
        facts["unigram_bits"], facts["bigram_bits"] = baselines(
            train, validation if len(validation) else train, vocabulary.starts_character
        )
        del train, validation
        _write_text(temporary / "vocabulary.json", vocabulary.to_json())
        _write_text(temporary / "facts.json", json.dumps(facts, indent=1))
        _publish(temporary, directory)

    corpus = load(directory, fingerprint)
    if corpus is None:
        raise LmappError(f"{directory} was written and is damaged or gone.\nName another place: --data.cache-dir")
    return corpus


def baselines(
    train: NDArray[np.unsignedinteger], scored: NDArray[np.unsignedinteger], starts_character: NDArray[np.bool_]
) -> tuple[float, float]:
    """Bits per character of a unigram and of a bigram model counted on `train`, add-one smoothed.

    −Σ log₂ p over the symbols of `scored` but the first, as a model that starts cold is scored, divided by the
    characters they make up: p(b) = (n_b + 1) / (n + V) and p(b | a) = (n_ab + 1) / (n_a + V), where n_a counts a's
    followed by a symbol.

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
    characters = int(targets[starts_character].sum())
    return float(unigram) / characters, float(bigram) / characters


def _windows(ids: NDArray[np.unsignedinteger], overlap: int) -> Iterator[NDArray[np.unsignedinteger]]:
    for begin in range(0, len(ids) - overlap, BLOCK):
        yield ids[begin : begin + BLOCK + overlap]


def _pairs(ids: NDArray[np.unsignedinteger], size: int) -> Iterator[NDArray[np.int64]]:
    """The pairs (a, b) that follow one another as a·size + b, block by block."""
    for block in _windows(ids, 1):
        yield block[:-1].astype(np.int64) * size + block[1:]


def _count_dense(ids: NDArray[np.unsignedinteger], size: int) -> NDArray[np.int64]:
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


class _Draft:
    """The text in a file of provisional ids, numbered in the order in which blocks bring new characters.

    Final ids need the whole training split's alphabet, and where that ends is known only at the end of the text. An id
    is written in the smallest type that held all ids so far, so the file is a row of runs of growing types.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.points: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)  # (P,) code point of each provisional id
        self.counts: NDArray[np.int64] = np.empty(0, dtype=np.int64)  # (P,)
        self.characters = 0
        self._table = np.full(0x110000, -1, dtype=np.int32)
        self._runs: list[tuple[np.dtype, int]] = []

    def fill(self, texts: Iterator[str], reading: sources.Reading) -> Iterator[None]:
        """Write the text, pausing after each block."""
        with self.path.open("wb") as file:
            for text in texts:
                try:
                    ids = self._number(code_points(text))
                except UnknownCharacterError as error:
                    where = reading.locate(self.characters + error.index)
                    raise LmappError(f"{where} is a lone surrogate, not a character.") from error
                dtype = _dtype(len(self.points))
                if self._runs and self._runs[-1][0] == dtype:
                    self._runs[-1] = (dtype, self._runs[-1][1] + len(ids))
                else:
                    self._runs.append((dtype, len(ids)))
                file.write(ids.astype(dtype).data)
                self.characters += len(ids)
                yield

    def _number(self, points: NDArray[np.uint32]) -> NDArray[np.int32]:
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


def _dtype(size: int) -> np.dtype:
    """The smallest unsigned type for ids 0 … size − 1; little-endian, so a cache can move."""
    return np.dtype("<u1" if size <= 1 << 8 else "<u2" if size <= 1 << 16 else "<u4")


def _stamps(files: Sequence[Path]) -> list[tuple[int, int]]:
    try:
        return [(status.st_size, status.st_mtime_ns) for status in map(os.stat, files)]
    except OSError as error:
        raise LmappError(f"{error.filename} cannot be read: {error.strerror}.") from error


def _check_fractions(val_fraction: float, test_fraction: float) -> None:
    for option, fraction in (("val", val_fraction), ("test", test_fraction)):
        if not 0 <= fraction < 1:
            raise UsageError(f"--data.{option}-fraction is {fraction}; it must be at least 0 and below 1.")
    if val_fraction + test_fraction >= 1:
        raise UsageError(
            f"--data.val-fraction {val_fraction} and --data.test-fraction {test_fraction} leave nothing to train on.\n"
            "Together they must be below 1."
        )


def _split(
    characters: int, val_fraction: float, max_val_characters: int | None, test_fraction: float, name: str
) -> tuple[tuple[int, int], bool]:
    """Where training and validation end, in characters, and whether validation was cut to the most allowed."""
    if characters == 0:
        raise LmappError(f"{name} is empty.")
    if characters == 1:
        raise LmappError(f"{name} is a single character; it takes at least 2 to predict one.")
    # The decimal fraction that was typed, not the binary one next to it: 0.29 of 100 characters is 29.
    test = int(characters * Fraction(repr(float(test_fraction))))
    asked = validation = int(characters * Fraction(repr(float(val_fraction))))
    if max_val_characters is not None:
        validation = min(validation, max_val_characters)
    capped = validation < asked
    test, validation = (part if part >= 2 else 0 for part in (test, validation))
    train = characters - validation - test
    if train < 2:
        raise UsageError(
            f"--data.val-fraction {val_fraction} and --data.test-fraction {test_fraction} leave {train} of "
            f"{characters} characters to train on; it takes at least 2."
        )
    return (train, train + validation), capped


def _split_counts(draft: _Draft, ends: tuple[int, int]) -> NDArray[np.int64]:
    """(3, P): how often each provisional id occurs in each split."""
    counts = np.zeros((3, len(draft.points)), dtype=np.int64)
    for row, begin, end in ((1, *ends), (2, ends[1], draft.characters)):
        for block in draft.blocks(begin, end):
            counts[row] += np.bincount(block, minlength=len(draft.points))
    counts[0] = draft.counts - counts[1] - counts[2]
    return counts


def _alphabet(draft: _Draft, counts: NDArray[np.int64], byte_fallback: bool | None) -> Vocabulary:
    """The training split's characters."""
    seen = counts[0] > 0
    characters = np.sort(draft.points[seen]).astype("<u4").tobytes().decode("utf-32-le")
    return Vocabulary(characters, byte_fallback=not seen.all() if byte_fallback is None else byte_fallback)


def _unseen_error(draft: _Draft, ids: NDArray[np.int64], ends: tuple[int, int], reading: sources.Reading) -> LmappError:
    index = 0
    for block in draft.blocks(0, draft.characters):
        unknown = np.flatnonzero(ids[block] < 0)
        if len(unknown):
            index += int(unknown[0])
            character = chr(draft.points[block[unknown[0]]])
            break
        index += len(block)
    split = SPLITS[sum(index >= end for end in ends)]
    if split == "train":  # only a given vocabulary can lack a character of this split
        problem = "is not in the vocabulary, which has no byte fallback"
        remedy = "Use a model that was trained with --data.byte-fallback true"
    else:
        problem = f"occurs in the {split} split and never in the training split"
        remedy = "Let it be written as bytes: --data.byte-fallback true"
    return LmappError(f"{describe(character)} {problem}.\nIt stands in {reading.locate(index)}.\n{remedy}")


def _write(
    path: Path,
    blocks: Iterator[NDArray[np.unsignedinteger]],
    vocabulary: Vocabulary,
    ids: NDArray[np.int64],
    points: NDArray[np.uint32],
    *,
    spell: bool,
) -> int:
    """Write the final ids of blocks of provisional ids; how many symbols they are.

    `ids` and `points` (P,) are the final id (−1: none) and the code point of each provisional id; `spell` says whether
    one without a final id occurs.
    """
    dtype = _dtype(len(vocabulary))
    final = ids if spell else ids.astype(dtype)
    symbols = 0
    with path.open("wb") as file:
        for block in blocks:
            out = final.take(block)
            if spell:
                out = vocabulary.spell(out, points.take(block)).astype(dtype)
            file.write(out.data)
            symbols += len(out)
        _to_disk(file)
    return symbols


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        _to_disk(file)


def _to_disk(file: Any) -> None:
    # Before the rename that makes the files valid, or a power cut could leave zeros under a valid name.
    file.flush()
    os.fsync(file.fileno())


def _map(path: Path, dtype: np.dtype) -> NDArray[np.unsignedinteger]:
    if path.stat().st_size == 0:
        empty = np.empty(0, dtype=dtype)
        empty.flags.writeable = False
        return empty
    return np.memmap(path, dtype=dtype, mode="r")


def load(directory: Path, fingerprint: str) -> EncodedCorpus | None:
    """The corpus of a directory; None if there is none or it is damaged. The fingerprint is taken at its word."""
    try:
        facts = json.loads((directory / "facts.json").read_text(encoding="utf-8"))
        vocabulary = Vocabulary.from_json((directory / "vocabulary.json").read_text(encoding="utf-8"))
        dtype = _dtype(len(vocabulary))
        maps = [_map(directory / f"{split}.bin", dtype) for split in SPLITS]
        if [len(ids) for ids in maps] != [facts[f"{split}_symbols"] for split in SPLITS]:
            return None
        return EncodedCorpus(directory, vocabulary, maps[0], maps[1], maps[2], facts, fingerprint)
    except (OSError, ValueError, KeyError, TypeError, LmappError):
        return None


@contextmanager
def _writing(parent: Path) -> Iterator[Path]:
    """A temporary directory beside the caches, gone afterwards; failures to write become an LmappError."""
    temporary = parent / _temporary_name()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(parent)
        temporary.mkdir()
        yield temporary
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        problem = "the disk is full" if full else error.strerror or str(error)
        raise LmappError(
            f"The encoded text cannot be kept in {parent}: {problem}.\nName another place: --data.cache-dir"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary_name() -> str:
    return f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}.tmp"


def _remove_leftovers(parent: Path) -> None:
    """Remove the temporary directories of processes of this machine that have died."""
    for path in parent.glob("*.*.*.tmp"):
        host, pid, _, _ = path.name.rsplit(".", 3)
        if host == socket.gethostname() and pid.isdecimal() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _publish(temporary: Path, directory: Path) -> None:
    """Give a finished directory its name, unless another process has; a damaged one of that name makes way."""
    while True:
        try:
            temporary.rename(directory)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if load(directory, "") is not None:
            return
        damaged = directory.parent / _temporary_name()
        with suppress(FileNotFoundError):
            directory.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
