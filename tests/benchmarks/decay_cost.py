"""What one measurement of gradient decay costs, in training steps of the same network.

As a run takes it for windows of T characters: 8 windows, lags up to 2T, 4 predictions each, in fp32 whatever the
training's precision; figures and records are made of it, but not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from measuring import Column, Result, Settings, interleave, result
from sides import OURS, OURS_BF16, OURS_FP32, VOCABULARY, Case, Training

import lmapp.cells
from lmapp.gradients.decay import measure, probe_shape, probe_windows
from lmapp.models import RecurrentModel

TITLE = "a measurement of gradient decay, in training steps"
COLUMNS: list[Column] = [
    ("bf16 steps", "figure", ".2f"),
    ("fp32 steps", "figure_fp32", ".2f"),
    ("ms", "measurement_ms", ".1f"),
    ("per 200: %", "share_every_200", ".2f"),
    ("fp32: %", "share_every_200_fp32", ".2f"),
]
CASES = [Case(cell, 1, 512, 32, 64) for cell in lmapp.cells.CELLS]

EVERY = 200
CHARACTERS = 100_000


def results(settings: Settings, cases: Sequence[Case] | None = None) -> Iterator[Result]:
    """One result a case."""
    for case in cases or CASES:
        name = f"decay {case.name} K={2 * case.length}"
        if settings.wants(name):
            yield _measure(settings, name, case)


def _measure(settings: Settings, name: str, case: Case) -> Result:
    training = {side: Training(side, case, settings.device) for side in OURS}
    model = training[OURS_BF16].model
    assert isinstance(model, RecurrentModel)
    shape, _ = probe_shape(CHARACTERS, CHARACTERS, truncation_length=case.length)
    assert shape is not None
    ids = np.random.default_rng(0).integers(VOCABULARY, size=CHARACTERS)
    windows = torch.from_numpy(probe_windows(ids, shape, seed=0)).to(settings.device)

    def measurement() -> None:
        decay = measure(model, windows, shape)
        decay.scalars()
        list(decay.records(0))

    sides = {side: trained.step for side, trained in training.items()}
    times = interleave({"measurement": measurement, **sides}, settings)
    taken = times["measurement"]
    steps, steps_fp32 = (taken.median / times[side].median for side in (OURS_BF16, OURS_FP32))
    by_round = taken.medians / times[OURS_BF16].medians
    return result(
        settings,
        name,
        steps,
        "training steps",
        figure_fp32=steps_fp32,
        figure_rounds=[float(by_round.min()), float(by_round.max())],
        measurement_ms=1e3 * taken.median,
        share_every_200=100 * steps / EVERY,
        share_every_200_fp32=100 * steps_fp32 / EVERY,
        spread={side: times[side].spread for side in times},
    )
