"""Long-range gradient decay during training: when it is measured and what it is called."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import lightning
import numpy as np
import torch

from lmapp.gradients.decay import JOINT, Decay, ProbeShape, measure
from lmapp.loggers.records import DECAY, Records, read_lines
from lmapp.loggers.wandb import DECAY_CURVES, DECAY_HISTORY
from lmapp.training import plan
from lmapp.training.module import LanguageModule


def affordable(every_steps: int, cost: float, step_seconds: float, budget: float) -> int:
    """The smallest multiple of `every_steps` at which measuring takes at most its share of the training's time.

    Args:
        every_steps: the least interval, in steps.
        cost: seconds of one measurement.
        step_seconds: of one step.
        budget: the seconds of measuring for each second of training steps.
    """
    return every_steps * max(1, math.ceil(cost / (budget * step_seconds * every_steps)))


class DecayProbe(lightning.Callback):
    """Measures before the first step, every `every_steps` steps and at the end, on the same windows all along.

    With a budget the interval is decided once, and kept in the run's progress: at the first multiple of `every_steps`
    by which `plan.TIMED_STEPS` steps were timed, from what the measurement taken there costs. The one before the first
    step would not do, as it warms up; and until the cost is known there is no other, which could be too much already.

    Args:
        windows: (N, W + K + m + 1) ids from `lmapp.training.probe.place`.
        shape: their shape.
        every_steps: at least 1.
        records: where decay.jsonl is.
        budget: share of the training's time that measuring may take; None for any.
        say: told the interval that the budget comes to.
    """

    def __init__(
        self,
        windows: np.ndarray,
        shape: ProbeShape,
        every_steps: int,
        records: Records,
        budget: float | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.windows = torch.from_numpy(windows)
        self.shape = shape
        self.every_steps = every_steps
        self.records = records
        self.budget = budget
        self.say = say
        self.latest: Decay | None = None
        self.latest_step = 0
        self._curves: list[dict[str, Any]] | None = None
        self._step_seconds: deque[float] = deque(maxlen=plan.TIMED_STEPS)

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
        progress = pl_module.progress
        self._step_seconds.append(pl_module.step_seconds)
        if self.budget is None or progress.decay_every_steps is not None:
            if pl_module.due(progress.decay_every_steps or self.every_steps):
                self._measure(pl_module)
        elif progress.finished:
            self._measure(pl_module)
        elif pl_module.due(self.every_steps) and len(self._step_seconds) == plan.TIMED_STEPS:
            progress.decay_every_steps = self._decide(pl_module, self.budget)

    def _decide(self, module: LanguageModule, budget: float) -> int:
        """Measure, and say how often that can be afforded."""
        if self.latest is None:  # resumed: the first measurement of a process warms up
            measure(module.model, self.windows.to(module.device), self.shape)
        started = time.perf_counter()
        self._measure(module)
        cost, step = time.perf_counter() - started, plan.pace(list(self._step_seconds))
        every = affordable(self.every_steps, cost, step, budget)
        instead = "" if every == self.every_steps else f" instead of {self.every_steps:,}"
        self.say(
            f"Gradient decay is measured every {every:,} steps{instead}: that takes {cost:.2g} s each time, "
            f"{100 * cost / (every * step):.2g} % of the training's."
        )
        return every

    def _measure(self, module: LanguageModule) -> None:
        self.latest = measure(module.model, self.windows.to(module.device), self.shape)
        self.latest_step = module.progress.step
        found = self.latest.records(module.progress.step)
        for record in found:
            self.records.append_json(DECAY, record)
        module.figures.update(self.latest.scalars())
        quoted = (self.latest.quoted, JOINT)
        if self._curves is None:  # a resumed run's file holds those before
            lines = read_lines(self.records.directory / DECAY)
            self._curves = [r for r in lines if (r["layer"], r["component"]) == quoted]
        else:
            self._curves += [r for r in found if (r["layer"], r["component"]) == quoted]
        module.figures[DECAY_CURVES] = self._curves
        if module.progress.finished:
            module.figures[DECAY_HISTORY] = self._curves
