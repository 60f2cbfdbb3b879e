"""The run's own files: lines appended as training goes, one small summary rewritten, all cut back on resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger

from lmapp.errors import LmappError
from lmapp.units import jsonable

METRICS, DECAY, CLIP_EVENTS, SAMPLES = "metrics.jsonl", "decay.jsonl", "clip_events.jsonl", "samples.txt"
APPENDED = (METRICS, DECAY, CLIP_EVENTS, SAMPLES)
SUMMARY = "summary.json"


class Records:
    """The appended files of a run's directory.

    A line is in the operating system's hands before the next step begins, so a killed process loses none; it costs the
    same however long the file already is.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}

    def append(self, name: str, text: str) -> None:
        """Append `text` to the file `name`.

        Raises:
            LmappError: the disk is full or the file cannot be written.
        """
        try:
            if name not in self._files:
                self._files[name] = open(self.directory / name, "a", encoding="utf-8")  # noqa: SIM115
            self._files[name].write(text)
            self._files[name].flush()
        except OSError as error:
            if name in self._files:
                with suppress(OSError):  # what is left in its buffer cannot be written at closing either
                    self._files.pop(name).close()
            raise LmappError(f"{self.directory / name} could not be written: {error.strerror or error}.") from error

    def append_json(self, name: str, record: Mapping[str, Any]) -> None:
        """Append one JSON line."""
        self.append(name, json.dumps(jsonable(record), ensure_ascii=False) + "\n")

    def sizes(self) -> dict[str, int]:
        """Bytes of each file now: stored in a checkpoint, so that a resumed run can cut back to it."""
        return {name: size for name in APPENDED if (size := _size(self.directory / name))}

    def cut_back(self, sizes: Mapping[str, int]) -> list[str]:
        """Cut every file to what it held when a checkpoint was written; returns the names of files that lack bytes."""
        short = []
        for name in APPENDED:
            path, size = self.directory / name, sizes.get(name, 0)
            if _size(path) > size:
                os.truncate(path, size)
            elif _size(path) < size:
                short.append(name)
        return short

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json, atomically."""
        path = self.directory / SUMMARY
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(jsonable(summary), indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise LmappError(f"{path} could not be written: {error.strerror or error}.") from error

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def read_lines(path: Path) -> Iterable[dict[str, Any]]:
    """The JSON lines that this run has written, in order; none if there is no file."""
    if path.exists():
        with open(path, encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class LocalLogger(Logger):
    """Lightning's logger onto metrics.jsonl: one line a logged step."""

    def __init__(self, records: Records) -> None:
        super().__init__()
        self.records = records

    @property
    def name(self) -> str:
        """Of the logger."""
        return "local"

    @property
    def version(self) -> str:
        """The run's directory."""
        return self.records.directory.name

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The configuration is in config.yaml."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Append the numbers among `metrics`."""
        numbers = {k: float(v) if not isinstance(v, int) else v for k, v in metrics.items() if _is_number(v)}
        axes = {name: numbers[f"train/{name}"] for name in ("characters", "seconds") if f"train/{name}" in numbers}
        self.records.append_json(METRICS, {"step": step, **axes, **numbers})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (hasattr(value, "item") and getattr(value, "ndim", 1) == 0)
