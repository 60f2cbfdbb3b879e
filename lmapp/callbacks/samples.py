"""Text the model writes as it learns."""

from __future__ import annotations

from typing import Any

import lightning
import numpy as np

from lmapp.errors import LmappError
from lmapp.inference.generation import Sampling, generate
from lmapp.inference.infill import mask_text, restore
from lmapp.loggers.records import SAMPLES, Records
from lmapp.training.module import LanguageModule
from lmapp.vocabulary import Vocabulary


class Samples(lightning.Callback):
    """Appends a sample to samples.txt every `every_steps` steps and at the end, always from the same seed."""

    def __init__(
        self, records: Records, vocabulary: Vocabulary, every_steps: int, *, seed: int, length: int = 300
    ) -> None:
        self.records = records
        self.vocabulary = vocabulary
        self.every_steps = every_steps
        self.seed = seed
        self.length = length

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write a sample if it is due."""
        assert isinstance(pl_module, LanguageModule)
        if not pl_module.due(self.every_steps):
            return
        try:
            text = self.sample(pl_module.model)
        except LmappError as error:  # a network that is not finite; what ends the run says so there
            text = f"({error})"
        loss = pl_module.figures.get(f"val/{pl_module.loss_name}")
        heading = f"step {pl_module.progress.step}" + (f", validation loss {loss:.4f}" if loss is not None else "")
        self.records.append(SAMPLES, f"--- {heading} ---\n{text}\n\n")

    def sample(self, model: Any) -> str:
        """What the model writes now."""
        sampling = Sampling(temperature=0.8)
        return "".join(generate(model, self.vocabulary, length=self.length, sampling=sampling, seed=self.seed))


class InfillSamples(Samples):
    """The same for an infill model: a piece of text, what is masked of it, and how the model restores that.

    Args:
        records: the run's appended files.
        vocabulary: of the corpus.
        every_steps: 0 for only at the end.
        ids: the text that the piece is the beginning of, (N,) integers.
        mask_fraction: share of the characters to restore.
        window: T, as in training.
        seed: of the mask.
        length: of the piece, in symbols.
    """

    def __init__(
        self,
        records: Records,
        vocabulary: Vocabulary,
        every_steps: int,
        *,
        ids: np.ndarray,
        mask_fraction: float,
        window: int,
        seed: int,
        length: int = 200,
    ) -> None:
        super().__init__(records, vocabulary, every_steps, seed=seed, length=length)
        self.window = window
        self.text, self.mask = mask_text(vocabulary.decode(ids[:length]), mask_fraction, seed)

    def sample(self, model: Any) -> str:
        """The masked piece, and below it the restored one."""
        return f"{self.text}\n--\n{restore(model, self.vocabulary, self.text, mask=self.mask, window=self.window).text}"
