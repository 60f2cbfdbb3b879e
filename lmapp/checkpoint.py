"""What a checkpoint file is, read safely and written atomically.

A checkpoint is one file that needs nothing else: Lightning's own dictionary with `state_dict` (plain tensors) and one
further key, `lmapp`, for the rest. Everything in it is a tensor, a primitive, a list or a dict, so that it loads with
torch's safe unpickler: opening a stranger's file runs nothing.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmapp.errors import LmappError, UsageError

VERSION = 1
BEST, LAST = "best.ckpt", "last.ckpt"


class CheckpointError(LmappError):
    """The file is no checkpoint of lmapp, is damaged, or carries code."""


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path`, atomically: whatever happens, the path holds the old file or the new one, whole.

    Raises:
        LmappError: the disk is full or the place cannot be written; the old file is untouched.
    """
    import torch

    # One name for all processes, so that what a killed one left is overwritten.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(dict(content), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        # torch reports a failed write of its archive as a RuntimeError.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise LmappError(
            f"The checkpoint {path} could not be written: {reason}.\n"
            "What was there before is whole. Free some space, then resume."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, tensors on the CPU, with torch's safe loading only.

    Raises:
        CheckpointError: missing, damaged, not written by lmapp, or holding anything but tensors and primitives.
    """
    import torch

    try:
        with open(path, "rb") as file:
            if file.read(2) != b"PK" or not zipfile.is_zipfile(path):
                raise CheckpointError(f"{path} is no checkpoint, or a damaged one (not a torch archive).")
        with zipfile.ZipFile(path) as archive:
            # torch maps tensors straight from the archive: a flipped bit would go unnoticed without this.
            damaged = archive.testzip()
        if damaged:
            raise CheckpointError(f"{path} is damaged (in {damaged}).")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"There is no checkpoint {path}.") from None
    except pickle.UnpicklingError as error:
        forbidden = "Unsupported" in str(error) or "GLOBAL" in str(error)
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, so it was not opened: reading it could run code."
            if forbidden
            else f"{path} is damaged: it cannot be read."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (RuntimeError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is damaged: {str(error).splitlines()[0]}.") from None
    if not isinstance(content, dict) or not isinstance(content.get("lmapp"), dict) or "state_dict" not in content:
        raise CheckpointError(f"{path} was not written by lmapp.")
    version = content["lmapp"].get("version")
    if version != VERSION:
        raise CheckpointError(f"{path} has checkpoint format {version}; this lmapp reads format {VERSION}.")
    return content


def run_directory(name: str, runs_dir: str | Path) -> Path:
    """The directory of a run, given as a path or by its name.

    Raises:
        UsageError: there is no such run (with the nearest name).
    """
    for place in (Path(name), Path(runs_dir) / name):
        if (place / "checkpoints").is_dir() or (place / "config.yaml").is_file():
            return place
    raise UsageError(f"There is no run {name}.{_nearest_run(name, Path(runs_dir))}")


def resolve(name: str, runs_dir: str | Path) -> Path:
    """The checkpoint file meant by a file, a run directory (its best checkpoint) or a run's name.

    Raises:
        UsageError: nothing of that name is there.
        CheckpointError: the run has no checkpoint yet.
    """
    if Path(name).is_file():
        return Path(name)
    for place in (Path(name), Path(runs_dir) / name):
        if place.is_dir():
            for file in (place / "checkpoints" / BEST, place / "checkpoints" / LAST):
                if file.is_file():
                    return file
            raise CheckpointError(f"The run {place} has no checkpoint yet.")
    raise UsageError(f"There is no checkpoint or run {name}.{_nearest_run(name, Path(runs_dir))}")


def _nearest_run(name: str, runs_dir: Path) -> str:
    import difflib

    runs = sorted(p.name for p in runs_dir.iterdir() if p.is_dir()) if runs_dir.is_dir() else []
    if not runs:
        return f" {runs_dir}/ holds no run."
    close = difflib.get_close_matches(name, runs, n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else f" The latest in {runs_dir}/ is {runs[-1]}."
