import base64
import bz2
import gc
import gzip
import io
import json
import os
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from lmapp.data import http
from lmapp.data.sources import fingerprint, resolve, stream
from lmapp.data.text import Reading, TextPolicy
from lmapp.errors import LmappError, UsageError

CACHE = Path("cache")


@dataclass
class Page:
    """What a path of the server answers."""

    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200
    length: int | None = None  # what the server says, if not the truth
    says_length: bool = True
    chunked: bool = False
    is_cut: bool = False
    has_head: bool = True
    password: str | None = None
    is_silent: bool = False


class Site(ThreadingHTTPServer):
    """A server on this machine; `pages` by path, `asked` as METHOD /path."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.asked: list[str] = []
        self.closing = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, *_) -> None:
        """A client that has read enough goes away."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, path: str, content: str | bytes = b"", **options) -> str:
        self.pages[path] = Page(content.encode() if isinstance(content, str) else content, **options)
        return self.address + path


class Handler(BaseHTTPRequestHandler):
    server: Site
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        self.close_connection = True
        self.server.asked.append(f"{self.command} {self.path}")
        page = self.server.pages.get(self.path.partition("?")[0], Page(b"<html>no</html>", status=404))
        if page.is_silent:
            self.server.closing.wait()
            return
        if not page.has_head and not with_body:
            page = Page(status=405)
        if page.password is not None:
            given = self.headers.get("Authorization", "").removeprefix("Basic ")
            if base64.b64decode(given).decode() != page.password:
                page = Page(status=401)
        self.send_response(page.status)
        self.send_header("Connection", "close")
        for name, value in page.headers.items():
            self.send_header(name, value)
        if page.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif page.says_length:
            self.send_header("Content-Length", str(len(page.content) if page.length is None else page.length))
        self.end_headers()
        if not with_body:
            return
        if page.chunked:
            for begin in range(0, len(page.content), 1000):
                chunk = page.content[begin : begin + 1000]
                self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            self.wfile.write(b"" if page.is_cut else b"0\r\n\r\n")
        else:
            self.wfile.write(page.content)


@pytest.fixture
def site(monkeypatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Site()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()
    thread.join()


def sources(*items: str):
    return resolve(items, cache_dir=CACHE)


def read(*items: str, separator="|", reading=None) -> str:
    return "".join(stream(sources(*items), separator=separator, reading=reading))


def mark(*found) -> str:
    return fingerprint(found, TextPolicy(), None, "text")


def zipped(**members: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def tarred(name: str, content: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def parquet(*texts: str) -> bytes:
    out = io.BytesIO()
    pa.parquet.write_table(pa.table({"text": texts}), out)
    return out.getvalue()


TEXT = "One\r\ntwo é\n" * 20_000
LINES = "".join(json.dumps({"text": text}) + "\n" for text in ("x\r\n", "y"))


# --- what is read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"chunked": True}, {"says_length": False}, {"has_head": False}])
def test_a_text_at_an_address(site, options):
    address = site.put("/a.txt", TEXT, **options)
    reading = Reading()
    assert read(address, reading=reading) == TEXT
    assert reading.bytes == len(TEXT.encode())
    assert reading.starts == [(address, 0)]
    [source] = sources(address)
    assert source.size() == (len(TEXT.encode()) if options in ({}, {"has_head": False}) else None)


@pytest.mark.parametrize(
    ("path", "content", "text"),
    [
        ("/a.txt.gz", gzip.compress(TEXT.encode()), TEXT),
        ("/a.bz2?raw=1.zip#top", bz2.compress(TEXT.encode()), TEXT),
        ("/a.jsonl.gz", gzip.compress(LINES.encode()), "x\r\n|y"),
        ("/a.csv", b'text\r\n"x\r\n"\r\ny\r\n', "x\r\n|y"),
        ("/a.parquet", parquet("x\r\n", "y"), "x\r\n|y"),
        ("/a.parquet.gz", gzip.compress(parquet("x\r\n", "y")), "x\r\n|y"),
        ("/a.zip", zipped(a="x", b="y"), "x|y"),
        ("/a.tgz", gzip.compress(tarred("a", TEXT.encode())), TEXT),
        ("/no%20suffix", b"text", "text"),
        ("/\u00e9", b"text", "text"),
    ],
)
def test_formats_by_the_suffix_of_the_path(site, path, content, text):
    site.put(path.partition("?")[0].replace("\u00e9", "%C3%A9"), content)
    assert read(site.address + path) == text
    assert not CACHE.exists() or os.listdir(CACHE) == []


def test_members_of_an_archive_at_an_address(site):
    address = site.put("/a.zip", zipped(**{"a.txt": "x", "b.md": "y"}))
    assert read(f"zip://*.md::{address}") == "y"
    address = site.put("/layer", tarred("a", b"z"))
    assert read(f"tar://*::{address}") == "z"
    assert sources(f"tar://*::{address}")[0].identity() != sources(address)[0].identity()


def test_nothing_is_asked_before_it_is_wanted(site):
    found = sources(site.put("/a.txt", TEXT), f"zip://*::{site.address}/b")
    pieces = stream(found)
    assert site.asked == []
    assert next(pieces)
    assert site.asked == ["HEAD /a.txt", "GET /a.txt"]
    pieces.close()


def test_redirections_are_followed(site):
    site.put("/there.txt", "text")
    address = site.put("/here", status=302, headers={"Location": "/there.txt"})
    assert read(address) == "text"
    around = site.put("/around", status=302, headers={"Location": "/around"})
    with pytest.raises(LmappError, match="/around cannot be read: it is redirected again and again"):
        read(around)


def test_local_files_and_addresses_mix(site, tmp_path):
    (tmp_path / "a").write_text("here")
    assert read(str(tmp_path / "a"), site.put("/b", "there"), str(tmp_path / "a")) == "here|there|here"


# --- encodings of the transfer -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("X-GZIP", gzip.compress), ("x-bzip2", bz2.compress)]
)
def test_an_encoded_transfer_is_undone(site, encoding, pack):
    assert read(site.put("/a.txt", pack(TEXT.encode()), headers={"Content-Encoding": encoding})) == TEXT
    twice = gzip.compress(pack(TEXT.encode()))
    assert read(site.put("/b.txt", twice, headers={"Content-Encoding": f"{encoding}, gzip"})) == TEXT
    assert read(site.put("/c.txt", TEXT, headers={"Content-Encoding": "identity"})) == TEXT


def test_a_packed_file_is_unpacked_once(site):
    for name in ("gzip", "x-gzip"):
        assert read(site.put("/a.txt.gz", gzip.compress(b"x"), headers={"Content-Encoding": name})) == "x"
        assert read(site.put("/a.tgz", gzip.compress(tarred("a", b"x")), headers={"Content-Encoding": name})) == "x"
    assert read(site.put("/a.bz2", gzip.compress(bz2.compress(b"x")), headers={"Content-Encoding": "gzip"})) == "x"


def test_an_encoding_that_is_not_known_is_named(site):
    with pytest.raises(LmappError, match=r"/a.txt comes in an encoding that is not read: br\.\nDownload"):
        read(site.put("/a.txt", b"x", headers={"Content-Encoding": "br"}))


# --- identity ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["ETag", "Last-Modified"])
def test_a_version_is_known_by_its_headers(site, header):
    [source] = sources(site.put("/a.txt", "text", headers={header: '"1"'}))
    before = mark(source), source.stamp()
    assert before == (mark(source), source.stamp())
    assert set(site.asked) == {"HEAD /a.txt"}
    site.put("/a.txt", "text", headers={header: '"2"'})
    assert mark(source) != before[0]
    assert source.stamp() != before[1]
    [other] = sources(site.put("/b.txt", "text", headers={header: '"2"'}))
    assert mark(source) != mark(other)


def test_a_version_without_headers_is_known_by_its_content(site):
    address = site.put("/a.txt", TEXT)
    [source] = sources(address)
    first = mark(source)
    assert source.stamp() is None
    site.put("/a.txt", "another text", headers={"ETag": "1"})
    assert "".join(stream([source])) == TEXT  # what was hashed
    assert mark(source) == first
    assert site.asked.count("GET /a.txt") == 1
    assert source.size() == len(TEXT.encode())
    assert os.listdir(CACHE) == []
    [source] = sources(f"{address}#part")
    assert source.name == address
    assert mark(source) != first
    assert "".join(stream([source])) == "another text"


# --- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"status": 404}, r"the server answers 404 Not Found\.\nCheck the address"),
        ({"status": 403}, r"the server answers 403 Forbidden\.\nCheck"),
        ({"status": 500}, r"the server answers 500 Internal Server Error\.\nTry again"),
        ({"length": 100}, r"the transfer ended before the file did\.\nTry again"),
        ({"chunked": True, "is_cut": True}, r"the transfer ended before the file did\.\nTry again"),
    ],
)
@pytest.mark.parametrize("path", ["/a.txt", "/a.jsonl", "/a.zip", "/a.tar", "/a.parquet"])
def test_what_the_server_does_not_give_is_named(site, options, reason, path):
    content = {"/a.zip": zipped(a="x"), "/a.tar": tarred("a", b"x"), "/a.parquet": parquet("x")}.get(
        path, LINES.encode()
    )
    if options.get("length"):
        options = {"length": len(content) + 1}
    address = site.put(path, content, **options)
    [source] = sources(address)
    acts = (
        [lambda: read(address)] + [source.size, source.stamp] * (options.get("status", 200) != 200) + [source.identity]
    )
    for act in acts:
        with pytest.raises(LmappError, match=f"{address} cannot be read: {reason}") as caught:
            act()
        assert str(caught.value).count("\n") < 3


def test_a_server_that_is_not_there_is_named(site):
    address = f"http://127.0.0.1:{site.server_port}/a.txt"
    site.server_close()
    for act in (lambda: read(address), lambda: mark(*sources(address))):
        with pytest.raises(LmappError, match=rf"{address} cannot be read: .*[Cc]onnect.*\nTry again"):
            act()


def test_a_server_that_says_nothing_is_named(site, monkeypatch):
    monkeypatch.setattr(http, "READ_SECONDS", 0.2)
    with pytest.raises(LmappError, match=r"/a.txt cannot be read: the server does not answer\.\nTry again"):
        read(site.put("/a.txt", is_silent=True))


def test_damage_at_an_address_is_named(site):
    with pytest.raises(LmappError, match=r"/a.gz is damaged or no .gz file"):
        read(site.put("/a.gz", b"text"))
    with pytest.raises(LmappError, match=r"/b.txt, byte 1: 0xff"):
        read(site.put("/b.txt", b"a\xff"))
    with pytest.raises(LmappError, match=r"/c.7z is an archive that is not read"):
        sources(f"{site.address}/c.7z")


def test_what_is_no_address_is_refused():
    for item in ("http://", "https:///a.txt", "http://[::1/a", "http://host:port/a", "http://me:secret@/x"):
        with pytest.raises(UsageError, match="is no address") as caught:
            sources(item)
        assert "secret" not in str(caught.value)


# --- passwords -----------------------------------------------------------------------------------------------------


def test_a_password_is_sent_and_never_shown(site, tmp_path):
    address = site.put("/a.txt", "text", password="me:se cret", headers={"ETag": "1"}).replace("//", "//me:se%20cret@")
    assert read(address) == "text"
    [source] = sources(address)
    assert source.name == f"{site.address}/a.txt"
    other = site.put("/a.txt", "text", password="me:other", headers={"ETag": "1"}).replace("//", "//me:other@")
    site.pages["/a.txt"].password = "me:se cret"
    before = mark(source)
    with pytest.raises(LmappError, match=rf"{site.address}/a.txt cannot be read: the server answers 401") as caught:
        read(other)
    assert "other" not in str(caught.value)
    site.pages["/a.txt"].password = "me:other"
    assert mark(*sources(other)) == before
    assert http.without_password(f"zip://*@::{other}") == f"zip://*@::{site.address}/a.txt"
    assert http.without_password("a@b.txt") == "a@b.txt"
    for broken in ("/gone", "/cut"):
        site.put("/cut", "x", length=9)
        with pytest.raises(LmappError, match=f"{site.address}{broken}") as caught:
            read(site.address.replace("//", "//me:secret@") + broken)
        assert "secret" not in str(caught.value)


# --- what is left --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux tells which files are open")
def test_no_connection_stays_open(site):
    def open_sockets() -> list[str]:
        links = []
        for number in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{number}"))
            except FileNotFoundError:
                continue
        return sorted(link for link in links if link.startswith("socket"))

    whole, cut, gone = site.put("/a", TEXT), site.put("/b", "x", length=9), f"{site.address}/gone"
    read(whole)  # what is made once stays
    site.shutdown()
    before = open_sockets()
    threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01}).start()
    for _ in range(3):
        read(whole)
        pieces = stream(sources(whole))
        next(pieces)
        pieces.close()
        for address in (cut, gone):
            with pytest.raises(LmappError):
                read(address)
            with pytest.raises(LmappError):
                mark(*sources(address))
    site.shutdown()
    gc.collect()  # an answer that was not let go of complains
    assert open_sockets() == before
