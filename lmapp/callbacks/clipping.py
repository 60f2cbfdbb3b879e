"""Clip events: each one a record with the text that caused it."""

from __future__ import annotations

from typing import Any

import lightning

from lmapp.data.batches import Batch
from lmapp.gradients.clipping import ClipEvent
from lmapp.loggers.records import CLIP_EVENTS, Records, read_lines
from lmapp.loggers.wandb import CLIP_TABLE
from lmapp.training.module import LanguageModule
from lmapp.vocabulary import Vocabulary

LONGEST = 1000
"""Symbols of an event's text: of a longer window, the stretch around the row's largest loss."""


class ClipEvents(lightning.Callback):
    """Appends a `ClipEvent` to clip_events.jsonl whenever a gradient was clipped, or discarded as not finite."""

    def __init__(self, records: Records, vocabulary: Vocabulary) -> None:
        self.records = records
        self.vocabulary = vocabulary

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step's event, if there was one; at the end hand all of them to W&B as a table."""
        assert isinstance(pl_module, LanguageModule) and pl_module.report is not None
        if pl_module.report.kind is not None:
            self.records.append_json(CLIP_EVENTS, self._event(pl_module, batch).as_dict())
        ends = pl_module.progress.finished or pl_module.progress.state == "stopped"
        if ends and (events := list(read_lines(self.records.directory / CLIP_EVENTS))):
            pl_module.figures[CLIP_TABLE] = events

    def _event(self, module: LanguageModule, batch: Batch) -> ClipEvent:
        report, progress = module.report, module.progress
        assert report is not None and report.kind is not None
        # The row with the largest loss; a row that is not finite counts as the largest.
        losses = report.losses.double().sum(1)
        row = int(losses.nan_to_num(nan=float("inf")).argmax())
        worst = int(report.losses[row].nan_to_num(nan=float("inf")).argmax())
        begin = max(0, min(worst - LONGEST // 2, batch.inputs.shape[1] - LONGEST))
        targets = batch.targets[row, begin : begin + LONGEST]
        ids = [int(batch.inputs[row, begin]), *(int(t) for t in targets if t >= 0)]
        return ClipEvent(
            kind=report.kind,
            step=progress.step,
            epoch=progress.epoch if progress.batch else progress.epoch - 1,
            norm=report.norm,
            threshold=report.threshold,
            factor=report.factor,
            loss=report.loss,
            learning_rate=report.learning_rate,
            text=self.vocabulary.decode(ids),
        )
