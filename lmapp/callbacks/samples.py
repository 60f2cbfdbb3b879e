"""Text the model writes as it learns."""

from __future__ import annotations

from typing import Any

import lightning

from lmapp.errors import LmappError
from lmapp.inference.generation import Sampling, generate
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
        sampling = Sampling(temperature=0.8)
        try:
            text = "".join(
                generate(pl_module.model, self.vocabulary, length=self.length, sampling=sampling, seed=self.seed)
            )
        except LmappError as error:  # a network that is not finite; what ends the run says so there
            text = f"({error})"
        loss = pl_module.figures.get("val/loss")
        heading = f"step {pl_module.progress.step}" + (f", validation loss {loss:.4f}" if loss is not None else "")
        self.records.append(SAMPLES, f"--- {heading} ---\n{text}\n\n")
