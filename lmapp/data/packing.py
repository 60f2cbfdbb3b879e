"""The bytes of a file as it is read: unpacked, block by block, from any place; and what is said when it is damaged."""

from __future__ import annotations

import bz2
import errno
import lzma
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import IO, Any, Protocol, TypeVar, cast

from lmapp.data.names import shown
from lmapp.errors import LmappError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK_BYTES = 1 << 20
"""Bytes read at a time."""

_PACKED_BYTES = 1 << 16  # unpacked at a time

T = TypeVar("T")

_DAMAGE: tuple[type[Exception], ...] = (
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
    lzma.LZMAError,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    zstd.ZstdError,
)


def unreadable(name: str, error: OSError) -> LmappError:
    """The message that a file cannot be read."""
    return LmappError(f"{name} cannot be read: {error.strerror or error or type(error).__name__}.")


def guarded(items: Iterable[T], name: str, suffix: str, *also: type[Exception]) -> Iterator[T]:
    """The same items; what is raised at a file that cannot be read or is damaged becomes a message.

    Args:
        items: What a reader of the file yields.
        name: What messages call the file.
        suffix: The end of its name that says what it is, if any does.
        also: Errors that the reader raises besides the usual ones.
    """
    try:
        yield from items
    except (*_DAMAGE, *also) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # that one means a wrong place in it
            raise unreadable(name, error) from error
        reason = shown(" ".join(str(error).split())).rstrip(".")[:200] or type(error).__name__
        problem = f"is damaged or no {suffix} file" if suffix else "is damaged"
        raise LmappError(f"{name} {problem}: {reason}.") from error


def blocks(file: IO[bytes], name: str, suffix: str) -> Iterator[bytes]:
    """The bytes of an open file; name and suffix as in `guarded`."""
    return guarded(iter(lambda: file.read(BLOCK_BYTES), b""), name, suffix)


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Inflate:
    """zlib's reader of gzip with the face of the other decompressors."""

    needs_input = True

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        out = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        self.needs_input = not self._zlib.unconsumed_tail
        return out


_DECOMPRESSORS: dict[str, Callable[[], _Decompressor]] = {
    "gz": _Inflate,
    "bz2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(memlimit=1 << 30),
    "zst": zstd.ZstdDecompressor,
}


class _Unpacked(RawIOBase):
    """What a compressed file of one or more streams holds, without ever more than a little of it in memory.

    The standard library's own files take a damaged stream of bzip2 or xz for the end, if a whole one stands before it,
    and an empty file for a compressed text without characters.
    """

    def __init__(self, file: IO[bytes], new: Callable[[], _Decompressor]) -> None:
        self._file, self._new = file, new
        self._stream = new()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            block = b""
            if self._stream.eof:
                block = self._stream.unused_data.lstrip(b"\0")
                while not block:  # streams may be padded with zeros
                    if not (block := self._file.read(_PACKED_BYTES)):
                        return 0
                    block = block.lstrip(b"\0")
                self._stream = self._new()
            elif self._stream.needs_input:
                block = self._file.read(_PACKED_BYTES)
            data = self._stream.decompress(block, len(buffer))
            if not data and not block and self._stream.needs_input and not self._stream.eof:
                raise EOFError("it is cut short")
        buffer[: len(data)] = data
        return len(data)


def unpacked(file: IO[bytes], packed: str) -> IO[bytes]:
    """The contents of an open file that is packed with gz, bz2, xz or zst."""
    return cast(IO[bytes], BufferedReader(_Unpacked(file, _DECOMPRESSORS[packed])))


def copied(blocks: Iterable[bytes], name: str, directory: Path | None) -> IO[bytes]:
    """A file without a name that holds the same, at its beginning; gone as soon as it is closed or the process ends.

    Args:
        blocks: What it is to hold.
        name: What messages call that.
        directory: Where it takes up room; None: the system's place for such files.
    """
    try:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        copy = TemporaryFile(dir=directory)  # noqa: SIM115
        try:
            copy.writelines(blocks)
            copy.seek(0)
        except BaseException:
            copy.close()
            raise
    except OSError as error:
        place = directory or gettempdir()
        raise LmappError(
            f"{name} cannot be kept in {place} while it is read: {error.strerror or error}.\n"
            "Name another place: --data.cache-dir"
        ) from error
    return copy


@contextmanager
def seekable(file: IO[bytes], name: str, suffix: str, scratch: Path | None) -> Iterator[IO[bytes]]:
    """The file, or a copy of it that can be read from any place; `scratch` as in `copied`."""
    if file.seekable():
        yield file
    else:
        with copied(blocks(file, name, suffix), name, scratch) as copy:
            yield copy
