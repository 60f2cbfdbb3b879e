"""Training figures: what is logged of the steps since the last time, and of the norms of all."""

from __future__ import annotations

import math
from typing import Any

import lightning

from lmapp.loggers.wandb import NORMS
from lmapp.training.module import LanguageModule
from lmapp.units import perplexity


class TrainingFigures(lightning.Callback):
    """Every `every_steps` steps: means over the steps since the last time, `gradient/clip_fraction` their share.

    The quantiles `gradient/norm_p50`, `_p90` and `_p99` are of the whole run so far; at its end the loggers get the
    histogram that they are from.
    """

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the step to the sums; put the means into the figures if they are due."""
        assert isinstance(pl_module, LanguageModule)
        report, progress = pl_module.report, pl_module.progress
        assert report is not None
        sums = progress.since_log

        def add(name: str, value: float) -> None:
            sums[name] = sums.get(name, 0.0) + value

        add("steps", 1)
        if report.kind == "nonfinite":
            add("nonfinite", 1)
        else:
            add("predicted", report.predicted)
            add("loss", report.loss * report.predicted)
            add("norm", report.norm)
            add("norm_clipped", report.norm * report.factor)
            add("clips", report.kind == "clip")
        # A difference of two totals, so that it stays right where a step was not finite.
        sums.setdefault("from_characters", progress.characters - batch.characters)
        sums.setdefault("from_seconds", progress.seconds - pl_module.step_seconds)
        if not pl_module.due(self.every_steps) and progress.state != "stopped":
            return
        seconds = progress.seconds - sums["from_seconds"]
        figures: dict[str, float] = {
            "train/chars_per_second": (progress.characters - sums["from_characters"]) / max(seconds, 1e-9),
            "train/learning_rate": report.learning_rate,
            "gradient/clip_fraction": sums.get("clips", 0.0) / sums["steps"],
            "gradient/nonfinite": sums.get("nonfinite", 0.0),
        }
        finite = sums["steps"] - sums.get("nonfinite", 0.0)
        if finite and sums["predicted"]:
            loss = sums["loss"] / sums["predicted"]
            figures[f"train/{pl_module.loss_name}"] = loss
            if pl_module.loss_name == "loss":
                figures |= {"train/perplexity": perplexity(loss), "train/bits_per_char": loss / math.log(2)}
        if finite:
            figures |= {
                "gradient/norm": sums["norm"] / finite,
                "gradient/norm_clipped": sums["norm_clipped"] / finite,
            }
        if sums.get("answers"):
            figures["train/accuracy"] = sums["correct"] / sums["answers"]
        if "omega" in sums:
            figures["train/omega"] = sums["omega"] / sums["omegas"]
        figures |= {f"gradient/{name}": norm for name, norm in progress.norms.percentiles().items()}
        pl_module.figures.update(figures)
        if progress.finished or progress.state == "stopped":
            pl_module.figures[NORMS] = progress.norms.chart()
        progress.since_log = {}
