"""What a run directory says: its configuration, metrics, gradient decay and clip events.

A run may still be going on or have been killed, so any file may be missing and the last line of one be unfinished.
"""

import difflib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lmapp.errors import LmappError, UsageError

Record = dict[str, Any]

_MARKS = ("config.yaml", "summary.json", "metrics.jsonl")


@dataclass(frozen=True)
class History:
    """The files of one run, each read when first asked for and empty where it does not exist.

    Attributes:
        path: The run directory `runs/NAME`.

    Raises:
        LmappError: (from every property) a file is damaged; the message names it, and the line.
    """

    path: Path

    @property
    def name(self) -> str:
        """The run's name, which is its directory's."""
        return self.path.resolve().name

    @cached_property
    def config(self) -> Record:
        """The complete configuration, in sections."""
        try:
            content = yaml.load(_read(self.path / "config.yaml"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f" in line {mark.line + 1}" if mark else ""
            raise LmappError(f"{self.path / 'config.yaml'} is not valid YAML{where}.") from error
        if content is None:
            return {}
        if not isinstance(content, dict):
            raise LmappError(f"{self.path / 'config.yaml'} does not hold sections of options.")
        return content

    @cached_property
    def summary(self) -> Record:
        """summary.json, rewritten at every save: state, best and last validation, parameters, seconds, …."""
        return _read_object(self.path / "summary.json")

    @cached_property
    def metrics(self) -> list[Record]:
        """Lines of metrics.jsonl: step, characters, seconds, and the logged names each line has."""
        return read_lines(self.path / "metrics.jsonl")

    @cached_property
    def decay(self) -> list[Record]:
        """Lines of decay.jsonl: step, layer ("all" or a number), component, lags, G, R, zero_share."""
        return read_lines(self.path / "decay.jsonl")

    @cached_property
    def clip_events(self) -> list[Record]:
        """Lines of clip_events.jsonl: kind, step, epoch, norm, threshold, factor, loss, learning_rate, text."""
        return read_lines(self.path / "clip_events.jsonl")

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one logged name, from the lines that have it."""
        lines = [line for line in self.metrics if name in line]
        return [int(line["step"]) for line in lines], [float(line[name]) for line in lines]


def find(run: str, runs_dir: Path | str) -> Path:
    """The directory of a run given as a directory, as a checkpoint file inside one, or by name.

    Args:
        run: What the user wrote.
        runs_dir: Where runs are by name.

    Raises:
        UsageError: No such run; the message names the nearest existing ones.
    """
    path = Path(run)
    if path.is_file() and path.parent.name == "checkpoints":
        path = path.parent.parent
    for candidate in (path, Path(runs_dir) / run):
        if any((candidate / mark).is_file() for mark in _MARKS):
            return candidate
    if path.is_dir() and path.resolve() != Path(runs_dir).resolve():
        raise UsageError(f"{run} is not a run's directory: it has no config.yaml and no metrics.jsonl.")
    names = _names(Path(runs_dir))
    if not names:
        raise UsageError(f"There is no run {run!r}: {runs_dir} holds no runs.\nTrain one with: lmapp train")
    nearest = difflib.get_close_matches(path.name, names, n=3, cutoff=0.3) or names[-3:]
    raise UsageError(f"There is no run {run!r} in {runs_dir}.\nNearest: {', '.join(nearest)}")


def _names(runs_dir: Path) -> list[str]:
    if not runs_dir.is_dir():
        return []
    return sorted(path.name for path in runs_dir.iterdir() if any((path / mark).is_file() for mark in _MARKS))


def read_lines(path: Path) -> list[Record]:
    """One object a line. An unfinished last line, left by a writer that was killed or is at work, is no line yet.

    Args:
        path: A .jsonl file; one that does not exist has no lines.

    Raises:
        LmappError: Any other line is not a JSON object; the message names file and line.
    """
    content = _read(path)
    # Not splitlines: text may hold other characters that count as line ends, such as U+2028.
    lines = content.split(b"\n")
    if not _is_object(lines[-1]):
        lines.pop()
    try:
        # All at once is several times faster than one by one.
        records = json.loads(b"[" + b",".join(lines) + b"]")
        if len(records) == len(lines) and all(type(record) is dict for record in records):
            return records
    except ValueError:
        pass
    for number, line in enumerate(lines, 1):
        if not _is_object(line):
            raise LmappError(f"{path} is damaged in line {number}: {_excerpt(line)}\nRemove that line to go on.")
    return [json.loads(line) for line in lines]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", "backslashreplace").strip()
    return repr(text if len(text) <= 60 else text[:59] + "…")


def _read_object(path: Path) -> Record:
    content = _read(path)
    if not content:
        return {}
    try:
        value = json.loads(content)
    except ValueError as error:
        raise LmappError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise LmappError(f"{path} does not hold a JSON object.")
    return value


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise LmappError(f"{path} cannot be read: {error.strerror}.") from error
