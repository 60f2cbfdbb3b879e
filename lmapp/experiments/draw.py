"""Pictures of gradients. matplotlib is imported when something is drawn, and never opens a window."""

import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
_MORE_MARKERS = ("o", "s", "v", "D", "P", "X")  # of the third checkpoint of one cell and those after it
_FLOOR = 1e-4  # the axis goes no lower, so that a network that forgets at once does not flatten the others


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One checkpoint's lines in a picture of gradients; what is None was not measured and is not drawn.

    Attributes:
        label: What the legend calls it.
        cell: Name of its cell, which chooses colour, line and marker.
        lags: (K+1,) lags in steps.
        R: (K+1,) gradient norm at each lag relative to the reference lag.
        zero_share: (K+1,) share of exactly zero gradients at each lag.
        half_life: Lag in steps at which R falls to 1/2; None where no gradient was finite.
        censored: The measurement ended before that; the half-life is greater than `half_life`.
        bounds: The tight bound and the loose one, (K+1,) each.
        eigenvalues: (n,) complex, of the state's Jacobian over one step.
        radius: The mean spectral radius of such Jacobians.
        half_weights: In words, the lag up to which half of it comes from.
        weight_share: Share of the recurrent weights' gradient that comes from each lag and those below it, from lag 0.
        norms: Gradient norms of the training, rising, at the quantiles 1 to 99 %.
        threshold: At which these were clipped.
    """

    label: str
    cell: str
    lags: Sequence[float]
    R: Sequence[float]
    zero_share: Sequence[float]
    half_life: float | None
    censored: bool
    bounds: tuple[Sequence[float], Sequence[float]] | None = None
    eigenvalues: Sequence[complex] | np.ndarray | None = None
    radius: float | None = None
    weight_share: Sequence[float] | None = None
    half_weights: str = ""
    norms: Sequence[float] | None = None
    threshold: float | None = None


QUANTILES = np.arange(1, 100) / 100
"""Of `Sheet.norms`."""


@dataclass(frozen=True)
class _Style:
    color: str
    line: str
    marker: str
    hollow: bool

    def markers(self, count: int) -> dict[str, Any]:
        """Of a line of so many points: a dozen, hollow for the second checkpoint of one cell."""
        return {
            "color": self.color,
            "linestyle": self.line,
            "marker": self.marker,
            "markersize": 5,
            "markevery": max(1, count // 12),
            "markerfacecolor": "white" if self.hollow else self.color,
        }


def draw_gradients(sheets: Sequence[Sheet], path: Path | str, *, title: str) -> None:
    """Draw four panels to a PNG 2100 pixels wide: decay with bounds, spectrum, weight gradient by lag, norms.

    Args:
        sheets: Up to about six stay legible. The second checkpoint of one cell has hollow markers.
        path: The file, replaced in one move when the picture is complete.
        title: Above the picture.

    Raises:
        LmappError: The file cannot be written.
    """
    figure, (decay, spectrum, weights, norms) = new_figure(2, 2, size=(14, 9.2))
    styles = _styles([sheet.cell for sheet in sheets])
    _draw_decay(decay, sheets, styles)
    _draw_spectrum(spectrum, sheets, styles)
    _draw_weights(weights, sheets, styles)
    _draw_norms(norms, sheets, styles)
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize=13)
    save(figure, Path(path))


def _draw_decay(axes: Any, sheets: Sequence[Sheet], styles: Sequence[_Style]) -> None:
    last = max((float(max(sheet.lags)) for sheet in sheets), default=1.0)
    lowest, highest = 0.005, 1.0
    bounded = False
    for sheet, style in zip(sheets, styles, strict=True):
        lags, R = np.asarray(sheet.lags, dtype=float), np.asarray(sheet.R, dtype=float)
        if len(positive := R[R > 0]):
            lowest, highest = min(lowest, positive.min()), max(highest, positive.max())
        axes.plot(lags, np.where(R > 0, R, np.nan), linewidth=1.8, label=_legend(sheet), **style.markers(len(lags)))
        if sheet.bounds is not None:
            for bound, width in zip(sheet.bounds, (1.1, 0.6), strict=True):
                axes.plot(lags, _positive(bound), color=style.color, linestyle=(0, (1, 1)), linewidth=width)
            bounded = True
        if sheet.half_life is not None and not sheet.censored:
            axes.vlines(sheet.half_life, _FLOOR / 10, 0.5, color=style.color, linewidth=0.9, linestyle=style.line)
            fill, edge = ("white", style.color) if style.hollow else (style.color, "black")
            axes.plot([sheet.half_life], [0.5], marker=style.marker, markersize=9, color=fill, markeredgecolor=edge)
    for level, name in ((0.5, "1/2\nhalf-life"), (0.01, "1/100\nhorizon")):
        axes.axhline(level, color="0.45", linewidth=0.8, zorder=0)
        axes.annotate(
            name, (1, level), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axes.set_yscale("log")
    axes.set_ylim(max(lowest / 1.5, _FLOOR), highest * (30 if bounded else 1.5))
    axes.set_xlim(0, last)
    axes.set_xlabel("lag k: steps back from the prediction")
    axes.set_ylabel("relative gradient norm $R_k$")
    axes.set_title("How far back the gradient reaches" + (" (dotted: bounds)" if bounded else ""), loc="left")
    if sheets:
        axes.legend(frameon=False, handlelength=3.2)


def _draw_spectrum(axes: Any, sheets: Sequence[Sheet], styles: Sequence[_Style]) -> None:
    axes.set_title("Eigenvalues of the state's Jacobian over one step", loc="left")
    turn = np.linspace(0, 2 * np.pi, 361)
    axes.plot(np.cos(turn), np.sin(turn), color="0.45", linewidth=0.8)
    axes.annotate("1", (1, 0), xytext=(3, 3), textcoords="offset points", color="0.35")
    drawn = False
    for sheet, style in zip(sheets, styles, strict=True):
        if sheet.radius is None:
            continue
        drawn = True
        label = f"{plain(sheet.label)}: mean radius {sheet.radius:.3g}"
        if sheet.eigenvalues is None:  # too many to be computed: the circle that holds them
            axes.plot(
                sheet.radius * np.cos(turn),
                sheet.radius * np.sin(turn),
                color=style.color,
                linestyle=style.line,
                label=label,
            )
            continue
        values = np.asarray(sheet.eigenvalues)
        axes.scatter(
            values.real,
            values.imag,
            s=16,
            marker=style.marker,
            facecolors="none" if style.hollow else style.color,
            edgecolors=style.color,
            linewidths=0.7,
            alpha=0.6,
            label=label,
        )
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xlabel("real part")
    axes.set_ylabel("imaginary part")
    _legend_or(axes, drawn, "not measured", loc="upper right")


def _draw_weights(axes: Any, sheets: Sequence[Sheet], styles: Sequence[_Style]) -> None:
    axes.set_title("Where the recurrent weights' gradient comes from", loc="left")
    drawn = False
    for sheet, style in zip(sheets, styles, strict=True):
        if sheet.weight_share is None:
            continue
        drawn = True
        share = np.asarray(sheet.weight_share, dtype=float)
        axes.plot(
            np.arange(len(share)),
            share,
            linewidth=1.8,
            label=f"{plain(sheet.label)}: half from lags up to {sheet.half_weights}",
            **style.markers(len(share)),
        )
    axes.set_ylim(0, 1.02)
    axes.set_xscale("symlog", linthresh=1, linscale=0.4)
    axes.set_xlim(left=0)
    axes.set_xlabel("lag k")
    axes.set_ylabel("share from lags up to k")
    _legend_or(axes, drawn, "no cell here has recurrent weights of its own", loc="lower right")


def _draw_norms(axes: Any, sheets: Sequence[Sheet], styles: Sequence[_Style]) -> None:
    axes.set_title("Gradient norms of the training", loc="left")
    drawn = False
    for sheet, style in zip(sheets, styles, strict=True):
        if sheet.norms is None or not max(sheet.norms, default=0) > 0:
            continue
        drawn = True
        label = plain(sheet.label) + ("" if sheet.threshold is None else f": clipped above {sheet.threshold:g}")
        axes.plot(_positive(sheet.norms), QUANTILES, linewidth=1.8, label=label, **style.markers(len(QUANTILES)))
        if sheet.threshold is not None:
            axes.axvline(sheet.threshold, color=style.color, linestyle=style.line, linewidth=0.9)
    if drawn:
        axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.set_xlabel("norm before clipping")
    axes.set_ylabel("share of steps below")
    _legend_or(axes, drawn, "not recorded", loc="upper left")


def _positive(values: Sequence[float]) -> np.ndarray:
    """What a logarithmic axis can show; NaN leaves a gap."""
    numbers = np.asarray(values, dtype=float)
    return np.where(numbers > 0, numbers, np.nan)


def _legend_or(axes: Any, drawn: bool, why_not: str, loc: str) -> None:
    if drawn:
        axes.legend(framealpha=0.8, edgecolor="none", handlelength=3.2, loc=loc)
    else:
        axes.text(0.5, 0.5, why_not, transform=axes.transAxes, ha="center", va="center", color="0.35")


def _styles(cells: Sequence[str]) -> list[_Style]:
    """One a checkpoint: of its cell, and for further checkpoints of that cell hollow, then with other markers."""
    unknown = sorted(set(cells) - set(_STYLES))
    known = _STYLES | {cell: _OTHER_STYLES[number % len(_OTHER_STYLES)] for number, cell in enumerate(unknown)}
    styles = []
    for number, cell in enumerate(cells):
        color, line, marker = known[cell]
        before = cells[:number].count(cell)
        if before > 1:
            marker = _MORE_MARKERS[before % len(_MORE_MARKERS)]
        styles.append(_Style(color, line, marker, before % 2 == 1))
    return styles


def plain(text: str) -> str:
    """A name as matplotlib is to show it: `$` begins no formula, and `_` hides no label."""
    shown = text.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _legend(sheet: Sheet) -> str:
    if sheet.half_life is None:
        return f"{plain(sheet.label)}: no gradient"
    half_life = f"> {sheet.half_life:g}" if sheet.censored else f"{sheet.half_life:.3g}"
    # Before the reference lag every gradient is zero, by the cell's equation.
    reference = next((number for number, share in enumerate(sheet.zero_share) if share < 1), 0)
    zeros = max(sheet.zero_share[reference:], default=0.0)
    said = f"{plain(sheet.label)}: half-life {half_life} steps"
    return said + (f", up to {100 * zeros:.0f} % of gradients exactly 0" if zeros else "")


def new_figure(rows: int, columns: int, *, size: tuple[float, float]) -> tuple["Figure", list[Any]]:
    """A figure of so many inches, 150 pixels each, and its axes from left to right, the upper row first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: "Figure", path: Path) -> None:
    """Write a PNG, replaced in one move when it is complete.

    Raises:
        LmappError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # a box says it as well
            figure.savefig(temporary, format="png")
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise LmappError(f"{path} could not be written: {error.strerror or error}.") from error
