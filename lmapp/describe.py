"""What a run prints: what was understood before its first step, and what came of it at its end."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import rich.console
import torch
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from lmapp.config import Config, DataConfig, TrainConfig
from lmapp.data.http import without_password
from lmapp.data.streaming import Batches
from lmapp.data.tasks import Task, task_of
from lmapp.gradients.decay import Decay, cut_recurrence_warning, verdict
from lmapp.gradients.norms import advice
from lmapp.gradients.truncation import Truncation
from lmapp.training import memory, plan
from lmapp.training.module import Progress
from lmapp.training.probe import bridged
from lmapp.training.truncation import work
from lmapp.units import count, size


class Console(rich.console.Console):
    """A console whose reader may go away: training goes on without it."""

    def on_broken_pipe(self) -> None:
        """Print nothing from here on."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(console: rich.console.Console, message: str) -> None:
    """Say what is out of the ordinary."""
    console.print(f"[yellow]note[/]        {escape(message)}")


def line(console: rich.console.Console, name: str, text: str) -> None:
    """Say what something is."""
    console.print(f"[bold]{name:<11}[/] {escape(text)}")


@contextmanager
def encoding_progress(console: rich.console.Console) -> Iterator[Any]:
    """A bar while a large text is encoded; nothing for a small one."""
    columns = (TextColumn("encoding"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)
        started = time.monotonic()

        def progress(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total, visible=time.monotonic() - started > 0.5)

        yield progress


# Before the first step ------------------------------------------------------------------------------------------------


def text(console: rich.console.Console, config: Config, facts: Mapping[str, Any]) -> None:
    """The corpus, by the facts that were found when it was encoded."""
    data = config.data
    if (made := task_of(data)) is not None:
        _task(console, made, facts)
        return
    source = f"{data.corpus} (a named corpus)"
    if data.path:
        source = _named(data.path)
    elif data.hub is not None:
        source = f"{data.hub} on the hub, {data.hub_split}"
    records = f", {count(facts['records'], 'record')}" if facts["records"] != facts["files"] else ""
    files = f"{count(facts['files'], 'file')}{records}"
    if data.streaming:
        line(console, "corpus", f"{source}: read as a stream")
    else:
        added = ", separate validation and test data among them" if data.val_path or data.test_path else ""
        line(console, "corpus", f"{source}: {facts['characters']:,} characters in {files}{added}")
    line(console, "text", _policy(data, facts))
    for problem in _text_problems(data, facts):
        note(console, problem)
    line(console, "alphabet", _alphabet(data, facts))
    for problem in _alphabet_problems(data, facts):
        note(console, problem)
    line(console, "splits", _splits(data, facts))
    if data.val_fraction is None and not data.streaming and not facts["validation_characters"]:
        note(console, "The text is too short for a validation split.")
    baselined = f"the {facts['baseline_split']} split"
    if data.streaming and facts["baseline_split"] == "train":
        baselined = "the stream's beginning"
    line(console, "baselines", f"{_baselines(config, facts)} on {baselined}")


def _task(console: rich.console.Console, task: Task, facts: Mapping[str, Any]) -> None:
    """A made text: there are no files, and what counts is its answers."""
    line(
        console,
        "corpus",
        f"{task.kind}, a task of delay {task.delay:,}: records of {task.record:,} characters, "
        f"{facts['train_records']:,} to train on, {facts['validation_records']:,} for validation",
    )
    (example,) = task.records(1, np.random.default_rng(0))
    text = example.tobytes().decode()[1:]
    shown = text if len(text) <= 60 else f"{text[:30]} … {text[-20:]}"
    line(console, "record", f"{shown}  (scored: {count(task.answers, 'character')} at the end)")
    line(console, "alphabet", count(facts["alphabet"], "character"))
    line(console, "chance", _chance(task))


def _chance(task: Task) -> str:
    return f"accuracy 1/{task.choices}, {math.log(task.choices):.4f} nats, perplexity {task.choices}"


def _named(paths: Sequence[str]) -> str:
    return ", ".join(map(without_password, paths))


def _policy(data: DataConfig, facts: Mapping[str, Any]) -> str:
    """How the bytes became text."""
    if data.alphabet == "bytes":
        return "bytes as they are"
    words = [
        data.encoding if not facts["recognised"] else f"{data.encoding} or by byte order mark: {facts['recognised']}"
    ]
    if facts["boms_removed"]:
        words.append(f"{count(facts['boms_removed'], 'byte order mark')} removed")
    words.append("line ends kept as they are" if data.newlines == "keep" else "each line end made a newline")
    if data.normalization != "none":
        words.append(data.normalization.upper())
    if data.lowercase:
        words.append("lower case")
    if data.reset_state:
        words.append("state reset at every record" if facts["records"] > 1 else "one record, so no state is reset")
    return ", ".join(words)


def _text_problems(data: DataConfig, facts: Mapping[str, Any]) -> Iterator[str]:
    if facts["replaced"]:
        yield f"{count(facts['replaced'], 'place')} could not be decoded as {data.encoding}: U+FFFD stands there now."
    if facts["skipped"]:
        yield f"{count(facts['skipped'], 'byte')} could not be decoded as {data.encoding} and were left out."
    if facts["left_out"]:
        yield f"{count(facts['left_out'], 'hidden file')} left out: {facts['left_out_names']}"


def _alphabet(data: DataConfig, facts: Mapping[str, Any]) -> str:
    if data.alphabet == "bytes":
        return f"256 bytes, of which {facts['alphabet']:,} occur in the training text"
    given = "" if data.alphabet == "characters" else f", given by {data.alphabet}"
    if data.streaming and not given:
        given = f" in the first {facts['train_characters']:,} of the stream"
    fallback = " and 256 byte symbols, so that any text can be written" if facts["byte_fallback"] else ""
    return f"{count(facts['alphabet'], 'character')}{given}{fallback}"


def _alphabet_problems(data: DataConfig, facts: Mapping[str, Any]) -> Iterator[str]:
    unseen = sum(facts[f"unseen_{split}"] for split in ("train", "validation", "test"))
    if data.alphabet != "characters":
        if unseen:
            yield (
                f"{count(unseen, 'character')} ({len(facts['unseen'])} distinct) are without a symbol in "
                f"{data.alphabet} and are written as bytes."
            )
        return
    if facts["rare"]:
        yield (
            f"{count(len(facts['rare']), 'character')} of the training text are too rare for a symbol "
            f"(--data.min-count {data.min_count}): they are written as bytes, {count(facts['rare_train'], 'time')}."
        )
    if unseen:
        yield (
            f"{count(unseen, 'character')} of validation and test ({len(facts['unseen'])} distinct) never occur in the "
            "training text and are written as bytes."
        )


def _splits(data: DataConfig, facts: Mapping[str, Any]) -> str:
    words = ["train the stream" if data.streaming else f"train {facts['train_characters']:,}"]
    if not facts["validation_characters"]:
        words.append("validation is off")
    else:
        how = "the last tenth" if data.val_fraction is None else f"a share of {data.val_fraction:g}"
        how += ", at most 1,000,000" if facts["validation_capped"] else ""
        if data.split_at != "character":
            how = f"from the start of a {data.split_at}"
        words.append(f"validation {facts['validation_characters']:,} ({_named(data.val_path) or how})")
    if facts["test_characters"]:
        given = f" ({_named(data.test_path)})" if data.test_path else ""
        words.append(f"test {facts['test_characters']:,}{given}")
    return ", ".join(words)


def network(console: rich.console.Console, config: Config, parameters: int) -> None:
    """The model."""
    model = config.model
    shape = {
        "recurrent": f"{len(model.cells)} × {model.hidden_size}",
        "window": f"of {count(model.window, 'character')} × {model.hidden_size}",
        "infill": f"{len(model.cells)} × {model.hidden_size} each way",
    }[model.kind]
    inputs = f"embedding of {model.embedding_size}" if model.embedding_size else "one-hot input"
    line(
        console,
        "model",
        f"{model.label} {shape}, {inputs}, {parameters:,} parameters, {model.init} start, seed {config.seed}",
    )


def steps(
    console: rich.console.Console,
    config: Config,
    batches: Batches,
    truncation: Truncation,
    need: memory.Need,
    how: Mapping[str, Any],
) -> None:
    """What a step reads, how far its gradient goes, and what it runs on: `how` is the plan."""
    model = config.model
    rows, length = count(batches.batch_size, "row"), count(batches.sequence_length, "character")
    carried = "state carried on" if config.train.carry_state else "state reset at every window"
    if config.data.task is not None and config.data.reset_state and config.train.carry_state:
        carried += ", initial at every record"
    if model.kind == "infill":
        carried = f"each window by itself, {100 * model.mask_fraction:g} % of it masked"
    if truncation.mode == "full":
        read = "each row's whole text" if config.data.task is None else "each record"
        carried = f"{read} at once (--data.sequence-length is not read)"
    whole = "window of the stream" if config.data.streaming else "pass"
    line(console, "batches", f"{rows} × {length}, {count(len(batches), 'step')} a {whole}, {carried}")
    if (processes := how["processes"]) > 1:
        line(console, "processes", f"{processes}, {count(batches.batch_size // processes, 'row')} each")
    _cuts(console, config.train, batches, truncation)
    task = task_of(config.data)
    if task is not None and model.kind == "window" and model.window <= task.delay:
        reach = count(model.window, "character")
        note(console, f"A window of {reach} does not reach over the delay of {count(task.delay, 'step')}.")
    elif task is not None and model.kind != "window" and (share := bridged(task, truncation)) < 1:
        some, only = ("The", f" for {100 * share:.0f} % of the answers only") if share else ("No", "")
        note(
            console,
            f"{some} gradient bridges the delay of {count(task.delay, 'step')}{only}. "
            f"Windows of --data.sequence-length {task.record} are a record each.",
        )
    if config.train.omega:
        line(console, "regulariser", f"Ω with weight {config.train.omega:g}, for a gradient as long at every step")
    if truncation.mode == "full":
        left = memory.available(torch.device(how["device"]))
        there = "" if left is None else f"; {size(left)} are available"
        most = f"{size(need.step)} of it for the step"
        if need.probe > need.step:
            most = f"{size(need.probe)} of it to measure gradient decay, {size(need.step)} for the step"
        line(console, "memory", f"about {size(need.total)}, {most}{there}")
    why = " (native here)" if how["precision"] == "bf16" and how["device"] == "cpu" else ""
    line(
        console,
        "device",
        f"{how['device']}, {count(how['threads'], 'thread')}, {how['precision']} products{why}, "
        f"kernel {' + '.join(how['kernels'])}",
    )


def _cuts(console: rich.console.Console, train: TrainConfig, batches: Batches, cut: Truncation) -> None:
    """Where the gradient is cut, unless that is where the windows begin; and where the text allows less than asked."""
    length = batches.sequence_length
    too_long = train.truncation_length is not None and train.truncation_length > cut.length
    beyond = f"--train.truncation-length {train.truncation_length} is longer than the windows that the text allows: "
    match cut.mode:
        case "full":
            line(console, "gradient", "cut nowhere")
        case "sliding":
            if too_long:
                note(
                    console,
                    f"--train.truncation-length {train.truncation_length:,} is longer than the rows, of at most "
                    f"{count(batches.longest, 'character')}: every loss looks back to the beginning of its row.",
                )
            if train.stride > cut.stride:
                note(
                    console,
                    f"--train.stride {train.stride} is longer than the windows that the text allows: "
                    f"{cut.stride} losses look back together.",
                )
            more = f" to {cut.look_back[1]:,}" if cut.stride > 1 else ""
            times = work(cut, length, batches.longest) / length
            line(
                console,
                "gradient",
                f"every loss looks back {cut.length:,}{more} steps, for about {times:.3g} times the work of block",
            )
        case "randomised":
            if too_long:
                note(console, f"{beyond}it is taken for {cut.length}.")
            line(
                console,
                "gradient",
                f"passes a step with probability {cut.keep_probability:.4g}, then made up for; "
                f"looks back {cut.mean_look_back:.3g} steps in the mean",
            )
        case "block" if cut.length < length:
            line(console, "gradient", f"cut every {cut.length:,} steps")
        case "block" if too_long:
            note(console, f"{beyond}the gradient is cut every {cut.length} steps.")


def limits(console: rich.console.Console, train: TrainConfig, total: int | None, done: int | None) -> None:
    """How long the run is: `done` are the steps behind a resumed one, `total` those of its plan, where there is one."""
    if done is not None:
        line(console, "plan", f"goes on after step {done:,} of {total:,}" if total else f"goes on after step {done:,}")
    elif total is not None:
        line(console, "plan", f"{total:,} steps")
    else:
        limit = plan.minutes(train)
        line(console, "plan", f"{limit:g} minutes of training, turned into steps after {plan.TIMED_STEPS} of them")


# At its end -----------------------------------------------------------------------------------------------------------


def figures(
    console: rich.console.Console,
    title: str,
    config: Config,
    facts: Mapping[str, Any],
    progress: Progress,
    decay: Decay | None,
    measured: int,
) -> None:
    """The closing table; `decay` is the last measurement, taken at step `measured`."""
    table = Table(title=title, title_justify="left", show_header=False, title_style="bold")
    table.add_column(style="bold")
    table.add_column()
    rows = [("best validation", progress.best), ("last validation", progress.last)]
    if progress.best == progress.last:
        rows = [("best and last", progress.best)]
    for name, row in rows:
        if row is not None:
            losses = (
                f"{row['val/infill_loss']:.4f} nats per masked character"
                if "val/infill_loss" in row
                else f"{row['val/loss']:.4f} nats, perplexity {row['val/perplexity']:.3f}, "
                + (
                    f"{row['val/bits_per_char']:.4f} bits per character"
                    if "val/accuracy" not in row
                    else f"accuracy {row['val/accuracy']:.4f}"
                )
            )
            table.add_row(name, f"{losses} (step {int(row['step']):,})")
    table.add_row("baselines", _baselines(config, facts))
    table.add_row(
        "training",
        f"{progress.step:,} steps, {progress.characters:,} characters, {progress.seconds:.4g} s, "
        f"{progress.characters / max(progress.seconds, 1e-9):,.0f} characters/s",
    )
    share = 100 * progress.clip_events / max(1, progress.step)
    table.add_row("clipping", f"{progress.clip_events:,} of {progress.step:,} gradients clipped ({share:.1f} %)")
    train = config.train
    found = advice(progress.norms, train.clip_norm, progress.clip_events, by_value=train.clip_value is not None)
    if found.mean is not None:
        quantiles = ", ".join(f"{percentage} % {norm:.3g}" for percentage, norm in found.quantiles.items())
        name = "largest entries" if found.quantity == "largest entry" else "gradient norms"
        table.add_row(name, f"mean {found.mean:.3g}; quantiles {quantiles}")
    table.add_row("threshold", found.sentence)
    if progress.nonfinite_events:
        table.add_row("non-finite", f"{progress.nonfinite_events:,} gradients discarded")
    if config.train.target_accuracy is not None and (progress.best or {}).get("val/accuracy", 0.0) >= (
        config.train.target_accuracy
    ):
        table.add_row("ended", f"the accuracy sought, {config.train.target_accuracy:g}, was reached")
    if decay is not None:
        when = "" if measured == progress.step else f" (measured at step {measured:,})"
        half_life = decay.figure("half_life")
        table.add_row("half-life", "none" if half_life is None else f"{half_life} steps of the gradient{when}")
    console.print(table)


def cost(console: rich.console.Console, decay: Decay, truncation: Truncation) -> None:
    """What the truncation costs, and a recurrence that is cut altogether."""
    warning = cut_recurrence_warning(decay)
    if warning:
        note(console, warning)
    console.print(escape(verdict(decay, truncation)))


def ways_on(console: rich.console.Console, kind: str, name: str, imports: str, *, validated: bool) -> None:
    """The commands for what was trained, with the options that import its cells."""
    commands = {
        "recurrent": ("generate", "evaluate", "gradients", "compare"),
        "window": ("generate", "evaluate", "gradients", "compare"),
        "infill": ("infill", "evaluate", "compare"),
    }
    for command in commands[kind]:
        text = " --split train" if command == "evaluate" and not validated else ""
        line = f"  lmapp {command} {shlex.quote(name)}{text}{'' if command == 'compare' else imports}"
        console.print(escape(line))


def _baselines(config: Config, facts: Mapping[str, Any]) -> str:
    """What counting characters comes to. A masked one has two neighbours: a bigram knows but the left one."""
    if (task := task_of(config.data)) is not None:
        return f"chance: {_chance(task)}"
    if config.model.kind == "infill":
        return f"unigram {facts['unigram_bits'] * math.log(2):.4f} nats per character"
    return f"unigram {facts['unigram_bits']:.3f}, bigram {facts['bigram_bits']:.3f} bits per character"
