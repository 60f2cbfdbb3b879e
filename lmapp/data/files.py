"""What text is read from: files of this machine, files at addresses, standard input.

Each can be told from another without being decoded, and is read in bounded memory: what is unpacked, and where rows and
members are found, is up to `formats`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import RawIOBase
from pathlib import Path
from typing import IO, ClassVar, cast

from lmapp.data import formats, http, packing
from lmapp.data.formats import Format, Record
from lmapp.data.names import leave_out, shown
from lmapp.data.text import Reading, TextPolicy
from lmapp.errors import LmappError, UsageError


class Source(ABC):
    """Something that text is read from.

    Attributes:
        name: What messages call it.
        is_one_text: It is one record, so there is nothing to separate in it and no column to look for.
        once: It can be read but once.
    """

    name: str
    is_one_text: bool = False
    once: bool = False

    @abstractmethod
    def size(self) -> int | None:
        """Its bytes as it lies there, packed or not; None if that is not known."""

    @abstractmethod
    def identity(self) -> str:
        """A text that is another one whenever the content is. Of a local file it is a hash, and its place no part."""

    @abstractmethod
    def stamp(self) -> object:
        """Another value than before if the content may have changed since; quickly found. None if that is not known."""

    @abstractmethod
    def records(self, policy: TextPolicy, column: str, reading: Reading) -> Iterator[Record]:
        """Its records, shaped by the policy; the pieces of one have to be read before the next is asked for."""


class _File(Source):
    """A source of bytes in a format.

    Args:
        name: What messages call it.
        form: Its format.
        members: Which members of an archive are meant; None: all.
        scratch: The directory for copies of what can be read only once, or only in order.
    """

    def __init__(self, name: str, form: Format, members: str | None, scratch: Path) -> None:
        self.name = name
        self.form = form
        self.members = members
        self.scratch = scratch
        self.is_one_text = form.holds == "text"
        self.left_out: list[str] = []  # names of files around it that were not taken

    @abstractmethod
    def opened(self) -> AbstractContextManager[IO[bytes]]:
        """Its bytes, from the first on."""

    def records(self, policy: TextPolicy, column: str, reading: Reading) -> Iterator[Record]:
        for name in self.left_out:
            leave_out(name, reading)
        before, size = reading.bytes, self.size()
        options = formats.Options(policy, column, reading, self.members, self.scratch)
        with self.opened() as file:
            counted = cast(IO[bytes], _Counted(file, reading, size))
            yield from formats.records(counted, self.name, self.form, options)
        if size is not None:  # what nothing was wanted of is done as well
            reading.bytes = before + size

    def _described(self, content: str) -> str:
        return json.dumps([self.form.holds, self.form.packings, self.members, content])

    def _hash(self) -> str:
        digest = hashlib.blake2b(digest_size=32)
        with self.opened() as file:
            for block in packing.blocks(file, self.name, ""):
                digest.update(block)
        return digest.hexdigest()


class LocalFile(_File):
    """A file of this machine."""

    def __init__(self, path: Path, form: Format, members: str | None, scratch: Path) -> None:
        super().__init__(shown(str(path)), form, members, scratch)
        self.path = path

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """The bytes of the file."""
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise packing.unreadable(self.name, error) from error
        with file:
            yield file

    def size(self) -> int:
        """Its size now."""
        return self.stamp()[0]

    def stamp(self) -> tuple[int, int]:
        """Its size and when it was written last."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise packing.unreadable(self.name, error) from error
        return status.st_size, status.st_mtime_ns

    def identity(self) -> str:
        """By its content."""
        return self._described(self._hash())


class _Copied(_File):
    """A file of which a copy can be kept while this object lives."""

    _copy: IO[bytes] | None = None

    def _keep(self, blocks: Iterable[bytes]) -> IO[bytes]:
        self._copy = packing.copied(blocks, self.name, self.scratch)
        weakref.finalize(self, self._copy.close)
        return self._copy


def _require_pipe() -> None:
    if sys.stdin is None or sys.stdin.closed or not hasattr(sys.stdin, "buffer"):
        raise LmappError("There is no standard input.\nPipe a text into this command, or name a file.")
    if sys.stdin.isatty():
        raise UsageError("--data.path -: standard input is a terminal.\nPipe a text into this command: … < FILE")


class StandardInput(_Copied):
    """What is piped into this process: plain text, kept in a copy since a text is read more than once."""

    _read: ClassVar[object] = None  # the stream that was, which has nothing more to give

    def __init__(self, scratch: Path) -> None:
        super().__init__("standard input", Format("text", (), ""), None, scratch)
        _require_pipe()

    def _kept(self) -> IO[bytes]:
        if self._copy is None:
            if StandardInput._read is sys.stdin:
                raise UsageError("--data.path -: standard input has been read already.\nName a file.")
            StandardInput._read = sys.stdin
            self._keep(packing.blocks(sys.stdin.buffer, self.name, ""))
        assert self._copy is not None
        return self._copy

    def opened(self) -> AbstractContextManager[IO[bytes]]:
        """The bytes of the copy, one reader at a time."""
        self._kept().seek(0)
        return nullcontext(self._kept())

    def size(self) -> int:
        """All that was piped in, once it has been read."""
        return os.fstat(self._kept().fileno()).st_size

    def stamp(self) -> None:
        """The copy does not change."""
        return None

    def identity(self) -> str:
        """By its content."""
        return self._described(self._hash())


class Pipe(_File):
    """What is piped into this process, read as it comes and but once."""

    once = True

    def __init__(self, scratch: Path) -> None:
        super().__init__("standard input", Format("text", (), ""), None, scratch)
        _require_pipe()

    def opened(self) -> AbstractContextManager[IO[bytes]]:
        """What is still to come."""
        return nullcontext(sys.stdin.buffer)

    def size(self) -> None:
        """Not known."""
        return None

    def stamp(self) -> None:
        """Not known."""
        return None

    def identity(self) -> str:
        """Of what is not kept nothing is known but that it was piped in."""
        return self._described("standard input")


class Remote(_Copied):
    """A file at an http or https address.

    Read as it comes; but if its server does not say when it changes, what was hashed is kept in a copy and read.
    """

    def __init__(self, address: str, form: Format, members: str | None, scratch: Path) -> None:
        super().__init__(http.name_of(address), form, members, scratch)
        self.address = address
        self._facts: http.Facts | None = None  # the last answer

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """The bytes that its server sends, or those of the copy, one reader at a time."""
        if self._copy is not None:
            self._copy.seek(0)
            yield self._copy
        else:
            with http.opened(self.address, next(iter(self.form.packings), None)) as file:
                yield file

    def size(self) -> int | None:
        """What its server says of it."""
        if self._copy is not None:
            return os.fstat(self._copy.fileno()).st_size
        if self._facts is None:
            self._facts = http.facts(self.address)
        return self._facts.size

    def stamp(self) -> http.Facts | None:
        """What its server says of its version."""
        self._facts = http.facts(self.address)
        return self._facts if self._facts.etag or self._facts.modified else None

    def identity(self) -> str:
        """By the address and what its server says of its version; without that, by its content."""
        stamp = None if self._copy is not None else self.stamp()
        if stamp is not None:
            return self._described(json.dumps([self.name, *stamp]))
        if self._copy is None:
            with self.opened() as file:
                self._keep(packing.blocks(file, self.name, ""))
        return self._described(self._hash())


class _Counted(RawIOBase):
    """A file that tells `reading` how much of it was read: no more than there is, though parts may be read again."""

    def __init__(self, file: IO[bytes], reading: Reading, size: int | None) -> None:
        self._file, self._reading = file, reading
        self._most = None if size is None else reading.bytes + size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        done = self._reading.bytes + len(block)
        self._reading.bytes = done if self._most is None else min(done, self._most)
        return block
