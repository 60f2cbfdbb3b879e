"""Files at http and https addresses, read as streams through fsspec."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import SplitResult, urlsplit

from lmapp.data import packing
from lmapp.data.names import shown
from lmapp.errors import LmappError, UsageError

if TYPE_CHECKING:
    from fsspec.implementations.http import HTTPFileSystem

CONNECT_SECONDS = 30
READ_SECONDS = 60
"""The longest a server may say nothing. However long a whole transfer takes, there is no limit to it."""

_ENCODINGS = {  # of a transfer, by their names in its header
    "gzip": "gz",
    "x-gzip": "gz",
    "bzip2": "bz2",
    "x-bzip2": "bz2",
    "xz": "xz",
    "x-xz": "xz",
    "zstd": "zst",
}


class Facts(NamedTuple):
    """What a server says of a file without sending it; None where it does not say."""

    size: int | None
    etag: str | None
    modified: str | None


def is_address(item: str) -> bool:
    """Whether it begins like an address of this kind."""
    return re.match("https?://", item, re.IGNORECASE) is not None


def split(address: str) -> SplitResult:
    """An address in its parts.

    Raises:
        UsageError: if it is none.
    """
    try:
        parts = urlsplit(address)
        if parts.hostname and (parts.port is None or parts.port):
            return parts._replace(fragment="")
    except ValueError:
        pass
    raise UsageError(f"{address.rpartition('@')[2]!r} is no address: https://HOST/FILE is meant.")


def without_password(item: str) -> str:
    """The same without the user and the password of the address that it holds, if it holds any."""
    return re.sub(r"\b((?!zip:|tar:)[a-z][a-z0-9+.-]*://)[^/?#]*@", r"\1", item, flags=re.IGNORECASE)


def name_of(address: str) -> str:
    """What messages call it."""
    return shown(without_password(split(address).geturl()))


def facts(address: str) -> Facts:
    """What its server says of a file.

    Raises:
        LmappError: if it cannot be reached or does not have the file.
    """
    with _client(address) as files, _asking(address):
        info = files.info(split(address).geturl())
    return Facts(info["size"], info.get("ETag"), info.get("Last-Modified"))


@contextmanager
def opened(address: str, packed: str | None) -> Iterator[IO[bytes]]:
    """The file at an address, from its beginning.

    Args:
        address: May hold a user and a password.
        packed: What the file itself is packed with (gz, …): some servers call that an encoding of the transfer.

    Raises:
        LmappError: if it cannot be had; also while it is read.
    """
    with _client(address) as files:
        with _asking(address):  # a size that is given is not asked for first
            response = files.open(
                split(address).geturl(), "rb", block_size=0, size=1, headers={"Accept-Encoding": "identity"}
            )
        with response:
            file = cast(IO[bytes], BufferedReader(_Body(response, address), packing.BLOCK_BYTES))
            named = response.r.headers.get("Content-Encoding", "").lower()
            for encoding in reversed(re.findall(r"[^\s,]+", named)):
                if encoding == "identity" or _ENCODINGS.get(encoding, "") == packed:
                    continue
                if encoding not in _ENCODINGS:
                    raise LmappError(
                        f"{name_of(address)} comes in an encoding that is not read: {shown(encoding)}.\n"
                        "Download it and name the file."
                    )
                file = packing.unpacked(file, _ENCODINGS[encoding])
            yield file


class _Body(RawIOBase):
    """What a server sends; whatever interrupts that becomes a message."""

    def __init__(self, response: Any, address: str) -> None:
        self._response, self._address = response, address

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _asking(self._address):
            data = self._response.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def _client(address: str) -> Iterator[HTTPFileSystem]:
    import aiohttp
    from fsspec.asyn import sync
    from fsspec.implementations.http import HTTPFileSystem

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
    options = {
        "timeout": timeout,
        "auto_decompress": False,  # `opened` does it, since some encodings are none
        "raise_for_status": True,  # so that the answer is let go of
        "trust_env": True,  # proxies
    }
    files = HTTPFileSystem(skip_instance_cache=True, client_kwargs=options)
    session = sync(files.loop, files.set_session)
    try:
        yield files
    finally:
        try:
            sync(files.loop, session.close)
        except NotImplementedError:  # the garbage collector came by in fsspec's own thread
            HTTPFileSystem.close_session(files.loop, session)


@contextmanager
def _asking(address: str) -> Iterator[None]:
    """What goes wrong between us and the server becomes a message."""
    import aiohttp

    try:
        yield
    except (aiohttp.ClientError, OSError, ValueError) as error:
        # fsspec makes a FileNotFoundError of all that it meets when it asks for facts.
        met = error.__cause__ if isinstance(error, FileNotFoundError) else None
        reason, refused = _reason(met or error)
        remedy = "Check the address." if refused else "Try again, or download it by other means and name the file."
        raise LmappError(f"{name_of(address)} cannot be read: {reason}.\n{remedy}") from error


def _reason(error: BaseException) -> tuple[str, bool]:
    """Why something could not be had, and whether that is the server's last word."""
    import aiohttp

    match error:
        case aiohttp.TooManyRedirects():
            return "it is redirected again and again", True
        case aiohttp.ClientResponseError():
            return f"the server answers {error.status} {shown(error.message)}".rstrip(), 400 <= error.status < 500
        case aiohttp.ClientPayloadError():
            return "the transfer ended before the file did", False
        case aiohttp.InvalidURL():
            return "it is no valid address", True
        case TimeoutError():
            return "the server does not answer", False
    return shown(" ".join(str(error).split())).rstrip(".") or type(error).__name__, False
