"""What can be learnt over a delay, beside what the gradient says: many small runs of one task, and what came of them.

Two claims are put to the test. The first: where the gradient that reaches back over the delay is small before the first
step, the task is not learnt. The second: randomised truncation learns what block truncation of the same length does
not, or learns it sooner.

Each run is an ordinary one with a name of its own, below one directory: what is there and finished is not trained
again, what was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import lmapp
from lmapp import checkpoint
from lmapp.config import Config, build, differences, read_yaml
from lmapp.errors import LmappError, UsageError
from lmapp.experiments.history import History
from lmapp.units import jsonable

CELLS: dict[str, dict[str, Any]] = {
    "tanh": {"cell": "vanilla", "init": "torch"},
    "tanh-orthogonal": {"cell": "vanilla", "init": "orthogonal"},
    "irnn": {"cell": "vanilla", "activation": "relu", "init": "identity"},
    "lstm": {"cell": "lstm", "forget_bias": 1.0},
    "gru": {"cell": "gru"},
    "lstm-chrono": {"cell": "lstm"},  # with chrono, by the delay
}
"""The networks, by what they are called."""

SOLVED = 0.99
"""The accuracy of a validation at which a task counts as learnt, and training ends."""

TASK = "brackets"
"""With distractors, for over blanks even an untrained network keeps enough of a symbol for a readout to find. A network
may still learn it without a gradient that reaches the bracket, by no longer letting distractors change its state: a way
to truncate that cuts before it is then late, but need not fail."""

HIDDEN, ROWS, RECORDS, RATE = 128, 32, 6400, 2e-3
VALIDATE_EVERY = 200_000
"""Characters."""
TRUNCATED = "lstm", 30
"""The network and the delay on which ways to truncate are compared."""


class Wanted(NamedTuple):
    """A run that is to be there.

    Attributes:
        name: of its directory.
        cell: of `CELLS`.
        delay: of the task.
        seed: of the run.
        mode: how its gradient is truncated.
        config: all of it.
    """

    name: str
    cell: str
    delay: int
    seed: int
    mode: str
    config: Config


class Lag(NamedTuple):
    """A lag in steps; censored: greater than that."""

    value: float
    censored: bool

    def __str__(self) -> str:
        return f">{self.value:g}" if self.censored else f"{self.value:.3g}"


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        name, cell, delay, seed, mode: as of the run that was wanted.
        state: "finished", or "stopped" by gradients that are not finite.
        solved: whether a validation found the share `SOLVED` of the answers right.
        accuracy: the best of all validations.
        loss: the lowest, in nats per character of an answer.
        steps: of training.
        characters: read in training, up to the validation that solved it.
        seconds: of training.
        half_life_start, half_life_end: of the gradient, before the first step and when last measured: at the end, if
            the run was not stopped.
        R_start, R_end: R at the delay, then.
    """

    name: str
    cell: str
    delay: int
    seed: int
    mode: str
    state: str
    solved: bool
    accuracy: float
    loss: float
    steps: int
    characters: int
    seconds: float
    half_life_start: Lag
    half_life_end: Lag
    R_start: float
    R_end: float


# What is trained ------------------------------------------------------------------------------------------------------


def wanted_runs(
    cells: Sequence[str], delays: Sequence[int], seeds: Sequence[int], seconds: float, out: Path
) -> list[Wanted]:
    """A run for each network, delay and seed: the record a window, for at most so many seconds of training steps."""
    return [
        _wanted(f"{cell}-{delay}-seed{seed}", cell, delay, seed, "record", {"max_minutes": seconds / 60}, 0, out)
        for delay in delays
        for cell in cells
        for seed in seeds
    ]


def truncated_runs(seeds: Sequence[int], characters: int, out: Path, cell: str, delay: int) -> list[Wanted]:
    """A run for each way to truncate and each seed: all may read as many characters.

    The modes: "block": windows of half the delay; "longer block": of one and a half delays, which begin anywhere in a
    record, so that only some answers look back far enough; "sliding": one step more than the delay, for every answer;
    "randomised": the truncation length of "block", a record a window; "full": a record, nothing cut.
    """
    half = max(2, delay // 2)
    record = _config(cell, delay, 1, {}, 0, out).data.record
    modes: dict[str, tuple[dict[str, Any], int]] = {
        "block": ({"bptt": "block"}, half),
        "longer block": ({"bptt": "block"}, delay + half),
        "sliding": ({"bptt": "sliding", "truncation_length": delay + 1, "stride": half}, record),
        "randomised": ({"bptt": "randomised", "truncation_length": half}, record),
        "full": ({"bptt": "full"}, record),
    }
    runs = []
    for mode, (train, length) in modes.items():
        for seed in seeds:
            name = f"truncation-{mode.replace(' ', '-')}-{cell}-{delay}-seed{seed}"
            limit = {**train, "max_steps": max(1, characters // (ROWS * length))}
            runs.append(_wanted(name, cell, delay, seed, mode, limit, length, out))
    return runs


def _wanted(
    name: str, cell: str, delay: int, seed: int, mode: str, train: dict[str, Any], length: int, out: Path
) -> Wanted:
    return Wanted(name, cell, delay, seed, mode, _config(cell, delay, seed, train, length, out))


def _config(cell: str, delay: int, seed: int, train: dict[str, Any], length: int, out: Path) -> Config:
    data: dict[str, Any] = {"task": TASK, "task_delay": delay, "task_records": RECORDS}
    data |= {"batch_size": ROWS} | ({"sequence_length": length} if length else {})
    chrono = {"chrono": float(max(3, delay))} if cell == "lstm-chrono" else {}
    read = ROWS * (length or delay + 3)
    return build(
        {
            "data": data,
            "model": {"hidden_size": HIDDEN, **CELLS[cell], **chrono},
            "train": {
                "optimizer": "adam",
                "weight_decay": 0.0,
                "learning_rate": RATE,
                "schedule": "constant",
                "warmup_steps": 20,
                "val_every_steps": max(1, VALIDATE_EVERY // read),
                "target_accuracy": SOLVED,
                "precision": "fp32",
                "device": "cpu",
                **train,
            },
            "gradients": {"every_steps": 1_000_000, "max_lag": delay + 1, "windows": 32},  # at the start and the end
            "logging": {"wandb": "disabled"},
            "runs_dir": str(out),
            "seed": seed,
        }
    )


def fulfil(run: Wanted, out: Path) -> None:
    """Train a run to its end; what is there of it is taken up, and nothing is done if that is all.

    Raises:
        UsageError: a run of its name was made with other options.
        Interrupted: by Ctrl-C; what there is of the run is saved.
    """
    path = out / run.name
    if not (path / "checkpoints" / checkpoint.LAST).is_file():
        shutil.rmtree(path, ignore_errors=True)  # it was killed before it saved anything
        action: dict[str, Any] = {"source": {**run.config.as_dict(), "name": run.name}}
    else:
        there = build(read_yaml(path / "config.yaml"))
        if other := [name for name, _, _ in differences(there, run.config) if name != "runs_dir"]:
            raise UsageError(
                f"{path} is there, made with another {' and '.join(other[:3])}.\nName another place: --out DIR"
            )
        if is_over(path):
            return
        action = {"resume": str(path)}
    try:
        lmapp.train(**action, quiet=True)
    except LmappError:
        if History(path).summary.get("state") != "stopped":  # by gradients: that is an outcome, too
            raise


def is_over(path: Path) -> bool:
    """Whether a run has come to its end."""
    return History(path).summary.get("state") in ("finished", "stopped")


# What came of it ------------------------------------------------------------------------------------------------------


def outcome(run: Wanted, out: Path) -> Outcome:
    """What the files of a run that is over say."""
    history = History(out / run.name)
    validated = [line for line in history.metrics if "val/accuracy" in line]
    solved_at = next((line for line in validated if line["val/accuracy"] >= SOLVED), None)
    measured = [line for line in history.metrics if "decay/half_life" in line]
    lags = [Lag(float(line["decay/half_life"]), bool(line.get("decay/half_life_censored"))) for line in measured]
    curves = [line["R"] for line in history.decay if (line["layer"], line["component"]) == ("all", "joint")]
    summary = history.summary
    return Outcome(
        *run[:-1],
        state=summary["state"],
        solved=solved_at is not None,
        accuracy=max((line["val/accuracy"] for line in validated), default=math.nan),
        loss=min((float(line["val/loss"]) for line in validated), default=math.nan),
        steps=summary["steps"],
        characters=(solved_at or summary)["characters"],
        seconds=summary["seconds"],
        half_life_start=lags[0] if lags else Lag(math.nan, False),
        half_life_end=lags[-1] if lags else Lag(math.nan, False),
        R_start=float(curves[0][run.delay]),
        R_end=float(curves[-1][run.delay]),
    )


def agreement(outcomes: Iterable[Outcome]) -> float | None:
    """How well R at the delay before the first step tells solved runs from others.

    The share of pairs of a solved and an unsolved run in which the solved one's R is the larger, half of those in which
    both are equal (the area under the ROC curve): 1 if a threshold parts them, 1/2 if R says nothing; None without a
    pair.
    """
    runs = list(outcomes)
    pairs = [(a.R_start, b.R_start) for a in runs if a.solved for b in runs if not b.solved]
    return sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs) if pairs else None


def longest(outcomes: Iterable[Outcome]) -> tuple[int, int, int]:
    """Of one cell the median over seeds of the longest delay solved (0: none), the seeds that solved it, and all."""
    best: dict[int, int] = {}
    for o in outcomes:
        best[o.seed] = max(best.get(o.seed, 0), o.delay if o.solved else 0)
    delay = median_low(best.values())
    return delay, sum(0 < delay <= found for found in best.values()), len(best)


def tables(outcomes: Sequence[Outcome], truncated: Sequence[Outcome]) -> Iterator[Table | str]:
    """What came out: the longest delay of each network, every delay of each, and the ways to truncate."""
    if outcomes:
        yield _longest_table(outcomes)
        yield _delay_table(outcomes)
        found = agreement(outcomes)
        yield (
            "All runs came out alike, so nothing can be said about what the decay curve predicts."
            if found is None
            else "Of a solved and an unsolved run, R at the delay before the first step was the larger in the solved "
            f"one in {100 * found:.0f} % of all such pairs (50 %: it predicts nothing; 100 %: a threshold parts them)."
        )
    if truncated:
        yield _truncation_table(truncated)
        block, randomised = ([o for o in truncated if o.mode == mode] for mode in ("block", "randomised"))
        if block and randomised:
            parts = [
                f"{name} to {_median(runs, 'accuracy'):.3f} within {_median(runs, 'characters'):,} characters"
                for name, runs in (("block truncation came", block), ("randomised", randomised))
            ]
            yield f"Accuracy with one truncation length: {' and '.join(parts)} (chance: 0.25)."


def _longest_table(outcomes: Sequence[Outcome]) -> Table:
    table = _table("Longest delay learnt (median over seeds), and the gradient before→after training")
    for heading in ("delay", "by seeds", "half-life", "R at delay"):
        table.add_column(heading, justify="right")
    for cell, own in _by(outcomes, "cell").items():
        delay, seeds, of = longest(own)
        at = [o for o in own if o.delay == (delay or min(o.delay for o in own))]
        table.add_row(cell, str(delay) if delay else f"not {at[0].delay}", f"{seeds} of {of}", *_gradient(at))
    return table


def _delay_table(outcomes: Sequence[Outcome]) -> Table:
    table = _table("Each network and delay (medians over seeds)")
    for heading in ("delay", "solved", "accuracy", "steps", "half-life", "R at delay"):
        table.add_column(heading, justify="right")
    for cell, own in _by(outcomes, "cell").items():
        for delay, runs in sorted(_by(own, "delay").items()):
            solved = f"{sum(o.solved for o in runs)} of {len(runs)}"
            accuracy, steps = f"{_median(runs, 'accuracy'):.3f}", f"{_median(runs, 'steps'):,}"
            table.add_row(cell, str(delay), solved, accuracy, steps, *_gradient(runs))
    return table


def _truncation_table(outcomes: Sequence[Outcome]) -> Table:
    first = outcomes[0]
    table = _table(f"Ways to truncate: {first.cell}, delay {first.delay}, at most as many characters (medians)")
    for heading in ("solved", "accuracy", "loss", "characters", "seconds", "R after"):
        table.add_column(heading, justify="right")
    for mode, runs in _by(outcomes, "mode").items():
        table.add_row(
            mode,
            f"{sum(o.solved for o in runs)} of {len(runs)}",
            f"{_median(runs, 'accuracy'):.3f}",
            f"{_median(runs, 'loss'):.4f}",
            f"{_median(runs, 'characters'):,}",
            f"{_median(runs, 'seconds'):.1f}",
            f"{_median(runs, 'R_end'):.2g}",
        )
    return table


def _table(title: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("", no_wrap=True)
    return table


def _gradient(runs: Sequence[Outcome]) -> list[str]:
    """Half-life and R at the delay, each before and after training."""
    return [
        f"{_median(runs, 'half_life_start')}→{_median(runs, 'half_life_end')}",
        f"{_median(runs, 'R_start'):.2g}→{_median(runs, 'R_end'):.2g}",
    ]


def _median(runs: Sequence[Outcome], name: str) -> Any:
    return median_low(getattr(o, name) for o in runs)


def _by(outcomes: Sequence[Outcome], name: str) -> dict[Any, list[Outcome]]:
    groups: dict[Any, list[Outcome]] = {}
    for o in outcomes:
        groups.setdefault(getattr(o, name), []).append(o)
    return groups


# The command ----------------------------------------------------------------------------------------------------------


def demonstrate(
    *,
    cells: Sequence[str],
    delays: Sequence[int],
    seeds: Sequence[int],
    seconds: float,
    characters: int,
    out: Path,
    truncated: tuple[str, int],
    console: Console,
) -> tuple[list[Outcome], list[Outcome]]:
    """Train what is not there yet, one run after the other on one thread, and read what came of all.

    Args:
        cells: of `CELLS`; none for no such run.
        delays: of the task.
        seeds: of the runs.
        seconds: of training steps for each of these runs, at most.
        characters: for each run of the comparison of truncations, at most; 0 for none.
        out: where the runs are.
        truncated: the network and delay of the comparison.
        console: told of each run as it ends.
    """
    runs = wanted_runs(cells, delays, seeds, seconds, out)
    others = truncated_runs(seeds, characters, out, *truncated) if characters else []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    outcomes = []
    try:
        for number, run in enumerate([*runs, *others], 1):
            fulfil(run, out)
            o = outcome(run, out)
            outcomes.append(o)
            console.print(
                f"{number:>3}/{len(runs) + len(others)}  {run.name}: {'solved, ' if o.solved else ''}accuracy "
                f"{o.accuracy:.3f} after {o.steps:,} steps, {o.seconds:.1f} s"
                + (", stopped by gradients that are not finite" if o.state == "stopped" else "")
            )
    finally:
        torch.set_num_threads(threads)
    return outcomes[: len(runs)], outcomes[len(runs) :]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration, or a part of it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lmapp.demonstration", description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS), help="of these (default: all)")
    parser.add_argument("--delays", nargs="*", type=_whole, default=[10, 30, 100, 300], help="of the task, in steps")
    parser.add_argument("--seeds", nargs="+", type=_whole, default=[1, 2, 3], help="of the runs")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training for each run, at most (default: 60)")
    parser.add_argument(
        "--characters",
        type=int,
        default=1_000_000,
        help="for each way to truncate, at most; 0 leaves them out (default: 1,000,000)",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/memory"), help="where runs are kept (runs/memory)")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    given = parser.parse_args(arguments)
    if not given.seconds > 0 or given.characters < 0:
        parser.error("--seconds is more than 0, --characters at least 0")
    try:
        outcomes, truncated = demonstrate(
            cells=given.cells,
            delays=given.delays,
            seeds=given.seeds,
            seconds=given.seconds,
            characters=given.characters,
            out=given.out,
            truncated=TRUNCATED,
            console=Console(stderr=True, highlight=False, soft_wrap=True),
        )
    except LmappError as error:
        again = " The same command goes on with all runs." if error.exit_code == 130 else ""
        print(f"{error}{again}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("Interrupted. The same command goes on.", file=sys.stderr)
        return 130
    if given.json:
        found = {"runs": [asdict(o) for o in outcomes], "truncation": [asdict(o) for o in truncated]}
        print(json.dumps(jsonable({**found, "agreement": agreement(outcomes)}), indent=1))
        return 0
    console = Console(highlight=False)
    for part in tables(outcomes, truncated):
        console.print(part, soft_wrap=isinstance(part, str))
        console.print()
    return 0


def _whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("a whole number at least 1")
    return number


if __name__ == "__main__":
    raise SystemExit(main())
