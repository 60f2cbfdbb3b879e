"""What a corpus is before a model is trained on it: its text, what may be wrong with it, and how it would be used."""

from __future__ import annotations

import bz2
import lzma
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmapp.config import DataConfig
from lmapp.data import sources
from lmapp.data.datamodule import TextDataModule
from lmapp.data.encoded import SPLITS, Progress
from lmapp.data.http import without_password
from lmapp.data.passages import LENGTH, shared
from lmapp.data.sources import Source
from lmapp.data.statistics import Place, Spot, Statistics
from lmapp.data.text import Reading, policy_of
from lmapp.errors import LmappError, UsageError
from lmapp.units import count

MIN_COUNTS = (2, 5, 10)
"""Values of `--data.min-count` whose effect is told."""

LONG_LINE = 10_000
"""Characters from which on a line is worth a remark."""

_COMPRESSORS: dict[str, Callable[[], Any]] = {
    "bzip2": lambda: bz2.BZ2Compressor(9),
    "xz": lambda: lzma.LZMACompressor(preset=6),
}

_SHOWN_FILES = 10
_SHOWN_CHARACTERS = 12
_SHOWN_RARE = 6
_SHOWN_KINDS = 8

# How much of the text it takes for a remark. The others are made whenever there is anything to remark.
_MANY_TAGS = 10, 5e-4  # at least so many, and so many a character
_MANY_TRAILING = 10, 0.1  # lines
_MANY_REPEATED = 0.01  # of the passages

_CONTROLS = "NULSOHSTXETXEOTENQACKBELBS TABLF VT FF CR SO SI DLEDC1DC2DC3DC4NAKSYNETBCANEM SUBESCFS GS RS US "
_NAMES = {point: _CONTROLS[3 * point :][:3].rstrip() for point in range(32)} | {0x7F: "DEL", 0x85: "NEL"}
_OTHER_LINE_ENDS = (0x0B, 0x0C, 0x85, 0x2028, 0x2029)
_JOINERS = (0x200C, 0x200D)  # parts of Persian words and of emoji
_UNNAMED = {"Cc": "control", "Cs": "surrogate", "Co": "private use", "Cn": "unassigned"}
_SCRIPTS = {
    "CJK": "CJK ideographs",
    "IDEOGRAPHIC": "CJK ideographs",
    "HIRAGANA": "hiragana",
    "KATAKANA": "katakana",
    "KATAKANA-HIRAGANA": "katakana",
    "FULLWIDTH": "full-width letters",
    "HALFWIDTH": "half-width letters",
}
_KINDS = {
    "Nd": "digits",
    "N": "other numbers",
    "P": "punctuation",
    "M": "combining marks",
    "S": "symbols",
    "Z": "spaces",
    "Cc": "control characters",
    "Cf": "invisible characters",
    "C": "unassigned, private or surrogates",
}


@dataclass(frozen=True)
class Finding:
    """Something that a reader of the text should know of before a model learns it.

    Attributes:
        kind: Its name.
        message: What it is.
        count: How often it occurs, if that can be counted.
        place: Where it is first.
    """

    kind: str
    message: str
    count: int | None = None
    place: Place | None = None


@dataclass(frozen=True)
class Inspection:
    """All there is to know of a corpus.

    Attributes:
        config: What was asked for.
        files: Name, bytes as it lies there (None: not known, as of an archive's member) and characters of each file.
        reading: What became of the sources' bytes.
        statistics: Of the whole text, of all splits.
        findings: What may be wrong with it.
        compressed: Bits per character that general compressors need for the sample of the statistics; none without a
            text.
        facts: What encoding it found out (`EncodedCorpus`); None if it cannot be trained on.
        shape: B, T and steps an epoch of a training; None if there can be none.
        problem: Why it cannot be trained on.
        bytes_on_disk: Of the sources, if that is known, and of the encoded text.
        directory: Where that lies.
    """

    config: DataConfig
    files: list[tuple[str, int | None, int]]
    reading: Reading
    statistics: Statistics
    findings: list[Finding]
    compressed: dict[str, float]
    facts: dict[str, Any] | None
    shape: tuple[int, int, int] | None
    problem: str | None
    bytes_on_disk: tuple[int | None, int | None]
    directory: str | None

    def as_dict(self) -> dict[str, Any]:
        """As `lmapp corpus --json` prints it: everything, nothing abbreviated."""
        found, facts, reading = self.statistics, self.facts, self.reading

        def character(point: int) -> dict[str, Any]:
            if found.as_bytes:
                return {"byte": point}
            return {"character": chr(point), "code": _code(point), "name": _name(point)}

        return {
            "files": [{"name": name, "bytes": bytes_, "characters": length} for name, bytes_, length in self.files],
            "encoding": self.config.encoding if not found.as_bytes else None,
            "recognised": reading.by_mark,
            "records": reading.records,
            "boms_removed": reading.boms,
            "replaced": reading.replaced,
            "skipped": reading.skipped,
            "left_out": reading.left_out_count,
            "left_out_names": reading.left_out,
            "characters": found.characters,
            "bytes": found.bytes,
            "lines": {
                "count": found.lines,
                "blank": found.blank_lines,
                "trailing_space": found.trailing,
                "ends": found.line_ends,
                "other_ends": {_name(point): int(found.counts[point]) for point in _other_ends(found)},
                "longest": found.longest,
                "longest_at": _json_place(found, found.longest_spot if found.longest else None),
            },
            "alphabet": [{**character(point), "count": int(found.counts[point])} for point in found.points.tolist()],
            "kinds": _kinds(found),
            "min_count": [
                {"value": value, "characters": distinct, "times": times} for value, distinct, times in _rarer(found)
            ],
            "repeated_passages": found.passages.repeated,
            "findings": [asdict(finding) for finding in self.findings],
            "bits_per_character": {
                **self.compressed,
                "compressed_characters": found.sample_characters,
                "unigram": facts and facts["unigram_bits"],
                "bigram": facts and facts["bigram_bits"],
                "scored_split": facts and facts["baseline_split"],
            },
            "splits": facts
            and {
                split: {unit: facts[f"{split}_{unit}"] for unit in ("characters", "symbols", "records")}
                for split in SPLITS
            },
            "vocabulary_size": facts and facts["vocabulary_size"],
            "byte_fallback": facts and facts["byte_fallback"],
            "batches": None
            if self.shape is None
            else dict(zip(("batch_size", "sequence_length", "steps"), self.shape, strict=True)),
            "problem": self.problem,
            "bytes_on_disk": dict(zip(("sources", "encoded"), self.bytes_on_disk, strict=True)),
            "directory": self.directory,
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """As a person reads it: (what it is, a line about it), long lists abbreviated; remarks are called `note`."""
        found = self.statistics
        yield "corpus", f"{_source(self.config)}: {self._amount()}"
        if len(self.files) > 1:
            for name, bytes_, length in self.files[:_SHOWN_FILES]:
                lies = "" if bytes_ is None else f", {_bytes(bytes_)}"
                yield "", f"{name}: {_count(found, length)}{lies}"
            if len(self.files) > _SHOWN_FILES:
                yield "", f"… and {len(self.files) - _SHOWN_FILES:,} more"
        yield "read as", self._encoding()
        if found.characters:
            yield from self._text_lines()
        if self.facts is not None:
            yield "splits", self._splits()
        if self.shape is not None:
            yield "batches", self._batches()
        if bits := self._bits():
            yield "bits/char", bits
        if self.directory is not None:
            yield "on disk", self._disk()
        for finding in self.findings:
            first = "at" if finding.count == 1 else "first at"
            where = "" if finding.place is None else f", {first} {self._at(finding.place)}"
            yield "note", f"{finding.message}{where}."
        if self.problem is not None:
            yield "note", f"It cannot be trained on. {' '.join(self.problem.splitlines())}"

    def _at(self, place: Place) -> str:
        line = f"line {place.line:,}"
        if self.reading.records != len(self.files):  # of a file of rows, the line is none of the file
            line += " of its text"
        return line if len(self.files) == 1 else f"{place.file}, {line}"

    def _amount(self) -> str:
        files = count(len(self.files), "file")
        empty = sum(not length for _, _, length in self.files)
        words = [f"{files}, {'one' if empty == 1 else empty} of them empty" if empty and len(self.files) > 1 else files]
        if self.reading.records != len(self.files):
            words.append(count(self.reading.records, "record"))
        if self.bytes_on_disk[0] is not None:
            words.append(_bytes(self.bytes_on_disk[0]))
        if self.config.val_path or self.config.test_path:
            words.append("separate validation and test data among them")
        return ", ".join(words)

    def _encoding(self) -> str:
        reading = self.reading
        if self.statistics.as_bytes:
            return "bytes as they are"
        words = [self.config.encoding]
        for encoding, files in sorted(reading.by_mark.items()):
            words.append(f"{count(files, 'file')} {encoding} by byte order mark")
        if reading.boms:
            words.append(f"{count(reading.boms, 'byte order mark')} removed")
        if reading.replaced:
            words.append(f"{count(reading.replaced, 'undecodable place')} now U+FFFD")
        if reading.skipped:
            words.append(f"{count(reading.skipped, 'undecodable byte')} left out")
        if reading.left_out_count:
            names = ", ".join(reading.left_out[:3]) + (" …" if reading.left_out_count > 3 else "")
            words.append(f"{count(reading.left_out_count, 'hidden file')} left out ({names})")
        return ", ".join(words)

    def _text_lines(self) -> Iterator[tuple[str, str]]:
        found = self.statistics
        points = found.points.tolist()
        of_bytes = f", {count(found.bytes, 'byte')} as UTF-8"
        if found.as_bytes and self.facts is not None:
            of_bytes = f", {count(self.facts['characters'], 'character')} as UTF-8"
        yield "text", f"{_count(found, found.characters)}{of_bytes}"
        ends = [f"{number:,} {name}" for name, number in found.line_ends.items() if number]
        others = [f"{found.counts[point]:,} {_name(point)}" for point in _other_ends(found)]
        longest = f"{_count(found, found.longest)} at {self._at(found.place(found.longest_spot))}"
        blank = f"{found.lines:,}, {_share(found.blank_lines, found.lines)} blank"
        yield "lines", blank + (f", the longest of {longest}" if found.longest else "")
        yield "line ends", (", ".join(ends) or "none") + (f"; not taken for any: {', '.join(others)}" if others else "")
        symbols = ""
        if self.facts is not None and self.facts["byte_fallback"] and not found.as_bytes:
            symbols = f"; {self.facts['vocabulary_size']:,} symbols, 256 of them bytes"
        yield (
            "alphabet",
            f"{count(len(points), 'different byte' if found.as_bytes else 'different character')}{symbols}",
        )
        shown = [f"{_label(p, found)} {_share(found.counts[p], found.characters)}" for p in points[:_SHOWN_CHARACTERS]]
        yield "frequent", ", ".join(shown)
        if rare := sorted(points[_SHOWN_CHARACTERS:], key=lambda p: (found.counts[p], p))[:_SHOWN_RARE]:
            yield "rare", ", ".join(f"{_described(p, found)} {found.counts[p]:,}" for p in rare)
        parts = list(_kinds(found).items())
        shown = [f"{name} {_share(times, found.characters)}" for name, times in parts[:_SHOWN_KINDS]]
        yield "kinds", ", ".join(shown) + (" …" if len(parts) > _SHOWN_KINDS else "")
        if not found.as_bytes:
            yield "min-count", self._min_counts()

    def _min_counts(self) -> str:
        found = self.statistics
        (value, distinct, times), *others = _rarer(found)
        if not others[-1][1]:
            return f"every character occurs at least {MIN_COUNTS[-1]} times"
        first = f"--data.min-count {value} would write {distinct:,} of them as bytes"
        shares = [f"{first} ({_share(times, found.characters)} of the text)"]
        shares += [f"{value}: {distinct:,} ({_share(times, found.characters)})" for value, distinct, times in others]
        return ", ".join(shares)

    def _splits(self) -> str:
        assert self.facts is not None
        sizes = {split: self.facts[f"{split}_characters"] for split in SPLITS}
        total = sum(sizes.values())
        words = [f"{split} {length:,} ({_share(length, total)})" for split, length in sizes.items() if length]
        return ", ".join(words) + ("" if sizes["validation"] else ", no validation")

    def _batches(self) -> str:
        assert self.shape is not None
        rows, length, steps = self.shape
        asked = self.config.batch_size, self.config.sequence_length
        shrunk = "" if asked == (rows, length) else f", shrunk from {asked[0]} × {asked[1]} to fit the text"
        return f"{count(rows, 'row')} × {count(length, 'character')}, {count(steps, 'step')} an epoch{shrunk}"

    def _bits(self) -> str:
        words = []
        if self.facts is not None:
            words.append(
                f"unigram {self.facts['unigram_bits']:.3f}, bigram {self.facts['bigram_bits']:.3f} on the "
                f"{self.facts['baseline_split']} split"
            )
        if self.compressed:
            found = self.statistics
            of = "the whole text" if found.whole_sample else f"{count(found.sample_characters, 'character')} of it"
            words.append(", ".join(f"{name} {bits:.3f}" for name, bits in self.compressed.items()) + f" on {of}")
        return "; ".join(words)

    def _disk(self) -> str:
        text, ids = self.bytes_on_disk
        assert ids is not None
        sources = "" if text is None else f"sources {_bytes(text)}, "
        return f"{sources}ids {_bytes(ids)}, mapped into memory as they are read, in {self.directory}"


def inspect(
    config: DataConfig, *, progress: Progress | None = None, say: Callable[[str], None] = lambda _: None
) -> Inspection:
    """Read the text once for its statistics, and encode it as a training would.

    Args:
        config: The `data` section.
        progress: Told (bytes done, bytes in all; None if that is not known) of two readings, of which the second is
            done when all that goes on during it is. Called from several threads, one at a time.
        say: Told in a line what keeps a reader waiting.

    Raises:
        LmappError: the text is not there or cannot be read. That it is too short to train on, or holds what cannot be
            encoded, is a `problem` of the inspection.
        UsageError: the text is to be read as a stream.
    """
    if config.streaming:
        raise UsageError(
            "--data.streaming is for texts that may never end: a corpus is read to its end to be described."
        )
    module = TextDataModule(config, say=say)
    texts = module.texts()
    group = [source for texts_of_split in texts.values() for source in texts_of_split]
    sizes = [source.size() for source in group]
    total = None if None in sizes else sum(size for size in sizes if size is not None)

    lock, shares = threading.Lock(), dict.fromkeys(("encoding", *_COMPRESSORS), 0.0)

    def tell(part: str, share: float) -> None:
        with lock:
            shares[part] = share
            if progress is not None and total is not None:
                progress(total + int(total * min(shares.values())), 2 * total)

    def tell_read(done: int) -> None:
        if progress is not None:
            progress(done, None if total is None else 2 * total)

    found, reading = _statistics(config, module.separator, texts, tell_read)
    module.progress = lambda done, all_: tell("encoding", done / all_ if all_ else 0.0)
    module.say = lambda _: None  # what becomes of the batches is told by their shape
    problem = disk = None
    with _compressing(found.sample, tell) as compressing:
        try:
            module.setup(texts=texts)
        except LmappError as error:
            problem = str(error)
        tell("encoding", 1.0)
        corpus, batches = module.corpus, module.batches
        findings = list(_findings(reading, found))
        if corpus is not None:
            splits = {split: getattr(corpus, split) for split in SPLITS}
            findings += _findings_between(found, corpus.facts, splits, config.alphabet not in ("characters", "bytes"))
            disk = sum(path.stat().st_size for path in corpus.directory.iterdir())
        sizes_of_sample = {name: compressed.result() for name, compressed in compressing.items()}
    characters = found.sample_characters  # none, in bytes that no character begins with
    return Inspection(
        config=config,
        files=_files(group, sizes, found),
        reading=reading,
        statistics=found,
        findings=findings,
        compressed={name: 8 * bytes_ / characters for name, bytes_ in sizes_of_sample.items() if characters},
        facts=None if corpus is None else corpus.facts,
        shape=None if batches is None else (batches.batch_size, batches.sequence_length, len(batches)),
        problem=problem,
        bytes_on_disk=(total, disk),
        directory=None if corpus is None else str(corpus.directory),
    )


def _statistics(
    config: DataConfig,
    separator: str | None,
    texts: Mapping[str, Sequence[Source]],
    tell: Callable[[int], None],
) -> tuple[Statistics, Reading]:
    policy, reading = policy_of(config), Reading()
    found = Statistics(as_bytes=policy.as_bytes)
    known = fed = 0
    for group in texts.values():
        pieces = sources.stream(group, policy=policy, separator=separator, column=config.column, reading=reading)
        for piece in pieces:
            begin = fed
            for name, start in reading.starts[known:]:
                found.add(piece[begin - fed : start - fed])
                found.begin(name)
                begin = start
            found.add(piece[begin - fed :])
            known, fed = len(reading.starts), fed + len(piece)
            del reading.record_starts[:]
            tell(reading.bytes)
    found.finish()
    return found, reading


@contextmanager
def _compressing(blocks: Sequence[bytes], tell: Callable[[str, float], None]) -> Iterator[dict[str, Future[int]]]:
    """The compressed sizes of bytes, found while something else is done; given up when that ends before."""
    ended = threading.Event()

    def compressed(name: str) -> int:
        compressor, total = _COMPRESSORS[name](), 0
        for number, block in enumerate(blocks):
            if ended.is_set():
                break
            tell(name, number / len(blocks))
            total += len(compressor.compress(block))
        total += len(compressor.flush())
        tell(name, 1.0)
        return total

    with ThreadPoolExecutor(len(_COMPRESSORS)) as pool:
        try:
            yield {name: pool.submit(compressed, name) for name in _COMPRESSORS}
        finally:
            ended.set()


def _files(
    group: Sequence[Source], sizes: Sequence[int | None], found: Statistics
) -> list[tuple[str, int | None, int]]:
    """The files and members that have text, then the files that have none."""
    known = {source.name: bytes_ for source, bytes_ in zip(group, sizes, strict=True)}
    files = [(name, known.get(name), length) for name, length in found.files]
    with_text = {name for name, _ in found.files}
    empty = [source for source in group if source.is_one_text and source.name not in with_text]
    return files + [(source.name, known[source.name], 0) for source in empty]


# What may be wrong ----------------------------------------------------------------------------------------------------


def _findings(reading: Reading, found: Statistics) -> Iterator[Finding]:
    """What can be seen of the text alone."""
    yield from _findings_in_lines(found)
    yield from _findings_in_characters(reading, found)
    at_least, rate = _MANY_TAGS
    for kind in ("tags", "entities"):
        match = found.found[kind]
        if match.count >= max(at_least, rate * found.characters):
            message = f"{match.count:,} {kind} of HTML or XML, as {_quoted(match.example)}"
            yield Finding(kind, message, match.count, _place(found, match.spot))
    match = found.found["mojibake"]
    if match.count:
        message = (
            f"{count(match.count, 'place')} with what looks like UTF-8 read in another encoding, as "
            f"{_quoted(match.example)} for {_quoted(_unmangled(match.example))}"
        )
        yield Finding("mojibake", message, match.count, _place(found, match.spot))
    if found.mixed_scripts.count:
        yield Finding(
            "mixed_scripts",
            f"Latin letters beside Cyrillic ones in {count(found.mixed_scripts.count, 'place')}, as "
            f"{_quoted(found.mixed_scripts.example)}: some may only look alike",
            found.mixed_scripts.count,
            _place(found, found.mixed_scripts.spot),
        )
    if found.not_nfc is not None:
        message = "One character written in several ways: --data.normalization nfc would change the text"
        yield Finding("not_normalized", message, place=_place(found, found.not_nfc))
    repeated = found.passages.repeated
    if repeated >= _MANY_REPEATED:
        share = _share(repeated, 1)
        message = f"The text repeats itself: {share} of its passages of {LENGTH} characters stand earlier in it already"
        yield Finding("repeated", message, place=_place(found, found.passages.first_repeated))


def _findings_in_lines(found: Statistics) -> Iterator[Finding]:
    longest = _place(found, found.longest_spot) if found.longest else None
    if found.lines == 1 and found.characters >= 1000:
        yield Finding("one_line", "The text is one single line")
    elif found.longest >= LONG_LINE:
        yield Finding("long_line", f"A line of {found.longest:,} characters", 1, longest)
    kinds = {name: number for name, number in found.line_ends.items() if number}
    if len(kinds) > 1:
        rarest = min(kinds, key=kinds.__getitem__)
        yield Finding(
            "mixed_line_ends",
            f"Line ends are mixed, {', '.join(f'{number:,} {name}' for name, number in kinds.items())} "
            f"(--data.newlines lf makes them one): {rarest}",
            kinds[rarest],
            _place(found, found.first_ends[rarest]),
        )
    at_least, rate = _MANY_TRAILING
    if found.trailing >= max(at_least, rate * found.lines):
        message = f"White space at the end of {_share(found.trailing, found.lines)} of the lines"
        yield Finding("trailing_space", message, found.trailing, _place(found, found.first_trailing))


def _findings_in_characters(reading: Reading, found: Statistics) -> Iterator[Finding]:
    points = found.points
    categories = np.array([_category(point, found) for point in points.tolist()], dtype="<U2")

    def of(
        kind: str, what: str, chosen: NDArray[np.int64], more: str = "", *, listed: Callable[[int], str] | None = None
    ) -> Iterator[Finding]:
        if len(chosen):
            times = int(found.counts[chosen].sum())
            names = "" if listed is None else f" ({_listed(map(listed, chosen[:4].tolist()), len(chosen))})"
            message = f"{count(times, what)}{names}{more}"
            yield Finding(kind, message, times, _place(found, found.first_of(chosen)))

    def label(point: int) -> str:
        return _label(point, found)

    usual = np.isin(points, [0, 9, 10, 13, *_OTHER_LINE_ENDS])
    yield from of("nul", "NUL", points[points == 0])
    yield from of("controls", "other control character", points[(categories == "Cc") & ~usual], listed=label)
    yield from of("tabs", "tab", points[points == 9])
    if found.as_bytes:
        return
    lost = f", {reading.replaced:,} of them by --data.errors replace" if reading.replaced else ""
    lost = f" (U+FFFD){lost}: text was lost where it was decoded"
    yield from of("replacement", "replacement character", points[points == 0xFFFD], lost)
    yield from of("boms", "byte order mark", points[points == 0xFEFF], " inside the text")
    invisible = (categories == "Cf") & ~np.isin(points, [0xFEFF, *_JOINERS]) & (points < 0xE0000)  # tags make flags
    yield from of("invisible", "invisible character", points[invisible], listed=_name)
    yield from of("private_use", "private character", points[categories == "Co"], listed=_code)
    unknown = f" that Unicode {unicodedata.unidata_version} does not know"
    yield from of("unassigned", "code point", points[categories == "Cn"], unknown, listed=_code)
    yield from of("surrogates", "lone surrogate", points[categories == "Cs"], listed=_code)


def _findings_between(
    found: Statistics, facts: Mapping[str, Any], ids: Mapping[str, NDArray[np.unsignedinteger]], given: bool
) -> Iterator[Finding]:
    """What can be seen of a split beside the training split, and of characters beside the alphabet."""
    times = sum(facts[f"unseen_{split}"] for split in SPLITS)
    if times:
        points = np.array([ord(character) for character in facts["unseen"]])
        names = _listed((_label(point, found) for point in points[:_SHOWN_RARE].tolist()), len(points))
        message = f"Not in the training text, yet in validation or test: {count(times, 'character')} ({names})"
        if given:
            message = f"Without a symbol in the alphabet that is given: {count(times, 'character')} ({names})"
        yield Finding("unseen", message, times, _place(found, found.first_of(points)))
    for split in SPLITS[1:]:
        share = shared(ids[split], ids["train"])
        if share >= _MANY_REPEATED:
            message = (
                f"{_share(share, 1)} of the passages of {LENGTH} characters of the {split} split stand in the training "
                "text too"
            )
            yield Finding(f"{split}_in_train", message)


def _unmangled(text: str) -> str:
    """What a text was before its UTF-8 was read as cp1252, or as latin-1 where that has no character."""
    raw = b"".join(c.encode("latin-1" if c <= "\xff" else "cp1252") for c in text)
    return raw.decode("utf-8", "replace")


# Words ----------------------------------------------------------------------------------------------------------------


def _source(config: DataConfig) -> str:
    if config.task is not None:
        return f"{config.task} (a task of delay {config.task_delay:,})"
    if config.path:
        return ", ".join(map(without_password, config.path[:3])) + (
            f" … ({len(config.path):,} names)" if len(config.path) > 3 else ""
        )
    return f"{config.corpus} (a named corpus)" if config.hub is None else f"{config.hub} on the hub, {config.hub_split}"


def _place(found: Statistics, spot: Spot | None) -> Place | None:
    return None if spot is None else found.place(spot)


def _json_place(found: Statistics, spot: Spot | None) -> dict[str, Any] | None:
    return None if spot is None else asdict(found.place(spot))


def _other_ends(found: Statistics) -> list[int]:
    return [point for point in _OTHER_LINE_ENDS if found.counts[point] and not (found.as_bytes and point > 0x7F)]


def _rarer(found: Statistics) -> Iterator[tuple[int, int, int]]:
    """(n, how many different characters occur fewer than n times, how often they do in all)."""
    times = found.counts[found.points]
    for value in MIN_COUNTS:
        yield value, int((times < value).sum()), int(times[times < value].sum())


def _kinds(found: Statistics) -> dict[str, int]:
    """How many characters of each kind or script, the most first."""
    kinds: Counter[str] = Counter()
    for point in found.points.tolist():
        kinds[_kind(point, found)] += int(found.counts[point])
    return dict(kinds.most_common())


def _kind(point: int, found: Statistics) -> str:
    if point in (10, 13):
        return "line ends"
    if point == 9:
        return "tabs"
    category = _category(point, found)
    if category == "":
        return "bytes above 0x7F"
    if category[0] == "L":
        script = unicodedata.name(chr(point), "OTHER").partition(" ")[0]
        return _SCRIPTS.get(script, f"{script.title()} letters")
    if category[0] == "S" and (point >= 0x1F000 or 0x2600 <= point <= 0x27BF):
        return "emoji and pictographs"
    return _KINDS.get(category, _KINDS.get(category[0], ""))


def _category(point: int, found: Statistics) -> str:
    """Of Unicode; none for a byte that only begins or continues a character."""
    return "" if found.as_bytes and point > 0x7F else unicodedata.category(chr(point))


def _code(point: int) -> str:
    return f"U+{point:04X}"


def _name(point: int) -> str:
    """A character's name, or why it has none."""
    name = unicodedata.name(chr(point), "") or _UNNAMED.get(unicodedata.category(chr(point)), "")
    return _NAMES.get(point, name)


def _label(point: int, found: Statistics) -> str:
    """A character as short as it can be shown."""
    character = chr(point)
    if found.as_bytes and point > 0x7F:
        return f"0x{point:02X}"
    if point in _NAMES or point == 32:
        return _NAMES.get(point, "space")
    if not character.isprintable() or unicodedata.category(character)[0] == "M":
        return _code(point)
    return character if character.isalnum() else repr(character)


def _described(point: int, found: Statistics) -> str:
    """A character and its name, if that says more."""
    name = _name(point)
    plain = found.as_bytes or point in _NAMES or name.startswith("CJK UNIFIED")
    return _label(point, found) if plain else f"{_label(point, found)} ({name})"


def _listed(shown: Iterable[str], number: int) -> str:
    """The first of a number of things."""
    words = list(shown)
    return ", ".join(words) + (" …" if number > len(words) else "")


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


def _count(found: Statistics, number: int) -> str:
    return count(number, "byte" if found.as_bytes else "character")


def _bytes(number: int) -> str:
    return count(number, "byte") if number < 1 << 20 else f"{number / 2**20:,.1f} MiB"


def _share(part: float, whole: float) -> str:
    percent = 100 * part / whole
    if 0 < percent < 0.01:
        return "less than 0.01 %"
    return f"{percent:.{1 if percent >= 1 else 2}f} %" if percent else "0 %"
