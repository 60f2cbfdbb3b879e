"""The end of every step: log what was measured, save if it is due, stop if it is time."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from lmapp import checkpoint
from lmapp.errors import LmappError
from lmapp.loggers.records import Records
from lmapp.training.module import LanguageModule


class SafeCheckpointIO(CheckpointIO):
    """Lightning's reading and writing of checkpoints by `lmapp.checkpoint`: atomic, and safe from any file.

    Args:
        writes: whether this process is the one that writes.
    """

    def __init__(self, writes: bool = True) -> None:
        self.writes = writes

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write atomically."""
        if self.writes:
            _write(Path(path), checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read with safe loading only, onto the CPU."""
        return checkpoint.read(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        """Delete the file."""
        Path(path).unlink(missing_ok=True)


_write = checkpoint.write


class EndOfStep(lightning.Callback):
    """The last callback of a step.

    Saves last.ckpt after every validation, when the plan is made, every `checkpoint_minutes`, on Ctrl-C and at the end;
    best.ckpt is the last.ckpt of the best validation (of the last save, if there is no validation). A network that is
    not finite is never saved. Several processes save and stop after the same steps; the first one writes.

    Args:
        directory: of the checkpoints.
        records: the run's appended files.
        minutes: between saves at most.
        summary: what summary.json is to say, asked at every save.
        validates: whether there is validation.
    """

    def __init__(
        self,
        directory: Path,
        records: Records,
        *,
        minutes: float,
        summary: Callable[[LanguageModule], dict[str, Any]],
        validates: bool,
    ) -> None:
        self.directory = directory
        self.records = records
        self.minutes = minutes
        self.summary = summary
        self.validates = validates
        self._saved_at = time.monotonic()
        self._planned: int | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Log what was measured before the first step."""
        assert isinstance(pl_module, LanguageModule)
        self._planned = pl_module.progress.total_steps
        self._log(pl_module)
        self._write_summary(pl_module)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, save, stop."""
        assert isinstance(pl_module, LanguageModule)
        progress = pl_module.progress
        self._log(pl_module)
        if progress.finished:
            progress.state = "finished"
        overdue = pl_module.ranks.first and time.monotonic() - self._saved_at >= self.minutes * 60
        asked, due = pl_module.ranks.sum([pl_module.stop_requested, overdue])
        if progress.state == "running" and asked:
            progress.state = "interrupted"
        validated = progress.last is not None and progress.last["step"] == progress.step
        planned = progress.total_steps != self._planned
        if progress.state in ("finished", "interrupted") or validated or planned or due:
            self._save(trainer, pl_module)
        if progress.state != "running":
            trainer.should_stop = True
            self._write_summary(pl_module)

    def _log(self, module: LanguageModule) -> None:
        progress = module.progress
        if module.figures:
            figures = {"train/characters": progress.characters, "train/seconds": progress.seconds, **module.figures}
            for logger in module.loggers:
                logger.log_metrics(figures, step=progress.step)
            module.figures = {}

    def _save(self, trainer: lightning.Trainer, module: LanguageModule) -> None:
        self._saved_at = time.monotonic()
        self._planned = module.progress.total_steps
        progress = module.progress
        if not all(bool(torch.isfinite(p).all()) for p in module.parameters()):
            progress.state = "stopped"
            return
        module.extras["records"] = self.records.sizes()
        last = self.directory / checkpoint.LAST
        trainer.save_checkpoint(last)  # by all processes, for each has a part of what is carried
        best = not self.validates or (progress.best is not None and progress.best["step"] == progress.step)
        if best and module.ranks.first:
            keep_as_best(last)
        self._write_summary(module)

    def _write_summary(self, module: LanguageModule) -> None:
        if module.ranks.first:
            self.records.write_summary(self.summary(module))


def keep_as_best(last: Path) -> None:
    """Let best.ckpt be the file that last.ckpt is now, atomically; later writes of last.ckpt leave it alone."""
    best = last.with_name(checkpoint.BEST)
    temporary = best.with_name(f".{best.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(last, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(last, temporary)
        os.replace(temporary, best)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise LmappError(f"{best} could not be written: {error.strerror or error}. {last} is whole.") from error
