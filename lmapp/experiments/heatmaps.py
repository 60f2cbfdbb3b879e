"""Heat maps: the gradient's decay through a training, and what a single prediction rests on.

matplotlib is imported when something is drawn, and never opens a window. The colours are those of viridis, whose
lightness rises evenly, so that a picture says the same in grey and to colour-blind readers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmapp.experiments.draw import new_figure, plain, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOWEST = -4.0  # log10 of what is drawn as nothing


def decay_history(steps: Sequence[int], lags: Sequence[float], R: Sequence[Sequence[float]]) -> np.ndarray:
    """A picture of R_k at every measured step, as pixels.

    Args:
        steps: (M,) optimiser steps done at each measurement, rising.
        lags: (K+1,) lags in time steps.
        R: (M, K+1) relative gradient norms.

    Returns:
        (height, width, 3) uint8.
    """
    figure, (axes,) = new_figure(1, 1, size=(8, 4.6))
    values = np.asarray(R, dtype=float).T
    with np.errstate(divide="ignore"):
        levels = np.maximum(np.log10(values), LOWEST)
    # Each measurement reaches half way to its neighbours; the first and the last as far outwards.
    middles = (np.asarray(steps[1:], dtype=float) + np.asarray(steps[:-1], dtype=float)) / 2
    first, last = (middles[0] - steps[0], steps[-1] - middles[-1]) if len(middles) else (0.5, 0.5)
    edges = np.concatenate([[steps[0] - first], middles, [steps[-1] + last]])
    mesh = axes.pcolormesh(edges, np.arange(len(lags) + 1) - 0.5, levels, vmin=LOWEST, vmax=max(0.0, levels.max()))
    bar = figure.colorbar(mesh, ax=axes, label="relative gradient norm $R_k$")
    decades = max(1, int(np.ceil((max(0.0, levels.max()) - LOWEST) / 8)))
    ticks = [float(t) for t in np.arange(np.ceil(LOWEST), max(0.0, np.floor(levels.max())) + 1, decades)]
    bar.set_ticks(ticks, labels=[("≤ " if t == LOWEST else "") + f"$10^{{{t:.0f}}}$" if t else "1" for t in ticks])
    half = [next((k for k, r in zip(lags, row, strict=True) if r < 0.5), None) for row in R]
    axes.plot(
        [s for s, k in zip(steps, half, strict=True) if k is not None],
        [k for k in half if k is not None],
        color="white",
        marker="o",
        markersize=3.5,
        linewidth=1,
        label="first lag below 1/2",
    )
    axes.legend(frameon=False, labelcolor="white", loc="upper right")
    if len(steps) > 1:
        axes.set_xlim(steps[0], steps[-1])
    axes.set_xlabel("step")
    axes.set_ylabel("lag k: steps back from the prediction")
    axes.set_title("How far back the gradient reached, as training went", loc="left")
    return pixels(figure)


def pixels(figure: "Figure") -> np.ndarray:
    """(height, width, 3) uint8 of a finished figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def draw_influence(text: Sequence[str], values: Sequence[float], predicted: str, path: Path | str, title: str) -> None:
    """Draw a text, each character on a ground as light as its influence is great, and the predicted one framed.

    Args:
        text: (N,) characters (or parts of one that is written as several symbols), the last before the predicted one.
        values: (N,) norms of the gradient on each.
        predicted: the character whose loss was followed back.
        path: the PNG, replaced in one move when it is complete.
        title: above it.

    Raises:
        LmappError: the file cannot be written.
    """
    import matplotlib

    columns = 64
    cells = [*text, predicted]
    lines = -(-len(cells) // columns)
    figure, (axes,) = new_figure(1, 1, size=(8, 1.1 + 0.27 * lines))
    levels = influence_levels(values)
    colours = matplotlib.colormaps["viridis"]
    for number, character in enumerate(cells):
        row, column = divmod(number, columns)
        last = number == len(text)
        ground = "white" if last else colours(levels[number])
        ink = "black" if last or levels[number] > 0.6 else "white"
        axes.add_patch(
            matplotlib.patches.Rectangle(
                (column, row),
                1,
                1,
                facecolor=ground,
                edgecolor="black" if last else "none",
                linewidth=1.2,
                zorder=1 + last,
            )
        )
        shown, size = glyph(character)
        axes.text(
            column + 0.5, row + 0.53, shown, color=ink, ha="center", va="center", fontsize=size, family=FONTS, zorder=3
        )
    axes.set_xlim(0, columns)
    axes.set_ylim(lines, 0)
    axes.set_axis_off()
    axes.set_title(plain(title), loc="left", fontsize=10)
    mappable = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(-DECADES, 0), colours)
    bar = figure.colorbar(mappable, ax=axes, orientation="horizontal", fraction=0.08, aspect=60, pad=0.02)
    bar.set_ticks(range(-DECADES, 1), labels=[*(f"$10^{{{d}}}$" for d in range(-DECADES, 0)), "the largest"])
    save(figure, Path(path))


def glyph(character: str) -> tuple[str, float]:
    """What is written in a character's place, and how large: its code point where no font at hand has it."""
    from matplotlib import font_manager

    shown = {" ": "", "\n": "⏎", "\t": "⇥"}.get(character, character)
    fonts = [font_manager.get_font(font_manager.findfont(family)) for family in FONTS]
    if any(all(font.get_char_index(ord(one)) for one in shown) for font in fonts):
        return shown, 8.5
    points = "".join(f"{ord(one):X}" for one in shown)
    return "\n".join(points[place : place + 3] for place in range(0, len(points), 3)), 4.0


DECADES = 3  # below a thousandth of the largest influence there is nothing to see
FONTS = ["DejaVu Sans Mono", "monospace"]


def influence_levels(values: Sequence[float]) -> np.ndarray:
    """0 to 1 of each influence, by its logarithm: 1 the largest, 0 a thousandth of it or less."""
    sizes = np.asarray(values, dtype=float)
    largest = sizes.max(initial=0.0)
    if largest == 0:
        return np.zeros(len(sizes))
    with np.errstate(divide="ignore"):
        return np.clip(1 + np.log10(sizes / largest) / DECADES, 0.0, 1.0)
