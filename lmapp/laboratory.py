"""Gradients of finished models: the decay of one or several checkpoints, measured and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lmapp.errors import LmappError, UsageError
from lmapp.experiments.draw import NamedCurve, draw_decay
from lmapp.gradients.decay import (
    Decay,
    cut_recurrence_warning,
    measure,
    not_defined,
    probe_shape,
    probe_windows,
    verdict,
)
from lmapp.gradients.truncation import Truncation
from lmapp.inference import load
from lmapp.models import RecurrentModel
from lmapp.training.truncation import resolve


@dataclass(frozen=True)
class Measurement:
    """The decay of one checkpoint.

    Attributes:
        label: its run's name.
        cell: of the network.
        text: what it was measured on.
        note: what differs from what was asked for, in words.
        truncation: of its training.
    """

    label: str
    cell: str
    step: int
    text: str
    note: str
    truncation: Truncation
    decay: Decay

    @property
    def verdict(self) -> str:
        """What the truncation costs, and the warning if the recurrence is cut."""
        warning, cost = cut_recurrence_warning(self.decay), verdict(self.decay, self.truncation)
        return f"{warning}\n{cost}" if warning else cost

    def as_dict(self) -> dict[str, Any]:
        """As `lmapp gradients --json` prints it: figures by their logged names, and the curves."""
        return {
            "label": self.label,
            "cell": self.cell,
            "step": self.step,
            "text": self.text,
            "note": self.note,
            "bptt": self.truncation.mode,
            "truncation_length": self.truncation.length,
            "figures": self.decay.scalars(),
            "curves": self.decay.records(self.step),
            "verdict": self.verdict,
        }


def measure_checkpoints(
    names: Sequence[str],
    *,
    paths: Sequence[str] = (),
    encoding: str | None = None,
    column: str | None = None,
    max_lag: int | None = None,
    windows: int = 8,
    runs_dir: str = "runs",
    cache_dir: str | None = None,
) -> list[Measurement]:
    """Measure each checkpoint's gradient decay on a text, by default its run's own validation split.

    Args:
        names: files, run directories or names of runs.
        paths: the text's files, named as in training.
        encoding: of these files; by default as in training.
        column: of rows, that holds the text; by default as in training.
        max_lag: K; by default twice the steps that a loss of each run looks back at most, and no more than 512.
        windows: of text, the same at every call.
        runs_dir: where names of runs are looked up.
        cache_dir: where encoded text is kept.

    Raises:
        LmappError: a checkpoint or text is not there, or the text is too short.
    """
    measured = []
    for language in [load(name, runs_dir=runs_dir) for name in names]:
        if not isinstance(language.model, RecurrentModel):
            why = not_defined(language.config.model.kind)
            raise UsageError(f"{language.path} has no gradient decay: {why}.")
        text = language.text(paths, encoding=encoding, column=column, cache_dir=cache_dir)
        if len(text.ids) < 2 and not paths:  # there was no validation: the run itself measured on this
            text = language.text(split="train", cache_dir=cache_dir)
        plan = language.saved["plan"]
        # The plan knows what τ came to on the text of the training, whose rows are not known here.
        truncation = replace(resolve(language.config.train, plan["sequence_length"]), length=plan["truncation_length"])
        shape, note = probe_shape(
            len(text.ids),
            0,
            truncation_length=truncation.length,
            windows=windows,
            max_lag=max_lag,
            look_back=truncation.look_back,
        )
        if shape is None:
            raise LmappError(f"{language.path}, on {text.name}: {note}.\nName a longer text: --data.path FILE")
        probe = torch.from_numpy(probe_windows(text.ids, shape, language.config.seed))
        decay = measure(language.model, probe, shape)
        path = language.path.parent.parent if language.path.parent.name == "checkpoints" else language.path
        label = language.config.model.label
        measured.append(Measurement(path.name, label, language.step, text.name, note, truncation, decay))
    return measured


def draw(measured: Sequence[Measurement], path: Path) -> None:
    """Draw the joint curves over all layers into a PNG."""
    curves = []
    for m in measured:
        curve = m.decay.curve()
        curves.append(
            NamedCurve(
                m.label,
                m.cell,
                curve.lags.tolist(),
                curve.R.tolist(),
                curve.zero_share.tolist(),
                curve.half_life.value,
                curve.half_life.censored,
            )
        )
    draw_decay(curves, path, title="How far back the gradient reaches")
