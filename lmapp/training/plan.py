"""How long a run is, and the learning rate of each step: pure functions of what is stored in the checkpoint."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lmapp.config import TrainConfig

TIMED_STEPS = 50
UNTIMED_STEPS = 10  # the first steps allocate and warm up; they say nothing about the pace
DEFAULT_MINUTES = 5.0


def minutes(config: TrainConfig) -> float | None:
    """The limit in minutes: as given, or the default if there is no limit of any kind."""
    if config.max_minutes is None and config.max_steps is None and config.max_epochs is None:
        return DEFAULT_MINUTES
    return config.max_minutes


def limit_in_steps(config: TrainConfig, steps_per_epoch: int) -> int | None:
    """The limits that are known before the first step, in steps; None if there is only one in minutes."""
    limits = [config.max_steps] if config.max_steps is not None else []
    if config.max_epochs is not None:
        limits.append(config.max_epochs * steps_per_epoch)
    return min(limits, default=None)


def steps_in_minutes(limit_minutes: float, done: int, seconds: float, seconds_per_step: float) -> int:
    """The whole run's number of steps under a limit in minutes of training steps.

    Args:
        limit_minutes: the limit.
        done: steps already taken.
        seconds: what they took.
        seconds_per_step: what each further step is expected to take.
    """
    left = max(0.0, limit_minutes * 60 - seconds)
    return max(done, 1) + math.floor(left / seconds_per_step)


def pace(step_seconds: Sequence[float]) -> float:
    """Seconds a step takes: the mean of the timed steps without the slowest and fastest tenth."""
    timed = sorted(step_seconds[UNTIMED_STEPS:] or step_seconds)
    tenth = len(timed) // 10
    return statistics.fmean(timed[tenth : len(timed) - tenth])


def learning_rate(config: TrainConfig, step: int, total_steps: int | None) -> float:
    """The learning rate of the update that follows `step` earlier ones.

    Linear warm-up, then constant or half a cosine down to 0 at `total_steps`. While the total is not known, the rate
    stays at its peak after the warm-up.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or total_steps is None:
        return config.learning_rate
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
