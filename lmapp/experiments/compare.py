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
        best_step: Step of the lowest validation loss.
        best_loss: Lowest validation loss, nats per character.
        best_perplexity: e^J there.
        best_bits_per_char: J / ln 2 there.
        last_loss: Last validation loss.
        last_perplexity: e^J there.
        last_bits_per_char: J / ln 2 there.
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
    best_step: int | None
    best_loss: float | None
    best_perplexity: float | None
    best_bits_per_char: float | None
    last_loss: float | None
    last_perplexity: float | None
    last_bits_per_char: float | None
    parameters: int | None
    characters: int | None
    seconds: float | None
    chars_per_second: float | None
    clip_share: float | None
    half_life: float | None
    half_life_censored: bool


@dataclass(frozen=True)
class Comparison:
    """Several runs, the lowest validation loss first, runs without validation last.

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

        Args:
            width: Columns of the terminal; options that do not fit beside each other go to a further table.
        """
        results = [
            ("state", [row.state for row in self.rows]),
            ("best", [_number(row.best_loss, ".4f") for row in self.rows]),
            ("perplexity", [_number(row.best_perplexity, ".3f") for row in self.rows]),
            ("bits/char", [_number(row.best_bits_per_char, ".3f") for row in self.rows]),
            ("at step", [_number(row.best_step, ",") for row in self.rows]),
            ("last", [_number(row.last_loss, ".4f") for row in self.rows]),
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
            *self._tables("Validation loss (nats per character)", results, width, "right"),
            *self._tables("Cost and gradients", cost, width, "right"),
            *self._tables("Options that differ", options, width, "left"),
        ]

    def _tables(
        self, title: str, columns: list[tuple[str, list[str]]], width: int, justify: Literal["left", "right"]
    ) -> list["Table"]:
        """As many tables as the columns need; only a text longer than the terminal is wrapped."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        names = [row.name for row in self.rows]
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
    pairs.sort(key=lambda pair: (pair[0].best_loss is None, pair[0].best_loss or 0.0, pair[0].name))
    configs = [_flatten(history.config) for _, history in pairs]
    keys = [key for key in dict.fromkeys(key for config in configs for key in config) if key != "name"]
    differences = {key: tuple(config.get(key) for config in configs) for key in keys}
    return Comparison(
        rows=tuple(row for row, _ in pairs),
        differences={key: values for key, values in differences.items() if any(value != values[0] for value in values)},
    )


def _row(history: History) -> Row:
    metrics = history.metrics
    last: Record = metrics[-1] if metrics else {}
    summary = history.summary
    if summary.get("steps", 0) < last.get("step", 0):
        summary = {"parameters": summary.get("parameters")}  # written earlier; the run went on
    validated = [line for line in metrics if _finite(line.get("val/loss")) is not None]
    best = summary.get("best") or min(validated, key=lambda line: line["val/loss"], default={})
    final = summary.get("last") or (validated[-1] if validated else {})
    best_loss, last_loss = _finite(best.get("val/loss")), _finite(final.get("val/loss"))
    step = max(int(summary.get("steps", 0)), int(last.get("step", 0)))
    characters = summary.get("characters", last.get("characters"))
    seconds = summary.get("seconds", last.get("seconds"))
    measured = next((line for line in reversed(metrics) if "decay/half_life" in line), {})
    return Row(
        name=history.name,
        path=str(history.path),
        state=summary["state"] if summary.get("state") in ENDED else UNFINISHED,
        step=step,
        best_step=best.get("step") if best_loss is not None else None,
        best_loss=best_loss,
        best_perplexity=_perplexity(best_loss),
        best_bits_per_char=_bits(best_loss),
        last_loss=last_loss,
        last_perplexity=_perplexity(last_loss),
        last_bits_per_char=_bits(last_loss),
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
