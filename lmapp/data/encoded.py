"""One bounded-memory pass of text into memory-mapped files of ids, keyed by content and options.

Shapes: N symbols of a split, V symbols of the alphabet, P distinct characters of the text, M records of a split.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lmapp.data import cache, sources
from lmapp.data.baselines import baselines
from lmapp.data.draft import Draft, map_file, smallest_dtype
from lmapp.data.sources import Source
from lmapp.data.text import Reading, TextPolicy
from lmapp.errors import LmappError, UsageError
from lmapp.units import count
from lmapp.vocabulary import Vocabulary, describe, utf8_lengths

FORMAT = 2
"""Part of every key: raised whenever the same text would give other files."""

SPLITS = ("train", "validation", "test")

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Cut:
    """Where the validation and the test split are cut off the end of the text, in this order.

    ⌊test_fraction · characters⌋ at the end, ⌊val_fraction · characters⌋ before them, the rest for training. A split of
    a single character would have nothing to predict and is left to training.

    Attributes:
        val_fraction: Share of the characters for validation.
        max_val_characters: The most characters that validation gets; None: no limit.
        test_fraction: Share of the characters for the test split.
        at: A cut falls on the character; or on the first start of a record, or of a file, from there on, and if there
            is none, on the last one.
    """

    val_fraction: float = 0.1
    max_val_characters: int | None = 1_000_000
    test_fraction: float = 0.0
    at: Literal["character", "record", "file"] = "character"


@dataclass(frozen=True)
class Alphabet:
    """Which characters get a symbol of their own.

    Attributes:
        min_count: How often a character has to occur in the training split.
        byte_fallback: Whether any other is written as bytes: True, always possible; None, if there is one; False, it is
            an error.
        given: A vocabulary to use as it is.
    """

    min_count: int = 1
    byte_fallback: bool | None = None
    given: Vocabulary | None = None


@dataclass(frozen=True)
class EncodedCorpus:
    """A text as ids, in three splits.

    Attributes:
        directory: Where it lies.
        vocabulary: Its alphabet, of V symbols.
        train, validation, test: (N,) ids, read-only memory maps of the smallest unsigned type that holds V − 1; an
            empty array for an empty split.
        starts: For each split (M,) the symbols at which its records begin, sorted.
        facts: What is known about the text, numbers and strings only:
            characters, bytes (of its UTF-8 form), files, records, boms_removed, recognised (encodings told by a byte
            order mark), replaced (undecodable places), skipped (undecodable bytes), left_out (hidden files), and
            left_out_names of the first;
            train_characters, validation_characters, test_characters, and the same with …_symbols and …_records;
            alphabet (distinct characters with a symbol, or distinct bytes), vocabulary_size, byte_fallback;
            rare (the distinct characters without a symbol that the training split holds) and unseen (those that it does
            not hold; with a given vocabulary all without a symbol), rare_train, unseen_train and so on for each split
            (how often they occur there);
            validation_capped (the share asked for was more than the largest allowed validation split);
            unigram_bits, bigram_bits, baseline_split (see `baselines`);
            text_fingerprint: of the text that training is cut from, without separate validation and test data.
        fingerprint: Of the contents and of the options that change the text (`sources.fingerprint`).
    """

    directory: Path
    vocabulary: Vocabulary
    train: NDArray[np.unsignedinteger]
    validation: NDArray[np.unsignedinteger]
    test: NDArray[np.unsignedinteger]
    starts: Mapping[str, NDArray[np.int64]]
    facts: dict[str, Any]
    fingerprint: str


def encode(
    text: Sequence[Source],
    *,
    cache_dir: Path,
    policy: TextPolicy = TextPolicy(),  # noqa: B008
    separator: str | None = None,
    column: str = "text",
    validation: Sequence[Source] = (),
    test: Sequence[Source] = (),
    cut: Cut = Cut(),
    alphabet: Alphabet = Alphabet(),
    progress: Progress | None = None,
) -> EncodedCorpus:
    """A text as ids, from the cache if it has been encoded before.

    Args:
        text: What is trained on; validation and test are cut off its end unless they are given.
        cache_dir: Where `encoded/KEY/` is made.
        policy: How bytes become text. With `as_bytes` the alphabet is that of the 256 bytes, whatever `alphabet` says.
        separator: What stands between two records (`sources.stream`).
        column: The field of a row that holds its text.
        validation: Separate validation data.
        test: Separate test data.
        cut: Where the splits that are not given are cut.
        alphabet: Which characters get a symbol.
        progress: Called with the bytes read so far and the bytes of all sources, None if that is not known.

    Raises:
        UsageError: if the fractions leave no training split, or the encoding is unknown.
        LmappError: if the text is empty or a single character, has a character that cannot be written, changes while
            it is read, cannot be read (`sources.stream`), or the cache cannot be written.
    """
    _check_fractions(cut)
    groups = {"text": text, "validation": validation, "test": test}
    groups = {name: group for name, group in groups.items() if group}
    stamps = [source.stamp() for group in groups.values() for source in group]
    prints = {name: sources.fingerprint(group, policy, separator, column) for name, group in groups.items()}
    fingerprint = prints["text"] if len(prints) == 1 else _hash(prints, 32)
    given = alphabet.given
    options = [cut.val_fraction, cut.max_val_characters, cut.test_fraction, cut.at]
    letters = [alphabet.min_count, alphabet.byte_fallback] if given is None else [given.characters, given.byte_fallback]
    directory = cache_dir / "encoded" / _hash([FORMAT, prints, options, letters], 16)
    cached = load(directory, fingerprint)
    if cached is not None:
        return cached

    with cache.writing(directory.parent) as temporary:
        draft, reading = Draft(temporary, as_bytes=policy.as_bytes), Reading()
        sizes = [source.size() for group in groups.values() for source in group]
        total = None if None in sizes else sum(size for size in sizes if size is not None)
        ends = {}
        for name, group in groups.items():
            pieces = sources.stream(group, policy=policy, separator=separator, column=column, reading=reading)
            for _ in draft.fill(pieces, reading):
                if progress is not None:
                    progress(reading.bytes, total)
            ends[name] = draft.length
        if [source.stamp() for group in groups.values() for source in group] != stamps:
            raise LmappError("The text changed while it was being read.\nTry again when nothing writes to its files.")

        ranges, capped = _ranges(draft, ends, {name: _called(group) for name, group in groups.items()}, cut, reading)
        counts = {split: draft.count(*ranges[split]) for split in SPLITS[1:]}
        counts["train"] = draft.counts - sum(counts.values())
        vocabulary = _vocabulary(draft, counts["train"], alphabet)
        facts = _facts(draft, reading, vocabulary, counts, given is not None)
        facts |= {"validation_capped": capped, "text_fingerprint": prints["text"]}
        if not facts["train_characters"]:
            raise LmappError(f"{_called(text)} holds no character: each of its bytes would continue one.")
        ids = np.arange(256) if policy.as_bytes else vocabulary.ids_of(draft.points)
        if (ids < 0).any() and not vocabulary.byte_fallback:
            raise _unknown_error(draft, ids, ranges, counts["train"], reading, given is not None)
        records = draft.starts
        for split, (begin, end) in ranges.items():
            first, after = np.searchsorted(records, [begin, end])
            starts = records[first:after] - begin
            written = _write(
                temporary / f"{split}.bin",
                draft.blocks(begin, end),
                vocabulary,
                ids,
                draft.points,
                spell=bool(counts[split][ids < 0].any()),
                starts=starts,
            )
            facts[f"{split}_symbols"], facts[f"{split}_records"] = written, len(starts)
        del records
        draft.remove()

        dtype = smallest_dtype(len(vocabulary))
        train_ids, scored = (map_file(temporary / f"{split}.bin", dtype) for split in SPLITS[:2])
        facts["baseline_split"] = "validation" if len(scored) else "train"
        facts["unigram_bits"], facts["bigram_bits"] = baselines(
            train_ids, scored if len(scored) else train_ids, vocabulary.starts_character
        )
        del train_ids, scored
        _write_text(temporary / "vocabulary.json", vocabulary.to_json())
        _write_text(temporary / "facts.json", json.dumps(facts, indent=1))
        cache.publish(temporary, directory, lambda place: load(place, "") is not None)

    corpus = load(directory, fingerprint)
    if corpus is None:
        raise LmappError(f"{directory} was written and is damaged or gone.\nName another place: --data.cache-dir")
    return corpus


def load(directory: Path, fingerprint: str) -> EncodedCorpus | None:
    """The corpus of a directory; None if there is none or it is damaged. The fingerprint is taken at its word."""
    try:
        facts = json.loads((directory / "facts.json").read_text(encoding="utf-8"))
        vocabulary = Vocabulary.from_json((directory / "vocabulary.json").read_text(encoding="utf-8"))
        dtype = smallest_dtype(len(vocabulary))
        maps = [map_file(directory / f"{split}.bin", dtype) for split in SPLITS]
        starts = {split: map_file(_starts_file(directory / f"{split}.bin"), np.dtype("<i8")) for split in SPLITS}
        if [len(ids) for ids in maps] != [facts[f"{split}_symbols"] for split in SPLITS]:
            return None
        if [len(starts[split]) for split in SPLITS] != [facts[f"{split}_records"] for split in SPLITS]:
            return None
        return EncodedCorpus(directory, vocabulary, maps[0], maps[1], maps[2], starts, facts, fingerprint)
    except (OSError, ValueError, KeyError, TypeError, LmappError):
        return None


def _hash(content: Any, size: int) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=size).hexdigest()


def _called(group: Sequence[Source]) -> str:
    return group[0].name if len(group) == 1 else f"The text of {len(group):,} files"


# Splits ---------------------------------------------------------------------------------------------------------------


def _check_fractions(cut: Cut) -> None:
    for option, fraction in (("val", cut.val_fraction), ("test", cut.test_fraction)):
        if not 0 <= fraction < 1:
            raise UsageError(f"--data.{option}-fraction is {fraction}; it must be at least 0 and below 1.")
    if cut.val_fraction + cut.test_fraction >= 1:
        raise UsageError(
            f"--data.val-fraction {cut.val_fraction} and --data.test-fraction {cut.test_fraction} leave nothing to "
            "train on.\nTogether they must be below 1."
        )


def _ranges(
    draft: Draft, ends: Mapping[str, int], names: Mapping[str, str], cut: Cut, reading: Reading
) -> tuple[dict[str, tuple[int, int]], bool]:
    """Where each split begins and ends in the draft, and whether validation was cut to the most allowed."""
    begin, given = 0, {}
    for group, end in ends.items():
        if end == begin:
            raise LmappError(f"{names[group]} is empty.")
        if end - begin == 1:
            raise LmappError(f"{names[group]} is a single character; it takes at least 2 to predict one.")
        given[group] = (begin, end)
        begin = end
    size = ends["text"]
    # The decimal fraction that was typed, not the binary one next to it: 0.29 of 100 characters is 29.
    test = 0 if "test" in given else int(size * Fraction(repr(float(cut.test_fraction))))
    asked = validation = 0 if "validation" in given else int(size * Fraction(repr(float(cut.val_fraction))))
    if cut.max_val_characters is not None:
        validation = min(validation, cut.max_val_characters)
    place = _places(draft, cut.at, size, reading)
    after_validation = place(size - test, size) if test > 1 else size
    if size - after_validation == 1:
        after_validation = size
    after_train = place(after_validation - validation, after_validation) if validation > 1 else after_validation
    if after_validation - after_train == 1:
        after_train = after_validation
    if after_train < 2:
        raise UsageError(
            f"--data.val-fraction {cut.val_fraction} and --data.test-fraction {cut.test_fraction} leave {after_train} "
            f"of {size} characters to train on; it takes at least 2."
        )
    ranges = {
        "train": (0, after_train),
        "validation": given.get("validation", (after_train, after_validation)),
        "test": given.get("test", (after_validation, size)),
    }
    return ranges, validation < asked


def _places(draft: Draft, at: str, size: int, reading: Reading) -> Callable[[int, int], int]:
    """Where a cut that is wanted at a position, before another one, may fall."""
    if at == "character":
        return (lambda wanted, before: _character_start(draft, wanted)) if draft.as_bytes else lambda wanted, _: wanted
    starts = draft.starts if at == "record" else np.array([start for _, start in reading.starts], dtype=np.int64)
    starts = np.array(starts[(starts > 0) & (starts < size)])

    def place(wanted: int, before: int) -> int:
        possible = starts[starts < before]
        if not len(possible):
            raise UsageError(
                f"--data.split-at {at}: the text has too few {at}s to cut validation or test off before one.\n"
                "Cut at a character, or name separate data: --data.val-path FILE"
            )
        return int(possible[min(int(np.searchsorted(possible, wanted)), len(possible) - 1)])

    return place


def _character_start(draft: Draft, wanted: int) -> int:
    """The first byte from there on that does not continue a character of UTF-8, if it is among the next four."""
    following = [byte for block in draft.blocks(wanted, min(wanted + 4, draft.length)) for byte in block]
    return next((wanted + i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), wanted)


# Alphabet -------------------------------------------------------------------------------------------------------------


def _vocabulary(draft: Draft, in_train: NDArray[np.int64], alphabet: Alphabet) -> Vocabulary:
    if draft.as_bytes:
        return Vocabulary("", byte_fallback=True)
    if alphabet.given is not None:
        return alphabet.given
    kept = in_train >= alphabet.min_count
    fallback = not kept.all() if alphabet.byte_fallback is None else alphabet.byte_fallback
    if not kept.any() and not fallback:
        raise UsageError(f"No character occurs --data.min-count {alphabet.min_count} times in the training split.")
    return Vocabulary(_text_of(draft.points[kept]), byte_fallback=fallback)


def _text_of(points: NDArray[np.uint32]) -> str:
    return np.sort(points).astype("<u4").tobytes().decode("utf-32-le")


def _facts(
    draft: Draft, reading: Reading, vocabulary: Vocabulary, counts: Mapping[str, NDArray[np.int64]], given: bool
) -> dict[str, Any]:
    """What is known once the alphabet is: see `EncodedCorpus`."""
    in_train = counts["train"]
    if draft.as_bytes:
        characters, sizes = vocabulary.starts_character, np.ones(256, dtype=np.int64)
        without = np.zeros(256, dtype=np.bool_)
    else:
        characters, sizes = np.ones(len(draft.points), dtype=np.bool_), utf8_lengths(draft.points)
        without = vocabulary.ids_of(draft.points) < 0
    rare = without & (in_train > 0) & (not given)
    unseen = without & ~rare
    facts: dict[str, Any] = {
        "characters": int(draft.counts @ characters),
        "bytes": int(draft.counts @ sizes),
        "files": len(reading.starts),
        "records": reading.records,
        "boms_removed": reading.boms,
        "recognised": ", ".join(sorted(reading.by_mark)),
        "replaced": reading.replaced,
        "skipped": reading.skipped,
        "left_out": reading.left_out_count,
        "left_out_names": ", ".join(reading.left_out),
        "alphabet": int((in_train > 0).sum()) if draft.as_bytes else len(vocabulary.characters),
        "vocabulary_size": len(vocabulary),
        "byte_fallback": vocabulary.byte_fallback,
        "rare": _text_of(draft.points[rare]),
        "unseen": _text_of(draft.points[unseen]),
    }
    for split in SPLITS:
        facts[f"{split}_characters"] = int(counts[split] @ characters)
        facts[f"rare_{split}"] = int(counts[split][rare].sum())
        facts[f"unseen_{split}"] = int(counts[split][unseen].sum())
    return facts


def _unknown_error(
    draft: Draft,
    ids: NDArray[np.int64],
    ranges: Mapping[str, tuple[int, int]],
    in_train: NDArray[np.int64],
    reading: Reading,
    given: bool,
) -> LmappError:
    """For the first character that has no symbol and cannot be written as bytes."""
    index = 0
    for block in draft.blocks(0, draft.length):
        unknown = np.flatnonzero(ids[block] < 0)
        if len(unknown):
            index += int(unknown[0])
            provisional = block[unknown[0]]
            break
        index += len(block)
    split = next(split for split, (begin, end) in ranges.items() if begin <= index < end)
    remedy = "Let it be written as bytes: --data.byte-fallback true"
    if given:
        problem = "is not in the vocabulary, which has no byte fallback"
        remedy = "Use a vocabulary with byte fallback: that of a model trained with --data.byte-fallback true"
    elif in_train[provisional]:
        problem = f"occurs {count(in_train[provisional], 'time')} in the training split: --data.min-count asks for more"
    else:
        problem = f"occurs in the {split} split and never in the training split"
    character = describe(chr(draft.points[provisional]))
    return LmappError(f"{character} {problem}.\nIt stands in {reading.locate(index)}.\n{remedy}")


# Files ----------------------------------------------------------------------------------------------------------------


def _write(
    path: Path,
    blocks: Iterator[NDArray[np.unsignedinteger]],
    vocabulary: Vocabulary,
    ids: NDArray[np.int64],
    points: NDArray[np.uint32],
    *,
    spell: bool,
    starts: NDArray[np.int64],
) -> int:
    """Write the final ids of blocks of provisional ids, and where records begin among them; how many symbols they are.

    `ids` and `points` (P,) are the final id (−1: none) and the code point of each provisional id; `spell` says whether
    one without a final id occurs; `starts` (M,) are characters of the split.
    """
    dtype = smallest_dtype(len(vocabulary))
    final = ids if spell else ids.astype(dtype)
    widths = np.where(ids < 0, utf8_lengths(points), 1)
    characters = symbols = 0
    with path.open("wb") as file, _starts_file(path).open("wb") as starts_file:
        for block in blocks:
            first, after = np.searchsorted(starts, [characters, characters + len(block)])
            here = starts[first:after] - characters
            out = final.take(block)
            if spell:
                before = np.cumsum(widths.take(block)) - widths.take(block)
                here = before[here]
                out = vocabulary.spell(out, points.take(block)).astype(dtype)
            file.write(out.data)
            starts_file.write((here + symbols).astype("<i8").data)
            characters += len(block)
            symbols += len(out)
        cache.to_disk(file)
        cache.to_disk(starts_file)
    return symbols


def _starts_file(path: Path) -> Path:
    return path.with_suffix(".starts")


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        cache.to_disk(file)
