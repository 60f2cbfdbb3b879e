"""Validation during training: when, and what its figures are called."""

from __future__ import annotations

import math
from typing import Any

import lightning
import numpy as np

from lmapp.models.evaluation import evaluate
from lmapp.training.module import LanguageModule
from lmapp.vocabulary import Vocabulary


class Validation(lightning.Callback):
    """Every `every_steps` steps and at the end: J of the validation split, by `lmapp.models.evaluation`.

    Args:
        ids: the validation split, (N,) integers.
        vocabulary: of the corpus.
        batch_size: B; the rows the split is read in, at most.
        every_steps: 0 for only at the end.
    """

    def __init__(self, ids: np.ndarray, vocabulary: Vocabulary, batch_size: int, every_steps: int) -> None:
        self.ids = ids
        self.vocabulary = vocabulary
        self.batch_size = batch_size
        self.every_steps = every_steps

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Validate if it is due; a better loss than ever before becomes `progress.best`."""
        assert isinstance(pl_module, LanguageModule)
        progress = pl_module.progress
        if not pl_module.due(self.every_steps):
            return
        score = evaluate(
            pl_module.model,
            self.ids,
            self.vocabulary.starts_character,
            self.vocabulary.symbol_bytes,
            batch_size=self.batch_size,
        )
        figures = {
            "val/loss": score.loss,
            "val/perplexity": score.perplexity,
            "val/bits_per_char": score.bits_per_char,
            "val/bits_per_byte": score.bits_per_byte,
        }
        pl_module.figures.update(figures)
        progress.last = {"step": progress.step, **figures}
        if math.isfinite(score.loss) and (progress.best is None or score.loss < progress.best["val/loss"]):
            progress.best = progress.last
