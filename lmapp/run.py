"""One run, from a configuration to a directory of results: assembles data, model, training, callbacks and loggers."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
import torch
import yaml
from rich.console import Console
from rich.table import Table

from lmapp import checkpoint
from lmapp.callbacks.clipping import ClipEvents
from lmapp.callbacks.decay import DecayProbe
from lmapp.callbacks.metrics import TrainingFigures
from lmapp.callbacks.progress import ProgressDisplay
from lmapp.callbacks.samples import InfillSamples, Samples
from lmapp.config import RESUMABLE, Config, build, differences, merge, option_name, read_yaml
from lmapp.data.batches import RowBatches
from lmapp.data.datamodule import TextDataModule
from lmapp.errors import LmappError, UsageError
from lmapp.gradients.decay import Truncation, cut_recurrence_warning, probe_shape, probe_windows, verdict
from lmapp.loggers import wandb as wandb_runs
from lmapp.loggers.records import SUMMARY, LocalLogger, Records
from lmapp.models import InfillModel, Network, RecurrentModel, make_model
from lmapp.training import memory, plan
from lmapp.training.infill import InfillModule
from lmapp.training.module import LanguageModule
from lmapp.training.saving import EndOfStep, SafeCheckpointIO, keep_as_best
from lmapp.training.truncation import resolve, work
from lmapp.training.validation import InfillValidation, Validation

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
    console = _Console(quiet=quiet, highlight=False)
    console.soft_wrap = not console.is_terminal  # in a pipe a line stays one line
    if resume is not None:
        if source is not None:
            raise UsageError("A resumed run has its own configuration: leave out the source.")
        return _resume(resume, Config().runs_dir if runs_dir is None else runs_dir, changes or {}, console)
    options: Mapping[str, Any] = {}
    if isinstance(source, Config):
        options = source.as_dict()
    elif isinstance(source, Mapping):
        options = source
    elif source is not None:
        options = read_yaml(source)
        build(options, source=str(source))
    options = merge(options, changes or {})
    return _Assembly(build(options if runs_dir is None else {**options, "runs_dir": runs_dir}), console).run()


def _resume(name: str, runs_dir: str, changes: Mapping[str, Any], console: Console) -> Run:
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
    limits = ("train.max_steps", "train.max_minutes", "train.max_epochs")
    replan = any(name in limits for name, _, _ in differences(old, config))
    if saved["progress"]["state"] == "finished" and not replan:
        _Assembly(config, console, directory=directory, saved=saved).complete_wandb()
        raise UsageError(
            f"The run {directory} is finished (step {saved['progress']['step']:,}).\n"
            "Give it a higher limit to go on: --train.max-steps, --train.max-minutes or --train.max-epochs."
        )
    best, validates = saved["progress"]["best"], saved["corpus"]["facts"]["validation_characters"] > 0
    if not validates or (best is not None and best["step"] == saved["progress"]["step"]):
        keep_as_best(last)  # it may have been killed between writing the two
    return _Assembly(config, console, directory=directory, saved=saved, replan=replan).run()


class _Assembly:
    """Everything of one run, put together in the order in which it is needed."""

    def __init__(
        self,
        config: Config,
        console: Console,
        *,
        directory: Path | None = None,
        saved: dict[str, Any] | None = None,
        replan: bool = False,
    ) -> None:
        self.config = config
        self.console = console
        self.directory = directory
        self.saved = saved
        self.replan = replan

    def run(self) -> Run:
        """Train to the end."""
        _quieten_libraries()
        config, saved = self.config, self.saved
        with torch.device("meta"):
            make_model(2, config.model)  # refuses what does not go together before the text is read
        if self.directory is None:
            _check_name(config)
        device = _device(config.train.device)
        if saved:
            torch.set_num_threads(saved["plan"]["threads"])
        data = self._open_data()
        batches = data.train_dataloader()
        self.truncation = resolve(config.train, batches.sequence_length)
        _check_weights(config, len(data.vocabulary), device)
        torch.manual_seed(config.seed)
        model = make_model(len(data.vocabulary), config.model).to(device)
        precision = saved["plan"]["precision"] if saved else _precision(config.train.precision, device)
        model.compute_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self.need = memory.needed(
            model, self.truncation, batches.batch_size, batches.sequence_length, config.train.carry_state
        )
        _check_memory(self.need, self.truncation, batches, device)
        if self.directory is None:
            self.directory = _make_directory(config, data.corpus_name)
        with _sole_writer(self.directory):
            return self._train(data, model, precision, device, self.directory)

    def _train(
        self, data: TextDataModule, model: Network, precision: str, device: torch.device, directory: Path
    ) -> Run:
        config, saved, corpus, batches = self.config, self.saved, data.corpus, data.train_dataloader()
        assert corpus is not None
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
                "kernels": self._kernels(model, batches),
                "threads": torch.get_num_threads(),
                "device": device.type,
                "batch_size": batches.batch_size,
                "sequence_length": batches.sequence_length,
                "bptt": self.truncation.mode,
                "truncation_length": self.truncation.length,
            },
            "parameters": sum(p.numel() for p in model.parameters()),
            "versions": {name: version(name) for name in ("lmapp", "torch", "lightning", "tokenizers", "wandb")},
            "wandb_id": saved["wandb_id"] if saved else None,
        }
        module = self._module(model, data)
        if saved and self.replan:
            module.new_total = self._new_total(saved["progress"], len(batches))
        records = Records(directory)
        if saved:
            self._take_up(saved, records)
        probe = self._probe(data, records)
        self._describe(data, module)
        wandb_run, written = self._open_wandb(data.corpus_name)
        loggers: list[Any] = [LocalLogger(records)]
        if wandb_run is not None:
            self.extras["wandb_id"] = wandb_run.id
            loggers.append(wandb_runs.RunLogger(wandb_run, written))
        signals = _Signals(module, self._say)
        trainer = lightning.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            max_epochs=-1,
            logger=loggers,
            callbacks=[signals, *self._callbacks(data, records, probe)],
            plugins=[SafeCheckpointIO()],
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
            return InfillModule(model, self.config, self.truncation, steps, self.extras, starts)
        return LanguageModule(model, self.config, self.truncation, steps, self.extras)

    def _kernels(self, model: Network, batches: RowBatches) -> list[str]:
        """What each layer runs on in a whole window that has others before it."""
        steps = work(self.truncation, batches.sequence_length, self.config.train.carry_state)
        if self.truncation.masks:
            assert isinstance(model, RecurrentModel)
            return model.kernels(batches.batch_size, steps, masks=True)
        return model.kernels(batches.batch_size, steps)

    def _take_up(self, saved: Mapping[str, Any], records: Records) -> None:
        """Bring a resumed run's files back to its checkpoint, and say where it will not be bit for bit the same."""
        for name in records.cut_back(saved["records"]):
            self._say(f"{records.directory / name} lacks lines that the checkpoint knows of.")
        _write_config(records.directory, self.config)
        now, then = self.extras, saved
        changed = [
            f"{name} {then[part][name]} is {now[part][name]} now"
            for part, names in (("plan", ("device", "kernels", "threads")), ("versions", ("lmapp", "torch")))
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
        with _encoding_progress(self.console) as progress:
            whole_rows = self.config.train.bptt == "full"
            data = TextDataModule(self.config.data, progress=progress, say=self._say, whole_rows=whole_rows)
            if self.saved:
                data.setup_from(self.saved["corpus"])
            else:
                data.setup()
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

    def _probe(self, data: TextDataModule, records: Records) -> DecayProbe | None:
        """The gradient-decay callback, if it is on and the text is long enough."""
        corpus, settings = data.corpus, self.config.gradients
        assert corpus is not None
        self.probe_note = ""
        if settings.every_steps == 0:
            return None
        if self.config.model.kind != "recurrent":
            self.probe_note = (
                "no gradient decay is measured: it is that of a state carried from left to right, "
                f"which {'a window' if self.config.model.kind == 'window' else 'an infill'} model does not have"
            )
            return None
        shape, self.probe_note = probe_shape(
            len(corpus.validation),
            len(corpus.train),
            truncation_length=self.truncation.length,
            windows=settings.windows,
            max_lag=self.truncation.max_lag if settings.max_lag is None else settings.max_lag,
            look_back=self.truncation.look_back,
        )
        if shape is None:
            return None
        ids = corpus.validation if shape.source == "validation" else corpus.train
        return DecayProbe(probe_windows(ids, shape, self.config.seed), shape, settings.every_steps, records)

    def _callbacks(self, data: TextDataModule, records: Records, probe: DecayProbe | None) -> list[lightning.Callback]:
        """In the order of a step's end: events, figures, validation, decay, sample, display, logging and saving."""
        config, corpus = self.config, data.corpus
        assert corpus is not None and self.directory is not None
        train = config.train
        callbacks: list[lightning.Callback] = [
            ClipEvents(records, data.vocabulary),
            TrainingFigures(config.logging.every_steps),
        ]
        validates = len(corpus.validation) > 1
        vocabulary, every = data.vocabulary, train.val_every_steps
        masking: dict[str, Any] = {}
        if config.model.kind == "infill":
            window = data.train_dataloader().sequence_length
            masking = {"mask_fraction": config.model.mask_fraction, "window": window}
        if validates:
            validation = InfillValidation if masking else Validation
            callbacks.append(validation(corpus.validation, vocabulary, config.data.batch_size, every, **masking))
        if probe is not None:
            callbacks.append(probe)
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
        return callbacks

    def _open_wandb(self, corpus_name: str) -> tuple[Any, set[int]]:
        """The W&B run and the steps it already holds; (None, …) when disabled."""
        assert self.directory is not None
        settings = self.config.logging
        mode, why = wandb_runs.choose_mode(settings.wandb)
        self._line(
            "W&B", f"{mode} ({why})" + ("" if mode != "offline" else f"; look with: wandb leet {self.directory}/wandb")
        )
        run = wandb_runs.open_run(
            self.directory,
            mode=mode,
            project=settings.project,
            group=settings.group,
            tags=[self.config.model.label, corpus_name, *settings.tags],
            name=self.directory.name,
            config={**self.config.as_dict(), "parameters": self.extras["parameters"], **self.extras["plan"]},
            run_id=self.extras["wandb_id"],
            say=self._say,
        )
        if run is None or not self.saved:
            return run, set()
        written = wandb_runs.written_steps(self.directory, run)
        wandb_runs.fill_gaps(run, self.directory, written)
        return run, written

    # What is said -----------------------------------------------------------------------------------------------------

    def _say(self, message: str) -> None:
        self.console.print(f"[yellow]note[/]        {_escape(message)}")

    def _line(self, name: str, text: str) -> None:
        self.console.print(f"[bold]{name:<11}[/] {_escape(text)}")

    def _describe(self, data: TextDataModule, module: LanguageModule) -> None:
        """What was understood, before the first step."""
        config, corpus, batches = self.config, data.corpus, data.train_dataloader()
        assert corpus is not None
        facts, how = corpus.facts, self.extras["plan"]
        source = ", ".join(config.data.path) if config.data.path else f"{config.data.corpus} (a named corpus)"
        self._line("corpus", f"{source}: {facts['characters']:,} characters in {_count(facts['files'], 'file')}")
        boms = f"; {_count(facts['boms_removed'], 'byte-order mark')} removed" if facts["boms_removed"] else ""
        self._line("text", f"{config.data.encoding}, line ends kept as they are{boms}")
        fallback = " and 256 byte symbols, so that any text can be written" if facts["byte_fallback"] else ""
        self._line("alphabet", f"{_count(facts['alphabet'], 'character')}{fallback}")
        unseen = facts["unseen_validation"] + facts["unseen_test"]
        if unseen:
            self._say(
                f"{_count(unseen, 'character')} of validation and test ({len(facts['unseen'])} distinct) never occur "
                "in the training text and are written as bytes."
            )
        held_out = (
            f"validation {facts['validation_characters']:,} "
            + ("(the last tenth" if config.data.val_fraction is None else f"(a share of {config.data.val_fraction:g}")
            + (", at most 1,000,000)" if facts["validation_capped"] else ")")
            if facts["validation_characters"]
            else "validation is off"
        )
        test = f", test {facts['test_characters']:,}" if facts["test_characters"] else ""
        self._line("splits", f"train {facts['train_characters']:,}, {held_out}{test}")
        if config.data.val_fraction is None and not facts["validation_characters"]:
            self._say("The text is too short for a validation split.")
        self._line(
            "baselines",
            f"{self._baselines(facts)} on the {facts['baseline_split']} split",
        )
        model = config.model
        shape = {
            "recurrent": f"{len(model.cells)} × {model.hidden_size}",
            "window": f"of {_count(model.window, 'character')} × {model.hidden_size}",
            "infill": f"{len(model.cells)} × {model.hidden_size} each way",
        }[model.kind]
        inputs = f"embedding of {model.embedding_size}" if model.embedding_size else "one-hot input"
        self._line(
            "model",
            f"{model.label} {shape}, {inputs}, {self.extras['parameters']:,} parameters, "
            f"{model.init} start, seed {config.seed}",
        )
        rows, length = _count(batches.batch_size, "row"), _count(batches.sequence_length, "character")
        carried = "state carried on" if config.train.carry_state else "state reset at every window"
        if model.kind == "infill":
            carried = f"each window by itself, {100 * model.mask_fraction:g} % of it masked"
        if self.truncation.mode == "full":
            carried = "each row's whole text at once (--data.sequence-length is not read)"
        self._line("batches", f"{rows} × {length}, {_count(len(batches), 'step')} a pass, {carried}")
        self._describe_truncation(batches)
        if self.truncation.mode == "full":
            memory_left = memory.available(torch.device(how["device"]))
            there = "" if memory_left is None else f"; {_size(memory_left)} are available"
            self._line("memory", f"about {_size(self.need.total)}, {_size(self.need.step)} of it for the step{there}")
        why = " (native here)" if how["precision"] == "bf16" and how["device"] == "cpu" else ""
        self._line(
            "device",
            f"{how['device']}, {_count(how['threads'], 'thread')}, {how['precision']} products{why}, "
            f"kernel {' + '.join(how['kernels'])}",
        )
        if self.probe_note:
            self._say(self.probe_note[0].upper() + self.probe_note[1:] + ".")
        if self.saved:
            done = self.saved["progress"]
            total = module.new_total if self.replan else done["total_steps"]
            self._line(
                "plan",
                f"goes on after step {done['step']:,} of {total:,}"
                if total
                else f"goes on after step {done['step']:,}",
            )
        elif module.progress.total_steps is not None:
            self._line("plan", f"{module.progress.total_steps:,} steps")
        else:
            limit = plan.minutes(config.train)
            self._line("plan", f"{limit:g} minutes of training, turned into steps after {plan.TIMED_STEPS} of them")
        self._line("run", f"{self.directory}")

    def _describe_truncation(self, batches: RowBatches) -> None:
        """Where the gradient is cut, unless that is where the windows begin."""
        cut, asked = self.truncation, self.config.train.truncation_length
        match cut.mode:
            case "full":
                self._line("gradient", "cut nowhere")
            case "sliding":
                more = f" to {cut.look_back[1]:,}" if cut.stride > 1 else ""
                length = batches.sequence_length
                times = work(cut, length, self.config.train.carry_state) / length
                self._line(
                    "gradient",
                    f"every loss looks back {cut.length:,}{more} steps, for about {times:.3g} times the work of block",
                )
            case "randomised":
                self._line(
                    "gradient",
                    f"passes a step with probability {cut.keep_probability:.4g}, then made up for; "
                    f"looks back {cut.mean_look_back:.3g} steps in the mean",
                )
            case "block" if cut.length < batches.sequence_length:
                self._line("gradient", f"cut every {cut.length:,} steps")
            case "block" if asked is not None and asked > cut.length:
                self._say(
                    f"--train.truncation-length {asked} is longer than the windows that the text allows: "
                    f"the gradient is cut every {cut.length} steps."
                )

    def _baselines(self, facts: Mapping[str, Any]) -> str:
        """What counting characters comes to. A masked one has two neighbours: a bigram knows but the left one."""
        if self.config.model.kind == "infill":
            return f"unigram {facts['unigram_bits'] * math.log(2):.4f} nats per character"
        return f"unigram {facts['unigram_bits']:.3f}, bigram {facts['bigram_bits']:.3f} bits per character"

    def _summary(self, module: LanguageModule) -> dict[str, Any]:
        progress, facts = module.progress, self.extras["corpus"]["facts"]
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
            "nonfinite_events": progress.nonfinite_events,
            "unigram_bits": facts["unigram_bits"],
            "bigram_bits": facts["bigram_bits"],
            "corpus": self.extras["corpus"]["name"],
            **self.extras["plan"],
        }

    def _close(self, module: LanguageModule, probe: DecayProbe | None) -> Run:
        """The closing table, the verdict and the way on; an early end is an error that says how to go on."""
        directory, progress = self.directory, module.progress
        assert directory is not None
        summary = self._summary(module)
        saved = (directory / "checkpoints" / checkpoint.LAST).is_file()
        way_on = f"Go on with: lmapp train --resume {_name(directory, self.config)}"
        if progress.state == "stopped":
            kept = f"The last checkpoint is whole: {directory / 'checkpoints'}." if saved else "Nothing was saved yet."
            in_a_row = progress.nonfinite_in_a_row
            what = (
                f"{_count(in_a_row, 'gradient')} in a row not finite"
                if in_a_row >= self.config.train.max_nonfinite
                else "the network's weights are not finite any more"
            )
            raise Stopped(
                f"Training stopped at step {progress.step:,}: {what}.\n"
                f"{kept}\nTry a lower --train.learning-rate or --train.clip-norm; clip_events.jsonl has the texts."
            )
        table = Table(title=f"{directory}", title_justify="left", show_header=False, title_style="bold")
        table.add_column(style="bold")
        table.add_column()
        rows = [("best validation", progress.best), ("last validation", progress.last)]
        if progress.best == progress.last:
            rows = [("best and last", progress.best)]
        for title, row in rows:
            if row is not None:
                figures = (
                    f"{row['val/infill_loss']:.4f} nats per masked character"
                    if "val/infill_loss" in row
                    else f"{row['val/loss']:.4f} nats, perplexity {row['val/perplexity']:.3f}, "
                    f"{row['val/bits_per_char']:.4f} bits per character"
                )
                table.add_row(title, f"{figures} (step {int(row['step']):,})")
        table.add_row("baselines", self._baselines(summary))
        table.add_row(
            "training",
            f"{progress.step:,} steps, {progress.characters:,} characters, {progress.seconds:.4g} s, "
            f"{progress.characters / max(progress.seconds, 1e-9):,.0f} characters/s",
        )
        share = 100 * progress.clip_events / max(1, progress.step)
        table.add_row("clipping", f"{progress.clip_events:,} of {progress.step:,} gradients clipped ({share:.1f} %)")
        if progress.nonfinite_events:
            table.add_row("non-finite", f"{progress.nonfinite_events:,} gradients discarded")
        if probe is not None and probe.latest is not None:
            when = "" if probe.latest_step == progress.step else f" (measured at step {probe.latest_step:,})"
            table.add_row("half-life", f"{probe.latest.curve().half_life} steps of the gradient{when}")
        self.console.print(table)
        if probe is not None and probe.latest is not None:
            warning = cut_recurrence_warning(probe.latest)
            if warning:
                self._say(warning)
            self.console.print(_escape(verdict(probe.latest, self.truncation)))
        if progress.state == "interrupted":
            raise Interrupted(f"Interrupted at step {progress.step:,} and saved.\n{way_on}")
        name = _name(directory, self.config)
        ways_on = {
            "recurrent": ("generate", "evaluate", "gradients", "compare"),
            "window": ("generate", "evaluate", "compare"),
            "infill": ("infill", "evaluate", "compare"),
        }
        for command in ways_on[self.config.model.kind]:
            self.console.print(f"  lmapp {command} {name}")
        return Run(directory, summary)


def _name(directory: Path, config: Config) -> str:
    """The run as a command names it: its name alone where that suffices."""
    return (
        directory.name if config.runs_dir == "runs" and Path("runs") / directory.name == directory else str(directory)
    )


def _flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The summary for W&B's table: one level, one sortable column a figure."""
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}/{name.removeprefix('val/')}": figure for name, figure in value.items()}
        elif value is not None:
            flat[key] = value
    return flat


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _device(wanted: str) -> torch.device:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UsageError("--train.device is cuda, but no CUDA device can be used here. Try --train.device cpu.")
    return torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and available) else "cpu")


def _precision(wanted: str, device: torch.device) -> str:
    """fp32 or bf16; auto means bf16 where the hardware multiplies it natively: emulated, it is slower than fp32."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "fp32"


def _check_weights(config: Config, vocabulary_size: int, device: torch.device) -> None:
    """Refuse a network that cannot fit, before it is made."""
    with torch.device("meta"):
        model = make_model(vocabulary_size, config.model)
    need, there = memory.weights(model), memory.available(device)
    if there is not None and need > there:
        parameters = sum(p.numel() for p in model.parameters())
        raise UsageError(
            f"This needs at least {_size(need)} of memory ({parameters:,} parameters); {_size(there)} are available.\n"
            "Try a smaller --model.hidden-size or --model.num-layers."
        )


def _check_memory(need: memory.Need, truncation: Truncation, batches: RowBatches, device: torch.device) -> None:
    """Refuse a step that cannot fit before the system starts to kill processes for it."""
    there = memory.available(device)
    if there is None or need.total <= there:
        return
    smaller = "--model.hidden-size, --data.batch-size or --data.sequence-length"
    match truncation.mode:
        case "full":
            ways = "It grows with the text: use less of it, a smaller --model.hidden-size, or another --train.bptt."
        case "sliding":
            ways = f"Try a larger --train.stride, or a smaller --train.truncation-length, {smaller}."
        case _:
            ways = f"Try a smaller {smaller}."
    raise UsageError(
        f"This needs about {_size(need.total)} of memory, {_size(need.step)} of it for a step of --train.bptt "
        f"{truncation.mode} on\n{_count(batches.batch_size, 'row')} of {_count(batches.sequence_length, 'character')}; "
        f"{_size(there)} are available.\n{ways}"
    )


def _size(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"


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


class _Console(Console):
    """A console whose reader may go away: training goes on without it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _encoding_progress(console: Console) -> Iterator[Any]:
    """A bar while a large text is encoded; nothing for a small one."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("encoding"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)
        started = time.monotonic()

        def progress(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total, visible=time.monotonic() - started > 0.5)

        yield progress


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
