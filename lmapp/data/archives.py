"""The members of zip and tar archives, one after the other and none of them loaded whole."""

from __future__ import annotations

import re
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import IO, NamedTuple, cast

from lmapp.data.names import is_hidden, leave_out, shown
from lmapp.data.text import Reading
from lmapp.errors import LmappError

_BLOCK_BYTES = 1 << 16
_NAMED = 5  # members that a message names


class _Member(NamedTuple):
    name: str
    is_file: bool  # no link, device or the like
    open: Callable[[], AbstractContextManager[IO[bytes]]]


class _InOrder:
    """A member's content, to be read from beginning to end: back in it means to unpack it again, or is not possible."""

    def __init__(self, content: IO[bytes]) -> None:
        self.read = content.read

    def seekable(self) -> bool:
        return False


def members(
    file: IO[bytes], kind: str, name: str, pattern: str | None, reading: Reading
) -> Iterator[tuple[str, IO[bytes]]]:
    """The names and contents of an archive's files in its order; each has to be read before the next is asked for.

    Hidden ones, links and the like are left out, and `reading` is told.

    Args:
        file: The archive. A zip archive is read from any place, a tar archive from its beginning to its end.
        kind: zip or tar.
        name: What messages call it.
        pattern: Only members of such names, hidden ones if a part of it begins with a dot: `*` stands for anything
            but /, `**` for any directories. None: all.
        reading: Where it is noted what was left out.

    Raises:
        LmappError: if there is no such member, or one is encrypted.
        zipfile.BadZipFile, tarfile.TarError, OSError, ValueError, RuntimeError, …: if the archive is damaged.
    """
    wanted = _matcher(pattern)
    asks_for_hidden = pattern is not None and is_hidden(pattern)
    others: list[str] = []
    some = False
    for member in {"zip": _zip, "tar": _tar}[kind](file, name):
        if not wanted(member.name.removeprefix("./")):
            others += [shown(member.name)] if len(others) < _NAMED else []
        elif not member.is_file or (is_hidden(member.name) and not asks_for_hidden):
            leave_out(f"{name}::{member.name}", reading)
        else:
            some = True
            with member.open() as content:
                yield member.name, cast(IO[bytes], _InOrder(content))
    if not some and pattern is None:
        raise LmappError(f"{name} holds no file, or only hidden ones and links.")
    if not some:
        raise LmappError(
            f"{name} holds no file that matches {pattern!r}.\nIt holds: {', '.join(others) or 'nothing'}"
            + (" …" if len(others) == _NAMED else "")
        )


def _matcher(pattern: str | None) -> Callable[[str], object]:
    if pattern is None:
        return lambda name: True
    from fsspec.utils import glob_translate

    try:
        return re.compile(glob_translate(pattern.removeprefix("/"))).match
    except (ValueError, re.error) as error:
        raise LmappError(f"{pattern!r} is no pattern of members' names: {error}.") from error


def _zip(file: IO[bytes], name: str) -> Iterator[_Member]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if not info.is_dir():
                is_file = stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)
                yield _Member(info.filename, is_file, partial(_open_in_zip, archive, info, name))


def _open_in_zip(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> IO[bytes]:
    if info.flag_bits & 1:
        raise LmappError(f"{name}::{shown(info.filename)} is encrypted.\nUnpack the archive and name its files.")
    return archive.open(info)


class _Header(tarfile.TarInfo):
    """A member's header that `tarfile` cannot pass over: to it a damaged one, or none, is the archive's end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):  # what does end an archive
                raise
            raise tarfile.ReadError(str(error) if buf else "it is cut short") from error


def _tar(file: IO[bytes], name: str) -> Iterator[_Member]:
    with tarfile.open(fileobj=file, mode="r|", bufsize=_BLOCK_BYTES, tarinfo=_Header) as archive:
        while (info := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it keeps them all
            # Nothing is found again in a stream, so a link has no content; nor has a directory or a device.
            content = cast(IO[bytes], None if info.issym() or info.islnk() else archive.extractfile(info))
            if not info.isdir():
                yield _Member(info.name, info.isreg(), partial[nullcontext[IO[bytes]]](nullcontext, content))
            if content is not None:
                _read_on(content)
        if _read_on(cast(IO[bytes], archive.fileobj)):  # also to have what is around the archive check its end
            raise LmappError(
                f"{name} goes on after the end of its archive, as archives put one behind the other do.\n"
                "Unpack them one by one and name the directory."
            )


def _read_on(file: IO[bytes]) -> bool:
    """Read what is left of a file; whether there is more than zeros."""
    some = False
    while block := file.read(_BLOCK_BYTES):
        some = some or bool(block.strip(b"\0"))
    return some
