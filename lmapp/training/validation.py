"""Validation during training: when, and what its figures are called."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, ClassVar

import lightning
import numpy as np

from lmapp.models.answers import AnswerScore, evaluate_answers
from lmapp.models.evaluation import Score, evaluate, evaluate_infill
from lmapp.training.module import LanguageModule
from lmapp.training.processes import Ranks
from lmapp.vocabulary import Vocabulary


class Validation(lightning.Callback):
    """Every `every_steps` steps and at the end: J of the validation split, by `lmapp.models.evaluation`.

    Args:
        ids: the validation split, (N,) integers.
        vocabulary: of the corpus.
        batch_size: B; the rows the split is read in, at most.
        every_steps: 0 for only at the end.
        starts: as `evaluate` takes them.
        ranks: this process among those that train together; each reads its share.
    """

    loss_name: ClassVar[str] = "val/loss"
    """The figure that is to be as low as can be."""

    def __init__(
        self,
        ids: np.ndarray,
        vocabulary: Vocabulary,
        batch_size: int,
        every_steps: int,
        *,
        starts: np.ndarray | None = None,
        ranks: Ranks = Ranks(),  # noqa: B008
    ) -> None:
        self.ids = ids
        self.vocabulary = vocabulary
        self.batch_size = batch_size
        self.every_steps = every_steps
        self.starts = starts
        self.ranks = ranks

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Validate if it is due; a loss better than ever becomes `progress.best`, the accuracy sought ends training."""
        assert isinstance(pl_module, LanguageModule)
        progress = pl_module.progress
        if not pl_module.due(self.every_steps):
            return
        figures = self.figures(pl_module.model)
        pl_module.figures.update(figures)
        progress.last = {"step": progress.step, **figures}
        loss = figures[self.loss_name]
        if math.isfinite(loss) and (progress.best is None or loss < progress.best[self.loss_name]):
            progress.best = progress.last
        target = pl_module.config.train.target_accuracy
        if target is not None and figures["val/accuracy"] >= target:
            progress.total_steps = progress.step

    def figures(self, model: Any) -> dict[str, float]:
        """What is measured of the model now, by its logged names."""
        score = self.whole(
            evaluate(
                model,
                self.ids,
                self.vocabulary.starts_character,
                self.vocabulary.symbol_bytes,
                batch_size=self.batch_size,
                starts=self.starts,
                share=(self.ranks.rank, self.ranks.world),
            )
        )
        return {
            "val/loss": score.loss,
            "val/perplexity": score.perplexity,
            "val/bits_per_char": score.bits_per_char,
            "val/bits_per_byte": score.bits_per_byte,
        }

    def whole(self, share: Score) -> Score:
        """The score of the whole split, from each process's share of it."""
        loss_sum, characters, size = self.ranks.sum([share.loss_sum, share.characters, share.bytes])
        return Score(loss_sum, int(characters), int(size))


class TaskValidation(Validation):
    """The same for a task: of the answers alone, each record read from the initial state; and their accuracy.

    Args:
        ids: the validation split, (M·P,) integers.
        vocabulary: of the task.
        batch_size: B; records read at once.
        every_steps: 0 for only at the end.
        scored: (P,) which symbols of a record are its answer.
        ranks: this process among those that train together; each reads its share.
    """

    def __init__(
        self,
        ids: np.ndarray,
        vocabulary: Vocabulary,
        batch_size: int,
        every_steps: int,
        *,
        scored: np.ndarray,
        ranks: Ranks = Ranks(),  # noqa: B008
    ) -> None:
        super().__init__(ids, vocabulary, batch_size, every_steps, ranks=ranks)
        self.scored = scored

    def figures(self, model: Any) -> dict[str, float]:
        """What is measured of the model now, by its logged names."""
        share = evaluate_answers(
            model, self.ids, self.scored, batch_size=self.batch_size, share=(self.ranks.rank, self.ranks.world)
        )
        (correct,) = self.ranks.sum([share.correct])
        score = AnswerScore(**asdict(self.whole(share)), correct=int(correct))
        return {
            "val/loss": score.loss,
            "val/perplexity": score.perplexity,
            "val/bits_per_char": score.bits_per_char,
            "val/accuracy": score.accuracy,
        }


class InfillValidation(Validation):
    """The same for an infill model: the loss on masked characters, under one mask all along, and nothing else.

    Args:
        ids: the validation split, (N,) integers.
        vocabulary: of the corpus.
        batch_size: B; windows read at once.
        every_steps: 0 for only at the end.
        mask_fraction: share of the characters to restore.
        window: T, as in training.
        ranks: this process among those that train together; each reads its share.
    """

    loss_name = "val/infill_loss"

    def __init__(
        self,
        ids: np.ndarray,
        vocabulary: Vocabulary,
        batch_size: int,
        every_steps: int,
        *,
        mask_fraction: float,
        window: int,
        ranks: Ranks = Ranks(),  # noqa: B008
    ) -> None:
        super().__init__(ids, vocabulary, batch_size, every_steps, ranks=ranks)
        self.mask_fraction = mask_fraction
        self.window = window

    def figures(self, model: Any) -> dict[str, float]:
        """What is measured of the model now, by its logged name: no perplexity, for it is none."""
        score = self.whole(
            evaluate_infill(
                model,
                self.ids,
                self.vocabulary.starts_character,
                self.vocabulary.symbol_bytes,
                mask_fraction=self.mask_fraction,
                window=self.window,
                batch_size=self.batch_size,
                share=(self.ranks.rank, self.ranks.world),
            )
        )
        return {self.loss_name: score.loss}
