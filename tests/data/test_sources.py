import bz2
import gzip
import json
import lzma
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmapp.data.sources import Reading, fingerprint, resolve, stream
from lmapp.errors import LmappError, UsageError


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(*files: Path, **options) -> str:
    pieces = list(stream(files, **options))
    assert all(pieces)
    return "".join(pieces)


def rows(*texts) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


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
    names = lambda *items: [str(path.relative_to(tmp_path)) for path in resolve([f"{tmp_path}/{i}" for i in items])]  # noqa: E731
    assert names("b.txt", "a.txt") == ["b.txt", "a.txt"]
    assert names("*.txt") == ["a.txt", "b.txt"]
    assert names("**/*.txt") == ["a.txt", "b.txt", "sub/d.txt", "sub/deep/c.txt"]
    assert names("other.md", "sub/*.txt", "?.txt") == ["other.md", "sub/d.txt", "a.txt", "b.txt"]


def test_a_file_counts_as_often_as_it_is_named_but_once_for_all_globs(tmp_path):
    a, b = write(tmp_path / "a.txt", "a"), write(tmp_path / "b.txt", "b")
    assert resolve([str(a), str(a)]) == [a, a]
    assert resolve([f"{tmp_path}/*.txt", f"{tmp_path}/**/*.txt"]) == [a, b]
    assert resolve([str(b), f"{tmp_path}/*.txt"]) == [b, a]
    assert resolve([f"{tmp_path}/*.txt", str(b)]) == [a, b, b]


def test_a_name_with_glob_characters_is_a_name_first(tmp_path):
    odd = write(tmp_path / "a[1]*.txt", "x")
    write(tmp_path / "a1.txt", "y")
    assert resolve([str(odd)]) == [odd]
    assert read(odd) == "x"


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(tmp_path / "x.txt", "x")
    assert resolve(["~/x.txt"]) == resolve(["~/*.txt"]) == [path]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("missing.txt", "missing.txt: no such file"),
        ("*.nothing", r"No file matches '.*\*\.nothing'"),
        ("folder", r"folder is a directory.*\n.*folder/\*\*/\*\.txt"),
        ("folder/*", "No file matches"),
        ("fifo", "not a regular file"),
        ("dangling", "no such file"),
        ("nul\0", "no such file"),
        ("n" * 300, "File name too long"),
        ("packed.zip", r"archive.*\n.*Unpack"),
        ("packed.tar.gz", "archive"),
        ("packed.txt.zst", "archive"),
    ],
)
def test_what_is_no_text_file_is_named(tmp_path, item, message):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("packed.zip", "packed.tar.gz", "packed.txt.zst"):
        write(tmp_path / name, "x")
    with pytest.raises(LmappError, match=message) as caught:
        resolve([f"{tmp_path}/{item}"])
    assert str(caught.value).count("\n") < 3


def test_no_path_at_all():
    with pytest.raises(UsageError, match=r"--data.path"):
        resolve([])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_is_named(tmp_path):
    path = write(tmp_path / "secret.txt", "x")
    path.chmod(0)
    with pytest.raises(LmappError, match=r"secret.txt cannot be read: Permission denied"):
        resolve([str(path)])


def test_a_failing_disk_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "secret.txt", "x")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    for act in (lambda: resolve([str(path)]), lambda: read(path), lambda: fingerprint([path])):
        with pytest.raises(LmappError, match=r"secret.txt cannot be read: Permission denied"):
            act()


# --- plain text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("block_bytes", [1, 2, 3, 4, 5, 6, 7, 1 << 20])
def test_a_text_comes_back_as_it_is(tmp_path, text, block_bytes):
    assert read(write(tmp_path / "a.txt", text), block_bytes=block_bytes) == text


@pytest.mark.parametrize("encoding", ["utf-8", "UTF8", "utf-16", "utf-16-le", "utf-32", "latin-1", "gb18030", "utf-7"])
@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 1 << 20])
def test_encodings_decode_the_same_in_any_blocks(tmp_path, encoding, block_bytes):
    text = "a\r\né\x00ÿ" if encoding == "latin-1" else "a\r\né漢😀\x00ÿ\u2029"
    assert read(write(tmp_path / "a.txt", text.encode(encoding)), encoding=encoding, block_bytes=block_bytes) == text


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 1 << 20])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-be"])
def test_one_byte_order_mark_at_a_files_start_goes_and_is_counted(tmp_path, encoding, block_bytes):
    bom = write(tmp_path / "bom.txt", "\ufeff\ufeffa\r\n\ufeffb".encode(encoding))
    plain = write(tmp_path / "plain.txt", "a\ufeff".encode(encoding))
    reading = Reading()
    options = {"encoding": encoding, "reading": reading, "block_bytes": block_bytes, "separator": ""}
    assert read(bom, plain, bom, **options) == "\ufeffa\r\n\ufeffb" + "a\ufeff" + "\ufeffa\r\n\ufeffb"
    assert reading.boms == 2


def test_a_file_of_only_a_byte_order_mark_is_empty(tmp_path):
    assert read(write(tmp_path / "a.txt", b"\xef\xbb\xbf")) == ""


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 5, 1 << 20])
@pytest.mark.parametrize(
    ("content", "offset", "wrong"),
    [
        (b"caf\xe9 au lait", 3, "0xe9"),
        ("漢字".encode() + b"\xff", 6, "0xff"),
        (b"\x80", 0, "0x80"),
        (b"ab\xed\xa0\x80", 2, "0xed"),
        (b"x" * 20 + b"\xc3(", 20, "0xc3"),
    ],
)
def test_an_undecodable_byte_is_named_with_its_place(tmp_path, content, offset, wrong, block_bytes):
    path = write(tmp_path / "bad.txt", content)
    with pytest.raises(LmappError, match=rf"bad.txt, byte {offset}: {wrong} is not utf-8") as caught:
        read(path, block_bytes=block_bytes)
    assert "--data.encoding latin-1" in str(caught.value)
    assert str(caught.value).count("\n") < 3


@pytest.mark.parametrize("block_bytes", [1, 2, 1 << 20])
def test_a_file_cut_in_a_character_is_told_apart(tmp_path, block_bytes):
    path = write(tmp_path / "cut.txt", b"abc" + "€".encode()[:2])
    with pytest.raises(LmappError, match=r"cut.txt, byte 3: 0xe2 0x82 .*cut in the middle of a character"):
        read(path, block_bytes=block_bytes)


@pytest.mark.parametrize(("encoding", "option"), [("utf-16", "utf-16"), ("utf-32", "utf-32")])
def test_a_utf_16_mark_under_utf_8_is_recognised(tmp_path, encoding, option):
    path = write(tmp_path / "a.srt", "subtitle".encode(encoding))
    with pytest.raises(LmappError, match=f"byte 0: 0xff(.|\n)*--data.encoding {option}"):
        read(path)
    assert read(path, encoding=option) == "subtitle"


def test_bytes_that_another_encoding_lacks(tmp_path):
    path = write(tmp_path / "a.txt", b"ab\x81")
    with pytest.raises(LmappError, match=r"byte 2: 0x81 is not cp1252(.|\n)*--data.encoding utf-8"):
        read(path, encoding="cp1252")
    with pytest.raises(LmappError, match=r"byte 2: 0x81 .*cut in the middle"):
        read(path, encoding="gbk")


def test_the_offset_counts_decompressed_bytes(tmp_path):
    path = write(tmp_path / "a.txt.gz", gzip.compress(b"a" * 5000 + b"\xe9\n"))
    with pytest.raises(LmappError, match=r"\(decompressed\), byte 5000: 0xe9"):
        read(path)


@pytest.mark.parametrize(
    ("encoding", "hint"),
    [("utf-9", "utf-?8|utf_8"), ("latn-1", "latin"), ("rot13", "."), ("", "utf-8"), ("x\0", "."), ("hex", ".")],
)
def test_an_unknown_encoding_is_refused_at_once(tmp_path, encoding, hint):
    path = write(tmp_path / "a.txt", "x")
    for act in (lambda: stream([path], encoding=encoding), lambda: fingerprint([path], encoding)):
        with pytest.raises(UsageError, match=rf"--data.encoding(.|\n)*({hint})"):
            act()


# --- compressed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
class TestCompressed:
    def test_text_keeps_its_newlines(self, tmp_path, suffix, pack):
        text = "a\r\nb\rc\n" * 1000 + "€"
        path = write(tmp_path / f"a.txt{suffix}", pack(text.encode()))
        reading = Reading()
        assert read(path, block_bytes=1000, reading=reading) == text
        assert reading.bytes == path.stat().st_size

    def test_upper_case_suffix(self, tmp_path, suffix, pack):
        assert read(write(tmp_path / f"A.TXT{suffix.upper()}", pack(b"x"))) == "x"

    def test_several_members(self, tmp_path, suffix, pack):
        assert read(write(tmp_path / f"a{suffix}", pack(b"one\n") + pack(b"two\n"))) == "one\ntwo\n"

    def test_json_lines(self, tmp_path, suffix, pack):
        path = write(tmp_path / f"a.jsonl{suffix}", pack(rows("x\r\n", "y").encode()))
        assert read(path, separator="|") == "x\r\n|y"

    @pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
    def test_damage_is_named(self, tmp_path, suffix, pack, name):
        whole = pack(rows(*map(str, range(3000))).encode())
        middle = len(whole) // 2
        bad = {"cut": whole[:-9], "no": b"nonsense" * 9, "flipped": whole[:middle] + b"\0" * 40 + whole[middle + 40 :]}
        for kind, content in bad.items():
            path = write(tmp_path / kind / f"{name}{suffix}", content)
            with pytest.raises(LmappError, match=rf"{kind}/{name}{suffix} .*"):
                read(path)


# --- JSON Lines ----------------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_are(tmp_path):
    texts = [*HOSTILE, "2020-01-01", "2020-01-01T00:00:00Z", "12", "null", '{"a": 1}', "\ufefflead"]
    path = write(tmp_path / "a.jsonl", rows(*texts))
    assert read(path, separator="\x1e") == "\x1e".join(texts)
    raw = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    assert read(write(tmp_path / "raw.jsonl", raw), separator="\x1e") == "\x1e".join(texts)


def test_other_columns_blank_lines_marks_and_line_ends(tmp_path):
    content = '\ufeff{"id": 1, "body": "x"}\r\n\n  \n{"body": "y", "more": [1, {}]}\r{"body": "z"}'
    reading = Reading()
    path = write(tmp_path / "a.ndjson", content)
    assert read(path, column="body", separator=" ", reading=reading) == "x y z"
    assert reading.boms == 1
    assert reading.bytes == path.stat().st_size


def test_json_lines_of_another_encoding_and_an_odd_name(tmp_path):
    path = write(tmp_path / "a[1] *?#%20.jsonl", '{"text": "café"}\n'.encode("latin-1"))
    assert read(path, encoding="latin-1") == "café"
    with pytest.raises(LmappError, match=r"byte 13: 0xe9 is not utf-8"):
        read(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "b"', "line 3 is not JSON"),
        ("plain words", "line 3 is not JSON"),
        ('"b"', "line 3 is not a JSON object"),
        ('[{"text": "b"}]', "line 3 is not a JSON object"),
        ('{"body": "b", "id": 3}', r"line 3 has no column 'text'.\nIts columns are: body, id\."),
        ('{"text": null}', "line 3: column 'text' is null"),
        ('{"text": 5}', "line 3: column 'text' is a int"),
        ('{"text": ["b"]}', "line 3: column 'text' is a list"),
        ('{"text": "a\\ud800"}', "line 3: .*surrogate"),
        ("[" * 100_000, "line 3 cannot be read as JSON"),
        ('{"text": %s}' % ("9" * 5000), "line 3 cannot be read as JSON"),
    ],
    ids=range(11),
)
def test_a_bad_row_is_named(tmp_path, line, message):
    path = write(tmp_path / "bad.jsonl", rows("a", "2020-01-01") + line + "\n" + rows("c"))
    with pytest.raises(LmappError, match=f"bad.jsonl, {message}") as caught:
        read(path)
    assert str(caught.value).count("\n") < 3


def test_json_lines_print_nothing_and_ask_no_network(tmp_path, monkeypatch, capfd):
    asked = []
    monkeypatch.setattr(socket.socket, "connect", lambda *args: asked.append(args))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **_: asked.append(args))
    read(write(tmp_path / "a.jsonl", rows(*map(str, range(1000)))))
    assert capfd.readouterr() == ("", "")
    assert asked == []


# --- between records -----------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("block_bytes", [1, 2, 3, 1 << 20])
def test_one_blank_line_stands_between_records(tmp_path, texts, joined, block_bytes):
    files = [write(tmp_path / f"{number}.txt", text) for number, text in enumerate(texts)]
    assert read(*files, block_bytes=block_bytes) == joined
    assert read(write(tmp_path / "rows.jsonl", rows(*texts))) == joined


@pytest.mark.parametrize("separator", ["", "\n", "<|end|>", "\x00"])
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_a_given_separator_is_put_exactly(tmp_path, separator, block_bytes):
    files = [write(tmp_path / f"{number}.txt", text) for number, text in enumerate(HOSTILE)]
    assert read(*files, separator=separator, block_bytes=block_bytes) == separator.join(HOSTILE)
    assert read(write(tmp_path / "rows.jsonl", rows(*HOSTILE)), separator=separator) == separator.join(HOSTILE)


def test_text_and_rows_mix(tmp_path):
    files = [write(tmp_path / "a.txt", "a\n"), write(tmp_path / "b.jsonl", rows("b", "c")), write(tmp_path / "d", "d")]
    assert read(*files) == "a\n\nb\n\nc\n\nd"


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


# --- fingerprint ---------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_of_contents_and_text_options(tmp_path):
    a, b = write(tmp_path / "a.txt", "one"), write(tmp_path / "b.txt", "two")
    moved = write(tmp_path / "elsewhere" / "c.md", "one")
    line = write(tmp_path / "r.jsonl", rows("one"))
    base = fingerprint([a, b])
    assert len(base) == 64
    assert fingerprint([moved, b]) == base
    assert fingerprint([a, b], "UTF8") == base
    assert fingerprint([a, b], column="body") == base  # changes nothing where there are no rows
    assert fingerprint([a], separator="|") == fingerprint([a])  # nor here, with a single record
    different = [
        base,
        fingerprint([b, a]),
        fingerprint([a]),
        fingerprint([a, b, b]),
        fingerprint([a, b], "latin-1"),
        fingerprint([a, b], separator=""),
        fingerprint([a, b], separator="|"),
        fingerprint([write(tmp_path / "d.txt", "on"), write(tmp_path / "e.txt", "etwo")]),
        fingerprint([line]),
        fingerprint([line], column="body"),
        fingerprint([line], separator="|"),
        fingerprint([write(tmp_path / "r.txt", rows("one"))]),
        fingerprint([write(tmp_path / "r.txt.gz", rows("one"))]),
    ]
    assert len(set(different)) == len(different)


def test_the_fingerprint_of_a_missing_file(tmp_path):
    with pytest.raises(LmappError, match=r"gone.txt cannot be read: No such file"):
        fingerprint([tmp_path / "gone.txt"])
    with pytest.raises(LmappError, match=r"gone.txt cannot be read: No such file"):
        read(tmp_path / "gone.txt")


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = write(tmp_path / "big.txt", b"all work and no play\n" * 3_000_000)  # 63 MB
    code = (
        "import sys, resource\nfrom pathlib import Path\nfrom lmapp.data.sources import stream\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\nprint(sum(map(len, stream([Path(sys.argv[1])]))), (peak() - before) // 1024)"
    )
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    characters, megabytes = map(int, result.stdout.split())
    assert characters == 63_000_000
    assert megabytes < 20


def test_no_files_have_no_text():
    assert list(stream([])) == []
