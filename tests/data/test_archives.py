import bz2
import gc
import gzip
import io
import lzma
import os
import stat
import sys
import tarfile
import zipfile

import pytest

from lmapp.data import archives
from lmapp.data.sources import resolve, stream
from lmapp.data.text import Reading, TextPolicy
from lmapp.errors import LmappError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd.compress}


def zipped(*members: tuple[str | zipfile.ZipInfo, str | bytes], compression=zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return out.getvalue()


def tarred(*members: tuple[str | tarfile.TarInfo, str | bytes], form=tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            content = content.encode() if isinstance(content, str) else content
            if info.isreg():
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def link(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "a.txt"
    return info


@pytest.fixture
def read(tmp_path):
    """Write an archive and read it, or those members that match."""

    def act(
        name: str, content: bytes, pattern: str | None = None, reading: Reading | None = None, separator="|"
    ) -> str:
        (tmp_path / name).write_bytes(content)
        kind = "zip" if content[:2] == b"PK" else "tar"
        item = str(tmp_path / name) if pattern is None else f"{kind}://{pattern}::{tmp_path}/{name}"
        return "".join(stream(resolve([item], cache_dir=tmp_path / "cache"), separator=separator, reading=reading))

    return act


MEMBERS = [("z.txt", "last\r\n"), ("a/b.md", "é"), ("a/empty", ""), ("c.jsonl", '{"text": "r"}\n{"text": "s"}\n')]
NAMES = ["a.zip", "a.tar", "a.tar.gz", "a.tgz", "a.tar.bz2", "a.tbz2", "a.tar.xz", "a.txz", "a.tar.zst", "A.TAR.GZ"]


def packed(name: str, *members) -> bytes:
    end = name.lower().rpartition(".")[2]
    if end == "zip":
        return zipped(*members)
    pack = PACK.get({"tgz": "gz", "tbz2": "bz2", "txz": "xz"}.get(end, end), bytes)
    return pack(tarred(*members))


@pytest.mark.parametrize("name", NAMES)
def test_members_are_read_in_their_order(read, tmp_path, name):
    reading = Reading()
    assert read(name, packed(name, *MEMBERS), reading=reading) == "last\r\n|é||r|s"
    assert reading.starts == [
        (f"{tmp_path}/{name}::{m}", at) for m, at in [("z.txt", 0), ("a/b.md", 7), ("c.jsonl", 10)]
    ]
    assert reading.bytes == (tmp_path / name).stat().st_size
    assert read(name, packed(name, *MEMBERS), separator=None) == "last\r\n\r\né\n\nr\n\ns"


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz"])
def test_members_of_every_format(read, tmp_path, name):
    import pyarrow as pa
    import pyarrow.parquet

    pa.parquet.write_table(pa.table({"text": ["p\r\n", "q"]}), tmp_path / "t.parquet")
    table = (tmp_path / "t.parquet").read_bytes()
    members = [("a.parquet", table), *((f"b.txt.{end}", pack(b"b\n")) for end, pack in PACK.items())]
    members += [
        ("c.csv", "text\nc\n"),
        ("d.jsonl.gz", gzip.compress(b'{"text": "d"}')),
        ("e.parquet.zst", PACK["zst"](table)),
    ]
    assert read(name, packed(name, *members)) == "p\r\n|q|b\n|b\n|b\n|b\n|c|d|p\r\n|q"


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_every_compression_of_zip(read, compression):
    assert read("a.zip", zipped(("a", "x" * 9999), compression=compression)) == "x" * 9999


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_form_of_tar(read, form):
    long = "d" * 90 + "/" + "n" * 90
    assert read("a.tar", tarred((long, "a"), ("b", "b"), form=form)) == "a|b"


def test_members_of_one_name_are_all_read(read):
    with pytest.warns(UserWarning, match="Duplicate"):
        content = zipped(("a", "1"), ("a", "2"))
    assert read("a.zip", content) == "1|2"
    assert read("a.tar", tarred(("a", "1"), ("a", "2"))) == "1|2"


def test_hidden_members_and_links_are_left_out_and_reported(read, tmp_path):
    symlink = zipfile.ZipInfo("link")
    symlink.external_attr = (stat.S_IFLNK | 0o777) << 16
    members = [("./a.txt", "a"), (".b", "b"), ("__MACOSX/a.txt", "c"), ("x/.y/z", "d"), ("dir/", "")]
    reading = Reading()
    assert read("a.zip", zipped(*members, (symlink, "a.txt")), reading=reading) == "a"
    assert reading.left_out == [f"{tmp_path}/a.zip::{name}" for name in (".b", "__MACOSX/a.txt", "x/.y/z", "link")]
    others = [
        (link(kind.decode(), kind), "")
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)
    ]
    directory = tarfile.TarInfo("dir")
    directory.type = tarfile.DIRTYPE
    reading = Reading()
    assert read("a.tar", tarred(*members[:4], *others, (directory, "")), reading=reading) == "a"
    assert reading.left_out == [f"{tmp_path}/a.tar::{name}" for name in (".b", "__MACOSX/a.txt", "x/.y/z", *"2163")]
    assert reading.left_out_count == 7


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz"])
def test_members_that_match(read, name):
    content = packed(
        name, ("a.txt", "1"), ("./b.txt", "2"), ("d/c.txt", "3"), ("d/e/f.txt", "4"), (".h.txt", "5"), ("x", "6")
    )
    assert read(name, content, "*.txt") == "1|2"
    assert read(name, content, "**/*.txt") == "1|2|3|4"
    assert read(name, content, "d/*") == "3"
    assert read(name, content, "[!a].txt") == "2"
    assert read(name, content, ".*") == "5"
    assert read(name, content, "x") == "6"
    assert read(name, content, "**") == "1|2|3|4|6"
    with pytest.raises(
        LmappError, match=r"holds no file that matches '\*.md'.\nIt holds: a.txt, ./b.txt, d/c.txt, .* …$"
    ):
        read(name, content, "*.md")
    with pytest.raises(LmappError, match="'a\\*\\*' is no pattern"):
        read(name, content, "a**")


def test_a_zip_or_tar_archive_by_another_name(read):
    assert read("book.epub", zipped(("a.xhtml", "x"), ("b.css", "y")), "*.xhtml") == "x"
    assert read("layer", tarred(("a", "x")), "*") == "x"
    with pytest.raises(LmappError, match=r"a.tgz is damaged or no .tgz file"):
        read("a.tgz", tarred(("a", "x")), "*")


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
@pytest.mark.parametrize("members", [[], [(".hidden", "x")]])
def test_an_archive_without_files_is_named(read, name, members):
    with pytest.raises(LmappError, match=f"{name} holds no file, or only hidden ones"):
        read(name, packed(name, *members))


@pytest.mark.parametrize("name", ["a.zip", "a.tar.xz"])
@pytest.mark.parametrize("inner", ["b.zip", "b.tgz", "b.tar", "b.tar.gz", "b.7z"])
def test_an_archive_in_an_archive_is_named(read, name, inner):
    with pytest.raises(LmappError, match=rf"{name}::{inner} is an archive .*\nUnpack"):
        read(name, packed(name, (inner, "x")))


def test_an_encrypted_member_is_named(read):
    content = bytearray(zipped(("a.txt", "x"), ("b.txt", "y")))
    for place in (content.rindex(b"PK\x03\x04") + 6, content.rindex(b"PK\x01\x02") + 8):
        content[place] |= 1
    with pytest.raises(LmappError, match=r"a.zip::b.txt is encrypted.\nUnpack"):
        read("a.zip", bytes(content))
    assert read("a.zip", bytes(content), "a.txt") == "x"


def test_a_member_with_another_checksum_is_named(read):
    content = zipped(("a.txt", "plain text"), compression=zipfile.ZIP_STORED).replace(b"plain text", b"plane text", 1)
    with pytest.raises(LmappError, match=r"a.zip::a.txt is damaged: Bad CRC-32"):
        read("a.zip", content)


def test_undecodable_bytes_of_a_member_are_named(read):
    for name in ("a.zip", "a.tar.gz"):
        with pytest.raises(LmappError, match=rf"{name}::b/c.txt, byte 1: 0xff"):
            read(name, packed(name, ("a", "x"), ("b/c.txt", b"x\xff")))
        with pytest.raises(LmappError, match=rf"{name}::c.txt.gz \(decompressed\), byte 1: 0xff"):
            read(name, packed(name, ("c.txt.gz", gzip.compress(b"x\xff"))))
        with pytest.raises(LmappError, match=rf"{name}::c.jsonl, line 2 is not JSON"):
            read(name, packed(name, ("c.jsonl", '{"text": ""}\n{')))


def test_names_of_members_cannot_write_to_the_terminal(read):
    for name in ("a.zip", "a.tar"):
        with pytest.raises(LmappError, match=r"a\\x1b\[1m.txt, byte 0"):
            read(name, packed(name, ("a\x1b[1m.txt", b"\xff")))


@pytest.mark.parametrize("name", NAMES[:-1])
def test_a_cut_archive_never_gives_a_shorter_text(read, name):
    content = packed(name, *MEMBERS)
    end = len(content) if not name.endswith(".tar") else content.rindex(b"}\n") + 2
    for length in [*range(0, end, max(1, end // 40)), end - 1]:
        with pytest.raises(LmappError, match=f"{name}(::z.txt|::c.jsonl)? .*damaged"):
            read(name, content[:length])


def test_a_tar_archive_cut_between_members_is_cut(read):
    content = tarred(("a", "1"), ("b", "2"))
    with pytest.raises(LmappError, match=r"a.tar is damaged or no .tar file: it is cut short"):
        read("a.tar", content[:1024])
    assert read("a.tar", content[:2560]) == "1|2"  # one block of zeros ends it


def test_a_damaged_header_is_not_the_end(read):
    content = bytearray(tarred(("a", "1"), ("b", "2")))
    content[1024] ^= 1
    with pytest.raises(LmappError, match=r"a.tar is damaged or no .tar file: bad checksum"):
        read("a.tar", bytes(content))


def test_archives_one_behind_the_other_are_refused(read):
    for name in ("a.tar", "a.tar.gz"):
        with pytest.raises(LmappError, match=rf"{name} goes on after the end of its archive"):
            read(name, packed(name, ("a", "1")) + packed(name, ("b", "2")))


def test_a_header_that_claims_any_size_is_an_end(read):
    info = tarfile.TarInfo("a")
    for kind in (tarfile.REGTYPE, b"Q", tarfile.GNUTYPE_LONGNAME):
        info.type, info.size = kind, 1 << 60
        for name in ("a", ".a"):
            info.name = name
            with pytest.raises(LmappError, match="damaged"):
                read("a.tar", info.tobuf(tarfile.GNU_FORMAT) + bytes(2048))


def test_members_that_were_read_are_not_kept(tmp_path):
    (tmp_path / "a.tar").write_bytes(tarred(*((f"{number}", "x") for number in range(100))))
    [source] = resolve([str(tmp_path / "a.tar")], cache_dir=tmp_path)
    kept = []
    for number, (_, _, pieces) in enumerate(source.records(TextPolicy(), "text", Reading())):
        assert next(pieces)
        if number % 33 == 0:  # looking at every object takes its time
            kept.append(sum(type(thing) is archives._Header for thing in gc.get_objects()))
    assert len(kept) == 4
    assert max(kept) < kept[0] + 5


def test_what_was_not_wanted_counts_as_read(read, tmp_path):
    reading = Reading()
    assert read("a.zip", zipped(("a", "x"), ("b", os.urandom(10_000))), "a", reading=reading) == "x"
    assert reading.bytes == (tmp_path / "a.zip").stat().st_size
