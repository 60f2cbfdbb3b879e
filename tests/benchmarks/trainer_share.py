"""What a run costs over a bare loop of the same steps: Trainer, every default callback, the run's own files, W&B.

`lmapp.train` trains as a user has it. After every 20 steps it pauses for as many bare ones (the same network, text,
optimiser, clipping; batches at hand), so that what slows the machine down meets both. A step of the run lasts from one
batch to the next. (What W&B's own process does meanwhile may fall on either.)

The share is that of the median ordinary step, and a twentieth of what the median logged step (every 20th) takes more.
What is done less often, validation and gradient decay, has its own price and is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from measuring import Column, Result, Settings, Times, half_range, result
from prose import prose_rows, write_prose
from sides import CLIP_NORM, LEARNING_RATE, OURS_BF16, Case, Training

import lmapp
from lmapp.config import LoggingConfig
from lmapp.training.module import LanguageModule

TITLE = "the Trainer's share, in per cent of the bare step"
COLUMNS: list[Column] = [
    ("share", "figure", ".1f"),
    ("medians", "share_of_medians", ".1f"),
    ("tenths", "share_of_low_quantiles", ".1f"),
    ("logging", "share_of_logging", ".1f"),
    ("pairs", "share_of_pairs", ".1f"),
    ("± of pairs", "spread_of_pairs", ".1f"),
    ("step, ms", "step_ms", ".2f"),
    ("bare, ms", "bare_ms", ".2f"),
]
CASES = [Case("gru", 1, 512, 32, 64)]

TURN = LoggingConfig().every_steps
WARM_UP = TURN
BARE_WINDOWS = 16
SHORTEST_TEXT = 100_000


class Turns:
    """Turns of the run and of the bare loop: `TURN` steps of one, then of the other."""

    def __init__(self, bare: Callable[[], None], settings: Settings) -> None:
        self._bare, self._clock = bare, settings.clock
        self.run: list[list[float]] = []
        """The last of each is a logged step."""
        self.bare: list[list[float]] = []
        """One before each turn of the run, and one after the last."""
        self._last = 0.0

    def batch_starts(self, step: int) -> None:
        """Told by the run, `step` steps behind it, at the start of every batch."""
        now = self._clock()
        if step > WARM_UP:
            self.run[-1].append(now - self._last)
        if step >= WARM_UP and (step - WARM_UP) % TURN == 0:
            self.bare.append([])
            for _ in range(TURN):
                started = self._clock()
                self._bare()
                self.bare[-1].append(self._clock() - started)
            self.run.append([])
        self._last = self._clock()


def results(settings: Settings, cases: Sequence[Case] | None = None) -> Iterator[Result]:
    """Two results a case: without and with W&B's offline run."""
    for case in cases or CASES:
        for wandb in ("disabled", "offline"):
            name = f"trainer {case.name} {wandb}"
            if settings.wants(name):
                yield _measure(settings, name, case, wandb)


def _measure(settings: Settings, name: str, case: Case, wandb: str) -> Result:
    text = prose_rows(case.rows, BARE_WINDOWS * case.length + 1)
    bare = Training(OURS_BF16, case, settings.device, text)
    bare.step()
    started = settings.clock()
    bare.step()
    turns_a_round = max(1, round(settings.seconds / (TURN * (settings.clock() - started))))
    turns = Turns(bare.step, settings)
    _train(case, turns, settings.rounds * turns_a_round, settings.device, wandb)
    run, ordinary, logged = (
        Times([turn[part] for turn in turns.run if turn]) for part in (slice(None), slice(-1), slice(-1, None))
    )
    loop = Times(turns.bare)
    # Each turn of the run against the bare ones around it.
    around = (loop.medians[:-1] + loop.medians[1:]) / 2
    pairs = 100 * (ordinary.medians / around - 1)
    medians = 100 * (ordinary.median / loop.median - 1)
    logging = 100 * float(np.median(logged.medians - ordinary.medians)) / TURN / loop.median
    return result(
        settings,
        name,
        medians + logging,
        "% of the bare step",
        share_of_medians=medians,
        share_of_low_quantiles=100 * (ordinary.low / loop.low - 1),
        share_of_logging=logging,
        share_of_pairs=float(np.median(pairs)),
        spread_of_pairs=half_range(pairs),
        step_ms=1e3 * ordinary.median,
        bare_ms=1e3 * loop.median,
        spread={"trainer": run.spread, "bare": loop.spread},
    )


def _train(case: Case, turns: Turns, count: int, device: str, wandb: str) -> None:
    """A run of `count` turns, and the step that ends the last of them."""

    class Module(LanguageModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            turns.batch_starts(self.progress.step)
            super().on_train_batch_start(batch, batch_idx)

    steps = WARM_UP + count * TURN + 1
    with TemporaryDirectory() as directory, patch("lmapp.run.LanguageModule", Module):
        characters = max(SHORTEST_TEXT, 10 * (steps + 1) * case.characters // 9)  # a tenth is for validation
        run = lmapp.train(
            {
                "data": {
                    "path": [str(write_prose(Path(directory), characters))],
                    "batch_size": case.rows,
                    "sequence_length": case.length,
                    "cache_dir": f"{directory}/cache",
                },
                "model": {"cell": case.cell, "hidden_size": case.hidden_size, "num_layers": case.num_layers},
                "train": {
                    "max_steps": steps,
                    "learning_rate": LEARNING_RATE,
                    "schedule": "constant",
                    "warmup_steps": 0,
                    "clip_norm": CLIP_NORM,
                    "precision": "bf16",
                    "device": device,
                },
                "logging": {"wandb": wandb},
                "runs_dir": f"{directory}/runs",
            },
            quiet=True,
        )
        assert run.metrics["steps"] == steps
        assert len(turns.run[-1]) == 0 and all(len(turn) == TURN for turn in turns.run[:-1])
