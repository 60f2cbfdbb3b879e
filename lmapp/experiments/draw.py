"""Pictures of runs. matplotlib is imported when something is drawn, and never opens a window."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmapp.errors import LmappError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart, one a family, each with a line and a marker that
# tell the cells apart in grey too. One cell looks the same in every picture.
_STYLES: dict[str, tuple[str, str, str]] = {
    "vanilla": ("#D55E00", "--", "s"),
    "lstm": ("#0072B2", "-", "o"),
    "lstm_linear": ("#0072B2", ":", "v"),
    "gru": ("#009E73", "-.", "^"),
    "gru_before": ("#009E73", ":", "<"),
    "mingru": ("#56B4E9", "-.", "P"),
    "minlstm": ("#56B4E9", "-", "X"),
    "concatenated": ("#E69F00", "--", "D"),
}
_OTHER_STYLES = (("#CC79A7", ":", "*"), ("#000000", ":", "h"), ("#CC79A7", "--", "p"), ("#000000", "-.", "d"))
_FLOOR = 1e-4  # the axis goes no lower, so that a network that forgets at once does not flatten the others


@dataclass(frozen=True)
class NamedCurve:
    """One line of a decay picture.

    Attributes:
        label: What the legend calls it.
        cell: Name of its cell, which chooses colour, line and marker.
        lags: Lags in steps.
        R: Gradient norm at each lag relative to the reference lag.
        zero_share: Share of exactly zero gradients at each lag.
        half_life: Lag in steps at which R falls to 1/2.
        censored: The measurement ended before that; the half-life is greater than `half_life`.
    """

    label: str
    cell: str
    lags: Sequence[float]
    R: Sequence[float]
    zero_share: Sequence[float]
    half_life: float
    censored: bool


def draw_decay(curves: Sequence[NamedCurve], path: Path | str, *, title: str) -> None:
    """Draw R against lag, with the levels 1/2 and 1/100 and every half-life, to a PNG 1600 pixels wide.

    Args:
        curves: Up to about six stay legible. The second curve of one cell has hollow markers.
        path: The file, replaced in one move when the picture is complete.
        title: Above the picture.

    Raises:
        LmappError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    styles = _styles([curve.cell for curve in curves])
    last = max((float(max(curve.lags)) for curve in curves), default=1.0)
    seen: list[str] = []
    lowest, highest = 0.005, 1.0
    for curve in curves:
        color, line, marker = styles[curve.cell]
        lags, R = np.asarray(curve.lags, dtype=float), np.asarray(curve.R, dtype=float)
        drawn = np.where(R > 0, R, np.nan)
        if len(positive := R[R > 0]):
            lowest, highest = min(lowest, positive.min()), max(highest, positive.max())
        fill, edge = ("white", color) if curve.cell in seen else (color, "black")
        axes.plot(
            lags,
            drawn,
            color=color,
            linestyle=line,
            linewidth=1.8,
            marker=marker,
            markersize=5.5,
            markevery=max(1, len(lags) // 12),
            markerfacecolor=fill,
            label=_legend(curve),
        )
        if not curve.censored:
            axes.vlines(curve.half_life, _FLOOR / 10, 0.5, color=color, linewidth=0.9, linestyle=line)
            axes.plot([curve.half_life], [0.5], marker=marker, markersize=9, color=fill, markeredgecolor=edge)
        seen.append(curve.cell)
    for level, name in ((0.5, "1/2\nhalf-life"), (0.01, "1/100\nhorizon")):
        axes.axhline(level, color="0.45", linewidth=0.8, zorder=0)
        axes.annotate(
            name, (1, level), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axes.set_yscale("log")
    axes.set_ylim(max(lowest / 1.5, _FLOOR), highest * 1.5)
    axes.set_xlim(0, last)
    axes.set_xlabel("lag k: steps back from the prediction")
    axes.set_ylabel("relative gradient norm $R_k$")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if curves:
        axes.legend(frameon=False, handlelength=3.2)
    _save(figure, Path(path))


def _styles(cells: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    unknown = sorted(set(cells) - set(_STYLES))
    return _STYLES | {cell: _OTHER_STYLES[number % len(_OTHER_STYLES)] for number, cell in enumerate(unknown)}


def _legend(curve: NamedCurve) -> str:
    half_life = f"> {curve.half_life:g}" if curve.censored else f"{curve.half_life:.3g}"
    # Before the reference lag every gradient is zero, by the cell's equation.
    reference = next((number for number, share in enumerate(curve.zero_share) if share < 1), 0)
    zeros = max(curve.zero_share[reference:], default=0.0)
    return f"{curve.label}: half-life {half_life} steps" + (f", up to {100 * zeros:.0f} % zeros" if zeros else "")


def _save(figure: "Figure", path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, format="png")
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise LmappError(f"{path} could not be written: {error.strerror or error}.") from error
