"""Statistics of a text against the plainest way to find them, however its pieces are cut."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmapp.data.passages import LENGTH
from lmapp.data.statistics import Place, Statistics

# Characters between which something happens: line ends, white space, tags, entities, marks, look-alikes, mojibake.
ALPHABET = "ab \t\r\n\v\x85\u2028\u00a0\0<p>/&amp;Ã©â€™ðŸ˜ée\u0301\u0327\u1100\u1161Аб\U0001f600\ud800\ufffd"
TEXTS = st.builds(str.__mul__, st.text(st.sampled_from(ALPHABET), max_size=100), st.integers(1, 4))
CUTS = st.lists(st.integers(0, 400), max_size=6)


def statistics_of(text: str, cuts: Sequence[int] = (), **options: Any) -> Statistics:
    found = Statistics(**options)
    found.begin("a.txt")
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in pairwise(places):
        found.add(text[begin:end])
    found.finish()
    return found


def everything(found: Statistics) -> dict[str, Any]:
    """All that is found, in values that can be compared."""
    values = {name: value for name, value in vars(found).items() if not name.startswith("_") and name != "passages"}
    values["counts"] = {chr(point): int(found.counts[point]) for point in found.points}
    values["first"] = {chr(point): found.first_of(np.array([point])) for point in found.points}
    passages = found.passages
    values["passages"] = [passages.limit, *(x.tolist() for x in (passages.hashes, passages.counts, passages.spots))]
    return values


def spot(text: str, position: int | None) -> tuple[int, int] | None:
    if position is None:
        return None
    ends = [i for i in range(position) if text[i] == "\n" or (text[i] == "\r" and text[i : i + 2] != "\r\n")]
    return position, len(ends)


def first(text: str, pattern: str) -> int | None:
    match = re.search(pattern, text)
    return match.start() if match else None


@settings(derandomize=True, deadline=None)
@given(TEXTS, CUTS, st.integers(2, 300))
@example("", [], 2)
@example("\r\n" * 9, [], 3)
@example("a\r", [], 2)
@example("x" * 500 + "\n \n", [], 2)
@example("x<a\nb>", [], 4)
@example("aАba", [], 2)
@example("xxÃ©xðŸ˜€", [], 3)
@example("xe\u0301x\u0327", [], 2)
def test_it_is_what_the_plainest_way_finds(text: str, cuts: list[int], block: int) -> None:
    found = statistics_of(text, cuts, block=block)
    lines = re.split("\r\n|\n|\r", text)
    lines = lines if lines[-1] else lines[:-1]
    trailing = [line for line in lines if line.strip() and line[-1].isspace()]
    assert found.characters == len(text)
    assert {chr(point): int(found.counts[point]) for point in found.points} == Counter(text)
    assert found.bytes == len(text.encode("utf-8", "surrogatepass"))
    crlf = text.count("\r\n")
    assert found.line_ends == {"LF": text.count("\n") - crlf, "CRLF": crlf, "CR": text.count("\r") - crlf}
    ends = {"LF": r"(?<!\r)\n", "CRLF": r"\r\n", "CR": r"\r(?!\n)"}
    assert [found.first_ends.get(kind) for kind in ends] == [spot(text, first(text, ends[kind])) for kind in ends]
    assert (found.lines, found.blank_lines) == (len(lines), sum(not line.strip() for line in lines))
    assert found.trailing == len(trailing)
    assert found.longest == max(map(len, lines), default=0)
    if found.longest:
        longest = next(i for i, line in enumerate(lines) if len(line) == found.longest)
        assert found.longest_spot[1] == longest
        assert text[found.longest_spot[0] :].startswith(lines[longest])
    if trailing:
        assert found.first_trailing is not None
        assert found.first_trailing == spot(text, found.first_trailing[0])
        assert lines[found.first_trailing[1]] == trailing[0]
    for character in set(text):
        assert found.first_of(np.array([ord(character)])) == spot(text, text.index(character))

    for name, pattern in {
        "tags": r"<[/!?]?[A-Za-z][^<>]{0,200}>",
        "entities": "&[A-Za-z]{2,8};",
        "mojibake": "Ã[©˜\x85€™Ÿ]|â€C|ðŸCC".replace("C", "[©˜\x85\u00a0€™Ÿ]"),
    }.items():
        assert found.found[name].count == len(re.findall(pattern, text)), name
        assert found.found[name].spot == spot(text, first(text, pattern)), name
    mixed = "[abeamp](?=[Аб])|[Аб](?=[abeamp])"
    assert found.mixed_scripts.count == len(re.findall(mixed, text))
    assert found.mixed_scripts.spot == spot(text, first(text, mixed))
    changes = [n - 1 for n in range(len(text) + 1) if unicodedata.normalize("NFC", text[:n]) != text[:n]]
    assert found.not_nfc == spot(text, changes[0] if changes else None)

    windows = [text[i : i + LENGTH] for i in range(len(text) - LENGTH + 1)]
    assert found.passages.repeated == (1 - len(set(windows)) / len(windows) if windows else 0)
    again = [i for i, window in enumerate(windows) if windows.count(window) > 1]
    assert found.passages.first_repeated == spot(text, again[0] if again else None)
    assert b"".join(found.sample) == text.encode("utf-8", "surrogatepass")


@settings(derandomize=True, deadline=None)
@given(TEXTS, CUTS, CUTS, st.integers(2, 100), st.booleans())
def test_the_cuts_of_the_pieces_do_not_matter(
    text: str, cuts: list[int], others: list[int], block: int, as_bytes: bool
) -> None:
    if as_bytes:
        text = text.encode("utf-8", "surrogatepass").decode("latin-1")
    options: dict[str, Any] = {"block": block, "sample_bytes": 100, "as_bytes": as_bytes}
    assert everything(statistics_of(text, cuts, **options)) == everything(statistics_of(text, others, **options))


def test_places_are_lines_of_their_own_file() -> None:
    found = Statistics(block=7)
    for name, text in {"a": "one\r\ntwo\r", "b": "\nthree", "c": "!\tfour\n\n<p>\0"}.items():
        found.begin(name)
        found.add(text)
    found.finish()
    assert found.files == [("a", 9), ("b", 6), ("c", 12)]

    def place(character: str) -> Place:
        spot = found.first_of(np.array([ord(character)]))
        assert spot is not None
        return found.place(spot)

    assert (place("o"), place("w"), place("\0")) == (Place("a", 1), Place("a", 2), Place("c", 3))
    assert (place("h"), place("!"), place("\t")) == (Place("b", 2), Place("c", 1), Place("c", 1))
    tags = found.found["tags"].spot
    assert tags is not None and found.place(tags) == Place("c", 3)
    assert found.place(found.longest_spot) == Place("b", 2)  # its line goes on in c


def test_what_stands_before_any_file_has_a_place() -> None:
    """As a separator of files without text has."""
    found = Statistics()
    found.add("\n-")
    found.finish()
    assert found.files == []
    assert found.place(found.longest_spot) == Place("the separator", 2)


def test_bytes_are_no_characters() -> None:
    raw = "Ã©é".encode() + b"\x85\xa0\xff <b>"
    found = statistics_of(raw.decode("latin-1"), as_bytes=True)
    assert (found.bytes, found.characters) == (len(raw), len(raw))
    assert b"".join(found.sample) == raw
    assert found.sample_characters == sum(byte & 0xC0 != 0x80 for byte in raw)
    assert (found.found["mojibake"].count, found.found["tags"].count) == (0, 1)
    assert found.not_nfc is None
    assert statistics_of("\x85\xa0\n", as_bytes=True).blank_lines == 0


@pytest.mark.parametrize("pieces", [1, 2, 5, 16, 17, 33, 100])
def test_a_sample_of_a_long_text_is_evenly_spaced(pieces: int) -> None:
    text = "".join(chr(0x4E00 + i) * 10 for i in range(pieces))
    found = statistics_of(text, block=10, sample_bytes=16 * 30)
    kept = [block.decode()[0] for block in found.sample]
    stride = next(stride for stride in (1, 2, 4, 8, 16) if -(-pieces // stride) <= (16 if stride == 1 else 8))
    assert kept == [chr(0x4E00 + i) for i in range(0, pieces, stride)]
    assert found.sample_characters == 10 * len(kept)
    assert found.whole_sample == (pieces <= 16)


def test_mojibake_is_found_and_proper_text_is_not(real_text: str) -> None:
    proper = "„Spaß“, „Größe…“ É\u00a0» Â, NÃO ÑANDÚ, Ðað, naïve, àé, “passé”, Ä–Ö €5 ™ Åse"
    assert statistics_of(proper).found["mojibake"].count == 0
    for text, encoding in (("é ü", "latin-1"), ("“€™”…", "cp1252"), ("Привет", "latin-1"), ("😀かな。", "cp1252")):
        raw = text.encode()
        wrong = raw.decode("latin-1" if encoding == "latin-1" else "cp1252", "replace")
        assert statistics_of(wrong).found["mojibake"].count > 0, text
    assert statistics_of(real_text).found["mojibake"].count == 0
