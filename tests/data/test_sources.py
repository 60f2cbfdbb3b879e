import json
import os
import re
import subprocess
import sys
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest

from lmapp.data import packing
from lmapp.data.sources import fingerprint, resolve, stem, stream
from lmapp.data.text import Reading, TextPolicy
from lmapp.errors import LmappError, UsageError

CACHE = Path("cache")


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def sources(*paths):
    return resolve([str(path) for path in paths], cache_dir=CACHE)


def names(*paths) -> list[str]:
    return [source.name for source in sources(*paths)]


def read(*paths, separator=None, column="text", reading=None, **policy) -> str:
    pieces = list(
        stream(sources(*paths), policy=TextPolicy(**policy), separator=separator, column=column, reading=reading)
    )
    assert all(pieces)
    return "".join(pieces)


def mark(*paths, separator=None, column="text", **policy) -> str:
    return fingerprint(sources(*paths), TextPolicy(**policy), separator, column)


def rows(*texts) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def pipe(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(content), encoding="ascii"))


HOSTILE = [
    "",
    "x",
    "a\n\nb\r\nc\u2029d",
    "\x00\x00",
    "\r\r\n\n\r",
    "👨‍👩‍👧‍👦\r\n",
    "<unk>\u2028\x85\x1c ",
    "漢字é😀" * 3,
]


# --- which files ---------------------------------------------------------------------------------------------------


def test_paths_and_globs_in_the_order_given(tmp_path):
    for name in ("b.txt", "a.txt", "sub/deep/c.txt", "sub/d.txt", "other.md"):
        write(tmp_path / name, name)
    (tmp_path / "directory.txt").mkdir()
    found = lambda *items: [os.path.relpath(name, tmp_path) for name in names(*(f"{tmp_path}/{i}" for i in items))]  # noqa: E731
    assert found("b.txt", "a.txt") == ["b.txt", "a.txt"]
    assert found("*.txt") == ["a.txt", "b.txt"]
    assert found("**/*.txt") == ["a.txt", "b.txt", "sub/d.txt", "sub/deep/c.txt"]
    assert found("other.md", "sub/*.txt", "?.txt") == ["other.md", "sub/d.txt", "a.txt", "b.txt"]
    assert found("other.md", "") == ["other.md", "a.txt", "b.txt", "sub/d.txt", "sub/deep/c.txt"]
    assert found("sub/d.txt", "sub", "sub/d.txt") == ["sub/d.txt", "sub/deep/c.txt", "sub/d.txt"]


def test_a_file_counts_as_often_as_it_is_named_but_once_for_all_globs(tmp_path):
    a, b = write(tmp_path / "a.txt", "a"), write(tmp_path / "b.txt", "b")
    assert names(a, a) == [str(a), str(a)]
    assert names(f"{tmp_path}/*.txt", f"{tmp_path}/**/*.txt", tmp_path) == [str(a), str(b)]
    assert names(b, f"{tmp_path}/*.txt") == [str(b), str(a)]
    assert names(f"{tmp_path}/*.txt", b) == [str(a), str(b), str(b)]


def test_a_name_with_glob_characters_is_a_name_first(tmp_path):
    odd = write(tmp_path / "a[1]*.txt", "x")
    write(tmp_path / "a1.txt", "y")
    assert names(odd) == [str(odd)]
    assert read(odd) == "x"


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(tmp_path / "x.txt", "x")
    assert names("~/x.txt") == names("~/*.txt") == names("~") == [str(path)]


def test_a_directory_is_all_files_below_it_sorted_but_the_hidden(tmp_path):
    for name in ("b/z", "b.txt", "a/y.txt", ".git/config", "b/.cache/x", ".DS_Store", "b/._z", "B"):
        write(tmp_path / "d" / name, f"{name}\n")
    (tmp_path / "d" / "up").symlink_to(tmp_path / "d", target_is_directory=True)
    (tmp_path / "d" / "link.txt").symlink_to(write(tmp_path / "elsewhere.txt", "linked"))
    (tmp_path / "link").symlink_to(tmp_path / "d", target_is_directory=True)
    for name in ("d", "link"):
        reading = Reading()
        assert read(tmp_path / name, separator="", reading=reading) == "B\na/y.txt\nb.txt\nb/z\nlinked"
        left_out = [".DS_Store", ".git", "b/._z", "b/.cache", "up"]
        assert reading.left_out == [f"{tmp_path / name}/{path}" for path in left_out]
        assert reading.left_out_count == 5


def test_what_is_left_out_is_counted_though_not_all_named(tmp_path):
    for number in range(25):
        write(tmp_path / "d" / f".{number}", "x")
    reading = Reading()
    assert read(write(tmp_path / "d" / "a", "a"), tmp_path / "d", reading=reading) == "a"
    assert (len(reading.left_out), reading.left_out_count) == (20, 25)


def test_hidden_files_that_are_named_are_read(tmp_path):
    write(tmp_path / ".a.txt", "a"), write(tmp_path / ".d" / "b.txt", "b"), write(tmp_path / "c.txt", "c")
    reading = Reading()
    assert read(tmp_path / ".a.txt", f"{tmp_path}/.d/*", f"{tmp_path}/.*.txt", separator="", reading=reading) == "ab"
    assert read(tmp_path / ".d") == "b"
    assert reading.left_out_count == 0


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("missing.txt", "missing.txt: no such file"),
        ("*.nothing", r"No file matches '.*\*\.nothing'"),
        ("folder", "no file in the directory .*folder"),
        ("secret", "no file that is not hidden in the directory .*secret"),
        ("folder/*", "No file matches"),
        ("fifo", "fifo is not a regular file"),
        ("strange", "strange/fifo is not a regular file"),
        ("broken", "broken/dangling: no such file"),
        ("round", "round/loop: no such file"),
        ("dangling", "no such file"),
        ("nul\0", r"nul\\x00: no such file"),
        ("n" * 300, "File name too long"),
        ("packed.7z", r"archive.*\n.*Unpack"),
        ("packed.rar", "archive"),
        ("zip://*::missing.zip", "missing.zip: no such file"),
        ("zip://*::folder", "folder is a directory"),
    ],
)
def test_what_is_no_text_file_is_named(tmp_path, item, message):
    for name in ("folder/inner", "secret", "strange", "broken", "round"):
        (tmp_path / name).mkdir(parents=True)
    write(tmp_path / "secret" / ".hidden", "x")
    os.mkfifo(tmp_path / "fifo")
    os.mkfifo(tmp_path / "strange" / "fifo")
    for link in ("dangling", "broken/dangling"):
        (tmp_path / link).symlink_to("nowhere")
    (tmp_path / "round" / "loop").symlink_to("loop")
    write(tmp_path / "packed.7z", "x"), write(tmp_path / "packed.rar", "x")
    prefix, _, path = item.rpartition("::")
    with pytest.raises(LmappError, match=message) as caught:
        sources(f"{prefix}{'::' if prefix else ''}{tmp_path}/{path}")
    assert str(caught.value).count("\n") < 3


def test_addresses_of_other_kinds_are_refused():
    for item in ("s3://bucket/x.txt", "file:///x.txt", "ftp://host/x", "s3://bucket/*.txt"):
        with pytest.raises(LmappError, match=rf"{re.escape(item)}: addresses of this kind are not read\.\nDownload"):
            sources(item)
    with pytest.raises(LmappError, match=r"^ftp://host/x: addresses"):
        sources("ftp://me:word@host/x")


def test_no_path_at_all():
    with pytest.raises(UsageError, match=r"--data.path"):
        sources()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_is_named(tmp_path):
    path = write(tmp_path / "d" / "secret.txt", "x")
    path.chmod(0)
    for name in (path, path.parent):
        with pytest.raises(LmappError, match=r"secret.txt cannot be read: Permission denied"):
            sources(name)


def test_a_failing_disk_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "secret.txt", "x")
    [source] = sources(path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    acts = (
        lambda: sources(path),
        lambda: list(stream([source])),
        lambda: fingerprint([source], TextPolicy(), None, "text"),
    )
    for act in acts:
        with pytest.raises(LmappError, match=r"secret.txt cannot be read: Permission denied"):
            act()


def test_a_disk_that_fails_while_it_is_read_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt.gz", "x")
    [source] = sources(path)

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(packing, "unpacked", lambda *_: type("File", (), {"read": fail}))
    with pytest.raises(LmappError, match=r"a.txt.gz cannot be read: Input/output error"):
        list(stream([source]))


def test_an_unreadable_directory_is_named(tmp_path, monkeypatch):
    write(tmp_path / "d" / "a.txt", "x")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(LmappError, match=r"/d cannot be read: Permission denied"):
        sources(tmp_path / "d")


def test_names_cannot_write_to_the_terminal(tmp_path):
    odd = write(tmp_path / "a\x1b[31m\n\u202eé\udc80 漢.txt", b"\xff")
    shown = r"a\x1b[31m\n\u202eé\udc80 漢.txt"
    assert names(odd) == [f"{tmp_path}/{shown}"]
    for item in (odd, f"{odd}missing", f"{odd}.7z", f"{tmp_path}/[\x1b]*", "s3://\x1b"):
        with pytest.raises(LmappError) as caught:
            read(item)
        assert all(line.isprintable() for line in str(caught.value).split("\n"))


# --- standard input ------------------------------------------------------------------------------------------------


def test_standard_input_is_read_as_often_as_needed(tmp_path, monkeypatch):
    pipe(monkeypatch, "é\r\npiped".encode())
    found = sources(write(tmp_path / "a", "a"), "-")
    same = mark(tmp_path / "a", write(tmp_path / "b", "é\r\npiped"))
    assert [fingerprint(found, TextPolicy(), None, "text") for _ in range(2)] == [same] * 2
    assert ["".join(stream(found)) for _ in range(2)] == ["a\n\né\r\npiped"] * 2
    assert found[1].size() == 9
    assert found[1].stamp() is None
    assert os.listdir(CACHE) == []


def test_standard_input_is_named_and_read_once(monkeypatch):
    pipe(monkeypatch, b"\xff")
    with pytest.raises(UsageError, match="once"):
        sources("-", "-")
    with pytest.raises(LmappError, match="standard input, byte 0: 0xff"):
        read("-")
    with pytest.raises(UsageError, match="read already"):
        read("-")


def test_a_terminal_or_nothing_as_standard_input_is_refused(monkeypatch):
    pipe(monkeypatch, b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(UsageError, match=r"terminal\.\nPipe"):
        sources("-")
    for nothing in (None, StringIO("x")):
        monkeypatch.setattr(sys, "stdin", nothing)
        with pytest.raises(LmappError, match="no standard input"):
            sources("-")


def test_a_copy_that_finds_no_place_is_named(tmp_path, monkeypatch):
    pipe(monkeypatch, b"x")
    write(tmp_path / "cache", "a file")
    with pytest.raises(
        LmappError, match=r"standard input cannot be kept in cache .*: File exists(.|\n)*--data.cache-dir"
    ):
        read("-")


def test_the_copy_of_standard_input_goes_with_a_killed_process(tmp_path):
    code = (
        "import os, pathlib, signal\nfrom lmapp.data.sources import resolve\n"
        "[source] = resolve(['-'], cache_dir=pathlib.Path('cache'))\nassert source.size() == 4\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", code], input=b"text", capture_output=True, check=False)
    assert result.returncode == -9, result.stderr
    assert os.listdir("cache") == []


# --- between records -----------------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 2, 3, 1 << 20])
def _blocks(request, monkeypatch):
    monkeypatch.setattr(packing, "BLOCK_BYTES", request.param)


@pytest.mark.parametrize(
    ("texts", "joined"),
    [
        (["a", "b"], "a\n\nb"),
        (["a\n", "b"], "a\n\nb"),
        (["a\n\n", "b"], "a\n\nb"),
        (["a\n\n\n", "b"], "a\n\n\nb"),
        (["a", "\nb"], "a\n\nb"),
        (["a\n", "\nb"], "a\n\nb"),
        (["a", "\n\n\nb"], "a\n\n\nb"),
        (["a\r\n", "b"], "a\r\n\r\nb"),
        (["a\r\n\r\n", "b"], "a\r\n\r\nb"),
        (["a", "\r\nb"], "a\n\r\nb"),
        (["a\r", "b"], "a\r\rb"),
        (["a\r", "\nb"], "a\r\r\nb"),
        (["\n", "\n"], "\n\n"),
        (["a", "", "b"], "a\n\nb"),
        (["", "a", ""], "a"),
        (["", ""], ""),
        (["\n\na\n", "b\n"], "\n\na\n\nb\n"),
        (["a", "b", "c"], "a\n\nb\n\nc"),
        (["ab", "c", "d\n", "e"], "ab\n\nc\n\nd\n\ne"),
    ],
)
@pytest.mark.usefixtures("_blocks")
def test_one_blank_line_stands_between_records(tmp_path, texts, joined):
    files = [write(tmp_path / f"{number}.txt", text) for number, text in enumerate(texts)]
    assert read(*files) == joined
    assert read(write(tmp_path / "rows.jsonl", rows(*texts))) == joined


@pytest.mark.parametrize("separator", ["", "\n", "<|end|>", "\x00"])
@pytest.mark.usefixtures("_blocks")
def test_a_given_separator_is_put_exactly(tmp_path, separator):
    files = [write(tmp_path / f"{number}.txt", text) for number, text in enumerate(HOSTILE)]
    assert read(*files, separator=separator) == separator.join(HOSTILE)
    assert read(write(tmp_path / "rows.jsonl", rows(*HOSTILE)), separator=separator) == separator.join(HOSTILE)


def test_text_and_rows_mix(tmp_path):
    files = [write(tmp_path / "a.txt", "a\n"), write(tmp_path / "b.jsonl", rows("b", "c")), write(tmp_path / "d", "d")]
    assert read(*files) == "a\n\nb\n\nc\n\nd"


def test_records_are_shaped_by_the_policy(tmp_path):
    files = [
        write(tmp_path / "a", "A\r\n"),
        write(tmp_path / "b.jsonl", rows("B\r", "e\u0301")),
        write(tmp_path / "c", "C"),
    ]
    shaped = {"newlines": "lf", "normalization": "nfc", "lowercase": True}
    assert read(*files, separator="|", **shaped) == "a\n|b\n|é|c"
    assert read(*files, separator="|", as_bytes=True) == "A\r\n|B\r|e\xcc\x81|C"
    assert read(*files, separator=None, **shaped) == "a\n\nb\n\né\n\nc"


def test_reading_says_where_a_character_stands(tmp_path):
    a, b, c = (write(tmp_path / name, text) for name, text in [("a", "ab\n"), ("b.jsonl", rows("cd", "e")), ("c", "f")])
    reading = Reading()
    text = read(a, b, c, reading=reading)
    assert reading.characters == len(text)
    assert reading.locate(text.index("b")) == f"{a}, character 1"
    assert reading.locate(text.index("c")) == f"{b}, character 0"
    assert reading.locate(text.index("e")) == f"{b}, character 4"
    assert reading.locate(text.index("f")) == f"{c}, character 0"
    assert reading.bytes == sum(path.stat().st_size for path in (a, b, c))


def test_reading_knows_every_record_that_has_text(tmp_path):
    a, b, c, d = (
        write(tmp_path / name, text)
        for name, text in [("a", "ab"), ("b.jsonl", rows("", "c", "", "de")), ("c", ""), ("d", "f")]
    )
    reading = Reading()
    assert read(a, b, c, d, separator="|", reading=reading) == "ab||c||de||f"
    assert list(reading.record_starts) == [0, 4, 7, 11]
    assert reading.starts == [(str(a), 0), (str(b), 4), (str(d), 11)]
    assert reading.records == 7
    read(a, reading=reading)
    assert list(reading.record_starts) == [0, 4, 7, 11, 12]
    assert reading.starts[-1] == (str(a), 12)


def test_an_unknown_encoding_is_refused_at_once(tmp_path):
    path = write(tmp_path / "a.txt", "x")
    for act in (
        lambda: stream(sources(path), policy=TextPolicy(encoding="utf-9")),
        lambda: mark(path, encoding="utf-9"),
    ):
        with pytest.raises(UsageError, match=r"--data.encoding(.|\n)*utf"):
            act()


# --- fingerprint ---------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_of_contents_and_text_options(tmp_path):
    a, b = write(tmp_path / "a.txt", "one"), write(tmp_path / "b.txt", "two")
    moved = write(tmp_path / "elsewhere" / "c.md", "one")
    line = write(tmp_path / "r.jsonl", rows("one"))
    base = mark(a, b)
    assert len(base) == 64
    assert mark(moved, b) == base
    assert mark(a, b, encoding="UTF8") == base
    assert mark(a, b, column="body") == base  # changes nothing where there are no rows
    assert mark(a, separator="|") == mark(a)  # nor here, with a single record
    different = [
        base,
        mark(b, a),
        mark(a),
        mark(a, b, b),
        mark(a, b, encoding="latin-1"),
        mark(a, b, errors="skip"),
        mark(a, b, newlines="lf"),
        mark(a, b, lowercase=True),
        mark(a, b, as_bytes=True),
        mark(a, b, separator=""),
        mark(a, b, separator="|"),
        mark(write(tmp_path / "d.txt", "on"), write(tmp_path / "e.txt", "etwo")),
        mark(line),
        mark(line, column="body"),
        mark(line, separator="|"),
        mark(write(tmp_path / "r.txt", rows("one"))),
        mark(write(tmp_path / "r.txt.gz", rows("one"))),
        mark(write(tmp_path / "r.csv", rows("one"))),
        mark(write(tmp_path / "r.tsv", rows("one"))),
        mark(write(tmp_path / "r.zip", rows("one"))),
        mark(f"zip://*.txt::{tmp_path}/r.zip"),
        mark(f"zip://*::{tmp_path}/r.zip"),
    ]
    assert len(set(different)) == len(different)


def test_the_stamp_changes_with_the_file(tmp_path):
    [source] = sources(write(tmp_path / "a.txt", "one"))
    before = source.stamp()
    assert source.stamp() == before
    os.utime(tmp_path / "a.txt", ns=(0, 0))
    assert source.stamp() != before
    assert source.size() == 3


def test_a_file_that_is_gone(tmp_path):
    found = sources(write(tmp_path / "gone.txt", "x"))
    (tmp_path / "gone.txt").unlink()
    acts = (
        lambda: fingerprint(found, TextPolicy(), None, "text"),
        lambda: list(stream(found)),
        lambda: found[0].stamp(),
        lambda: found[0].size(),
    )
    for act in acts:
        with pytest.raises(LmappError, match=r"gone.txt cannot be read: No such file"):
            act()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("data/pride.txt", "pride"),
        ("pride.txt.gz", "pride"),
        ("books.tar.gz", "books"),
        ("a.b.jsonl.zst", "a.b"),
        ("books/", "books"),
        ("books/*.txt", ""),
        ("zip://*.txt::/data/books.zip", "books"),
        ("https://me:word@host/a/pride.txt.gz?version=1.2#top", "pride"),
        ("tar://**::http://host/books.tgz", "books"),
    ],
)
def test_what_a_text_is_called(path, name):
    assert stem(path) == name


def test_no_sources_have_no_text():
    assert list(stream([])) == []


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = write(tmp_path / "big.txt", b"all work and no play\n" * 3_000_000)  # 63 MB
    code = (
        "import sys, resource\nfrom pathlib import Path\nfrom lmapp.data.sources import resolve, stream\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\nbefore = peak()\n"
        "sources = resolve(sys.argv[1:], cache_dir=Path('cache'))\n"
        "print(sum(map(len, stream(sources))), (peak() - before) // 1024)"
    )
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    characters, megabytes = map(int, result.stdout.split())
    assert characters == 63_000_000
    assert megabytes < 20
