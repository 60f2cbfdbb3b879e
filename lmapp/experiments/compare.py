"""Runs side by side: what differs between their configurations and how they came out."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lmapp.experiments.history import History, Record
from lmapp.units import jsonable, perplexity

if TYPE_CHECKING:
    from rich.table import Table

ENDED = ("finished", "stopped", "interrupted")
UNFINISHED = "unfinished"
"""The state of a run whose files do not say that it ended: it is still going on, or was killed."""

_GAP = 2  # columns between two of a table's cells


@dataclass(frozen=True)
class Row:
    """One run; a figure it does not have is None.

    Attributes:
        name: The run's name.
        path: Its directory.
        state: "finished", "stopped", "interrupted", or "unfinished" (going on, or killed).
        step: Optimiser steps done.
        infill: Whether it restores masked characters. Its loss is another figure, never ranked with the others'.
        best_step: Step of the lowest validation loss, of an infill model's own.
        best_loss: Lowest validation loss, nats per character.
        best_perplexity: e^J there.
        best_bits_per_char: J / ln 2 there.
        best_accuracy: Share of a task's answers right there.
        last_loss: Last validation loss.
        last_perplexity: e^J there.
        last_bits_per_char: J / ln 2 there.
        best_infill_loss: Lowest validation loss of an infill model, nats per masked character.
        last_infill_loss: Last one.
        parameters: Number of weights.
        characters: Characters trained on.
        seconds: Seconds spent in training steps.
        chars_per_second: Their ratio.
        clip_share: Share of steps whose gradient was clipped.
        half_life: Lag in steps at which the gradient has halved, last measured.
        half_life_censored: It is greater than `half_life`, where the measurement ended.
    """

    name: str
    path: str
    state: str
    step: int
    infill: bool
    best_step: int | None
    best_loss: float | None
    best_perplexity: float | None
    best_bits_per_char: float | None
    best_accuracy: float | None
    last_loss: float | None
    last_perplexity: float | None
    last_bits_per_char: float | None
    best_infill_loss: float | None
    last_infill_loss: float | None
    parameters: int | None
    characters: int | None
    seconds: float | None
    chars_per_second: float | None
    clip_share: float | None
    half_life: float | None
    half_life_censored: bool


@dataclass(frozen=True)
class Comparison:
    """Several runs, the lowest validation loss first; then infill models, by their own; runs without validation last.

    Attributes:
        rows: One a run.
        differences: For each option that is not the same in all runs, its value in each, in the order of `rows`; None
            where a run does not have it.
    """

    rows: tuple[Row, ...]
    differences: dict[str, tuple[Any, ...]]

    def as_dict(self) -> Record:
        """As JSON can hold it: {"runs": [… one dictionary a run, its options under "differences" …]}."""
        options = [
            {key: values[number] for key, values in self.differences.items()} for number in range(len(self.rows))
        ]
        return jsonable(
            {"runs": [asdict(row) | {"differences": own} for row, own in zip(self.rows, options, strict=True)]}
        )

    def tables(self, width: int = 80) -> list["Table"]:
        """For a terminal: results, cost and gradients, and the options that differ; one row a run in each.

        Infill models have a table of results of their own.

        Args:
            width: Columns of the terminal; options that do not fit beside each other go to a further table.
        """
        language, infill = [row for row in self.rows if not row.infill], [row for row in self.rows if row.infill]
        results = [
            ("state", [row.state for row in language]),
            ("best", [_number(row.best_loss, ".4f") for row in language]),
            ("perplexity", [_number(row.best_perplexity, ".3f") for row in language]),
            ("bits/char", [_number(row.best_bits_per_char, ".3f") for row in language]),
            ("at step", [_number(row.best_step, ",") for row in language]),
            ("last", [_number(row.last_loss, ".4f") for row in language]),
        ]
        if any(row.best_accuracy is not None for row in language):
            results.insert(2, ("accuracy", [_number(row.best_accuracy, ".3f") for row in language]))
        restored = [
            ("state", [row.state for row in infill]),
            ("best", [_number(row.best_infill_loss, ".4f") for row in infill]),
            ("at step", [_number(row.best_step, ",") for row in infill]),
            ("last", [_number(row.last_infill_loss, ".4f") for row in infill]),
        ]
        cost = [
            ("parameters", [_short(row.parameters) for row in self.rows]),
            ("chars", [_short(row.characters) for row in self.rows]),
            ("time", [_duration(row.seconds) for row in self.rows]),
            ("chars/s", [_number(row.chars_per_second, ",.0f") for row in self.rows]),
            ("clipped", ["–" if row.clip_share is None else f"{100 * row.clip_share:.1f} %" for row in self.rows]),
            ("half-life", [_half_life(row) for row in self.rows]),
        ]
        options = [(key, [_option(value) for value in values]) for key, values in self.differences.items()]
        return [
            *_tables("Validation loss (nats per character)", language, results, width, "right"),
            *_tables("Infill loss (nats per masked character)", infill, restored, width, "right"),
            *_tables("Cost and gradients", self.rows, cost, width, "right"),
            *_tables("Options that differ", self.rows, options, width, "left"),
        ]


def compare(paths: Sequence[Path | str]) -> Comparison:
    """Read runs and put them beside each other.

    Args:
        paths: Run directories; one named twice counts once.

    Raises:
        LmappError: A run's file is damaged.
    """
    unique = {Path(path).resolve(): Path(path) for path in paths}
    histories = [History(path) for path in unique.values()]
    pairs = [(_row(history), history) for history in histories]
    pairs.sort(key=lambda pair: _rank(pair[0]))
    configs = [_flatten(history.config) for _, history in pairs]
    keys = [key for key in dict.fromkeys(key for config in configs for key in config) if key != "name"]
    differences = {key: tuple(config.get(key) for config in configs) for key in keys}
    return Comparison(
        rows=tuple(row for row, _ in pairs),
        differences={key: values for key, values in differences.items() if any(value != values[0] for value in values)},
    )


def _tables(
    title: str,
    rows: Sequence[Row],
    columns: list[tuple[str, list[str]]],
    width: int,
    justify: Literal["left", "right"],
) -> list["Table"]:
    """As many tables as the columns need, none without rows; only a text longer than the terminal is wrapped."""
    if not rows:
        return []
    from rich import box
    from rich.table import Table
    from rich.text import Text

    names = [row.name for row in rows]
    name_width = min(max(map(len, ["run", *names])), max(20, width // 4))
    groups: list[list[tuple[str, list[str], int]]] = []
    left = 0
    for header, values in columns:
        # An option's name breaks between its words rather than make its column wider than its values.
        heading = header.replace(".", ".\n").replace("_", "_\n")
        needed = min(max(len(text) for text in [*heading.split("\n"), *values]), width - name_width - _GAP)
        if needed + _GAP > left:
            groups.append([])
            left = width - name_width
        left -= needed + _GAP
        groups[-1].append((heading, values, needed))
    tables: list[Table] = []
    for group in groups:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.title, table.title_justify = title if not tables else f"{title}, continued", "left"
        table.add_column("run", width=name_width, overflow="fold")
        for heading, _, needed in group:
            table.add_column(heading, justify=justify, width=needed, overflow="fold")
        for number, name in enumerate(names):
            table.add_row(Text(name), *(Text(values[number]) for _, values, _ in group))
        tables.append(table)
    return tables


def _rank(row: Row) -> tuple[int, float, str]:
    """Figures of one kind beside each other only."""
    if row.best_loss is not None:
        return 0, row.best_loss, row.name
    return (2, 0.0, row.name) if row.best_infill_loss is None else (1, row.best_infill_loss, row.name)


def _row(history: History) -> Row:
    metrics = history.metrics
    last: Record = metrics[-1] if metrics else {}
    summary = history.summary
    if summary.get("steps", 0) < last.get("step", 0):
        summary = {"parameters": summary.get("parameters")}  # written earlier; the run went on
    model = history.config.get("model")
    infill = isinstance(model, dict) and model.get("kind") == "infill"
    figure = "val/infill_loss" if infill else "val/loss"
    validated = [line for line in metrics if _finite(line.get(figure)) is not None]
    best = summary.get("best") or min(validated, key=lambda line: line[figure], default={})
    final = summary.get("last") or (validated[-1] if validated else {})
    lowest, latest = _finite(best.get(figure)), _finite(final.get(figure))
    best_loss, last_loss = (None, None) if infill else (lowest, latest)
    step = max(int(summary.get("steps", 0)), int(last.get("step", 0)))
    characters = summary.get("characters", last.get("characters"))
    seconds = summary.get("seconds", last.get("seconds"))
    measured = next((line for line in reversed(metrics) if "decay/half_life" in line), {})
    return Row(
        name=history.name,
        path=str(history.path),
        state=summary["state"] if summary.get("state") in ENDED else UNFINISHED,
        step=step,
        infill=infill,
        best_step=best.get("step") if lowest is not None else None,
        best_loss=best_loss,
        best_perplexity=_perplexity(best_loss),
        best_bits_per_char=_bits(best_loss),
        best_accuracy=_finite(best.get("val/accuracy")),
        last_loss=last_loss,
        last_perplexity=_perplexity(last_loss),
        last_bits_per_char=_bits(last_loss),
        best_infill_loss=lowest if infill else None,
        last_infill_loss=latest if infill else None,
        parameters=summary.get("parameters"),
        characters=characters,
        seconds=seconds,
        chars_per_second=characters / seconds if characters is not None and seconds else None,
        clip_share=_clip_share(history, step),
        half_life=_finite(measured.get("decay/half_life")),
        half_life_censored=bool(measured.get("decay/half_life_censored", 0)),
    )


def _clip_share(history: History, steps: int) -> float | None:
    """From the events where there are any, else from the logged shares, each over the steps since the one before."""
    if steps and (history.path / "clip_events.jsonl").is_file():
        events = [e for e in history.clip_events if e.get("kind") == "clip" and e.get("step", 0) <= steps]
        return len(events) / steps
    total, before = 0.0, 0
    at, shares = history.column("gradient/clip_fraction")
    for step, share in zip(at, shares, strict=True):
        total += share * (step - before)
        before = step
    return total / before if before else None


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _perplexity(loss: float | None) -> float | None:
    return None if loss is None else perplexity(loss)


def _bits(loss: float | None) -> float | None:
    return None if loss is None else loss / math.log(2)


def _flatten(config: Record, prefix: str = "") -> Record:
    flat: Record = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _short(count: float | None) -> str:
    """A count in three or four digits: 987, 12.3 k, 4.56 M."""
    if count is None:
        return "–"
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:.{2 if count < 10 * size else 1 if count < 100 * size else 0}f}{unit}"
    return f"{count:.0f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _half_life(row: Row) -> str:
    if row.half_life is None:
        return "–"
    return f"> {row.half_life:g}" if row.half_life_censored else f"{row.half_life:.3g}"


def _option(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
