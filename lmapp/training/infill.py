"""Training an infill model: what a step of it is."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lmapp.config import Config
from lmapp.data.batches import Batch
from lmapp.gradients.truncation import Truncation
from lmapp.models import InfillModel
from lmapp.models.evaluation import losses
from lmapp.models.infill import choose_masked
from lmapp.training.module import LanguageModule
from lmapp.training.processes import Ranks


class InfillModule(LanguageModule):
    """Trains a model on the characters of each batch, some of them masked anew from torch's global generator.

    Every window is read by itself: nothing is carried from one to the next.

    Args:
        model: what is trained.
        config: the run's configuration.
        truncation: the whole window; there is nothing else to choose.
        steps_per_epoch: batches in one pass over the text.
        extras: as a `LanguageModule` has them.
        starts_character: (V,) whether a symbol starts a character.
        ranks: this process among those that train together; each masks a share of its own rows' characters.
    """

    loss_name: ClassVar[str] = "infill_loss"

    def __init__(
        self,
        model: InfillModel,
        config: Config,
        truncation: Truncation,
        steps_per_epoch: int,
        extras: dict[str, Any],
        starts_character: np.ndarray,
        ranks: Ranks = Ranks(),  # noqa: B008
    ) -> None:
        super().__init__(model, config, truncation, steps_per_epoch, extras, ranks)
        self.starts_character: Tensor
        self.register_buffer("starts_character", torch.from_numpy(starts_character), persistent=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """J of the batch, in nats per masked character: what this process's rows add to it."""
        tokens = self.ranks.rows(batch.inputs)
        masked = choose_masked(tokens, self.starts_character, self.config.model.mask_fraction)
        logits = self.model(tokens.masked_fill(masked, self.model.mask_symbol))
        targets = tokens.masked_fill(~masked, -1)
        each = losses(logits, targets)
        (predicted,) = self.ranks.sum([int((masked & self.starts_character[tokens]).sum())])
        self._predicted, self._characters = int(predicted), batch.characters
        # Without a character that begins there, as in the middle of one spelt in bytes, nothing is masked.
        loss = each.sum() / max(1, self._predicted)
        self._loss, self._losses = loss.detach(), each.detach()
        self._last = batch.last
        return loss
