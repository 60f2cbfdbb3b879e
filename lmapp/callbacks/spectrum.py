"""Spectra of the state's Jacobian during training: when they are measured."""

from __future__ import annotations

from typing import Any

import lightning
from torch import Tensor

from lmapp.gradients.decay import ProbeShape
from lmapp.gradients.spectrum import measure_spectrum
from lmapp.training.module import LanguageModule

POINTS = 4
"""Of the text at which norm and radius are taken; a report of a checkpoint takes more."""


class SpectrumProbe(lightning.Callback):
    """Measures before the first step, every `every_steps` steps and at the end, on the windows of gradient decay.

    Args:
        windows: (N, W + K + m + 1) ids, as gradient decay has them.
        shape: their shape.
        every_steps: at least 1.
        seed: of the points and of the vectors that iterations start from.
    """

    def __init__(self, windows: Tensor, shape: ProbeShape, every_steps: int, seed: int) -> None:
        self.windows = windows
        self.shape = shape
        self.every_steps = every_steps
        self.seed = seed

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
        windows = self.windows.to(module.device)
        spectrum = measure_spectrum(module.model, windows, self.shape, points=POINTS, seed=self.seed)
        module.figures.update(spectrum.scalars())
