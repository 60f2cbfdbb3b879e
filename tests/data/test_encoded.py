import errno
import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lmapp.data import baselines as counting
from lmapp.data import cache, draft, encoded
from lmapp.data.baselines import baselines
from lmapp.data.encoded import Alphabet, Cut, encode
from lmapp.data.sources import resolve
from lmapp.data.text import TextPolicy
from lmapp.errors import LmappError, UsageError
from lmapp.vocabulary import Vocabulary


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.fixture
def run(tmp_path):
    """Encode a text with the cache below tmp_path."""

    def run(text, **options):
        return encoded_files([write(tmp_path / "text.txt", text)], tmp_path / "cache", **options)

    return run


def encoded_files(files, cache_dir, **options):
    """`encode` with the options of cut, alphabet and policy given by name."""
    parts = {"cut": Cut, "alphabet": Alphabet, "policy": TextPolicy}
    for part, kind in parts.items():
        given = {f.name: options.pop(f.name) for f in fields(kind) if f.name in options}
        options[part] = kind(**given)
    sources = resolve([str(path) for path in files], cache_dir=cache_dir)
    return encode(sources, cache_dir=cache_dir, **options)


def texts(corpus):
    decode = corpus.vocabulary.decode
    return decode(corpus.train), decode(corpus.validation), decode(corpus.test)


def leftovers(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache" / "encoded").glob("*.tmp"))


# --- ids and splits ------------------------------------------------------------------------------------------------


def test_splits_follow_one_another_by_characters(run, real_text):
    text = real_text[:10_007]
    corpus = run(text, val_fraction=0.1, test_fraction=0.05)
    assert texts(corpus) == (text[: 10_007 - 1500], text[10_007 - 1500 : 10_007 - 500], text[10_007 - 500 :])
    assert corpus.facts["train_characters"] == 8507
    assert corpus.facts["validation_characters"] == 1000
    assert corpus.facts["test_characters"] == 500
    assert corpus.facts["characters"] == 10_007
    assert corpus.facts["bytes"] == len(text.encode())


@pytest.mark.parametrize(
    "text",
    [
        "a\n\nb\r\nc\u2029d",
        "\x00\x00a\x00",
        "👨‍👩‍👧‍👦" * 20,
        "<0x0A>\u2028\x85" * 9,
        "aé漢😀" * 50,
        "12",
        "\r\r\n\n\r" * 10,
    ],
)
@pytest.mark.parametrize("fractions", [(0, 0), (0.1, 0), (0, 0.3), (0.2, 0.2)])
@pytest.mark.parametrize("byte_fallback", [None, True])
def test_any_text_comes_back(run, text, fractions, byte_fallback):
    corpus = run(text, val_fraction=fractions[0], test_fraction=fractions[1], byte_fallback=byte_fallback)
    assert "".join(texts(corpus)) == text
    assert corpus.facts["bytes"] == len(text.encode())
    assert corpus.vocabulary.characters == "".join(sorted(set(texts(corpus)[0])))
    assert all(len(part) != 1 for part in texts(corpus))


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, np.uint8), (256, np.uint8), (257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)]
)
def test_the_smallest_type_read_only(run, size, dtype):
    text = "".join(map(chr, range(0x20000, 0x20000 + size)))
    corpus = run(text, val_fraction=0)
    assert len(corpus.vocabulary) == size
    for ids in (corpus.train, corpus.validation, corpus.test):
        assert ids.dtype == dtype
        assert ids.ndim == 1
        assert not ids.flags.writeable
    assert corpus.train.tolist() == list(range(size))
    assert len(corpus.validation) == len(corpus.test) == 0


def test_blocks_of_any_size_give_the_same_files(run, tmp_path, monkeypatch):
    text = "".join(chr(97 + i % 26) + chr(0x4E00 + i * i % 700) for i in range(2000)) + "\u0391\u0392" * 50
    files = {}
    for block in (1, 7, 64, 1000, 1 << 20):
        monkeypatch.setattr(draft, "BLOCK", block)
        monkeypatch.setattr(counting, "BLOCK", block)
        monkeypatch.setattr(encoded, "FORMAT", f"blocks of {block}")
        corpus = run(text, test_fraction=0.1)
        assert "".join(texts(corpus)) == text
        facts = {name: round(fact, 9) if isinstance(fact, float) else fact for name, fact in corpus.facts.items()}
        files[block] = (corpus.train.tobytes(), corpus.validation.tobytes(), corpus.test.tobytes(), facts)
    assert all(content == files[1] for content in files.values())


def test_the_validation_split_is_capped_and_says_so(run):
    corpus = run("ab" * 500, val_fraction=0.5, max_val_characters=100)
    assert [len(part) for part in texts(corpus)] == [900, 100, 0]
    assert corpus.facts["validation_capped"] is True
    assert run("ab" * 500, val_fraction=0.5, max_val_characters=None).facts["validation_characters"] == 500
    assert run("ab" * 500, val_fraction=0.1, max_val_characters=100).facts["validation_capped"] is False


def test_fractions_are_the_decimals_that_were_typed(run):
    assert run("ab" * 50, val_fraction=0.29).facts["validation_characters"] == 29  # 0.29 * 100 is 28.999…


@pytest.mark.parametrize("length", range(2, 40))
@pytest.mark.parametrize("fractions", [(0.1, 0.0), (0.1, 0.1), (0.0, 0.0)])
def test_tiny_texts_have_a_training_split(run, length, fractions):
    text = ("five\nshort\nlines\n" * 3)[:length]
    train, validation, test = texts(run(text, val_fraction=fractions[0], test_fraction=fractions[1]))
    assert train + validation + test == text
    assert len(train) >= 2
    assert len(validation) != 1
    assert len(test) != 1


def test_nothing_to_train_on(run):
    for text in ("", "\ufeff"):
        with pytest.raises(LmappError, match=r"text\.txt is empty"):
            run(text)
    with pytest.raises(LmappError, match="at least 2 to predict one"):
        run("漢")
    with pytest.raises(UsageError, match=r"--data.val-fraction 0.9 .*leave 1 of 10"):
        run("0123456789", val_fraction=0.9)


@pytest.mark.parametrize(("val", "test"), [(-0.1, 0), (1, 0), (0, 1.5), (0.5, 0.5), (0.9, 0.2), (math.nan, 0)])
def test_impossible_fractions(run, val, test):
    with pytest.raises(UsageError, match=r"--data.(val|test)-fraction"):
        run("abc" * 100, val_fraction=val, test_fraction=test)


def test_a_byte_order_mark_is_counted(run):
    corpus = run("\ufeffab\r\ncd\r\n")
    assert corpus.facts["boms_removed"] == 1
    assert "".join(texts(corpus)) == "ab\r\ncd\r\n"


def test_several_files_and_an_encoding(tmp_path):
    files = [write(tmp_path / "a.txt", "é1".encode("latin-1")), write(tmp_path / "b.txt", "é2".encode("latin-1"))]
    corpus = encoded_files(files, tmp_path / "cache", encoding="latin-1", separator="|", val_fraction=0)
    assert texts(corpus)[0] == "é1|é2"
    assert corpus.facts["files"] == 2
    assert corpus.facts["bytes"] == 7


def test_progress_ends_at_the_whole(tmp_path):
    path = write(tmp_path / "a.txt", b"ab\n" * 2_000_000)
    calls = []
    encoded_files([path], tmp_path / "cache", progress=lambda *call: calls.append(call))
    assert len(calls) > 3
    assert calls == sorted(calls)
    assert calls[-1] == (6_000_000, 6_000_000)


def test_a_text_that_changes_meanwhile(tmp_path):
    path = write(tmp_path / "a.txt", "ab" * 100)
    with pytest.raises(LmappError, match="changed while it was being read"):
        encoded_files([path], tmp_path / "cache", progress=lambda *_: write(path, "cd"))
    assert list((tmp_path / "cache" / "encoded").iterdir()) == []


# --- characters that training has not seen -------------------------------------------------------------------------


def test_unseen_characters_become_bytes_and_are_counted(run):
    text = "abc" * 30 + "ab漢" + "é" * 4 + "b\u2029a" + "a漢c"
    corpus = run(text, val_fraction=0.1, test_fraction=0.03)
    assert corpus.facts["validation_characters"] == 10
    assert texts(corpus) == (text[:-13], text[-13:-3], text[-3:])
    assert corpus.vocabulary == Vocabulary("abc", byte_fallback=True)
    assert corpus.facts["unseen"] == "é\u2029漢"
    assert corpus.facts["unseen_train"] == 0
    assert corpus.facts["unseen_validation"] == 6
    assert corpus.facts["unseen_test"] == 1
    assert corpus.facts["alphabet"] == 3
    assert corpus.facts["vocabulary_size"] == 259
    assert corpus.facts["validation_symbols"] == len(corpus.validation) == 10 + 2 + 4 + 2
    assert corpus.vocabulary.starts_character[corpus.validation].sum() == 10
    np.testing.assert_array_equal(corpus.validation, corpus.vocabulary.encode(text[-13:-3]))


def test_byte_fallback_by_option(run):
    assert not run("ab" * 50).vocabulary.byte_fallback
    assert run("ab" * 50, byte_fallback=True).vocabulary.byte_fallback
    assert not run("ab" * 50, byte_fallback=False).vocabulary.byte_fallback
    with pytest.raises(
        LmappError, match=r"'é' \(U\+00E9\) occurs in the validation split(.|\n)*character 97"
    ) as caught:
        run("ab" * 48 + "aébb", byte_fallback=False)
    assert "--data.byte-fallback true" in str(caught.value)
    assert str(caught.value).count("\n") < 3
    with pytest.raises(LmappError, match=r"the test split(.|\n)*character 97"):
        run("ab" * 48 + "aébb", byte_fallback=False, val_fraction=0, test_fraction=0.1)


def test_a_given_vocabulary_is_used(run, tmp_path):
    vocabulary = Vocabulary("abcdefg", byte_fallback=True)
    corpus = run("abxy" * 30, given=vocabulary, val_fraction=0)
    assert corpus.vocabulary == vocabulary
    assert texts(corpus)[0] == "abxy" * 30
    assert corpus.facts["unseen"] == "xy"
    assert corpus.facts["unseen_train"] == 60
    with pytest.raises(LmappError, match=r"'x' .*not in the vocabulary(.|\n)*text.txt, character 2"):
        run("abxy" * 30, given=Vocabulary("ab"), val_fraction=0)
    same = run("abxy" * 30, given=Vocabulary("abxy"), val_fraction=0)
    assert same.vocabulary == Vocabulary("abxy")
    assert same.directory != corpus.directory
    assert leftovers(tmp_path) == []


def test_a_lone_surrogate_is_named(run):
    with pytest.raises(LmappError, match=r"text.txt, character 2 is a lone surrogate"):
        run(b"ab+2AA-b", encoding="utf-7")


def test_rare_characters_become_bytes_and_are_counted(run):
    text = "abc" * 30 + "漢漢é" + "ab漢é!" * 2
    corpus = run(text, val_fraction=0.1, min_count=3)
    assert texts(corpus) == (text[:-10], text[-10:], "")
    assert corpus.vocabulary == Vocabulary("abc", byte_fallback=True)
    assert (corpus.facts["rare"], corpus.facts["unseen"]) == ("é漢", "!")
    assert [corpus.facts[f"rare_{split}"] for split in ("train", "validation", "test")] == [3, 4, 0]
    assert [corpus.facts[f"unseen_{split}"] for split in ("train", "validation", "test")] == [0, 2, 0]
    assert corpus.facts["train_symbols"] == len(corpus.train) == 93 + 2 + 2 + 1
    assert corpus.facts["train_characters"] == 93
    assert run(text, min_count=2).vocabulary.characters == "abc漢"
    assert not run("abab" * 9, min_count=2).vocabulary.byte_fallback
    nothing = run("ab" * 9 + "é", min_count=100, val_fraction=0)  # bytes alone write every text
    assert nothing.vocabulary == Vocabulary("", byte_fallback=True)
    assert texts(nothing)[0] == "ab" * 9 + "é"
    with pytest.raises(LmappError, match=r"'é' .* occurs 1 time in the training split: --data.min-count"):
        run("ab" * 40 + "é" + "ab" * 20, min_count=2, byte_fallback=False)


# --- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_bytes_are_their_own_ids(run, monkeypatch, block):
    monkeypatch.setattr(draft, "BLOCK", block)
    content = "\ufeff".encode() + bytes(range(256)) + "é漢\r\nab".encode() * 60
    corpus = run(content, as_bytes=True, val_fraction=0.2)
    parts = [part.astype(np.uint8).tobytes() for part in (corpus.train, corpus.validation, corpus.test)]
    assert b"".join(parts) == content
    assert parts[1][0] & 0xC0 != 0x80  # no character is cut
    assert corpus.train.dtype == np.uint8
    assert corpus.vocabulary == Vocabulary("", byte_fallback=True)
    assert corpus.facts["bytes"] == len(content)
    assert corpus.facts["characters"] == sum(byte & 0xC0 != 0x80 for byte in content)
    assert corpus.facts["alphabet"] == len(set(parts[0]))
    assert corpus.facts["boms_removed"] == corpus.facts["unseen_validation"] == 0
    assert corpus.facts["validation_characters"] == sum(byte & 0xC0 != 0x80 for byte in parts[1])


def test_bytes_of_no_character(run):
    with pytest.raises(LmappError, match=r"text.txt holds no character"):
        run(b"\x80" * 100, as_bytes=True)
    assert run(b"a" * 50 + b"\x80" * 50, as_bytes=True, val_fraction=0.5).facts["validation_characters"] == 0


# --- records -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 5, 1 << 20])
@pytest.mark.parametrize("min_count", [1, 3])
def test_record_starts_are_symbols(tmp_path, monkeypatch, block, min_count):
    monkeypatch.setattr(draft, "BLOCK", block)
    rows = ["eins", "", "zwölf ✓", "漢字", "x", "drei " * 9, "ende✓"]
    path = write(tmp_path / "rows.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows))
    corpus = encoded_files([path], tmp_path / "cache", separator="|", val_fraction=0.3, min_count=min_count)
    decode, whole = corpus.vocabulary.decode, ""
    for split in encoded.SPLITS:
        ids, starts = getattr(corpus, split), corpus.starts[split]
        assert corpus.facts[f"{split}_records"] == len(starts)
        assert not starts.flags.writeable
        for start in starts:
            rest = decode(ids[start:])
            assert any(rest.startswith(row) or row.startswith(rest) for row in rows if row)
            assert start == 0 or decode(ids[start - 1 : start]) == "|"
        whole += decode(ids)
    assert whole == "|".join(rows)
    assert sum(len(starts) for starts in corpus.starts.values()) == sum(map(bool, rows))
    assert corpus.facts["records"] == len(rows)
    assert corpus.facts["files"] == 1


def test_splits_at_records_and_files(tmp_path):
    files = [write(tmp_path / f"{name}.txt", name * 10) for name in "abcd"]

    def parts(**options):
        return texts(encoded_files(files, tmp_path / "cache", separator="|", **options))

    assert parts(val_fraction=0.3, at="file") == ("a" * 10 + "|" + "b" * 10 + "|" + "c" * 10 + "|", "d" * 10, "")
    assert parts(val_fraction=0.1, at="file")[1] == "d" * 10  # there is no later start
    assert parts(val_fraction=0.25, test_fraction=0.25, at="file")[1:] == ("c" * 10 + "|", "d" * 10)
    assert parts(val_fraction=0.3, at="record") == parts(val_fraction=0.3, at="file")
    assert parts(val_fraction=0, at="file")[1] == ""
    with pytest.raises(UsageError, match=r"--data.split-at file: the text has too few files"):
        encoded_files(files[:1], tmp_path / "cache", val_fraction=0.5, at="file")
    with pytest.raises(UsageError, match="too few files"):
        encoded_files(files[:2], tmp_path / "cache", val_fraction=0.2, test_fraction=0.2, at="file")


def test_separate_validation_and_test_data(tmp_path):
    a, b, c = (
        write(tmp_path / f"{name}.txt", text) for name, text in zip("abc", ("ab" * 50, "éa" * 3, "b"), strict=True)
    )
    where = tmp_path / "cache"
    given = [resolve([str(path)], cache_dir=where) for path in (a, b, a)]
    corpus = encode(given[0], cache_dir=where, validation=given[1], test=given[2], cut=Cut(val_fraction=0))
    assert texts(corpus) == ("ab" * 50, "éa" * 3, "ab" * 50)
    assert corpus.vocabulary == Vocabulary("ab", byte_fallback=True)
    assert [corpus.starts[split].tolist() for split in encoded.SPLITS] == [[0], [0], [0]]
    alone = encode(given[0], cache_dir=where)
    assert corpus.fingerprint != alone.fingerprint
    assert corpus.facts["text_fingerprint"] == alone.facts["text_fingerprint"] == alone.fingerprint
    cut = encode(given[0], cache_dir=where, validation=given[1], cut=Cut(val_fraction=0, test_fraction=0.1))
    assert [len(part) for part in texts(cut)] == [90, 6, 10]
    with pytest.raises(LmappError, match=r"c.txt is a single character"):
        encode(given[0], cache_dir=where, validation=resolve([str(c)], cache_dir=where))


# --- baselines -----------------------------------------------------------------------------------------------------


def naive_baselines(train, scored, starts):
    size = len(starts)
    counts, pairs = Counter(train), Counter(pairwise(train))
    followed = Counter(train[:-1])
    characters = sum(bool(starts[b]) for b in scored[1:])
    unigram = sum(-math.log2((counts[b] + 1) / (len(train) + size)) for b in scored[1:])
    bigram = sum(-math.log2((pairs[a, b] + 1) / (followed[a] + size)) for a, b in pairwise(scored))
    return unigram / characters, bigram / characters


@pytest.mark.parametrize("dense_pairs", [0, 1 << 20])
@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_baselines_equal_a_naive_twin(monkeypatch, dense_pairs, block):
    monkeypatch.setattr(counting, "_DENSE_PAIRS", dense_pairs)
    monkeypatch.setattr(counting, "BLOCK", block)
    random = np.random.default_rng(0)
    for size, n, m in [(1, 2, 2), (2, 1, 2), (5, 200, 50), (90, 40, 30), (300, 100, 300)]:
        train, scored = random.integers(0, size, n), random.integers(0, size, m)
        starts = random.random(size) < 0.8
        starts[scored[1]] = True
        for dtype in [np.uint16, *([np.uint8] if size <= 256 else [])]:
            got = baselines(train.astype(dtype), scored.astype(dtype), starts)
            assert got == pytest.approx(naive_baselines(train.tolist(), scored.tolist(), starts), rel=1e-12)


def test_baselines_of_a_corpus(run, real_text):
    text = real_text[:30_000] + "\u2026\u2026"
    corpus = run(text)
    expected = naive_baselines(corpus.train.tolist(), corpus.validation.tolist(), corpus.vocabulary.starts_character)
    assert (corpus.facts["unigram_bits"], corpus.facts["bigram_bits"]) == pytest.approx(expected, rel=1e-12)
    assert corpus.facts["baseline_split"] == "validation"
    assert 1 < corpus.facts["bigram_bits"] < corpus.facts["unigram_bits"] < 8
    alone = run(text, val_fraction=0)
    expected = naive_baselines(alone.train.tolist(), alone.train.tolist(), alone.vocabulary.starts_character)
    assert (alone.facts["unigram_bits"], alone.facts["bigram_bits"]) == pytest.approx(expected, rel=1e-12)
    assert alone.facts["baseline_split"] == "train"


# --- the cache -----------------------------------------------------------------------------------------------------


def test_the_second_time_nothing_is_encoded(run, monkeypatch):
    first = run("abc" * 100 + "é")

    def refuse(*_, **__):
        raise AssertionError("read again")

    monkeypatch.setattr(encoded.sources, "stream", refuse)
    second = run("abc" * 100 + "é")
    assert second.directory == first.directory
    assert second.facts == first.facts
    assert second.vocabulary == first.vocabulary
    assert second.fingerprint == first.fingerprint
    np.testing.assert_array_equal(second.train, first.train)
    np.testing.assert_array_equal(second.validation, first.validation)


def test_every_option_has_its_own_files(run):
    options = [
        {},
        {"val_fraction": 0.2},
        {"test_fraction": 0.1},
        {"max_val_characters": 5},
        {"max_val_characters": None},
        {"byte_fallback": True},
        {"byte_fallback": False},
        {"encoding": "latin-1"},
        {"given": Vocabulary("abc")},
        {"given": Vocabulary("abc", byte_fallback=True)},
        {"given": Vocabulary("abcd")},
    ]
    assert len({run("abc" * 100, **option).directory for option in options}) == len(options)
    assert run("abc" * 100, separator="|").directory == run("abc" * 100).directory  # no second record, same text


def test_a_corpus_that_moved_is_the_same_corpus(tmp_path):
    one, two = write(tmp_path / "one.txt", "abc" * 9), write(tmp_path / "two.md", "abc" * 9)
    first, second = (encoded_files([path], tmp_path / "cache") for path in (one, two))
    assert first.directory == second.directory


def test_facts_are_numbers_and_strings(run):
    facts = run("abc" * 30 + "é").facts
    assert all(isinstance(fact, (int, float, str)) for fact in facts.values())
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "test.bin", "vocabulary.json", "facts.json"])
@pytest.mark.parametrize("damage", ["gone", "empty", "longer"])
def test_a_damaged_cache_is_made_again(run, tmp_path, name, damage):
    options = {"val_fraction": 0.2, "test_fraction": 0.2}
    corpus = run("abc" * 100, **options)
    expected, path = texts(corpus), corpus.directory / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else path.read_bytes() + b"]")
    again = run("abc" * 100, **options)
    assert texts(again) == expected
    assert again.directory == corpus.directory
    assert [p.name for p in (tmp_path / "cache" / "encoded").iterdir()] == [corpus.directory.name]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EDQUOT])
def test_a_full_disk_leaves_nothing(run, tmp_path, monkeypatch, code):
    def full(_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(cache.os, "fsync", full)
        with pytest.raises(
            LmappError, match=r"cannot be kept in .*--data\.cache-dir|(.|\n)*--data\.cache-dir"
        ) as caught:
            run("abc" * 100)
    assert ("disk is full" in str(caught.value)) == (code != errno.EACCES)
    assert list((tmp_path / "cache" / "encoded").iterdir()) == []
    assert "".join(texts(run("abc" * 100))) == "abc" * 100


def test_a_cache_that_cannot_be_made(tmp_path):
    path = write(tmp_path / "text.txt", "abc" * 9)
    with pytest.raises(LmappError, match=r"--data.cache-dir"):
        encoded_files([path], path)


def test_a_read_only_cache_is_enough_once_it_is_filled(run, monkeypatch):
    run("abc" * 100)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("written to"))
    run("abc" * 100)


CHILD = """
import sys, time
from pathlib import Path
from lmapp.data import draft, encoded, sources
draft.BLOCK = 1000
def progress(done, total):
    print(done, flush=True)
    time.sleep(float(sys.argv[3]))
cache = Path(sys.argv[2])
corpus = encoded.encode(sources.resolve([sys.argv[1]], cache_dir=cache), cache_dir=cache, progress=progress)
decode = corpus.vocabulary.decode
assert decode(corpus.train) + decode(corpus.validation) == Path(sys.argv[1]).read_text()
print("done", corpus.directory)
"""


def child(path, tmp_path, pause):
    command = [sys.executable, "-c", CHILD, str(path), str(tmp_path / "cache"), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_process_leaves_nothing_wrong(tmp_path, real_text):
    path = write(tmp_path / "text.txt", real_text[:50_000])
    with child(path, tmp_path, 5) as process:
        assert process.stdout.readline().strip().isdigit()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(leftovers(tmp_path)) == 1
    alive = tmp_path / "cache" / "encoded" / leftovers(tmp_path)[0].replace(f".{process.pid}.", f".{os.getpid()}.")
    elsewhere = tmp_path / "cache" / "encoded" / f"another.host.example.{process.pid}.00000000.tmp"
    alive.mkdir()
    elsewhere.mkdir()
    corpus = encoded_files([path], tmp_path / "cache")
    assert "".join(texts(corpus)) == real_text[:50_000]
    assert leftovers(tmp_path) == sorted([alive.name, elsewhere.name])


def test_two_processes_at_once(tmp_path, real_text):
    path = write(tmp_path / "text.txt", real_text[:50_000])
    with child(path, tmp_path, 0.02) as one, child(path, tmp_path, 0.02) as two:
        said = [process.communicate()[0].splitlines() for process in (one, two)]
    assert one.returncode == two.returncode == 0
    assert len(said[0]) > 1  # both encoded: neither found the other's finished
    assert len(said[1]) > 1
    assert said[0][-1] == said[1][-1]
    assert [entry.name for entry in (tmp_path / "cache" / "encoded").iterdir()] == [Path(said[0][-1].split()[1]).name]


def test_memory_does_not_grow_with_the_text(tmp_path):
    path = write(tmp_path / "big.txt", "all work and no play €\n".encode() * 2_000_000)  # 50 MB
    code = (
        "import sys, re\nfrom pathlib import Path\nfrom lmapp.data.encoded import encode\n"
        "from lmapp.data.sources import resolve\n"
        "held = lambda: int(re.search(r'RssAnon:\\s*(\\d+)', Path('/proc/self/status').read_text())[1]) // 1024\n"
        "before, peak = held(), 0\n"
        "def progress(*_):\n    global peak\n    peak = max(peak, held())\n"
        "cache = Path(sys.argv[2])\n"
        "encode(resolve([sys.argv[1]], cache_dir=cache), cache_dir=cache, progress=progress)\n"
        "print(max(peak, held()) - before)"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "cache")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 150
