import bz2
import csv
import gzip
import io
import json
import lzma
import socket
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lmapp.data import formats, packing
from lmapp.data.sources import resolve, stream
from lmapp.data.text import Reading, TextPolicy
from lmapp.errors import LmappError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd.compress}
PACK["lzma"] = lambda content: lzma.compress(content, format=lzma.FORMAT_ALONE)

HOSTILE = [
    "",
    "x",
    "a\n\nb\r\nc\u2029d",
    "\x00\x00",
    "\r\r\n\n\r",
    "👨‍👩‍👧‍👦\r\n",
    "<unk>\u2028\x85\x1c ",
    '"',
    'a","b;\t""',
    "漢字é😀" * 3,
    "2020-01-01",
    "2020-01-01T00:00:00Z",
    "12",
    "null",
    "NA",
    '{"a": 1}',
    "\ufefflead",
    "\n",
    " ",
]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(*paths, separator=None, column="text", reading=None, **policy) -> str:
    sources = resolve([str(path) for path in paths], cache_dir=Path("cache"))
    options = {"separator": separator, "column": column, "reading": reading}
    pieces = list(stream(sources, policy=TextPolicy(**policy), **options))
    assert all(pieces)
    return "".join(pieces)


def json_lines(*texts, ascii=True) -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=ascii) + "\n" for text in texts).encode()


def table(*texts, delimiter=",", end="\r\n", quoting=csv.QUOTE_MINIMAL, encoding="utf-8") -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter, lineterminator=end, quoting=quoting)
    writer.writerows([["id", "text"], *enumerate(texts)])
    return out.getvalue().encode(encoding)


def parquet(*texts, kind=None, **options) -> bytes:
    out = io.BytesIO()
    columns = {"id": pa.array(range(len(texts))), "text": pa.array(texts, type=kind or pa.string())}
    pa.parquet.write_table(pa.table(columns), out, **options)
    return out.getvalue()


ROWS = {"jsonl": json_lines, "ndjson": json_lines, "csv": table, "parquet": parquet}
ROWS["tsv"] = lambda *texts: table(*texts, delimiter="\t")


@pytest.fixture(params=[1, 2, 3, 5, 1 << 20])
def _blocks(request, monkeypatch):
    monkeypatch.setattr(packing, "BLOCK_BYTES", request.param)


# --- text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.usefixtures("_blocks")
def test_a_text_comes_back_as_it_is(tmp_path, text):
    assert read(write(tmp_path / "a.txt", text)) == text.removeprefix("\ufeff")
    assert read(write(tmp_path / "b", text), as_bytes=True) == text.encode().decode("latin-1")


@pytest.mark.usefixtures("_blocks")
def test_marks_are_counted_in_every_file(tmp_path):
    bom = write(tmp_path / "bom.txt", "\ufeffa\r\n\ufeffb")
    wide = write(tmp_path / "wide.txt", "é".encode("utf-16"))
    reading = Reading()
    assert read(bom, bom, wide, separator="|", reading=reading) == "a\r\n\ufeffb|a\r\n\ufeffb|é"
    assert (reading.boms, reading.by_mark) == (3, {"utf-16": 1})


def test_every_file_has_its_own_offsets(tmp_path):
    fine, bad = write(tmp_path / "fine.txt", "a" * 100), write(tmp_path / "bad.txt", b"ab\xff")
    with pytest.raises(LmappError, match=r"bad.txt, byte 2: 0xff"):
        read(fine, bad)


# --- compressed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", PACK)
class TestCompressed:
    def test_text_keeps_its_newlines(self, tmp_path, suffix):
        text = "a\r\nb\rc\n" * 1000 + "€"
        path = write(tmp_path / f"a.txt.{suffix}", PACK[suffix](text.encode()))
        reading = Reading()
        assert read(path, reading=reading) == text
        assert reading.bytes == path.stat().st_size

    @pytest.mark.usefixtures("_blocks")
    def test_in_any_blocks(self, tmp_path, suffix, monkeypatch):
        monkeypatch.setattr(packing, "_PACKED_BYTES", 3)
        assert read(write(tmp_path / f"a.{suffix}", PACK[suffix](b"one\n") + b"\0" * 8)) == "one\n"

    def test_upper_case_suffix(self, tmp_path, suffix):
        assert read(write(tmp_path / f"A.TXT.{suffix.upper()}", PACK[suffix](b"x"))) == "x"

    def test_packed_twice(self, tmp_path, suffix):
        assert read(write(tmp_path / f"a.txt.gz.{suffix}", PACK[suffix](gzip.compress(b"x")))) == "x"

    @pytest.mark.parametrize("rows", ROWS)
    def test_rows(self, tmp_path, suffix, rows):
        path = write(tmp_path / f"a.{rows}.{suffix}", PACK[suffix](ROWS[rows]("x\r\n", "y")))
        reading = Reading()
        assert read(path, separator="|", reading=reading) == "x\r\n|y"
        assert reading.bytes == path.stat().st_size

    def test_the_offset_counts_decompressed_bytes(self, tmp_path, suffix):
        for name in (f"a.txt.{suffix}", f"a.csv.{suffix}"):
            path = write(tmp_path / name, PACK[suffix](b"a" * 5000 + b"\xe9\n"))
            with pytest.raises(LmappError, match=r"\(decompressed\), byte 5000: 0xe9"):
                read(path)

    def test_members_of_a_zip_archive_are_found_in_it(self, tmp_path, suffix):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("b.txt", "b")
        assert read(write(tmp_path / f"a.zip.{suffix}", PACK[suffix](out.getvalue()))) == "b"

    @pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.tar"])
    def test_damage_is_named(self, tmp_path, suffix, name):
        content = json_lines(*map(str, range(3000)))
        whole = PACK[suffix](content)
        middle = len(whole) // 2
        bad = {
            "cut": whole[: len(whole) - 9],
            "short": whole[:4],
            "no": b"nonsense" * 9,
            "flipped": whole[:middle] + b"\0" * 40 + whole[middle + 40 :],
            "empty": b"",
        }
        for kind, damaged in bad.items():
            if kind == "flipped" and suffix == "lzma" and name != "a.parquet":
                continue  # this format has no checksum
            (tmp_path / kind).mkdir()
            path = write(tmp_path / kind / f"{name}.{suffix}", damaged)
            with pytest.raises(
                LmappError, match=rf"{kind}/{name}.{suffix} is damaged or no {name[1:] if name == 'x' else ''}"
            ):
                read(path)


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst"])
class TestSeveralStreams:
    def test_all_are_read(self, tmp_path, suffix):
        pack = PACK[suffix]
        assert read(write(tmp_path / f"a.{suffix}", pack(b"one\n") + pack(b"") + pack(b"two\n"))) == "one\ntwo\n"
        assert (
            read(write(tmp_path / f"b.{suffix}", pack(b"one\n") + b"\0" * 512 + pack(b"two\n") + b"\0" * 4))
            == "one\ntwo\n"
        )
        assert read(write(tmp_path / f"c.{suffix}", pack(b""))) == ""

    def test_a_damaged_later_one_is_not_the_end(self, tmp_path, suffix):
        first, second = PACK[suffix](b"one\n" * 99), PACK[suffix](b"two\n" * 99)
        for kind, later in {"flipped": b"??" + second[2:], "cut": second[:-5], "text": b"and text"}.items():
            path = write(tmp_path / f"{kind}.txt.{suffix}", first + later)
            with pytest.raises(LmappError, match=rf"{kind}.txt.{suffix} is damaged or no .{suffix} file"):
                read(path)


# --- rows of any format --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ROWS)
@pytest.mark.usefixtures("_blocks")
def test_rows_come_back_as_they_are(tmp_path, suffix):
    path = write(tmp_path / f"a.{suffix}", ROWS[suffix](*HOSTILE))
    reading = Reading()
    assert read(path, separator="\x1e", reading=reading) == "\x1e".join(HOSTILE)
    assert reading.records == len(HOSTILE)
    assert reading.bytes == path.stat().st_size
    assert read(path, separator="\x1e", as_bytes=True) == "\x1e".join(HOSTILE).encode().decode("latin-1")


@pytest.mark.parametrize("suffix", ROWS)
def test_many_rows(tmp_path, suffix):
    texts = [f"row {number}\r\n" * (number % 5) for number in range(1000)]
    assert read(write(tmp_path / f"a.{suffix}", ROWS[suffix](*texts)), separator="|") == "|".join(texts)


@pytest.mark.parametrize("suffix", ROWS)
def test_a_missing_column_lists_those_there_are(tmp_path, suffix):
    path = write(tmp_path / f"a.{suffix}", ROWS[suffix]("x"))
    listed = "text" if ROWS[suffix] is json_lines else "id, text"
    with pytest.raises(
        LmappError, match=rf"a.{suffix}.* has no column 'body'\.\nIts columns are: {listed}\..*--data.column"
    ):
        read(path, column="body")


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_line_that_is_no_row_ends_before_memory_does(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(formats, "LONGEST_ROW", 1000)
    monkeypatch.setattr(packing, "BLOCK_BYTES", 100)
    assert len(read(write(tmp_path / f"a.{suffix}", ROWS[suffix]("x" * 950)))) == 950
    number = {"jsonl": 3, "csv": 4}[suffix]
    with pytest.raises(LmappError, match=rf"b.{suffix}, line {number} has more than 1,000 characters.*\n.*{suffix}"):
        read(write(tmp_path / f"b.{suffix}", ROWS[suffix]("a", "b", "x" * 5000)))


# --- JSON Lines ----------------------------------------------------------------------------------------------------


def test_json_with_its_characters_unescaped(tmp_path):
    path = write(tmp_path / "a.jsonl", json_lines(*HOSTILE, ascii=False))
    assert read(path, separator="\x1e") == "\x1e".join(HOSTILE)


@pytest.mark.usefixtures("_blocks")
def test_other_columns_blank_lines_marks_and_line_ends(tmp_path):
    content = '\ufeff{"id": 1, "body": "x"}\r\n\n  \n\r\n{"body": "y", "more": [1, {}]}\r\r\n{"body": "z"}'
    reading = Reading()
    path = write(tmp_path / "a.ndjson", content)
    assert read(path, column="body", separator=" ", reading=reading) == "x y z"
    assert reading.boms == 1
    assert reading.bytes == path.stat().st_size
    assert read(write(tmp_path / "b.jsonl", content[1:].encode("utf-16")), column="body", separator=" ") == "x y z"


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
        ('{"a\\nb": 1}', r"line 3 has no column 'text'.\nIts columns are: a\\nb\."),
        ('{"text": null}', "line 3: column 'text' is null"),
        ('{"text": 5}', "line 3: column 'text' is a int"),
        ('{"text": ["b"]}', "line 3: column 'text' is a list"),
        ('{"text": "a\\ud800"}', "line 3: .*surrogate"),
        ("[" * 100_000, "line 3 cannot be read as JSON"),
        ('{"text": %s}' % ("9" * 5000), "line 3 cannot be read as JSON"),
        ('{"text": "b"}\r{"text": "c"}', "line 3 is not JSON: Extra data"),
    ],
    ids=range(13),
)
def test_a_bad_row_is_named(tmp_path, line, message):
    path = write(tmp_path / "bad.jsonl", json_lines("a", "2020-01-01") + line.encode() + b"\n" + json_lines("c"))
    for policy in ({}, {"as_bytes": True}):
        with pytest.raises(LmappError, match=f"bad.jsonl, {message}") as caught:
            read(path, **policy)
        assert str(caught.value).count("\n") < 3


def test_reading_prints_nothing_and_asks_no_network(tmp_path, monkeypatch, capfd):
    asked = []
    monkeypatch.setattr(socket.socket, "connect", lambda *args: asked.append(args))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **_: asked.append(args))
    for suffix, rows in ROWS.items():
        read(write(tmp_path / f"a.{suffix}", rows(*map(str, range(1000)))))
    assert capfd.readouterr() == ("", "")
    assert asked == []


# --- CSV -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "quoting"),
    [("\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_MINIMAL), ("\r\n", csv.QUOTE_ALL), ("\r\r\n", csv.QUOTE_MINIMAL)],
)
@pytest.mark.usefixtures("_blocks")
def test_line_ends_in_quotes_are_kept_and_between_rows_do_not_matter(tmp_path, end, quoting):
    texts = ["a\nb", "c\r\nd", "e\rf", "\r", "", "g"]
    path = write(tmp_path / "a.csv", "\ufeff".encode() + table(*texts, end=end, quoting=quoting) + end.encode())
    assert read(path, separator="|") == "|".join(texts)
    assert read(write(tmp_path / "b.csv", table("x", "y").rstrip()), separator="|") == "x|y"


def test_semicolons_and_tabs_are_found_if_the_column_is(tmp_path):
    texts = ["a,b", "c;d\te"]
    for delimiter in ";\t":
        path = write(tmp_path / "a.csv", table(*texts, delimiter=delimiter))
        assert read(path, separator="|") == "|".join(texts)
    assert read(write(tmp_path / "b.csv", "\n\n'x';\"text\"\n1;2\n")) == "2"
    assert read(write(tmp_path / "c.csv", "id;text\n1;2\n"), column="id;text") == "1;2"
    with pytest.raises(LmappError, match=r"d.csv, line 1 has no column 'text'.\nIts columns are: id;body\."):
        read(write(tmp_path / "d.csv", "id;body\n1;2\n"))
    with pytest.raises(LmappError, match=r"e.tsv, line 1 has no column 'text'.\nIts columns are: id,text\."):
        read(write(tmp_path / "e.tsv", "id,text\n1,2\n"))


def test_csv_of_another_encoding(tmp_path):
    path = write(tmp_path / "a.csv", table("café", "漢", encoding="utf-16"))
    assert read(path, separator="|") == "café|漢"
    path = write(tmp_path / "b.csv", table("café", encoding="latin-1"))
    assert read(path, encoding="latin-1") == "café"
    with pytest.raises(LmappError, match=r"b.csv, byte 14: 0xe9"):
        read(path)


def test_a_header_alone_has_no_rows(tmp_path):
    assert read(write(tmp_path / "a.csv", "id,text\n")) == ""
    for content in ("", "\n\r\n"):
        with pytest.raises(LmappError, match=r"b.csv is empty: it has no header"):
            read(write(tmp_path / "b.csv", content))


def test_a_long_field_is_no_exception(tmp_path):
    text = "long\n" * 100_000
    assert read(write(tmp_path / "a.csv", table(text, "x"))) == text + "\nx"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('"3,c\nd\ne,f', "the row that begins in line 4 cannot be read: a quote is opened and never closed"),
        ('3,"c"d', "the row that begins in line 4 cannot be read: ',' expected after '\"'"),
        ("3,c\rd", r"the row that begins in line 4 cannot be read: a carriage return \(CR\) without LF"),
        ("3", r", line 4 has 1 fields, and the header 2\.\n"),
        ("3,c,d", ", line 4 has 3 fields, and the header 2"),
        ('3,"c\nd",\n', ", line 4 has 3 fields, and the header 2"),
        ('3,"c\nd"\n4', ", line 6 has 1 fields, and the header 2"),
    ],
)
def test_a_bad_row_of_csv_is_named(tmp_path, lines, message):
    path = write(tmp_path / "bad.csv", f'id,text\n1,"a\nb"\n{lines}')
    with pytest.raises(LmappError, match=f"bad.csv(: )?{message}") as caught:
        read(path)
    assert str(caught.value).count("\n") < 3


def test_a_field_that_is_too_long_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LONGEST_ROW", 1000)
    with pytest.raises(LmappError, match=r"a.csv: the row that begins in line 2 cannot be read: a field has more than"):
        read(write(tmp_path / "a.csv", 'id,text\n1,"' + "x\n" * 1000))


def test_a_column_that_occurs_twice_is_named(tmp_path):
    with pytest.raises(LmappError, match=r"a.csv, line 1 names 2 columns 'text'.\nRename"):
        read(write(tmp_path / "a.csv", "text,text\n1,2\n"))
    out = io.BytesIO()
    pa.parquet.write_table(pa.Table.from_arrays([pa.array(["x"])] * 2, names=["text", "text"]), out)
    with pytest.raises(LmappError, match=r"a.parquet has 2 columns 'text'.\nRename"):
        read(write(tmp_path / "a.parquet", out.getvalue()))


# --- Parquet -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
def test_every_type_of_strings(tmp_path, kind, compression):
    content = parquet(*HOSTILE, kind=kind, compression=compression, row_group_size=4)
    assert read(write(tmp_path / "a.parquet", content), separator="\x1e") == "\x1e".join(HOSTILE)


def test_a_bad_row_of_parquet_is_named(tmp_path):
    with pytest.raises(LmappError, match=r"a.parquet, row 40: column 'text' is null"):
        read(write(tmp_path / "a.parquet", parquet(*"x" * 39, None)))
    raw = pa.array([b"ok", b"\xff"], type=pa.binary()).view(pa.string())
    out = io.BytesIO()
    pa.parquet.write_table(pa.table({"text": raw}), out)
    with pytest.raises(LmappError, match=r"b.parquet, row 2: column 'text' is not utf-8"):
        read(write(tmp_path / "b.parquet", out.getvalue()))
    for values, kind in (
        ([1], "int64"),
        ([b"x"], "binary"),
        ([["x"]], "list"),
        ([None], "null"),
        ([{"a": "x"}], "struct"),
    ):
        out = io.BytesIO()
        pa.parquet.write_table(pa.table({"text": values}), out)
        with pytest.raises(LmappError, match=f"c.parquet: column 'text' is of type {kind}"):
            read(write(tmp_path / "c.parquet", out.getvalue()))


def test_a_column_with_a_dot_is_no_path(tmp_path):
    out = io.BytesIO()
    pa.parquet.write_table(pa.table({"a": [{"b": "no"}], "a.b": ["yes"]}), out)
    assert read(write(tmp_path / "a.parquet", out.getvalue()), column="a.b") == "yes"


def test_damaged_parquet_is_named(tmp_path):
    whole = parquet(*(f"row {number}" for number in range(5000)), compression="gzip")
    middle = len(whole) // 2
    flipped = whole[:middle] + b"\0" * 40 + whole[middle + 40 :]
    for kind, content in {"cut": whole[:-9], "no": b"nonsense" * 9, "empty": b"", "flipped": flipped}.items():
        with pytest.raises(LmappError, match=rf"{kind}.parquet is damaged or no .parquet file") as caught:
            read(write(tmp_path / f"{kind}.parquet", content))
        assert "\n" not in str(caught.value)


# --- anything at all -----------------------------------------------------------------------------------------------


def tarred(content: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("a.txt")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def zipped(content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", content)
    return out.getvalue()


WHOLE = {"txt": lambda text: text.encode(), "tar": lambda text: tarred(text.encode())}
WHOLE |= {"zip": lambda text: zipped(text.encode()), "tgz": lambda text: gzip.compress(tarred(text.encode()))}
WHOLE |= {suffix: lambda text, pack=pack: pack(text.encode()) for suffix, pack in PACK.items()}
WHOLE |= {
    "tar.zst": lambda text: PACK["zst"](tarred(text.encode())),
    "jsonl.xz": lambda text: PACK["xz"](json_lines(text)),
}
WHOLE |= {"csv.bz2": lambda text: PACK["bz2"](table(text)), "parquet.zst": lambda text: PACK["zst"](parquet(text))}
WHOLE |= ROWS

settings.register_profile("files", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
FEW = settings(settings.get_profile("files"), max_examples=25)

START = {
    "gz": b"\x1f\x8b\x08",
    "bz2": b"BZh9",
    "xz": b"\xfd7zXZ\x00",
    "zst": b"(\xb5/\xfd",
    "zip": b"PK\x03\x04",
    "parquet": b"PAR1",
}


def is_read_or_named(path: Path) -> None:
    try:
        read(path)
    except LmappError as error:
        message = str(error)
    else:
        return
    assert path.name in message
    assert message.count("\n") < 3
    assert all(line.isprintable() for line in message.split("\n"))


@pytest.mark.parametrize("suffix", WHOLE)
@given(content=st.binary(max_size=2000))
@settings(FEW)
def test_any_bytes_are_text_or_a_message(tmp_path, suffix, content):
    for start in (b"", START.get(suffix.rpartition(".")[2], b"")):
        is_read_or_named(write(tmp_path / f"a.{suffix}", start + content))


@pytest.mark.parametrize("suffix", WHOLE)
@given(data=st.data())
@settings(FEW)
def test_changed_bytes_are_text_or_a_message(tmp_path, suffix, data):
    content = bytearray(WHOLE[suffix]("some text\r\n" * 5 + "é"))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    is_read_or_named(write(tmp_path / f"a.{suffix}", content[: data.draw(st.integers(0, len(content)))]))


@pytest.mark.parametrize("suffix", WHOLE)
@given(text=st.text())
@example(text="\r\n\r\u2028\x85\x00\x1a\ufeff")
@settings(FEW)
def test_any_text_comes_back(tmp_path, suffix, text):
    text = text.encode("utf-8", "ignore").decode()
    own = suffix.split(".")[0] not in ROWS and text.startswith("\ufeff")
    path = write(tmp_path / f"a.{suffix}", WHOLE[suffix](text))
    for separator in (None, ""):
        assert read(path, separator=separator) == text[own:]


# --- memory --------------------------------------------------------------------------------------------------------

MEGABYTE = (b"all work and no play" * 52_429)[: 1 << 20]


def streams(pack) -> bytes:
    return pack(MEGABYTE) * 64


def one(pack) -> bytes:
    return pack(MEGABYTE * 64)


def member(pack) -> bytes:
    info = tarfile.TarInfo("a.txt")
    info.size = 64 << 20
    return pack(info.tobuf()) + streams(pack) + pack(bytes(1024))


LARGE = {
    "txt.gz": lambda: one(lambda content: gzip.compress(content, 1)),
    "txt.bz2": lambda: streams(bz2.compress),
    "txt.xz": lambda: one(lambda content: lzma.compress(content, preset=0)),
    "txt.zst": lambda: one(zstd.compress),
    "tar.gz": lambda: member(gzip.compress),
    "tar.zst": lambda: member(zstd.compress),
    "tar": lambda: member(bytes),
    "zip": lambda: zipped(MEGABYTE * 64),
    "jsonl.gz": lambda: gzip.compress(json_lines(MEGABYTE[:1000].decode()) * 67_109, 1),
    "csv.zst": lambda: zstd.compress(b"text\n" + (MEGABYTE[:1000] + b"\n") * 67_109),
    "parquet": lambda: parquet(*[MEGABYTE.decode()] * 64, use_dictionary=False, write_batch_size=1),
}


@pytest.mark.parametrize("suffix", LARGE)
def test_memory_does_not_grow_with_what_is_packed(tmp_path, suffix):
    small, large = tmp_path / f"small.{suffix}", write(tmp_path / f"large.{suffix}", LARGE[suffix]())
    write(
        small, WHOLE.get(suffix, lambda text: PACK[suffix[-3:].strip(".")](WHOLE[suffix.split(".")[0]](text)))("text")
    )
    code = (  # not getrusage: its peak is that of the process that started this one, if that is larger
        "import re, sys\nfrom pathlib import Path\nfrom lmapp.data.sources import resolve, stream\n"
        "for path in sys.argv[1:]:\n"
        "    characters = sum(map(len, stream(resolve([path], cache_dir=Path('cache')))))\n"
        "    peak = re.search(r'VmHWM:\\s*(\\d+) kB', Path('/proc/self/status').read_text())[1]\n"
        "    print(characters, int(peak) // 1024)"
    )
    result = subprocess.run([sys.executable, "-c", code, small, large], capture_output=True, text=True, check=True)
    (few, before), (many, after) = (map(int, line.split()) for line in result.stdout.splitlines())
    assert few == 4
    assert many >= 64 << 20
    assert after - before < 24, (before, after)
