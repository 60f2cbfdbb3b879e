"""Gradient norms and update-to-weight ratios of a network's parts: when they are taken and what they are called."""

from __future__ import annotations

from typing import Any

import lightning
from torch import Tensor

from lmapp.gradients.updates import group_norms, grouped, update_ratios
from lmapp.training.module import LanguageModule


class UpdateFigures(lightning.Callback):
    """Of every `every_steps`-th step and the last: `gradient/group/{name}` before clipping, `update/{name}`.

    A step whose gradient was not finite has none. Weights are copied at these steps only.
    """

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps
        self._norms: dict[str, float] = {}
        self._before: dict[str, list[Tensor]] = {}

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Ask to be shown gradients before they are clipped."""
        assert isinstance(pl_module, LanguageModule)
        pl_module.before_clipping = self._look

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare the weights with what they were, if they were copied."""
        if not self._before:
            return
        assert isinstance(pl_module, LanguageModule)
        ratios = update_ratios(self._before, grouped(pl_module.model.named_parameters()))
        pl_module.figures.update({f"gradient/group/{name}": norm for name, norm in self._norms.items()})
        pl_module.figures.update({f"update/{name}": ratio for name, ratio in ratios.items()})
        self._before = {}

    def _look(self, module: LanguageModule) -> None:
        if not module.will_be_due(self.every_steps):
            return
        named = list(module.model.named_parameters())
        self._norms = group_norms(grouped((name, p.grad) for name, p in named if p.grad is not None))
        self._before = grouped((name, p.detach().clone()) for name, p in named)
