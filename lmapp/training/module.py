"""The Lightning module: one training step, its clipping, what is reported of it and when it is saved.

Thin: the model, the clipping and the plan are pure functions elsewhere. What a step did is in `report`, what the run
has done so far in `progress`; callbacks read both and put what is to be logged into `figures`, which go to the loggers
as one dictionary when every callback has seen the batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import lightning
import torch
from torch import Tensor

from lmapp.config import Config
from lmapp.data.batches import Batch
from lmapp.gradients import clipping
from lmapp.gradients.norms import NormHistogram
from lmapp.gradients.regulariser import Taken, add_gradients, watching
from lmapp.gradients.truncation import Truncation
from lmapp.models import Network
from lmapp.models.evaluation import losses
from lmapp.training import plan
from lmapp.training.optimizers import make_optimizer
from lmapp.training.processes import Ranks
from lmapp.training.truncation import Carried, cold, read


class StepReport(NamedTuple):
    """What one step did.

    loss: the mean over the characters `predicted`. losses (B, T): that of each prediction in nats, 0 where nothing is
    predicted; of several processes each has those of its own rows, but all of them where `kind` is not None. norm: of
    the gradient before clipping (its largest entry under clipping by value). kind: "clip", "nonfinite" or None.
    correct: of a task's `predicted` characters those that the likeliest symbol predicts; None for other texts.
    """

    loss: float
    predicted: int
    losses: Tensor
    norm: float
    threshold: float | None
    factor: float
    kind: Literal["clip", "nonfinite"] | None
    learning_rate: float
    correct: int | None = None


@dataclass
class Progress:
    """What a run has done so far: all of it is saved, so that a resumed run goes on as if nothing had happened."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches of the current epoch that were trained on."""
    characters: int = 0
    seconds: float = 0.0
    """Spent in training steps."""
    total_steps: int | None = None
    """The plan: None until a limit in minutes has been turned into steps."""
    step_seconds: list[float] = field(default_factory=list)
    """Of the steps timed for the plan."""
    clip_events: int = 0
    nonfinite_events: int = 0
    nonfinite_in_a_row: int = 0
    since_log: dict[str, float] = field(default_factory=dict)
    """Sums since training figures were last logged."""
    norms: NormHistogram = field(default_factory=NormHistogram)
    """Of every step so far, before clipping (largest entries under clipping by value)."""
    decay_every_steps: int | None = None
    """The interval at which gradient decay is measured, once its cost under a budget is known."""
    best: dict[str, float] | None = None
    """step and the figures (val/loss, val/perplexity, …) of the best validation so far."""
    last: dict[str, float] | None = None
    """The same of the last validation."""
    state: str = "running"
    """running, finished, interrupted, stopped (by non-finite gradients)."""

    @property
    def finished(self) -> bool:
        """Whether the plan is fulfilled."""
        return self.total_steps is not None and self.step >= self.total_steps


class LanguageModule(lightning.LightningModule):
    """Trains a model on batches of characters: of several processes each on its share of the rows, with one gradient.

    Args:
        model: what is trained.
        config: the run's configuration.
        truncation: where the gradient through time is cut.
        steps_per_epoch: batches in one pass over the text.
        extras: what a checkpoint stores beside what the module knows itself (vocabulary, text policy, facts).
        ranks: this process among those that train together.
    """

    loss_name: ClassVar[str] = "loss"
    """What J is called in train/… and val/…."""

    def __init__(
        self,
        model: Network,
        config: Config,
        truncation: Truncation,
        steps_per_epoch: int,
        extras: dict[str, Any],
        ranks: Ranks = Ranks(),  # noqa: B008
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.config = config
        self.truncation = truncation
        self.extras = extras
        self.ranks = ranks
        self.steps_per_epoch = steps_per_epoch
        self.progress = Progress(total_steps=self._known_total(steps_per_epoch))
        self.figures: dict[str, Any] = {}
        """To be logged at this step, by their contract names."""
        self.report: StepReport | None = None
        """Of the last step taken."""
        self.step_seconds = 0.0
        """What the last step took."""
        self.stop_requested = False
        """Set by Ctrl-C: end after this step, saved."""
        self.before_clipping: Callable[[LanguageModule], None] | None = None
        """Called in a step whose gradient is finite, when that is summed up and neither clipped nor applied."""
        self.new_total: int | None = None
        """The plan of a resumed run whose limits were changed."""
        self._carried: Carried | None = None
        self._omegas: Taken = []
        self._omega = 0.0
        self._random: dict[str, Any] | None = None
        self._draws_anew = ranks.world > 1
        self._position: dict[str, int] | None = None
        self._loss, self._losses, self._predicted, self._characters = torch.zeros(()), torch.zeros(()), 0, 0
        self._correct: Tensor | None = None
        self._last = False
        self._started = 0.0

    # What is due at a step, asked by every callback -----------------------------------------------------------------

    def due(self, every_steps: int) -> bool:
        """Whether something done every so many steps (0: only at the end) is to be done after the current step."""
        at_end = self.progress.finished
        return at_end or (every_steps > 0 and self.progress.step % every_steps == 0)

    def will_be_due(self, every_steps: int) -> bool:
        """The same of the step being taken, before `progress` knows of it.

        Not foreseen is an end that the step itself brings, by turning a limit in minutes into steps or by the accuracy
        that a validation after it finds.
        """
        step, total = self.progress.step + 1, self.progress.total_steps
        at_end = self._last or (total is not None and step >= total)
        return at_end or (every_steps > 0 and step % every_steps == 0)

    # Training -------------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimiser; its learning rate is set before every step."""
        return make_optimizer(self.model, self.config.train)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Set the step's learning rate."""
        self._started = time.perf_counter()
        if batch_idx != self.progress.batch:
            raise RuntimeError(f"the loader is at batch {batch_idx}, the run at {self.progress.batch}")
        rate = plan.learning_rate(self.config.train, self.progress.step, self.progress.total_steps)
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = rate

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """J of the batch, in nats per character: what this process's rows add to it."""
        inputs, targets = self.ranks.rows(batch.inputs), self.ranks.rows(batch.targets)
        if batch_idx == 0 or not self.config.train.carry_state or self._carried is None:
            self._carried = cold(self.model, inputs.shape[0])
        keep = self.ranks.rows(batch.keep)
        with ExitStack() as watched:
            if self.config.train.omega:
                self._omegas = watched.enter_context(watching(self.model))
            logits, self._carried = read(self.model, inputs, self._carried, self.truncation, keep)
        each = losses(logits, targets)
        self._predicted = batch.characters if batch.answers is None else batch.answers
        # A narrow batch may hold nothing but further bytes of characters, or no answer.
        loss = each.sum() / max(1, self._predicted)
        self._loss, self._losses = loss.detach(), each.detach()
        self._correct = None if batch.answers is None else (logits.detach().argmax(-1) == targets).sum()
        self._characters = batch.characters
        self._last = batch.last
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip once, by our own function, and keep the norm for whoever asks; a non-finite gradient is discarded."""
        train = self.config.train
        if train.omega:
            self._omega = add_gradients(self._omegas, train.omega, self.ranks.sum)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.ranks.sum_(gradients)
        norm = float(clipping.global_norm(gradients))
        # The first process's norm, so that unlike processors cannot disagree on what is done about it.
        own = [float(self._loss), norm if self.ranks.first else 0.0]
        loss, norm, *correct = self.ranks.sum(own if self._correct is None else [*own, float(self._correct)])
        if self.before_clipping is not None and math.isfinite(norm):
            self.before_clipping(self)
        threshold, factor = train.clip_norm, 1.0
        kind: Literal["clip", "nonfinite"] | None = None
        if not math.isfinite(norm):
            kind = "nonfinite"
            factor = 0.0
            for parameter in self.model.parameters():
                parameter.grad = None  # the optimiser passes over it: no update, no weight decay
        elif train.clip_value is not None:
            threshold = train.clip_value
            norm = float(clipping.clip_by_value(gradients, threshold))
            if norm > threshold:
                kind, factor = "clip", threshold / norm
        elif threshold is not None and norm > threshold:
            kind, factor = "clip", threshold / norm
            clipping.clip_by_norm(gradients, threshold, norm)
        self.report = StepReport(
            loss=loss,
            predicted=self._predicted,
            losses=self._losses if kind is None else self.ranks.gather_rows(self._losses),
            norm=norm,
            threshold=threshold,
            factor=factor,
            kind=kind,
            learning_rate=optimizer.param_groups[0]["lr"],
            correct=int(correct[0]) if correct else None,
        )

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Take the step, then bring `progress` up to date with it."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        assert self.report is not None
        elapsed = self.step_seconds = time.perf_counter() - self._started
        progress = self.progress
        progress.step += 1
        progress.batch += 1
        if progress.batch == self.steps_per_epoch:
            progress.batch = 0
            progress.epoch += 1
        progress.characters += self._characters
        progress.seconds += elapsed
        progress.norms.add(self.report.norm)
        if self.report.kind == "nonfinite":
            progress.nonfinite_events += 1
            progress.nonfinite_in_a_row += 1
            self._carried = None  # what made the gradient blow up must not be carried on
        else:
            progress.nonfinite_in_a_row = 0
            progress.clip_events += self.report.kind == "clip"
            sums = progress.since_log
            if self.report.correct is not None:
                sums["correct"] = sums.get("correct", 0) + self.report.correct
                sums["answers"] = sums.get("answers", 0) + self.report.predicted
            if self.config.train.omega:
                sums["omega"] = sums.get("omega", 0.0) + self._omega
                sums["omegas"] = sums.get("omegas", 0.0) + 1
        self._fix_plan(elapsed)
        if self._last:  # a stream has ended that cannot be read again
            progress.total_steps = progress.step
        if progress.nonfinite_in_a_row >= self.config.train.max_nonfinite:
            progress.state = "stopped"

    def _known_total(self, steps_per_epoch: int) -> int | None:
        # With a limit in minutes, the plan is made once the pace is known.
        if plan.minutes(self.config.train) is not None:
            return None
        return plan.limit_in_steps(self.config.train, steps_per_epoch)

    def _fix_plan(self, elapsed: float) -> None:
        """Turn a limit in minutes into steps, once, when enough steps have been timed: by the first process's clock."""
        progress, train = self.progress, self.config.train
        limit_minutes = plan.minutes(train)
        if progress.total_steps is not None or limit_minutes is None:
            return
        progress.step_seconds.append(elapsed)
        known = plan.limit_in_steps(train, self.steps_per_epoch)
        if len(progress.step_seconds) >= plan.TIMED_STEPS or progress.seconds >= limit_minutes * 60:
            rate = plan.pace(progress.step_seconds)
            timed = plan.steps_in_minutes(limit_minutes, progress.step, progress.seconds, rate)
            progress.total_steps = timed if known is None else min(timed, known)
        elif known is not None and progress.step >= known:
            progress.total_steps = known
        progress.total_steps = self.ranks.of_first(progress.total_steps)

    # Saving ---------------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the key `lmapp`: everything beside Lightning's own, as tensors and primitives.

        What is carried is that of all B rows; `random` has one state a process.
        """
        whole = self.ranks.gather_rows
        states, tokens, keep = (None, None, None) if self._carried is None else self._carried
        checkpoint["lmapp"] = {
            **self.extras,
            "progress": asdict(self.progress),
            "states": None if states is None else [{n: whole(t) for n, t in s._asdict().items()} for s in states],
            "tokens": None if tokens is None else whole(tokens),
            "keep": None if keep is None else whole(keep),
            "random": {
                "torch": whole(torch.get_rng_state()[None]),
                "cuda": list(whole(torch.cuda.get_rng_state(self.device)[None])) if self.device.type == "cuda" else [],
            },
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on from `checkpoint`: progress and carried state; the random state is set by `on_train_start`."""
        saved = checkpoint["lmapp"]
        self.progress = Progress(**{**saved["progress"], "norms": NormHistogram(**saved["progress"]["norms"])})
        self.progress.state = "running"
        if self.new_total is not None:
            self.progress.total_steps = self.new_total
        if saved["states"] is not None:
            kinds = [type(s) for s in self.model.initial_state(1)]
            own = self.ranks.rows
            states = tuple(
                kind(**{name: own(tensor) for name, tensor in state.items()})
                for kind, state in zip(kinds, saved["states"], strict=True)
            )
            self._carried = Carried(states, own(saved["tokens"]), own(saved["keep"]))
        self._draws_anew = saved["plan"]["processes"] != self.ranks.world
        self._random = None if self._draws_anew else saved["random"]
        self._count_epochs(checkpoint["loops"]["fit_loop"])

    def _count_epochs(self, loop: dict[str, Any]) -> None:
        """Set Lightning's own counts right: resumed at an epoch's end, it does not count the next as begun.

        A second resume, in that next epoch's middle, would then start the epoch again.
        """
        begun = self.progress.epoch + (self.progress.batch > 0)
        counts = {"ready": begun, "started": begun, "processed": self.progress.epoch, "completed": self.progress.epoch}
        loop["epoch_progress"] = {"total": dict(counts), "current": dict(counts)}
        if self.progress.batch == 0:
            self._position = loop["state_dict"]["combined_loader"][0]  # which it then does not restore
            batches = loop["epoch_loop.batch_progress"]
            batches["is_last_batch"] = False
            batches["total"]["completed"] = batches["total"]["processed"]

    def on_train_start(self) -> None:
        """Restore the random state last, so that nothing done while setting up can have moved it."""
        if self._position is not None:
            loader: Any = self.trainer.train_dataloader
            loader.load_state_dict(self._position)
        if self._random is not None:
            # A copy: of a view torch reads the memory before it.
            torch.set_rng_state(self._random["torch"][self.ranks.rank].clone())
            if self._random["cuda"] and self.device.type == "cuda":
                torch.cuda.set_rng_state(self._random["cuda"][self.ranks.rank].clone(), self.device)
        elif self._draws_anew:
            torch.manual_seed(self.ranks.seed(self.config.seed, self.progress.step))
        if self._carried is not None:
            states, tokens, keep = self._carried
            states = tuple(type(s)(*(t.to(self.device) for t in s)) for s in states)
            self._carried = Carried(states, tokens.to(self.device), None if keep is None else keep.to(self.device))
