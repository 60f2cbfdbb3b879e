"""Batches of an encoded text: the share of a training step's time that is spent on getting one, and how fast they are.

They come from the run's own data module: read from its memory-mapped file, laid out as tensors, put on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from measuring import Column, Result, Settings, interleave, result
from prose import write_prose
from sides import OURS, OURS_BF16, OURS_FP32, Case, Training

from lmapp.config import DataConfig
from lmapp.data.datamodule import TextDataModule

TITLE = "waiting for data"
COLUMNS: list[Column] = [
    ("of step: %", "share", ".3f"),
    ("of fp32: %", "share_fp32", ".3f"),
    ("batch, ms", "batch_ms", ".3f"),
    ("chars/s", "characters_per_second", ",.0f"),
]
CASES = [Case("gru", 1, 512, 32, 64)]
ALONE = [(256, 256)]
"""Rows and lengths of batches that nothing is trained on."""
CHARACTERS = 2_000_000


def results(settings: Settings, cases: Sequence[Case] | None = None) -> Iterator[Result]:
    """One result a case, then one for each of the batches alone."""
    for case in cases or CASES:
        name = f"data {case.name}"
        if settings.wants(name):
            sides = {side: Training(side, case, settings.device).step for side in OURS}
            yield _measure(settings, name, case.rows, case.length, sides)
    for rows, length in ALONE:
        name = f"data {rows}x{length}"
        if settings.wants(name):
            yield _measure(settings, name, rows, length, {})


def _measure(settings: Settings, name: str, rows: int, length: int, steps: dict[str, Callable[[], None]]) -> Result:
    with TemporaryDirectory() as directory:
        path = write_prose(Path(directory), CHARACTERS)
        config = DataConfig(path=[str(path)], batch_size=rows, sequence_length=length, cache_dir=f"{directory}/cache")
        data = TextDataModule(config)
        data.setup()
        batches = iter(batch for _ in count() for batch in data.train_dataloader())

        def take() -> None:
            batch = next(batches)
            batch.inputs.to(settings.device), batch.targets.to(settings.device)

        times = interleave({"batch": take, **steps}, settings)
    taken = times["batch"].median
    characters = rows * length / taken
    shares = {side: 100 * taken / (taken + times[side].median) for side in steps}
    return result(
        settings,
        name,
        shares[OURS_BF16] if steps else characters,
        "% of the step's time" if steps else "characters/s",
        figure_fp32=shares.get(OURS_FP32),
        share=shares.get(OURS_BF16),
        share_fp32=shares.get(OURS_FP32),
        batch_ms=1e3 * taken,
        characters_per_second=characters,
        spread={side: times[side].spread for side in times},
    )
