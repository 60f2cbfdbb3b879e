"""How bytes become text, and how far the reading of a text has come.

Our own incremental decoder, because the loaders at hand turn CRLF and CR into LF, keep a byte order mark as a
character, and cannot say at which byte decoding fails. Bytes go through `decode`, which changes nothing that it can
decode; what a policy asks for besides is done by `shape`. Both work piece by piece, and where the pieces are cut makes
no difference to the text.
"""

from __future__ import annotations

import codecs
import difflib
import re
import sys
import threading
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from encodings.aliases import aliases
from functools import cache, partial
from itertools import chain
from typing import Literal

from lmapp.config import DataConfig
from lmapp.errors import LmappError, UsageError

_BYTE_ORDER_MARKS = (  # UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)

# The forms of Unicode that are asked for, and the decomposition that each begins with.
_FORMS: dict[str, tuple[Literal["NFC", "NFKC"], Literal["NFD", "NFKD"]]] = {
    "nfc": ("NFC", "NFD"),
    "nfkc": ("NFKC", "NFKD"),
}

_NOT_PIECEWISE = {"idna", "punycode", "unicode-escape"}  # what they decode depends on where the bytes are cut

_SAMPLE_BYTES = 1 << 16  # what a guess at the encoding looks at, at most half of it before the place at fault

# Encodings of Latin letters, the likeliest first: charset-normalizer takes one for another of them too often.
_LATIN = ("cp1252", "mac-roman", "cp850", "cp1250", "iso8859-2")

_USUAL = {"iso8859-1": "latin-1", "gbk": "gb18030", "gb2312": "gb18030", "euc_jis_2004": "euc_jp", "cp1125": "cp866"}


@dataclass(frozen=True)
class TextPolicy:
    """How the bytes of a corpus become text.

    Attributes:
        encoding: Python's name of the encoding. Under utf-8 a UTF-16 or UTF-32 byte order mark is believed.
        errors: What becomes of bytes that cannot be decoded: an error, U+FFFD in each such place, or nothing.
        newlines: Whether line ends stay as they are, or CRLF and CR become LF.
        normalization: The form of Unicode that the text is brought into.
        lowercase: Whether the text is made lower case.
        as_bytes: A byte alphabet: every byte is handed on as the character U+0000 … U+00FF of its value. Nothing is
            decoded, removed or changed, whatever the other fields say.
    """

    encoding: str = "utf-8"
    errors: Literal["strict", "replace", "skip"] = "strict"
    newlines: Literal["keep", "lf"] = "keep"
    normalization: Literal["none", "nfc", "nfkc"] = "none"
    lowercase: bool = False
    as_bytes: bool = False

    def apply(self, text: str) -> str:
        """What becomes of a whole text: newlines, normalization, lower case, in this order; or else its bytes."""
        if self.as_bytes:
            return as_byte_text(text)
        if self.newlines == "lf":
            text = _line_feeds(text)
        if self.normalization != "none":
            text = unicodedata.normalize(_FORMS[self.normalization][0], text)
        return text.lower() if self.lowercase else text


def policy_of(config: DataConfig) -> TextPolicy:
    """The policy that the options of a configuration make."""
    return TextPolicy(
        encoding=config.encoding,
        errors=config.errors,
        newlines=config.newlines,
        normalization=config.normalization,
        lowercase=config.lowercase,
        as_bytes=config.alphabet == "bytes",
    )


@dataclass
class Reading:
    """How far a stream of text has come; it keeps this up to date.

    Attributes:
        bytes: Bytes read of the sources as they lie there, compressed or not.
        characters: Characters handed out.
        boms: Byte order marks removed, those in `by_mark` among them.
        replaced: Undecodable places that became U+FFFD.
        skipped: Undecodable bytes left out.
        records: Records that have begun.
        by_mark: Encodings recognised by a byte order mark (utf-16, utf-32), and in how many files.
        left_out: Names of hidden files and members left out, the first of them.
        left_out_count: How many were left out.
        starts: Each file or archive member that has text, and the index of its first character in the stream.
        record_starts: The index of the first character of each record that has text. Whoever reads the stream may
            empty it on the way.
    """

    bytes: int = 0
    characters: int = 0
    boms: int = 0
    replaced: int = 0
    skipped: int = 0
    records: int = 0
    by_mark: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    left_out_count: int = 0
    starts: list[tuple[str, int]] = field(default_factory=list)
    record_starts: array[int] = field(default_factory=lambda: array("q"))

    def locate(self, index: int) -> str:
        """Where character `index` of the stream stands: file and character within it, from 0."""
        name, start = [entry for entry in self.starts if entry[1] <= index][-1]
        return f"{name}, character {index - start:,}"


def as_byte_text(text: str) -> str:
    """The UTF-8 bytes of a text, each as the character U+0000 … U+00FF of its value.

    Raises:
        UnicodeEncodeError: at a lone surrogate.
    """
    return text.encode().decode("latin-1")


# Bytes -> text --------------------------------------------------------------------------------------------------------


def codec(encoding: str) -> str:
    """The encoding's one name.

    Raises:
        UsageError: if there is no encoding of this name that decodes bytes to text piece by piece.
    """
    try:
        found = codecs.lookup(encoding)
        decoder = found.incrementaldecoder
        if found.name not in _NOT_PIECEWISE and decoder and isinstance(decoder().decode(b"", True), str):
            return "utf-8" if found.name == "utf-8-sig" else found.name
    except (LookupError, ValueError, TypeError):
        pass
    known = sorted({*aliases, *aliases.values(), "latin-1", "utf-8", "utf-16"})
    near = difflib.get_close_matches(encoding.lower(), [name for name in known if name != encoding.lower()], n=1)
    hint = f"Did you mean {near[0]}?" if near else "Python's names are meant: utf-8, latin-1, cp1252, utf-16, gb18030 …"
    raise UsageError(f"--data.encoding: there is no text encoding {encoding!r}.\n{hint}")


class _Gaps(threading.local):
    """What could not be decoded in this thread so far, as the two error handlers count it."""

    places = 0
    bytes = 0

    def meet(self, error: UnicodeError, instead: str) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        self.places += 1
        self.bytes += error.end - error.start
        return instead, error.end


_gaps = _Gaps()
_HANDLERS = {"strict": "strict", "replace": "lmapp.replace", "skip": "lmapp.skip"}
codecs.register_error(_HANDLERS["replace"], partial(_gaps.meet, instead="\ufffd"))
codecs.register_error(_HANDLERS["skip"], partial(_gaps.meet, instead=""))


def decode(blocks: Iterable[bytes], policy: TextPolicy, name: str, reading: Reading) -> Iterator[str]:
    """The text of one file in pieces, none of them empty; nothing but its encoding is undone.

    A byte order mark at the start is removed and counted. Under utf-8, one of UTF-16 or UTF-32 is believed. With
    `policy.as_bytes` every byte is a character.

    Args:
        blocks: The file's bytes, cut anywhere.
        policy: Its encoding, and what becomes of bytes that cannot be decoded.
        name: What messages call the file.
        reading: Where marks and undecodable bytes are counted.

    Raises:
        LmappError: under `errors` strict, at bytes that cannot be decoded, with their offset in the file and the
            encoding that it probably has; or if utf-16 or utf-32 lacks the mark that tells its byte order.
        UsageError: at an unknown encoding.
    """
    blocks = filter(None, blocks)
    if policy.as_bytes:
        yield from (block.decode("latin-1") for block in blocks)
        return
    encoding, start = codec(policy.encoding), b""
    for block in blocks:
        start += block
        if len(start) >= 4:
            break
    marked = _by_mark(start, encoding, name)
    if encoding == "utf-8" and marked:
        reading.by_mark[marked[:6]] = reading.by_mark.get(marked[:6], 0) + 1
    decoder = codecs.getincrementaldecoder(marked or encoding)(_HANDLERS[policy.errors])
    kept, fed, begun = b"", 0, False
    for block in chain([start], blocks, [b""]):
        places, left_out = _gaps.places, _gaps.bytes
        fed += len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            offset = fed - len(error.object) + error.start
            if not block:
                raise _cut(name, marked or encoding, error, offset) from error
            at_hand = kept + block
            sample = _sample(at_hand, offset - fed + len(at_hand))
            raise _undecodable(name, encoding, marked, error, offset, sample) from error
        except UnicodeError as error:
            raise LmappError(
                f"{name}, before byte {fed}: this is not {encoding} ({error}).\n"
                "Name the encoding that it has: --data.encoding utf-8"
            ) from error
        if policy.errors == "replace":
            reading.replaced += _gaps.places - places
        else:
            reading.skipped += _gaps.bytes - left_out
        kept = (kept + block[-_SAMPLE_BYTES:])[-_SAMPLE_BYTES:]
        if text and not begun:
            begun = True
            if text[0] == "\ufeff":
                reading.boms += 1
                text = text[1:]
        if text:
            yield text


def _by_mark(start: bytes, encoding: str, name: str) -> str | None:
    """The encoding, with its byte order, of the byte order mark that a file starts with, if it is to be believed."""
    believed = "utf" if encoding == "utf-8" else encoding
    for mark, marked in _BYTE_ORDER_MARKS:
        if start.startswith(mark) and marked.startswith(believed):
            return marked
    if start and encoding in ("utf-16", "utf-32"):
        raise LmappError(
            f"{name} does not start with a byte order mark, which {encoding} needs.\n"
            f"If its text is {encoding.upper()}, name its byte order: --data.encoding {encoding}-le, or {encoding}-be"
        )
    return None


def _where(name: str, error: UnicodeDecodeError, offset: int) -> str:
    wrong = " ".join(f"0x{byte:02x}" for byte in error.object[error.start : error.end][:4])
    return f"{name}, byte {offset}: {wrong}"


def _cut(name: str, encoding: str, error: UnicodeDecodeError, offset: int) -> LmappError:
    return LmappError(
        f"{_where(name, error, offset)} only begins a character of {encoding}: the file is cut in the middle of a "
        "character.\n"
        "Restore its end, or take these bytes off. If it has another encoding, name it: --data.encoding latin-1\n"
        "To read on without them: --data.errors skip"
    )


def _undecodable(
    name: str, encoding: str, marked: str | None, error: UnicodeDecodeError, offset: int, sample: bytes
) -> LmappError:
    kind = f"{marked or encoding} ({error.reason}){', the encoding of its byte order mark' if marked else ''}"
    further = "To put U+FFFD in the place of such bytes: --data.errors replace"
    if encoding == "utf-8" and not marked and _mostly_utf_8(sample):
        remedy = "The rest of what was read is utf-8, so the file is damaged."
        further += ", or leave them out: skip"
    elif likely := _likely(sample, marked or encoding):
        remedy = f"It looks like {' or '.join(likely)}: --data.encoding {likely[0]}"
    elif encoding == "utf-8":
        remedy = "If it has another encoding, name it: --data.encoding latin-1 (Western), cp1252, gb18030 …"
    else:
        remedy = "Name the encoding that it has: --data.encoding utf-8"
    return LmappError(f"{_where(name, error, offset)} is not {kind}.\n{remedy}\n{further}")


def _sample(at_hand: bytes, place: int) -> bytes:
    """The bytes around a place that a guess looks at: whole lines if possible, to cut no character."""
    begin = max(0, place - _SAMPLE_BYTES // 2)
    end = begin + _SAMPLE_BYTES
    if b"\0" not in at_hand[begin:end]:  # as in UTF-16, where a newline has another byte
        if begin:
            begin = at_hand.find(b"\n", begin, place) + 1 or begin
        end = at_hand.rfind(b"\n", place, end) + 1 or end
    return at_hand[begin:end]


def _mostly_utf_8(sample: bytes) -> bool:
    """Whether there are more characters of several bytes in a sample than places that are not UTF-8."""
    right = sample.decode("utf-8", "ignore")
    wrong = sample.decode("utf-8", "replace").count("\ufffd") - right.count("\ufffd")
    return len(re.findall(r"[^\x00-\x7f]", right)) > wrong


def _likely(sample: bytes, encoding: str) -> list[str]:
    """The encodings other than `encoding` that a sample may well have, by Python's names: one, two alike, or none."""
    runs = re.findall(rb"[\x80-\xff]+", sample)
    if encoding != "utf-8" and runs and _as_text(sample, "utf-8") is not None:
        return ["utf-8"]
    alone = sum(len(run) == 1 for run in runs)
    if 2 * alone > len(runs) and len(re.findall(rb"[A-Za-z]", sample)) > 2 * len(runs):  # as in words of Latin letters
        texts = {name: text for name in _LATIN if name != encoding and (text := _as_text(sample, name)) is not None}
        if texts:
            return [max(texts, key=lambda name: _fitting(texts[name]))]

    import charset_normalizer

    guesses = list(charset_normalizer.from_bytes(sample))
    best = [guess for guess in guesses if (guess.chaos, guess.coherence) == (guesses[0].chaos, guesses[0].coherence)]
    names = (codecs.lookup(guess.encoding).name for guess in best)
    usual = dict.fromkeys(_USUAL.get(name, name) for name in names)
    likely = [name for name in usual if name != encoding and _as_text(sample, name) is not None]
    return likely if len(likely) <= 2 else []


def _as_text(sample: bytes, encoding: str) -> str | None:
    """The sample decoded; None if it has bytes that the encoding lacks, or characters that stand in no text."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeError:
        return None
    kinds = {unicodedata.category(character) for character in set(text) - set("\t\n\v\f\r\x1a\x1b")}
    return None if kinds & {"Cc", "Cn", "Co", "Cs"} else text


def _fitting(text: str) -> int:
    """How many characters behind a small ASCII letter are what may well stand there: a small letter, or such a sign."""
    behind = re.findall(r"(?<=[a-z])([^\x00-\x7f])(?=([a-z]?))", text)
    return sum(sign.islower() or sign in ("’–—…·\xa0\xad" if inside else "’”“»–—…\xa0") for sign, inside in behind)


# Text -> text ---------------------------------------------------------------------------------------------------------


def shape(pieces: Iterable[str], policy: TextPolicy) -> Iterator[str]:
    """A text with the newlines, normalization and lower case that a policy asks for, in pieces, none of them empty.

    Joined, they are `policy.apply` of the joined pieces, wherever these are cut. To that end the last characters of a
    piece may wait for the next: as a rule one, otherwise a character and all that combines with it, or a capital sigma
    and the apostrophes and the like behind it. Memory grows with the longest such run; no text that is written to be
    read has one of more than some dozens of characters. With `policy.as_bytes` the pieces pass as they are.
    """
    pieces = filter(None, pieces)
    if policy.as_bytes:
        return pieces
    if policy.newlines == "lf":
        pieces = _piecewise(pieces, _line_feeds, lambda piece: len(piece) - piece.endswith("\r"))
    if policy.normalization != "none":
        composed, decomposed = _FORMS[policy.normalization]
        pieces = _piecewise(pieces, partial(unicodedata.normalize, composed), partial(_last_start, decomposed))
    return _lowered(pieces) if policy.lowercase else pieces


def _piecewise(pieces: Iterator[str], change: Callable[[str], str], cut: Callable[[str], int | None]) -> Iterator[str]:
    """The changed text in pieces. `cut` says where a piece may be divided, whatever stands before and after it."""
    waiting: list[str] = []
    for piece in pieces:
        place = cut(piece)
        if place is None:
            waiting.append(piece)
            continue
        if text := "".join([*waiting, piece[:place]]):
            yield change(text)
        waiting = [piece[place:]]
    if text := "".join(waiting):
        yield change(text)


def _line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _last_start(form: Literal["NFD", "NFKD"], piece: str) -> int | None:
    """The place of the last character that has nothing to do with the characters before it under normalization."""
    for place in range(len(piece) - 1, -1, -1):
        if piece[place] < "\u0300":  # the first combining character
            return place
        first = unicodedata.normalize(form, piece[place])[0]
        if not unicodedata.combining(first) and first not in _joinable():
            return place
    return None


@cache
def _joinable() -> frozenset[str]:
    """The characters that composition may join to a character before them."""
    jamo = [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)]  # vowels and finals of Hangul are joined by rule
    parts = (unicodedata.decomposition(chr(point)).split() for point in range(sys.maxunicode + 1))
    seconds = [int(pair[1], 16) for pair in parts if len(pair) == 2 and not pair[0].startswith("<")]
    return frozenset(map(chr, jamo + seconds))


def _lowered(pieces: Iterator[str]) -> Iterator[str]:
    """`str.lower` over pieces: of all characters, only the capital sigma looks around."""
    waiting, in_word = "", False
    for piece in chain(pieces, [""]):
        text = waiting + piece
        sigma = text.rfind("Σ")
        if sigma < 0:
            waiting, lowered = "", text.lower()
        else:
            waiting = text[sigma:] if piece and all(map(_ignorable, text[sigma + 1 :])) else ""
            lowered = ("a" * in_word + text).lower()[in_word : -len(waiting) or None]
        in_word = _in_word(text[: len(text) - len(waiting)], in_word)
        if lowered:
            yield lowered


def _in_word(text: str, before: bool) -> bool:
    """Whether a sigma after the text would follow a letter, with ignorable characters between them at most."""
    for character in reversed(text):
        if not _ignorable(character):
            return f"{character}Σ".lower()[-1] == "ς"
    return before


def _ignorable(character: str) -> bool:
    """Whether sigma looks past the character for a letter."""
    return f"a{character}Σ".lower()[-1] == "ς" and f"{character}Σ".lower()[-1] == "σ"
