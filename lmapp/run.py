"""One run, from a configuration to a directory of results: assembles data, model, training, callbacks and loggers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
import numpy as np
import torch
import yaml
from lightning.fabric.plugins.environments import LightningEnvironment
from rich.console import Console

from lmapp import checkpoint, describe
from lmapp.callbacks.clipping import ClipEvents
from lmapp.callbacks.decay import DecayProbe
from lmapp.callbacks.metrics import TrainingFigures
from lmapp.callbacks.progress import ProgressDisplay
from lmapp.callbacks.samples import InfillSamples, Samples
from lmapp.callbacks.spectrum import SpectrumProbe
from lmapp.callbacks.updates import UpdateFigures
from lmapp.config import RESUMABLE, Config, build, differences, merge, option_name, read_yaml
from lmapp.data.datamodule import TextDataModule
from lmapp.data.encoded import EncodedCorpus
from lmapp.data.http import without_password
from lmapp.data.tasks import task_of
from lmapp.errors import LmappError, UsageError
from lmapp.gradients import spectrum
from lmapp.gradients.decay import ProbeShape, not_defined
from lmapp.loggers import wandb as wandb_runs
from lmapp.loggers.records import SUMMARY, LocalLogger, Records
from lmapp.models import InfillModel, Network, RecurrentModel, make_model
from lmapp.training import memory, plan, processes
from lmapp.training.infill import InfillModule
from lmapp.training.module import LanguageModule
from lmapp.training.probe import SEED, place
from lmapp.training.processes import Ranks
from lmapp.training.saving import EndOfStep, SafeCheckpointIO, keep_as_best
from lmapp.training.truncation import check_resets, kernels, resolve
from lmapp.training.validation import InfillValidation, TaskValidation, Validation
from lmapp.units import count

_DIGESTED = 1_000_000
"""Characters of the validation text that it is told by, beside its length; a symbol is at least a quarter of one."""

COMPLETE = "complete"
"""Of `wandb` in summary.json: W&B's run was closed with everything in it."""


class Stopped(LmappError):
    """The run ended before its plan was fulfilled; what it had is saved."""


class Interrupted(Stopped):
    """By Ctrl-C or SIGTERM."""

    exit_code = 130


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        path: its directory.
        metrics: its summary: best and last validation figures, parameters, characters, seconds, steps.
    """

    path: Path
    metrics: dict[str, Any]


def train(
    source: str | Path | Mapping[str, Any] | Config | None = None,
    *,
    resume: str | None = None,
    runs_dir: str | None = None,
    changes: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Run:
    """Train a model as a configuration says, or go on with a run.

    Several processes, started by torchrun or srun, train it together; only the first of them writes and prints.

    Args:
        source: a YAML file, nested options as a dict, or a Config; by default the default configuration.
        resume: a run's name or directory, to go on with instead.
        runs_dir: where runs are; by default as configured.
        changes: options in place of those of the source; of a resumed run only limits and logging may change.
        quiet: print nothing.

    Raises:
        UsageError: an option is wrong, or a run of that name exists.
        LmappError: the text cannot be had, the disk is full, the gradients stay non-finite.
        Interrupted: by Ctrl-C; the run is saved.
    """
    with processes.joined() as ranks:
        console = describe.Console(quiet=quiet or not ranks.first, highlight=False)
        console.soft_wrap = not console.is_terminal  # in a pipe a line stays one line
        if resume is not None:
            if source is not None:
                raise UsageError("A resumed run has its own configuration: leave out the source.")
            runs_dir = Config().runs_dir if runs_dir is None else runs_dir
            with ranks.agreed():
                assembly = _taken_up(resume, runs_dir, changes or {}, console, ranks)
        else:
            with ranks.agreed():
                assembly = _Assembly(_configured(source, changes or {}, runs_dir), console, ranks)
        return assembly.run()


def _configured(
    source: str | Path | Mapping[str, Any] | Config | None, changes: Mapping[str, Any], runs_dir: str | None
) -> Config:
    """The configuration of a new run, from what `train` is given."""
    options: Mapping[str, Any] = {}
    if isinstance(source, Config):
        options = source.as_dict()
    elif isinstance(source, Mapping):
        options = source
    elif source is not None:
        options = read_yaml(source)
        build(options, source=str(source))
    options = merge(options, changes)
    return build(options if runs_dir is None else {**options, "runs_dir": runs_dir})


def _taken_up(name: str, runs_dir: str, changes: Mapping[str, Any], console: Console, ranks: Ranks) -> _Assembly:
    """A run that is to go on, from its last checkpoint."""
    directory = checkpoint.run_directory(name, runs_dir)
    last = directory / "checkpoints" / checkpoint.LAST
    if not last.is_file():
        raise LmappError(_ended_too_soon(directory))
    content = checkpoint.read(last)
    saved = content["lmapp"]
    old = build(saved["config"])
    config = build(merge(saved["config"], changes)) if changes else old
    refused = [name for name, _, _ in differences(old, config) if name not in RESUMABLE]
    if refused:
        options = ", ".join(option_name(name.split(".")) for name in refused)
        raise UsageError(
            f"{options} cannot change when a run goes on: only limits and logging can.\nStart a new run instead."
        )
    limits = ("train.max_steps", "train.max_minutes", "train.max_epochs", "train.target_accuracy")
    replan = any(name in limits for name, _, _ in differences(old, config))
    if saved["progress"]["state"] == "finished" and not replan:
        if ranks.first:
            _Assembly(config, console, ranks, directory=directory, saved=saved).complete_wandb()
        raise UsageError(
            f"The run {directory} is finished (step {saved['progress']['step']:,}).\n"
            "Give it a higher limit to go on: --train.max-steps, --train.max-minutes or --train.max-epochs."
        )
    best, validates = saved["progress"]["best"], saved["corpus"]["facts"]["validation_characters"] > 0
    if ranks.first and (not validates or (best is not None and best["step"] == saved["progress"]["step"])):
        keep_as_best(last)  # it may have been killed between writing the two
    return _Assembly(config, console, ranks, directory=directory, saved=saved, replan=replan)


class _Assembly:
    """Everything of one run, put together in the order in which it is needed."""

    def __init__(
        self,
        config: Config,
        console: Console,
        ranks: Ranks = Ranks(),  # noqa: B008
        *,
        directory: Path | None = None,
        saved: dict[str, Any] | None = None,
        replan: bool = False,
    ) -> None:
        self.config = config
        self.console = console
        self.ranks = ranks
        self.directory = directory
        self.saved = saved
        self.replan = replan

    def run(self) -> Run:
        """Train to the end."""
        _quieten_libraries()
        config, saved, ranks = self.config, self.saved, self.ranks
        with ranks.agreed():
            with torch.device("meta"):
                make_model(2, config.model)  # refuses what does not go together before the text is read
            if self.directory is None and ranks.first:
                _check_name(config)
            if ranks.world > 1 and config.data.streaming and "-" in config.data.path:
                raise UsageError(
                    "--data.streaming reads standard input once, and every process reads the text.\n"
                    "Train in one process, or leave out --data.streaming."
                )
            device = _device(config.train.device, ranks)
        _refuse_shared(device, ranks)
        with _threads(saved["plan"]["threads"] if saved else None), ExitStack() as held:
            data = self._open_data()
            precision = saved["plan"]["precision"] if saved else _precision(config.train.precision, device)
            precision = ranks.of_first(precision)
            with ranks.agreed():
                model = self._prepare(data, precision, device)
            with ranks.agreed():
                if ranks.first:
                    self.directory = self.directory or _make_directory(config, data.corpus_name)
                    held.enter_context(_sole_writer(self.directory))
            directory = Path(ranks.of_first(str(self.directory)))
            return self._train(data, model, precision, device, directory)

    def _prepare(self, data: TextDataModule, precision: str, device: torch.device) -> Network:
        """The model, if there is memory to train it, and how its gradient is cut and measured."""
        config, ranks = self.config, self.ranks
        corpus, batches = data.corpus, data.train_dataloader()
        assert corpus is not None
        _check_rows(batches.batch_size, config, ranks.world)
        self.truncation = resolve(config.train, batches.sequence_length, batches.longest)
        memory.check_weights(config, len(data.vocabulary), device, ranks.local_world)
        torch.manual_seed(config.seed)
        model = make_model(len(data.vocabulary), config.model).to(device)
        model.compute_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self.probe_shape, self.probe_note, self.probe_windows = self._place_probe(corpus)
        shape = batches.batch_size // ranks.world, batches.sequence_length, batches.longest
        if batches.resets:
            check_resets(model)
        self.need = memory.needed(model, config.train, self.truncation, *shape, self.probe_shape, resets=batches.resets)
        memory.check(self.need, config, self.truncation, batches, self.probe_shape, device, ranks.local_world)
        return model

    def _train(
        self, data: TextDataModule, model: Network, precision: str, device: torch.device, directory: Path
    ) -> Run:
        config, saved, corpus, batches = self.config, self.saved, data.corpus, data.train_dataloader()
        assert corpus is not None
        ranks, self.directory = self.ranks, directory
        shape = batches.batch_size // ranks.world, batches.sequence_length, batches.longest
        self.validated_on = _digest(data) if len(corpus.validation) > 1 else None
        self.extras: dict[str, Any] = {
            "version": checkpoint.VERSION,
            "config": config.as_dict(),
            "vocabulary": data.vocabulary.to_json(),
            "corpus": {
                "name": data.corpus_name,
                "key": corpus.directory.name,
                "fingerprint": corpus.fingerprint,
                "facts": corpus.facts,
            },
            "plan": {
                "precision": precision,
                "kernels": kernels(model, self.truncation, *shape, resets=batches.resets),
                "threads": torch.get_num_threads(),
                "device": device.type,
                "cpu": _cpu(),
                "batch_size": batches.batch_size,
                "sequence_length": batches.sequence_length,
                "bptt": self.truncation.mode,
                "truncation_length": self.truncation.length,
                "processes": ranks.world,
            },
            "parameters": sum(p.numel() for p in model.parameters()),
            "versions": {name: version(name) for name in ("lmapp", "torch", "lightning", "tokenizers", "wandb")},
            "wandb_id": saved["wandb_id"] if saved else None,
        }
        module = self._module(model, data)
        if saved and self.replan:
            module.new_total = self._new_total(saved["progress"], len(batches))
        records = Records(directory)
        if saved and ranks.first:
            self._take_up(saved, records)
        probe = self._probe(records)
        self._describe(data, module)
        wandb_run, written = self._open_wandb(data.corpus_name) if ranks.first else (None, set())
        loggers: list[Any] = [LocalLogger(records)] if ranks.first else []
        if wandb_run is not None:
            self.extras["wandb_id"] = wandb_run.id
            loggers.append(wandb_runs.RunLogger(wandb_run, written))
        signals = _Signals(module, self._say)
        trainer = lightning.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1 if device.index is None else [device.index],
            max_epochs=-1,
            logger=loggers,
            callbacks=[signals, *self._callbacks(data, model, records, probe)],
            # To Lightning each process is alone.
            plugins=[SafeCheckpointIO(ranks.first), LightningEnvironment()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
        )
        last = directory / "checkpoints" / checkpoint.LAST
        try:
            with signals, memory.kept_between_steps():
                trainer.fit(module, datamodule=data, ckpt_path=last if saved else None, weights_only=True)
        finally:
            records.close()
            if wandb_run is not None:
                wandb_run.summary.update(_flat(self._summary(module)))
                wandb_run.finish(exit_code=0 if module.progress.state == "finished" else 1)
                if module.progress.state == "finished":
                    records.write_summary({**self._summary(module), "wandb": COMPLETE})
        return self._close(module, probe)

    def _module(self, model: Network, data: TextDataModule) -> LanguageModule:
        steps = len(data.train_dataloader())
        if isinstance(model, InfillModel):
            starts = data.vocabulary.starts_character
            return InfillModule(model, self.config, self.truncation, steps, self.extras, starts, self.ranks)
        return LanguageModule(model, self.config, self.truncation, steps, self.extras, self.ranks)

    def _take_up(self, saved: Mapping[str, Any], records: Records) -> None:
        """Bring a resumed run's files back to its checkpoint, and say where it will not be bit for bit the same."""
        for name in records.cut_back(saved["records"]):
            self._say(f"{records.directory / name} lacks lines that the checkpoint knows of.")
        _write_config(records.directory, self.config)
        now, then = self.extras, saved
        # Which processor there is decides how the products of a CPU are computed, and their last bits.
        plan_names = ["processes", "device", "kernels", *(["cpu"] if now["plan"]["device"] == "cpu" else [])]
        changed = [
            f"{name} {then[part][name]} is {now[part][name]} now"
            for part, names in (("plan", plan_names), ("versions", ("lmapp", "torch")))
            for name in names
            if now[part][name] != then[part][name]
        ]
        if changed:
            self._say(f"Going on, but not bit for bit: {'; '.join(changed)}.")
        if self.replan and self.config.train.schedule == "cosine":
            self._say(
                "With the new limit the cosine schedule is stretched: the learning rate rises where it had fallen."
            )

    def complete_wandb(self) -> None:
        """Give a finished run's W&B run what a kill at the very end kept from it."""
        assert self.saved is not None
        assert self.directory is not None
        summary = json.loads((self.directory / SUMMARY).read_text(encoding="utf-8"))
        if self.saved["wandb_id"] is None or summary.get("wandb") == COMPLETE:
            return
        self.extras = dict(self.saved)
        with _sole_writer(self.directory):
            wandb_run, _ = self._open_wandb(self.saved["corpus"]["name"])
            if wandb_run is not None:
                wandb_run.summary.update(_flat(summary))
                wandb_run.finish()
                Records(self.directory).write_summary({**summary, "wandb": COMPLETE})

    # The parts --------------------------------------------------------------------------------------------------------

    def _open_data(self) -> TextDataModule:
        with describe.encoding_progress(self.console) as progress:
            whole_rows = self.config.train.bptt == "full"
            data = TextDataModule(
                self.config.data, progress=progress, say=self._say, seed=self.config.seed, whole_rows=whole_rows
            )
            ranks = self.ranks
            with ranks.agreed():
                if ranks.first and self.saved:
                    data.setup_from(self.saved["corpus"])
                elif ranks.first:
                    data.setup()
            corpus = data.corpus
            known = ranks.of_first(corpus and {"key": corpus.directory.name, "fingerprint": corpus.fingerprint})
            # Now it is in the cache. A machine that does not share that one encodes the text once, too.
            for turn in (0, 1):
                with ranks.agreed():
                    if not ranks.first and turn == min(ranks.local_rank, 1):
                        data.setup_from(known)
        return data

    def _new_total(self, progress: Mapping[str, Any], steps_per_epoch: int) -> int | None:
        """The plan under changed limits: the pace so far is known, so that no step need be timed."""
        train, step = self.config.train, progress["step"]
        total = plan.limit_in_steps(train, steps_per_epoch)
        minutes = plan.minutes(train)
        if minutes is not None:
            timed = plan.steps_in_minutes(minutes, step, progress["seconds"], progress["seconds"] / step)
            total = timed if total is None else min(total, timed)
        if total is not None and total <= step:
            limits = [
                f"{option_name(('train', name))} {getattr(train, name):g}"
                for name in ("max_steps", "max_minutes", "max_epochs")
                if getattr(train, name) is not None
            ]
            raise UsageError(
                f"The run is at step {step:,}, beyond the limit given ({total:,} steps): there is nothing left to do.\n"
                f"In force are {' and '.join(limits)}: raise them, or set one to none."
            )
        return total

    def _place_probe(self, corpus: EncodedCorpus) -> tuple[ProbeShape | None, str, np.ndarray | None]:
        """Where gradients are measured, if they are and the text is long enough, and what is to be said of it."""
        settings = self.config.gradients
        if settings.every_steps == 0:
            return None, "", None
        if self.config.model.kind == "infill":
            return None, f"no gradient decay is measured: {not_defined('infill')}", None
        return place(
            self.config,
            self.truncation,
            corpus.validation,
            corpus.train,
            task=task_of(self.config.data),
            windows=settings.windows,
            max_lag=settings.max_lag,
        )

    def _probe(self, records: Records) -> DecayProbe | None:
        if self.probe_shape is None or self.probe_windows is None:
            return None
        settings = self.config.gradients
        return DecayProbe(
            self.probe_windows, self.probe_shape, settings.every_steps, records, settings.budget, self._say
        )

    def _callbacks(
        self, data: TextDataModule, model: Network, records: Records, probe: DecayProbe | None
    ) -> list[lightning.Callback]:
        """In the order of a step's end: validation, events, figures, decay, spectrum, sample, display, saving.

        Validation is first because it may end the run, at which the others' figures are due. Only it and saving are the
        work of all processes.
        """
        config, corpus = self.config, data.corpus
        assert corpus is not None and self.directory is not None
        train = config.train
        callbacks: list[lightning.Callback] = []
        validates = len(corpus.validation) > 1
        vocabulary, every = data.vocabulary, train.val_every_steps
        masking: dict[str, Any] = {}
        if config.model.kind == "infill":
            window = data.train_dataloader().sequence_length
            masking = {"mask_fraction": config.model.mask_fraction, "window": window}
        split = corpus.validation, vocabulary, config.data.batch_size, every
        if (task := task_of(config.data)) is not None:
            callbacks.append(TaskValidation(*split, scored=task.scored, ranks=self.ranks))
        elif validates and masking:
            callbacks.append(InfillValidation(*split, **masking, ranks=self.ranks))
        elif validates:
            starts = corpus.starts["validation"] if config.data.reset_state else None
            callbacks.append(Validation(*split, starts=starts, ranks=self.ranks))
        callbacks += [
            ClipEvents(records, data.vocabulary),
            TrainingFigures(config.logging.every_steps),
            UpdateFigures(config.logging.every_steps),
        ]
        if probe is not None:
            callbacks.append(probe)
            every_spectrum = config.gradients.spectrum_every_steps
            if isinstance(model, RecurrentModel) and every_spectrum:
                reason = spectrum.why_not(model)
                if reason is None:
                    callbacks.append(SpectrumProbe(probe.windows, probe.shape, every_spectrum, SEED))
                else:
                    self._say(f"No spectrum is measured: {reason}.")
        if masking:
            ids = corpus.validation if validates else corpus.train
            callbacks.append(InfillSamples(records, vocabulary, every, ids=ids, seed=config.seed, **masking))
        else:
            callbacks.append(Samples(records, vocabulary, every, seed=config.seed))
        if not self.console.quiet:
            callbacks.append(ProgressDisplay(self.console))
        callbacks.append(
            EndOfStep(
                self.directory / "checkpoints",
                records,
                minutes=train.checkpoint_minutes,
                summary=self._summary,
                validates=validates,
            )
        )
        return callbacks if self.ranks.first else [c for c in callbacks if isinstance(c, Validation | EndOfStep)]

    def _open_wandb(self, corpus_name: str) -> tuple[Any, set[int]]:
        """The W&B run and the steps it already holds; (None, …) when disabled."""
        assert self.directory is not None
        settings = self.config.logging
        mode, why = wandb_runs.choose_mode(settings.wandb)
        look = "" if mode != "offline" else f"; look with: wandb leet {self.directory}/wandb"
        describe.line(self.console, "W&B", f"{mode} ({why}){look}")
        run = wandb_runs.open_run(
            self.directory,
            mode=mode,
            project=settings.project,
            group=settings.group,
            tags=[self.config.model.label, corpus_name, *settings.tags],
            name=self.directory.name,
            config={**_shown(self.config), "parameters": self.extras["parameters"], **self.extras["plan"]},
            run_id=self.extras["wandb_id"],
            secret=any(without_password(word) != word for word in sys.argv),
            say=self._say,
        )
        if run is None or not self.saved:
            return run, set()
        written = wandb_runs.written_steps(self.directory, run)
        wandb_runs.fill_gaps(run, self.directory, written)
        return run, written

    # What is said -----------------------------------------------------------------------------------------------------

    def _say(self, message: str) -> None:
        describe.note(self.console, message)

    def _describe(self, data: TextDataModule, module: LanguageModule) -> None:
        """What was understood, before the first step."""
        config, console, facts, batches = self.config, self.console, self._facts(), data.train_dataloader()
        describe.text(console, config, facts)
        describe.network(console, config, self.extras["parameters"])
        describe.steps(console, config, batches, self.truncation, self.need, self.extras["plan"])
        if self.probe_note:
            self._say(self.probe_note[0].upper() + self.probe_note[1:] + ".")
        total, done = module.progress.total_steps, None
        if self.saved:
            done = self.saved["progress"]["step"]
            total = module.new_total if self.replan else self.saved["progress"]["total_steps"]
        describe.limits(console, config.train, total, done)
        describe.line(console, "run", f"{self.directory}")

    def _facts(self) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = self.extras["corpus"]["facts"]
        return facts

    def _summary(self, module: LanguageModule) -> dict[str, Any]:
        progress, facts = module.progress, self._facts()
        return {
            "state": progress.state,
            "best": progress.best,
            "last": progress.last,
            "steps": progress.step,
            "total_steps": progress.total_steps,
            "epochs": progress.epoch,
            "characters": progress.characters,
            "seconds": progress.seconds,
            "parameters": self.extras["parameters"],
            "clip_events": progress.clip_events,
            "clip_share": progress.clip_events / max(1, progress.step),
            "norm_mean": progress.norms.mean,
            **progress.norms.percentiles(),
            "nonfinite_events": progress.nonfinite_events,
            "unigram_bits": facts["unigram_bits"],
            "bigram_bits": facts["bigram_bits"],
            "corpus": self.extras["corpus"]["name"],
            "validated_on": self.validated_on,
            **self.extras["plan"],
        }

    def _close(self, module: LanguageModule, probe: DecayProbe | None) -> Run:
        """The closing table, the verdict and the way on; an early end is an error that says how to go on."""
        directory, progress = self.directory, module.progress
        assert directory is not None
        summary = self._summary(module)
        saved = (directory / "checkpoints" / checkpoint.LAST).is_file()
        imports = checkpoint.import_options(self.config.model.cells)
        way_on = f"Go on with: lmapp train --resume {_name(directory, self.config)}{imports}"
        if progress.state == "stopped":
            kept = f"The last checkpoint is whole: {directory / 'checkpoints'}." if saved else "Nothing was saved yet."
            in_a_row = progress.nonfinite_in_a_row
            what = (
                f"{count(in_a_row, 'gradient')} in a row not finite"
                if in_a_row >= self.config.train.max_nonfinite
                else "the network's weights are not finite any more"
            )
            raise Stopped(
                f"Training stopped at step {progress.step:,}: {what}.\n"
                f"{kept}\nTry a lower --train.learning-rate or --train.clip-norm; clip_events.jsonl has the texts."
            )
        decay, measured = (None, 0) if probe is None else (probe.latest, probe.latest_step)
        describe.figures(self.console, f"{directory}", self.config, summary, progress, decay, measured)
        if decay is not None:
            describe.cost(self.console, decay, self.truncation)
        if progress.state == "interrupted":
            raise Interrupted(f"Interrupted at step {progress.step:,} and saved.\n{way_on}")
        validated = progress.last is not None
        kind = self.config.model.kind
        describe.ways_on(self.console, kind, _name(directory, self.config), imports, validated=validated)
        return Run(directory, summary)


def _digest(data: TextDataModule) -> str:
    """What the validation text is told by, whatever the alphabet: runs with the same one can be ranked together."""
    assert data.corpus is not None
    beginning = data.vocabulary.decode(data.corpus.validation[: 4 * _DIGESTED])[:_DIGESTED]
    length = data.corpus.facts["validation_characters"]
    return hashlib.sha256(f"{length}:{beginning}".encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _name(directory: Path, config: Config) -> str:
    """The run as a command names it: its name alone where that suffices."""
    return (
        directory.name if config.runs_dir == "runs" and Path("runs") / directory.name == directory else str(directory)
    )


def _shown(config: Config) -> dict[str, Any]:
    """The configuration for others to see: without the passwords of addresses."""
    options = config.as_dict()
    for name in ("path", "val_path", "test_path"):
        options["data"][name] = list(map(without_password, options["data"][name]))
    return options


def _flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The summary for W&B's table: one level, one sortable column a figure."""
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}/{name.removeprefix('val/')}": figure for name, figure in value.items()}
        elif value is not None:
            flat[key] = value
    return flat


def _device(wanted: str, ranks: Ranks) -> torch.device:
    """The CPU or a GPU: of several processes each has its own."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UsageError("--train.device is cuda, but no CUDA device can be used here. Try --train.device cpu.")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    if ranks.world == 1:
        return torch.device("cuda")
    # Where each process is shown but its own GPU, that has number 0.
    device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _refuse_shared(device: torch.device, ranks: Ranks) -> None:
    """Refuse two processes on one GPU: what they tell each other goes from one GPU to another.

    Raises:
        UsageError: there are more processes than GPUs.
    """
    if device.type == "cuda" and ranks.world > 1:
        used = ranks.gather((socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)))
        if len(set(used)) < ranks.world:
            raise UsageError(
                "There are more processes than GPUs: start one for each GPU of a machine, or set --train.device cpu."
            )


def _check_rows(rows: int, config: Config, processes: int) -> None:
    """Refuse rows that cannot be shared out evenly.

    Raises:
        UsageError: they cannot.
    """
    if rows % processes == 0:
        return
    fewer = rows // processes * processes
    which = [str(fewer)] if fewer else []
    if rows == config.data.batch_size:  # not the most that the text allows
        which.append(str(fewer + processes))
    way = f"Set --data.batch-size {' or '.join(which)}." if which else "Use more text, or fewer processes."
    raise UsageError(f"{count(rows, 'row')} cannot be divided evenly among {processes} processes.\n{way}")


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """So many threads for a while, if a number is given; the caller's own number afterwards."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cpu() -> str:
    """What decides which products a CPU computes, and so their last bits."""
    onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return f"{torch.backends.cpu.get_cpu_capability()}{' with oneDNN' if onednn else ' without oneDNN'}"


def _precision(wanted: str, device: torch.device) -> str:
    """fp32 or bf16; auto means bf16 where the hardware multiplies it natively: emulated, it is slower than fp32."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "fp32"


def _ended_too_soon(directory: Path) -> str:
    return (
        f"The run {directory} has no checkpoint to go on from.\n"
        f"Start it again under another --name, or after: rm -r {directory}"
    )


def _check_name(config: Config) -> None:
    """Refuse a name that is taken or cannot be one, before any work is done for it."""
    name = config.name
    if name is None:
        return
    if name in (".", "..") or name.startswith("-") or "/" in name or os.sep in name or not name.isprintable():
        raise UsageError(
            f"--name is a plain name, not {name!r}: no path (the place is --runs-dir), no hyphen at its start."
        )
    directory = Path(config.runs_dir) / name
    if directory.exists() and not (directory / "checkpoints" / checkpoint.LAST).exists():
        raise UsageError(_ended_too_soon(directory))
    if directory.exists():
        raise UsageError(
            f"The run {directory} exists and is not overwritten.\n"
            f"Choose another --name, or go on with it: lmapp train --resume {_name(directory, config)}"
            f"{checkpoint.import_options(config.model.cells)}"
        )


def _write_config(directory: Path, config: Config) -> None:
    """Write config.yaml, atomically: complete and usable as input, so without the name that is taken."""
    text = yaml.safe_dump(replace(config, name=None).as_dict(), sort_keys=False, allow_unicode=True)
    temporary = directory / ".config.yaml.tmp"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, directory / "config.yaml")


def _make_directory(config: Config, corpus: str) -> Path:
    """A new directory `runs_dir/NAME`; an existing one is never touched."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", corpus).strip("-.") or "text"
    cell = config.model.label
    stem = config.name or f"{plain}-{cell}-{datetime.now():%Y%m%d-%H%M%S}"
    parent = Path(config.runs_dir)
    for attempt in range(100):
        directory = parent / (stem if attempt == 0 else f"{stem}-{attempt + 1}")
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            _check_name(config)
            continue
        except OSError as error:
            raise LmappError(f"{directory} cannot be made: {error.strerror or error}.") from None
        try:
            (directory / "checkpoints").mkdir()
            _write_config(directory, config)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise LmappError(f"{directory} cannot be written: {error.strerror or error}.") from None
        return directory
    raise LmappError(f"{parent} holds a hundred runs named {stem} already.")


@contextmanager
def _sole_writer(directory: Path) -> Iterator[None]:
    """Hold a run's directory, so that no second process writes into it; a killed process holds nothing.

    Raises:
        UsageError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with open(directory / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"The run {directory} is being trained by another process.") from None
        yield


class _Signals(lightning.Callback):
    """Ctrl-C and SIGTERM end the run after the current step, saved; a second one ends it at once."""

    def __init__(self, module: LanguageModule, say: Callable[[str], None]) -> None:
        self.module = module
        self.say = say

    def __enter__(self) -> _Signals:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._take()
        return self

    def __exit__(self, *exception: object) -> None:
        if _in_main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Once more: Lightning has put its own answer to SIGTERM on top, which ends the program with code 0."""
        self._take()

    def _take(self) -> None:
        if _in_main_thread():
            for number in self._before:
                signal.signal(number, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.module.stop_requested:
            raise Interrupted("Ended at once. What was saved last is whole.")
        self.module.stop_requested = True
        self.say("Ending after this step; once more ends at once.")


def _in_main_thread() -> bool:
    """Python handles signals there only."""
    return threading.current_thread() is threading.main_thread()


def _quieten_libraries() -> None:
    """Keep Lightning's hints about other set-ups off the terminal; warnings about this one stay."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        "The 'train_dataloader' does not have many workers",
        "You defined a `validation_step`",
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "Your `IterableDataset` has `__len__` defined",
    ):
        warnings.filterwarnings("ignore", message=f".*{message}.*")
