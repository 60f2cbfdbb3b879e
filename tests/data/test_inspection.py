"""What an inspection finds in a corpus, and that it survives every text."""

import bz2
import gzip
import io
import json
import lzma
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lmapp.config import DataConfig, build
from lmapp.data import inspection
from lmapp.data.datamodule import TextDataModule
from lmapp.data.inspection import Inspection, inspect
from lmapp.data.statistics import Place, Statistics
from lmapp.errors import LmappError
from lmapp.units import jsonable


def data(**options: Any) -> DataConfig:
    return build({"data": {"cache_dir": "cache", **options}}).data


def inspected(text: str | bytes, **options: Any) -> Inspection:
    """Of a text in `a.txt`."""
    Path("a.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    found = inspect(data(path="a.txt", **options))
    json.dumps(jsonable(found.as_dict()), allow_nan=False)
    assert len(list(found.lines())) < 40
    return found


def kinds(found: Inspection) -> dict[str, tuple[int | None, int | None]]:
    """Each finding's count and line."""
    return {f.kind: (f.count, None if f.place is None else f.place.line) for f in found.findings}


def said(found: Inspection) -> str:
    return "\n".join(f"{name}: {line}" for name, line in found.lines())


def prose(characters: int, seed: int = 1) -> str:
    """Words in lines, none of which comes again."""
    words = random.Random(seed).choices(["some", "words", "of", "any", "length", "and", "order", "here"], k=characters)
    return "".join(word + ("\n" if i % 9 == 8 else " ") for i, word in enumerate(words))[: characters - 2] + "e\n"


# Figures --------------------------------------------------------------------------------------------------------------


def test_figures_of_a_real_text(real_text: str) -> None:
    text = real_text[:100_000] + "é\n"
    found = inspected(text)
    document = found.as_dict()
    assert document["files"] == [{"name": "a.txt", "bytes": len(text.encode()), "characters": len(text)}]
    assert (document["characters"], document["bytes"]) == (len(text), len(text.encode()))
    assert {entry["character"]: entry["count"] for entry in document["alphabet"]} == Counter(text)
    counts = [entry["count"] for entry in document["alphabet"]]
    assert counts == sorted(counts, reverse=True)
    assert document["alphabet"][-1]["name"] == "LATIN SMALL LETTER E WITH ACUTE"
    lines = text.splitlines()
    assert document["lines"]["count"] == len(lines)
    assert document["lines"]["blank"] == sum(not line.strip() for line in lines)
    assert document["lines"]["longest"] == max(map(len, lines))
    assert document["lines"]["longest_at"]["line"] == 1 + max(range(len(lines)), key=lambda i: (len(lines[i]), -i))
    assert sum(document["kinds"].values()) == len(text)
    assert document["kinds"]["line ends"] == text.count("\n")
    for entry, value in zip(document["min_count"], (2, 5, 10), strict=True):
        rarer = {character: times for character, times in Counter(text).items() if times < value}
        assert entry == {"value": value, "characters": len(rarer), "times": sum(rarer.values())}
    bits = document["bits_per_character"]
    assert bits["bzip2"] == 8 * len(bz2.compress(text.encode(), 9)) / len(text)
    assert bits["xz"] == 8 * len(lzma.compress(text.encode(), preset=6)) / len(text)
    assert bits["compressed_characters"] == len(text)


def test_what_a_training_would_do_is_what_is_told(real_text: str) -> None:
    Path("v.txt").write_text(real_text[50_000:52_000])
    config = data(path="a.txt", val_path="v.txt", batch_size=8, sequence_length=16, min_count=3)
    Path("a.txt").write_text(real_text[:20_000])
    found = inspect(config)
    module = TextDataModule(config)
    module.setup()
    assert module.corpus is not None and module.batches is not None
    assert found.facts == module.corpus.facts
    document = found.as_dict()
    assert [entry["name"] for entry in document["files"]] == ["a.txt", "v.txt"]
    assert document["characters"] == 22_000
    assert document["splits"]["train"]["characters"] == 20_000
    assert document["splits"]["validation"]["characters"] == 2_000
    assert document["batches"] == {"batch_size": 8, "sequence_length": 16, "steps": len(module.batches)}
    assert document["bits_per_character"]["unigram"] == module.corpus.facts["unigram_bits"]
    assert Path(document["directory"]) == module.corpus.directory
    sources = Path("a.txt").stat().st_size + Path("v.txt").stat().st_size
    sizes = [path.stat().st_size for path in module.corpus.directory.iterdir()]
    assert document["bytes_on_disk"] == {"sources": sources, "encoded": sum(sizes)}
    assert document["problem"] is None


def test_a_large_text_is_compressed_by_pieces_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(**options: Any) -> Statistics:
        return Statistics(**options, block=1000, sample_bytes=4000)

    monkeypatch.setattr(inspection, "Statistics", small)
    text = prose(20_000)
    found = inspected(text)
    pieces = [text[begin : begin + 1000] for begin in range(0, len(text), 16_000)]
    kept = "".join(pieces)
    assert found.as_dict()["bits_per_character"]["bzip2"] == 8 * len(bz2.compress(kept.encode(), 9)) / len(kept)
    assert f"on {len(kept):,} characters of it" in said(found)


def test_files_and_records(real_text: str) -> None:
    Path("d").mkdir()
    for i in range(12):
        Path(f"d/{i:02}.txt").write_bytes(gzip.compress(real_text[: 100 * i].encode()) if i == 3 else b"x\0" * i)
    Path("d/03.txt").rename("d/03.txt.gz")
    Path("d/rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two\ttabs")))
    Path("d/.hidden").write_text("no")
    Path("d/marked.txt").write_text("\ufeffabc", encoding="utf-16-le")
    found = inspect(data(path="d"))
    files = {name: (bytes_, characters) for name, bytes_, characters in found.files}
    assert len(files) == 14
    assert files["d/00.txt"] == (0, 0)
    assert files["d/03.txt.gz"] == (Path("d/03.txt.gz").stat().st_size, 302)  # with the blank line behind it
    assert files["d/marked.txt"] == (8, 5)
    lines = said(found)
    assert "d: 14 files, one of them empty, 15 records, " in lines
    assert lines.count(".txt: ") == 9 and "… and 4 more" in lines
    assert "1 file utf-16 by byte order mark, 1 byte order mark removed" in lines
    assert "1 hidden file left out (d/.hidden)" in lines
    assert len(found.as_dict()["files"]) == 14
    assert found.as_dict()["left_out_names"] == ["d/.hidden"]
    places = {finding.kind: finding.place for finding in found.findings}
    assert places["nul"] == Place("d/01.txt", 1)
    assert places["tabs"] == Place("d/rows.jsonl", 3)
    assert "1 tab, at d/rows.jsonl, line 3 of its text." in lines


def test_a_task_is_described_as_it_is_read_in_training() -> None:
    config = build({"data": {"task": "copy", "task_delay": 20, "task_records": 500, "cache_dir": "cache"}}).data
    found = inspect(config)
    record = 1 + 1 + 20 + 3
    training, validation = found.files
    assert training == ("the task copy, training", 500 * record, 500 * record)
    assert validation == ("the task copy, validation", 100 * record, 100 * record)
    assert found.facts is not None
    assert found.statistics.characters == found.facts["characters"] == 600 * record
    assert found.statistics.blank_lines <= 1


def test_undecodable_bytes_as_they_are_asked_to_be() -> None:
    raw = prose(3000).encode() + b"caf\xe9\nna\xefve"
    replaced, skipped = inspected(raw, errors="replace"), inspected(raw, errors="skip")
    assert (replaced.as_dict()["replaced"], skipped.as_dict()["skipped"]) == (2, 2)
    assert "2 undecodable places now U+FFFD" in said(replaced)
    assert "2 undecodable bytes left out" in said(skipped)
    assert kinds(replaced)["replacement"][0] == 2
    assert "2 of them by --data.errors replace" in said(replaced)
    assert "replacement" not in kinds(skipped)
    with pytest.raises(LmappError, match=r"byte 3003: 0xe9 is not utf-8"):
        inspected(raw)


def test_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch, real_text: str) -> None:
    raw = real_text[:5000].encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    found = inspect(data(path="-"))
    assert found.problem is None
    assert found.facts is not None and found.facts["characters"] == found.statistics.characters == 5000


def test_progress_goes_on_from_the_first_reading_to_the_second(real_text: str) -> None:
    Path("a.txt").write_bytes(real_text.encode()[:30_000])
    told: list[tuple[int, int | None]] = []
    inspect(data(path="a.txt"), progress=lambda done, total: told.append((done, total)))
    assert [total for _, total in told] == [60_000] * len(told)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == 60_000


# Findings -------------------------------------------------------------------------------------------------------------


def test_nothing_is_found_in_plain_text() -> None:
    found = inspected(prose(30_000))
    assert found.findings == []
    assert "note" not in said(found)


@pytest.mark.parametrize(
    ("addition", "kind", "count", "line"),
    [
        ("\0x\0\n", "nul", 2, 2),
        ("\x1b[0m \x7f\n", "controls", 2, 2),
        ("a\tb\tc\n", "tabs", 2, 2),
        ("\n\ufffd\n", "replacement", 1, 3),
        ("a\ufeffb\n", "boms", 1, 2),
        ("soft\u00adhyphen\n", "invisible", 1, 2),
        ("\ue000\n", "private_use", 1, 2),
        ("\u0378\n", "unassigned", 1, 2),
        ("a\r\nb\rc\r\n", "mixed_line_ends", 1, 3),
        ("\ncafÃ© voilÃ\u00a0 â€™s\n", "mojibake", 2, 3),
        ("Москвa\n", "mixed_scripts", 1, 2),
        ("cafe\u0301\n", "not_normalized", None, 2),
        ("x" * 10_000 + "\n", "long_line", 1, 2),
        ("<p>x</p>\n" * 30, "tags", 60, 2),
        ("x &amp; y &#39;\n" * 30, "entities", 60, 2),
        ("blank at the end \n" * 100, "trailing_space", 100, 2),
    ],
)
def test_what_is_found(addition: str, kind: str, count: int | None, line: int) -> None:
    found = inspected("first line\n" + addition + prose(3000))
    assert kinds(found)[kind] == (count, line), found.findings
    assert kinds(found).keys() <= {kind, "repeated", "invisible"} | ({"mixed_line_ends"} if "\r" in addition else set())
    assert "note: " in said(found)


def test_proper_text_is_not_reported() -> None:
    text = "Zoë says “naïve” – Straße, Łódź; 東京 👩\u200d👧 5 < 6 && x > y; AT&T\n" + prose(30_000)
    assert inspected(text).findings == []


def test_one_line() -> None:
    assert kinds(inspected(prose(20_000).replace("\n", " "))) == {"one_line": (None, None)}


def test_a_text_that_repeats_itself() -> None:
    once = prose(20_000)
    found = inspected(once + "new\n" + once)
    assert found.as_dict()["repeated_passages"] == pytest.approx(0.5, abs=0.01)
    assert kinds(found)["repeated"] == (None, 1)
    assert "50.0 %" in said(found) or "49." in said(found)


def test_validation_text_that_was_trained_on() -> None:
    text = prose(20_000)
    Path("v.txt").write_text(text[5000:6000] + prose(1000, seed=2))
    Path("t.txt").write_text(prose(1000, seed=3))
    found = inspected(text, val_path="v.txt", test_path="t.txt")
    assert "validation_in_train" in kinds(found)
    assert "test_in_train" not in kinds(found)
    assert "passages of 64 characters of the validation split stand in the training text too" in said(found)


def test_validation_characters_that_training_lacks() -> None:
    found = inspected(prose(3000) + "ж\nжю\n")
    assert kinds(found)["unseen"] == (3, inspected(prose(3000)).statistics.lines + 1)
    assert "3 characters (ж, ю)" in said(found)


# Anything -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "a.txt is empty."),
        (b"a", "a.txt is a single character; it takes at least 2 to predict one."),
        (b"\n", "a.txt is a single character"),
        (b"ab", None),
        (b"\0" * 5000, None),
        (b"\r" * 1000, None),
        (b"no newline", None),
        (b"x" * 300_000, None),
    ],
)
def test_any_text(text: bytes, problem: str | None) -> None:
    found = inspected(text)
    assert (found.problem is None) == (problem is None)
    assert (found.problem or "").startswith(problem or "")
    assert found.statistics.characters == len(text)
    assert (f"note: It cannot be trained on. {found.problem}" in said(found)) == (problem is not None)
    assert (found.shape is None) == (problem is not None)


def test_random_bytes() -> None:
    raw = random.Random(1).randbytes(50_000)
    for options in ({"encoding": "latin-1"}, {"errors": "replace"}, {"errors": "skip"}, {"alphabet": "bytes"}):
        found = inspected(raw, **options)
        assert {"nul", "controls", "tabs", "mixed_line_ends"} <= kinds(found).keys(), options
        assert found.facts is not None


def test_bytes(real_text: str) -> None:
    raw = (real_text[:5000] + "é漢\n").encode()
    found = inspected(raw, alphabet="bytes")
    assert f"text: {len(raw):,} bytes, 5,003 characters as UTF-8" in said(found)
    assert found.as_dict()["kinds"]["bytes above 0x7F"] == sum(byte > 0x7F for byte in raw)
    assert {entry["byte"]: entry["count"] for entry in found.as_dict()["alphabet"]} == Counter(raw)
    bits = found.as_dict()["bits_per_character"]
    assert bits["xz"] == 8 * len(lzma.compress(raw, preset=6)) / 5003


def test_bytes_that_begin_no_character() -> None:
    found = inspected(b"\x80" * 100, alphabet="bytes")
    assert found.problem is not None and found.problem.startswith("a.txt holds no character")
    assert (found.compressed, found.statistics.characters) == ({}, 100)


def test_surrogates_are_shown_and_refused() -> None:
    found = inspected(b"a\\ud800b" * 100, encoding="raw_unicode_escape")
    assert kinds(found)["surrogates"] == (100, 1)
    assert found.problem == "a.txt, character 1 is a lone surrogate, not a character."


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"shrink": False}, "The training text has 2,700 characters, too few for 100 rows"),
        ({"byte_fallback": "false"}, "'ж' (U+0436) occurs in the validation split"),
        ({"split_at": "record"}, "--data.split-at record: the text has too few records"),
        ({"alphabet": "none.json"}, "The vocabulary none.json cannot be read"),
    ],
)
def test_why_it_cannot_be_trained_on(options: dict[str, Any], problem: str) -> None:
    found = inspected(prose(2999) + "ж", batch_size=100, **options)
    assert found.problem is not None and found.problem.startswith(problem)
    assert found.statistics.characters == 3000
    assert found.shape is None
    assert (found.facts is None) == ("shrink" not in options)


@pytest.mark.parametrize("path", ["none.txt", "none*.txt", "bad.txt.gz", "bad.jsonl"])
def test_what_cannot_be_read_is_an_error_as_in_training(path: str) -> None:
    Path("bad.txt.gz").write_bytes(b"nothing")
    Path("bad.jsonl").write_text("nothing")
    with pytest.raises(LmappError) as training:
        TextDataModule(data(path=path)).setup()
    with pytest.raises(LmappError) as here:
        inspect(data(path=path))
    assert str(here.value) == str(training.value)
    with pytest.raises(LmappError):
        inspected(prose(1000), val_path=path)
