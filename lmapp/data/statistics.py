"""What a text is, found in one pass over its pieces: its characters, its lines, and what may be wrong with it.

Shapes: N characters of a block, L line ends of a block, P distinct characters of the text.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmapp.data.passages import LENGTH, Passages
from lmapp.vocabulary import utf8_lengths

BLOCK = 1 << 18
"""Characters worked on at a time."""

SAMPLE_BYTES = 1 << 24
"""A text of up to so many bytes is kept whole, to be compressed; of a larger one, pieces of half as many together."""

_BEHIND = 255
"""Characters of the text before a block that it is seen with; no pattern is longer."""

Spot = tuple[int, int]
"""Where something stands: the character and the line of the whole text, both from 0."""


@dataclass(frozen=True)
class Place:
    """Where something stands, as an editor shows it.

    Attributes:
        file: The file or archive member.
        line: Its line, from 1; LF, CRLF and CR end one.
    """

    file: str
    line: int


@dataclass
class Found:
    """What matches a pattern.

    Attributes:
        count: How often.
        example: The first match.
        spot: Where that stands.
    """

    count: int = 0
    example: str = ""
    spot: Spot | None = None


# What UTF-8 looks like that was read as cp1252 or latin-1: a byte that begins a character, as it does in Western, Greek
# and Cyrillic texts, punctuation, kana and emoji; and bytes that continue one. Other beginnings, and punctuation behind
# letters that end words, occur in proper text, as “Spaß” and “A–Ö”.
_LATER = "\x80-\xbf" + bytes(range(0x80, 0xA0)).decode("cp1252", "ignore")
_IN_WORDS = "\x80-\x9f\xa1-\xaa\xac-\xba\xbc-\xbf€‚ƒ„†‡ˆ‰ŠŒŽ˜™šœžŸ"
_BEGINNINGS = {
    "ÃÄÅÎÏÑ": f"[{_IN_WORDS}]",
    "ÂÐ": f"[{_LATER}]",
    "â": f"[\x80\x82\x84€‚„][{_LATER}]",
    "ã": f"[\x80-\x83€‚ƒ][{_LATER}]",
    "ï": f"[¼½»][{_LATER}]",
    "ð": f"[\x9fŸ][{_LATER}][{_LATER}]",
}

# A match of one of these never begins inside another, so what is found does not depend on where the search begins.
_PATTERNS = {
    "tags": re.compile("<[/!?]?[A-Za-z][^<>]{0,200}>"),
    "entities": re.compile("&(?:[A-Za-z]{2,8}|#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6});"),
    "mojibake": re.compile(
        f"[{''.join(_BEGINNINGS)}](?:" + "|".join(f"(?<=[{a}]){b}" for a, b in _BEGINNINGS.items()) + ")"
    ),
}
_BEYOND_ASCII = {"mojibake"}  # their matches do not end in ASCII


class Statistics:
    """Everything about a text that one pass can tell; `finish` closes the account.

    The pieces may be cut anywhere. Memory is bounded, whatever the length of text and lines.

    Attributes:
        characters: Of the whole text.
        counts: (0x110000,) how often each code point occurs.
        line_ends: How many there are of each kind: LF, CRLF and CR.
        first_ends: Where each kind that occurs is first.
        lines, blank_lines, trailing: Lines; those without a visible character; others that end with white space.
        first_trailing: The first of these.
        longest, longest_spot: The most characters of a line, its end not counted, and where it begins.
        found: What matches the patterns for `tags` (of HTML or XML), `entities` (`&amp;`) and `mojibake` (UTF-8 that
            was read as latin-1 or cp1252).
        mixed_scripts: Latin letters beside Cyrillic ones.
        not_nfc: Where the text first differs from its Unicode normal form C.
        passages: Those of `LENGTH` characters that were sampled.
        sample: UTF-8 of the blocks of the text, or of evenly spaced ones.
        sample_characters: How many characters that is; of bytes, how many begin one in UTF-8.

    Args:
        as_bytes: The characters are bytes, U+0000 to U+00FF, so that only those of ASCII mean something.
        block: Characters worked on at a time, at least 2.
        sample_bytes: The most bytes of a text that is sampled whole; of another, half of it is sampled at most.
    """

    def __init__(self, *, as_bytes: bool = False, block: int = BLOCK, sample_bytes: int = SAMPLE_BYTES) -> None:
        self.as_bytes = as_bytes
        self.characters = 0
        self.counts = np.zeros(0x110000, dtype=np.int64)
        self.line_ends = {"LF": 0, "CRLF": 0, "CR": 0}
        self.first_ends: dict[str, Spot] = {}
        self.lines = self.blank_lines = self.trailing = 0
        self.first_trailing: Spot | None = None
        self.longest, self.longest_spot = 0, (0, 0)
        self.found = {name: Found() for name in _PATTERNS}
        self.mixed_scripts = Found()
        self.not_nfc: Spot | None = None
        self.passages = Passages()
        self.sample: list[bytes] = []
        self.sample_characters = 0

        self._block = block
        self._sample_bytes = sample_bytes
        self._waiting: list[str] = []
        self._fed = 0
        self._first = np.zeros((0x110000, 2), dtype=np.int64)  # the spot of each code point that occurs
        self._files: list[tuple[str, int]] = []  # name, first character
        self._file_lines: list[int] = []  # the line of the whole text that this character stands in
        self._behind = ""
        self._values_behind = np.empty(0, dtype=np.uint8)
        self._ends = np.empty(0, dtype=np.int64)  # where the lines end from `_behind` on
        self._lines_before = 0  # line ends before these
        self._line_begin = 0  # of the line that has not ended yet: its begin, the visible characters it has so far,
        self._line_visible = 0
        self._last_white = False  # and whether its last is white space
        self._stride, self._blocks = 1, 0  # of the sample: every how manieth block is taken, and how many there were
        self._sampled: list[tuple[bytes, int]] = []

        beyond = [
            *range(0x1C, 0x20),
            0x85,
            0xA0,
            0x1680,
            *range(0x2000, 0x200B),
            0x2028,
            0x2029,
            0x202F,
            0x205F,
            0x3000,
        ]
        self._white = np.zeros(0x3002, dtype=np.bool_)  # the last stands for all behind it
        self._white[[*range(9, 14), 32, *(() if as_bytes else beyond)]] = True

    # Reading ----------------------------------------------------------------------------------------------------------

    def begin(self, file: str) -> None:
        """The next piece begins a file, or an archive's member."""
        self._files.append((file, self._fed))

    def add(self, piece: str) -> None:
        """The text goes on with a piece."""
        self._waiting.append(piece)
        self._fed += len(piece)
        if self._fed - self.characters < self._block:
            return
        text, begin = "".join(self._waiting), 0
        while len(text) - begin >= self._block:
            end = begin + self._block
            end -= text[end - 1] == "\r"  # what it ends may be a CRLF
            self._take(text[begin:end])
            begin = end
        self._waiting = [text[begin:]]

    def finish(self) -> None:
        """The text is at its end."""
        if text := "".join(self._waiting):
            self._take(text)
        self._waiting = []
        if self._line_begin < self.characters:  # a last line without an end
            length, visible = self.characters - self._line_begin, self._line_visible > 0
            self._count_lines(np.array([self._line_begin]), np.array([length]), np.array([visible]))
            if visible and self._last_white:
                self._count_trailing(1, self.characters - 1)
        self.passages.settle()
        self.sample = [text for text, _ in self._sampled]
        self.sample_characters = sum(length for _, length in self._sampled)

    def _take(self, text: str) -> None:
        values = self._values(text)
        together = np.concatenate([self._values_behind, values])
        in_block = np.bincount(values, minlength=256)
        self._take_lines(values, in_block)
        self._take_files(len(values))
        self._take_characters(values, in_block)
        hashes, at = self.passages.sample(together[max(0, len(self._values_behind) - LENGTH + 1) :])
        at += self.characters - min(LENGTH - 1, len(self._values_behind))
        self.passages.count(hashes, np.stack([at, self._line_of(at)], axis=1))
        self._take_patterns(text)
        if not self.as_bytes:
            self._take_scripts(together)
            self._take_form(text)
        self._take_sample(text)
        self.characters += len(text)
        self._behind = (self._behind + text)[-_BEHIND:]
        self._values_behind = together[-_BEHIND:]

    def _values(self, text: str) -> NDArray[np.unsignedinteger]:
        """The code points (N,), in bytes where they fit."""
        if self.as_bytes or text.isascii():
            return np.frombuffer(text.encode("latin-1"), dtype=np.uint8)
        return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")

    def _line_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n,): the lines of characters (n,) of this block, or of the `_BEHIND` before it."""
        return self._lines_before + np.searchsorted(self._ends, positions)

    def _spot(self, position: int) -> Spot:
        return position, int(self._line_of(np.array([position]))[0])

    # Lines ------------------------------------------------------------------------------------------------------------

    def _take_files(self, length: int) -> None:
        known = len(self._file_lines)
        here = bisect_left(self._files, self.characters + length, lo=known, key=lambda entry: entry[1])
        starts = np.array([start for _, start in self._files[known:here]], dtype=np.int64)
        self._file_lines += self._line_of(starts).tolist()

    def _take_lines(self, values: NDArray[np.unsignedinteger], in_block: NDArray[np.int64]) -> None:
        ends = np.flatnonzero(values == 10)
        last = ends  # behind the last character of each line that is not its end
        kinds = {"LF": ends}
        if in_block[13]:
            returns = np.flatnonzero(values == 13)
            alone = values[np.minimum(returns + 1, len(values) - 1)] != 10
            after_cr = np.zeros(len(values) + 1, dtype=np.bool_)
            after_cr[returns + 1] = True
            kinds = {"LF": ends[~after_cr[ends]], "CRLF": returns[~alone], "CR": returns[alone]}
            ends = np.sort(np.concatenate([ends, kinds["CR"]]))
            last = ends - (after_cr[ends] & (values[ends] == 10))
        white = self._white.take(values, mode="clip")
        visible = np.concatenate([[0], np.cumsum(~white, dtype=np.int64)])

        begins = np.concatenate([[self._line_begin - self.characters], ends + 1])
        visible_at = visible[np.maximum(begins, 0)]
        visible_at[0] -= self._line_visible
        has_visible = visible[last] > visible_at[:-1]
        kept = np.searchsorted(self._ends, self.characters - _BEHIND)
        self._lines_before += int(kept)
        self._ends = np.concatenate([self._ends[kept:], ends + self.characters])
        for kind, at in kinds.items():
            self.line_ends[kind] += len(at)
            if len(at) and kind not in self.first_ends:
                self.first_ends[kind] = self._spot(int(at[0]) + self.characters)
        self._count_lines(begins[:-1] + self.characters, last - begins[:-1], has_visible)
        white_before = np.concatenate([[self._last_white], white])[last]
        trailing = np.flatnonzero(has_visible & white_before)
        if len(trailing):
            self._count_trailing(len(trailing), self.characters + int(last[trailing[0]]) - 1)

        self._line_begin = int(begins[-1]) + self.characters
        self._line_visible = int(visible[-1] - visible_at[-1])
        self._last_white = bool(white[-1])

    def _count_lines(
        self, begins: NDArray[np.int64], lengths: NDArray[np.int64], has_visible: NDArray[np.bool_]
    ) -> None:
        if len(lengths) and lengths.max() > self.longest:
            line = int(np.argmax(lengths))
            self.longest, self.longest_spot = int(lengths[line]), (int(begins[line]), self.lines + line)
        self.lines += len(lengths)
        self.blank_lines += int(np.count_nonzero(~has_visible))

    def _count_trailing(self, count: int, position: int) -> None:
        self.trailing += count
        if self.first_trailing is None:
            self.first_trailing = self._spot(position)

    # Characters -------------------------------------------------------------------------------------------------------

    def _take_characters(self, values: NDArray[np.unsignedinteger], in_block: NDArray[np.int64]) -> None:
        known = self.counts[: len(in_block)]
        is_new = (known == 0) & (in_block > 0)
        if is_new.any():
            at = np.flatnonzero(is_new.take(values))
            points, firsts = np.unique(values[at], return_index=True)
            positions = at[firsts] + self.characters
            self._first[points] = np.stack([positions, self._line_of(positions)], axis=1)
        known += in_block

    def _take_scripts(self, values: NDArray[np.unsignedinteger]) -> None:
        """Pairs of a Latin and a Cyrillic letter, in this block or across its beginning."""
        if values.dtype == np.uint8:
            return
        values = values[max(0, len(self._values_behind) - 1) :]
        cyrillic, latin = (values >> 8) == 4, ((values | 32) >= 97) & ((values | 32) <= 122)
        pairs = np.flatnonzero((cyrillic[1:] & latin[:-1]) | (latin[1:] & cyrillic[:-1]))
        if len(pairs) and self.mixed_scripts.spot is None:
            first = int(pairs[0])
            self.mixed_scripts.example = "".join(map(chr, values[first : first + 2]))
            self.mixed_scripts.spot = self._spot(self.characters - min(1, len(self._values_behind)) + first)
        self.mixed_scripts.count += len(pairs)

    # Patterns ---------------------------------------------------------------------------------------------------------

    def _take_patterns(self, text: str) -> None:
        together, ascii_only = self._behind + text, text.isascii()
        for name, pattern in _PATTERNS.items():
            if name in _BEYOND_ASCII and (ascii_only or self.as_bytes):
                continue
            found = self.found[name]
            if found.spot is None and (match := pattern.search(together)):
                found.example = match.group()
                found.spot = self._spot(self.characters - len(self._behind) + match.start())
            found.count += len(pattern.findall(together)) - len(pattern.findall(self._behind))

    def _take_form(self, text: str) -> None:
        if self.not_nfc is not None or text.isascii():  # which nothing before it joins
            return
        together = self._behind + text
        if not unicodedata.is_normalized("NFC", together):  # what is normalised is so in all its parts
            end = bisect_left(
                range(len(together)), True, key=lambda end: not unicodedata.is_normalized("NFC", together[: end + 1])
            )
            self.not_nfc = self._spot(self.characters - len(self._behind) + end)

    # Sample -----------------------------------------------------------------------------------------------------------

    def _take_sample(self, text: str) -> None:
        if self._blocks % self._stride == 0:
            raw = text.encode("latin-1") if self.as_bytes else text.encode("utf-8", "surrogatepass")
            characters = len(text)
            if self.as_bytes:
                characters = int(np.count_nonzero(np.frombuffer(raw, dtype=np.uint8) & 0xC0 != 0x80))
            self._sampled.append((raw, characters))
        self._blocks += 1
        size = sum(len(raw) for raw, _ in self._sampled)
        while len(self._sampled) > 1 and size > (self._sample_bytes if self._stride == 1 else self._sample_bytes // 2):
            self._sampled = self._sampled[::2]
            self._stride *= 2
            size = sum(len(raw) for raw, _ in self._sampled)

    # What came of it --------------------------------------------------------------------------------------------------

    @property
    def points(self) -> NDArray[np.int64]:
        """(P,): the code points that occur, the most frequent first, equally frequent ones in their order."""
        points = np.flatnonzero(self.counts)
        return points[np.argsort(-self.counts[points], kind="stable")]

    @property
    def bytes(self) -> int:
        """Of the text as UTF-8."""
        points = self.points
        lengths = np.ones(len(points), dtype=np.int64) if self.as_bytes else utf8_lengths(points.astype(np.uint32))
        return int(self.counts[points] @ lengths)

    @property
    def whole_sample(self) -> bool:
        """Whether the sample is the whole text."""
        return self._stride == 1

    @property
    def files(self) -> list[tuple[str, int]]:
        """The files that have text, and how many characters: what stands between two belongs to the first."""
        ends = [start for _, start in self._files[1:]] + [self.characters]
        return [(name, end - start) for (name, start), end in zip(self._files, ends, strict=False)]

    def first_of(self, points: NDArray[np.int64]) -> Spot | None:
        """The spot of the first character that is one of these code points."""
        spots = self._first[points[self.counts[points] > 0]]
        if not len(spots):
            return None
        position, line = spots[np.argmin(spots[:, 0])]
        return int(position), int(line)

    def place(self, spot: Spot) -> Place:
        """A spot as its file and the line there."""
        position, line = spot
        file = bisect_right(self._files, position, key=lambda entry: entry[1]) - 1
        if file < 0:  # it stands between files without text
            return Place("the separator", line + 1)
        return Place(self._files[file][0], line - self._file_lines[file] + 1)
