"""Files and directories in the cache: whole or not there at all, whatever happens to the process that makes them."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lmapp.errors import LmappError


@contextmanager
def writing(parent: Path) -> Iterator[Path]:
    """A temporary directory in `parent`, gone afterwards.

    Raises:
        LmappError: for every OSError inside: the disk is full, the place cannot be written.
    """
    temporary = parent / _temporary_name()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(parent)
        temporary.mkdir()
        yield temporary
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        problem = "the disk is full" if full else error.strerror or str(error)
        raise LmappError(
            f"The encoded text cannot be kept in {parent}: {problem}.\nName another place: --data.cache-dir"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, directory: Path, is_whole: Callable[[Path], bool]) -> None:
    """Give a finished directory its name, unless another process has; a damaged one of that name makes way."""
    while True:
        try:
            temporary.rename(directory)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if is_whole(directory):
            return
        damaged = directory.parent / _temporary_name()
        with suppress(FileNotFoundError):
            directory.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)


def to_disk(file: Any) -> None:
    """Wait until an open file's content is on the disk."""
    # Before the rename that makes the files valid, or a power cut could leave zeros under a valid name.
    file.flush()
    os.fsync(file.fileno())


def _temporary_name() -> str:
    return f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}.tmp"


def _remove_leftovers(parent: Path) -> None:
    """Remove the temporary directories of processes of this machine that have died."""
    for path in parent.glob("*.*.*.tmp"):
        host, pid, _, _ = path.name.rsplit(".", 3)
        if host == socket.gethostname() and pid.isdecimal() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
