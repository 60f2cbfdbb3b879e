"""What a checkpoint file is, read safely and written atomically.

A checkpoint is one file that needs nothing else: Lightning's own dictionary with `state_dict` (plain tensors) and one
further key, `lmapp`, for the rest. Everything in it is a tensor, a primitive, a list or a dict, so that it loads with
torch's safe unpickler: opening a stranger's file runs nothing.
"""

from __future__ import annotations

import difflib
import os
import pickle
import sys
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmapp.errors import LmappError, UsageError

VERSION = 2
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
        whole = os.path.exists(path)
        way_on = "The one before it is whole: make room, then resume." if whole else "There is none before it."
        raise LmappError(f"The checkpoint {path} could not be written: {_reason(error)}.\n{way_on}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


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
            # Nor does it look at this bit, which makes torch take an entry for a directory, and its content for zeros.
            damaged = damaged or next((e.filename for e in archive.infolist() if e.external_attr & 0x10), None)
        if damaged:
            raise CheckpointError(f"{path} is damaged (in {damaged}).")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
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
    except Exception as error:  # a damaged archive makes its readers raise nearly anything
        raise CheckpointError(f"{path} is damaged: {_first_line(error)}.") from None
    if not isinstance(content, dict) or not isinstance(content.get("lmapp"), dict) or "state_dict" not in content:
        raise CheckpointError(f"{path} was not written by lmapp.")
    version = content["lmapp"].get("version")
    if version != VERSION:
        raise CheckpointError(f"{path} has checkpoint format {version}; this lmapp reads format {VERSION}.")
    if not _is_complete(content["lmapp"]):
        raise CheckpointError(f"{path} is no complete checkpoint of lmapp: a part is missing.")
    _refuse_code(path, content["lmapp"])
    return content


def _is_complete(saved: dict[str, Any]) -> bool:
    match saved:
        case {
            "config": dict(),
            "vocabulary": str(),
            "corpus": {"name": str(), "key": str(), "fingerprint": str(), "facts": dict()},
            "plan": {
                "precision": str(),
                "threads": int(),
                "device": str(),
                "cpu": str(),
                "kernels": list(),
                "processes": int(),
                "sequence_length": int(),
                "truncation_length": int(),
            },
            "progress": {"step": int(), "state": str(), "best": _},
            "states": _,
            "tokens": _,
            "keep": _,
            "random": dict(),
            "records": dict(),
            "wandb_id": _,
        }:
            return True
    return False


def outside_modules(cells: Sequence[str]) -> list[str]:
    """The modules that hold those of the cells so named which are from outside lmapp."""
    modules = [name.partition(":")[0] for name in cells if ":" in name]
    return list(dict.fromkeys(module for module in modules if not module.startswith("lmapp.")))


def import_options(cells: Sequence[str]) -> str:
    """What a command takes for a checkpoint with these cells, after its name: ` --import own`, or nothing."""
    return "".join(f" --import {module}" for module in outside_modules(cells))


def _refuse_code(path: Path, saved: dict[str, Any]) -> None:
    """A cell from outside lmapp is code that would be imported by its name: only what already is may be used."""
    model = saved["config"].get("model")
    cell = model.get("cell", []) if isinstance(model, dict) else []
    cells = [cell] if isinstance(cell, str) else cell
    if not isinstance(cells, list | tuple) or not all(isinstance(name, str) for name in cells):
        raise CheckpointError(f"{path} is no complete checkpoint of lmapp: its cells have no names.")
    unknown = list(dict.fromkeys(n for n in cells if any(m not in sys.modules for m in outside_modules([n]))))
    for name in unknown:
        # What is to be copied into a command can be no more than a name.
        if not all(part.isidentifier() for part in name.replace(":", ".", 1).split(".")):
            raise CheckpointError(f"{path} is no complete checkpoint of lmapp: {name!r} names no cell.")
    if unknown:
        raise CheckpointError(
            f"{path} was not opened, for the code of {' and '.join(unknown)} is not lmapp's own: if you trust it, "
            f"add{import_options(unknown)}\nIn Python, import {', '.join(outside_modules(unknown))} first."
        )


def _reason(error: Exception) -> str:
    """Why a write failed: torch's archive writer covers the system's own error with a RuntimeError."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


def run_directory(name: str, runs_dir: str | Path) -> Path:
    """The directory of a run, given as a path or by its name.

    Raises:
        UsageError: there is no such run (with the nearest name).
    """
    for place in _places(name, runs_dir):
        if _is_run(place):
            return place
    if Path(name).is_file():
        raise UsageError(f"{name} is a file, not a run: name the run or its directory.")
    raise UsageError(f"There is no run {name!r}.{_nearest_run(name, Path(runs_dir))}")


def resolve(name: str, runs_dir: str | Path) -> Path:
    """The checkpoint file meant by a file, a run directory (its best checkpoint) or a run's name.

    Raises:
        UsageError: nothing of that name is there.
        CheckpointError: the run has no checkpoint yet.
    """
    if Path(name).is_file():
        return Path(name)
    for place in _places(name, runs_dir):
        for file in (place / "checkpoints" / BEST, place / "checkpoints" / LAST):
            if file.is_file():
                return file
        if _is_run(place):
            raise CheckpointError(f"The run {place} has no checkpoint yet.")
    raise UsageError(f"There is no checkpoint or run {name!r}.{_nearest_run(name, Path(runs_dir))}")


def _places(name: str, runs_dir: str | Path) -> tuple[Path, ...]:
    return (Path(name), Path(runs_dir) / name) if name else ()


def _is_run(place: Path) -> bool:
    return (place / "checkpoints").is_dir() or (place / "config.yaml").is_file()


def _nearest_run(name: str, runs_dir: Path) -> str:
    runs = {p.name: p.stat().st_mtime for p in sorted(runs_dir.iterdir()) if _is_run(p)} if runs_dir.is_dir() else {}
    if not runs:
        return f" {runs_dir}/ holds no run."
    close = difflib.get_close_matches(Path(name).name, runs, n=1, cutoff=0.5)
    return (
        f" Did you mean {close[0]}?" if close else f" The latest in {runs_dir}/ is {max(runs, key=lambda r: runs[r])}."
    )
