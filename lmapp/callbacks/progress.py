"""What the terminal shows while a run goes on."""

from __future__ import annotations

import math
import time
from typing import Any

import lightning
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lmapp.training.module import LanguageModule
from lmapp.training.module import Progress as Done
from lmapp.units import perplexity

LINE_SECONDS = 30.0


class ProgressDisplay(lightning.Callback):
    """A bar with loss, perplexity, speed and time left on a terminal; elsewhere a line every half minute."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._shown = 0.0
        self._loss = math.nan

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Open the bar."""
        self._shown = time.monotonic()
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=16),
                TextColumn("{task.fields[figures]}"),
                console=self.console,
                refresh_per_second=4,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=None, figures="")
            self._bar.start()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the step; a validation gets a line that stays."""
        assert isinstance(pl_module, LanguageModule) and pl_module.report is not None
        progress, loss = pl_module.progress, pl_module.report.loss
        if math.isfinite(loss) and pl_module.report.predicted:
            self._loss = loss if math.isnan(self._loss) else 0.98 * self._loss + 0.02 * loss
        if progress.last is not None and progress.last["step"] == progress.step:
            better = "  best" if progress.best == progress.last else ""
            name = pl_module.loss_name
            ppl = f"  perplexity {progress.last['val/perplexity']:.3f}" if name == "loss" else " a masked character"
            if "val/accuracy" in progress.last:
                ppl += f"  accuracy {progress.last['val/accuracy']:.3f}"
            self.console.print(
                f"step {progress.step:>6,}  train {self._loss:.4f}  "
                f"validation {progress.last[f'val/{name}']:.4f} nats{ppl}{better}",
                highlight=False,
            )
            self._shown = time.monotonic()
        now = time.monotonic()
        if now - self._shown < (0.25 if self._bar else LINE_SECONDS):
            return
        self._shown = now
        speed = f"{progress.characters / max(progress.seconds, 1e-9):,.0f} chars/s"
        ppl = f"  ppl {perplexity(self._loss):.2f}" if pl_module.loss_name == "loss" else ""
        figures = f"loss {self._loss:.3f}{ppl}  {speed}  {_left(progress)}"
        total = progress.total_steps
        if self._bar:
            self._bar.update(
                self._task,
                completed=progress.step,
                total=total,
                figures=figures,
                description=f"step {progress.step:,}" + (f"/{total:,}" if total else ""),
            )
        else:
            self.console.print(f"step {progress.step:,}{f'/{total:,}' if total else ''}  {figures}", highlight=False)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Close the bar."""
        self.close()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """Close the bar."""
        self.close()


def _left(progress: Done) -> str:
    if progress.total_steps is None:
        return "measuring the pace"
    seconds = (progress.total_steps - progress.step) * progress.seconds / progress.step
    return f"{int(seconds // 60)}:{int(seconds % 60):02d} left"
