"""Long-range gradient decay during training: when it is measured and what it is called."""

from __future__ import annotations

from typing import Any

import lightning
import numpy as np
import torch

from lmapp.gradients.decay import Decay, ProbeShape, measure
from lmapp.loggers.records import DECAY, Records, read_lines
from lmapp.loggers.wandb import DECAY_CURVES
from lmapp.training.module import LanguageModule


class DecayProbe(lightning.Callback):
    """Measures before the first step, every `every_steps` steps and at the end, on the same windows all along.

    Args:
        windows: (N, W + K + m + 1) ids from `lmapp.gradients.decay.probe_windows`.
        shape: their shape.
        every_steps: 0 for never.
        records: where decay.jsonl is.
    """

    def __init__(self, windows: np.ndarray, shape: ProbeShape, every_steps: int, records: Records) -> None:
        self.windows = torch.from_numpy(windows)
        self.shape = shape
        self.every_steps = every_steps
        self.records = records
        self.latest: Decay | None = None
        self.latest_step = 0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Measure the untrained network; a resumed run has that behind it."""
        assert isinstance(pl_module, LanguageModule)
        if pl_module.progress.step == 0:
            self._measure(pl_module)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure if it is due."""
        assert isinstance(pl_module, LanguageModule)
        if pl_module.due(self.every_steps):
            self._measure(pl_module)

    def _measure(self, module: LanguageModule) -> None:
        self.latest = measure(module.model, self.windows.to(module.device), self.shape)
        self.latest_step = module.progress.step
        for record in self.latest.records(module.progress.step):
            self.records.append_json(DECAY, record)
        module.figures.update(self.latest.scalars())
        # The chart overlays every measured step, so it is made from the file that holds them all.
        lines = read_lines(self.records.directory / DECAY)
        module.figures[DECAY_CURVES] = [r for r in lines if (r["layer"], r["component"]) == ("all", "joint")]
