"""Long-range gradient decay: how the gradient of a prediction's loss shrinks, or grows, k steps back in time.

For an end point i and a lag k the gradient is ∂J^(i)/∂S_{i−k}, where S is what the next step really reads: h, or h and
c, which become leaves together. Three pure steps: `probe_shape` and `probe_windows` fix where to measure, `measure`
takes the norms, and `Curve` turns them into G_k, R_k and figures.

Shapes: N windows, m end points a window, P = N·m pairs (window-major), K the largest lag, W warm-up steps, T = K + m
steps, H hidden, L layers. All lengths and lags are in time steps (symbols), τ is the truncation length.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmapp.gradients.truncation import UNLIMITED, Truncation

if TYPE_CHECKING:
    from lmapp.models.recurrent import RecurrentModel

HALF = 0.5  # the level whose crossing is the half-life
HORIZON = 0.01  # the level whose crossing is the horizon; 1 − HORIZON is the share that `lag_99` holds
JOINT = "joint"
ALL: Literal["all"] = "all"
SMALLEST_MAX_LAG = 2
USUAL_MAX_LAG = 512  # K at most, unless a longer one is asked for: the measurement's memory grows with it

Layer = int | Literal["all"]
Norms = dict[tuple[Layer, str], np.ndarray]


# Where it is measured


def not_defined(kind: str) -> str:
    """Why a model of another kind than recurrent has no gradient decay."""
    article = "an" if kind == "infill" else "a"
    return f"it is that of a state carried from left to right, which {article} {kind} model does not have"


@dataclass(frozen=True)
class ProbeShape:
    """What is measured, the same through a whole run.

    Attributes:
        windows: N.
        warm_up: W, steps that bring the state from zero to a natural one.
        max_lag: K.
        end_points: m, predictions measured at the end of each window.
        truncation_length: τ, the length the training cuts its gradient to.
        source: The text the windows come from; "train" means the end of the training text.
        look_back: The fewest and the most steps that the training's losses look back; 1 to τ if not given.
    """

    windows: int
    warm_up: int
    max_lag: int
    end_points: int
    truncation_length: int
    source: Literal["validation", "train"] = "validation"
    look_back: tuple[int, int] | None = None

    @property
    def length(self) -> int:
        """Symbols of one window: W + K + m inputs and the last target."""
        return self.warm_up + self.max_lag + self.end_points + 1


def probe_shape(
    validation_characters: int,
    train_characters: int,
    *,
    truncation_length: int,
    windows: int = 8,
    warm_up: int = 64,
    max_lag: int | None = None,
    end_points: int = 4,
    look_back: tuple[int, int] | None = None,
) -> tuple[ProbeShape | None, str]:
    """Fit the probe windows to the text there is.

    Validation text is used when it holds all windows side by side, else the end of the training text if that is longer.
    Where even one window does not fit, W shrinks to 0 and then K; below K = 2 there is nothing to measure.

    Args:
        validation_characters: Symbols of validation text, 0 if there is none.
        train_characters: Symbols of training text.
        truncation_length: τ.
        windows: N.
        warm_up: W.
        max_lag: K; if not given twice the most steps that a loss looks back (of whole rows twice τ), so that what
            twice τ would lose can be said too, but at most 512.
        end_points: m.
        look_back: as `ProbeShape` has it.

    Returns:
        The shape, or None if decay is off, and in words everything that is not as asked for ("" if all is).
    """
    most = truncation_length if look_back is None or look_back[1] == UNLIMITED else look_back[1]
    lag = min(2 * most, USUAL_MAX_LAG) if max_lag is None else max_lag
    asked = ProbeShape(windows, warm_up, lag, end_points, truncation_length)
    needed = windows * asked.length
    source: Literal["validation", "train"] = "validation"
    available = validation_characters
    notes = []
    if max_lag is None and lag < 2 * most:
        notes.append(f"the largest lag is {lag} instead of {2 * most:,}, unless a longer one is asked for")
    if validation_characters < needed and train_characters > validation_characters:
        source, available = "train", train_characters
        has = f"only {validation_characters:,} characters" if validation_characters else "no characters"
        notes.append(
            f"measured on the end of the training text, because the validation text has {has} "
            f"and {windows} windows need {needed:,}"
        )
    missing = max(0, asked.length - available)
    cut_warm_up = min(missing, warm_up)
    cut_lag = missing - cut_warm_up
    if lag - cut_lag < SMALLEST_MAX_LAG:
        return None, (
            f"gradient decay is off: lags up to {SMALLEST_MAX_LAG} and {end_points} predictions need "
            f"{SMALLEST_MAX_LAG + end_points + 1} characters of text and a largest lag of {SMALLEST_MAX_LAG}; "
            f"there are {available:,} characters and the largest lag is {lag}"
        )
    if cut_warm_up:
        notes.append(f"the warm-up is {warm_up - cut_warm_up} steps instead of {warm_up}, because the text is short")
    if cut_lag:
        notes.append(f"the largest lag is {lag - cut_lag} instead of {lag}, because the text is short")
    length = asked.length - missing
    fitting = min(windows, available - length + 1)
    if fitting < windows:
        notes.append(f"the text holds only {fitting} of {windows} windows")
    if available < fitting * length:
        notes.append(f"the windows overlap: {fitting} windows of {length:,} characters lie in {available:,}")
    shape = ProbeShape(fitting, warm_up - cut_warm_up, lag - cut_lag, end_points, truncation_length, source, look_back)
    return shape, f"gradient decay: {'; '.join(notes)}" if notes else ""


def probe_windows(ids: np.ndarray, shape: ProbeShape, seed: int) -> np.ndarray:
    """Choose the windows: the same for the same ids, shape and seed; no global random state is used.

    Args:
        ids: The symbols (1-D, a memory map will do) of the whole text that `shape.source` names. Of a training text
            only the end is used.
        shape: From `probe_shape` for this text.
        seed: Where in the text they lie.

    Returns:
        (N, W + K + m + 1) int64, in text order, non-overlapping if the text holds N windows side by side, else spread
        evenly.
    """
    count, length = shape.windows, shape.length
    side_by_side = count * length
    first = max(0, len(ids) - side_by_side) if shape.source == "train" else 0
    spare = len(ids) - first - side_by_side
    if spare >= 0:
        gaps = np.random.default_rng(seed).integers(0, spare, size=count, endpoint=True)
        starts = first + np.sort(gaps) + length * np.arange(count)
    else:
        starts = np.linspace(0, len(ids) - length, count).astype(np.int64)
    return np.stack([np.asarray(ids[start : start + length], dtype=np.int64) for start in starts])


# The measurement


def measure(model: "RecurrentModel", windows: Tensor, shape: ProbeShape) -> "Decay":
    """Take ‖∂J^(i)/∂S_{i−k}‖₂ for every end point i and every lag k = 0..K, per layer and over all layers.

    Each window is warmed up over W steps from the initial state, then the gradient of each of its last m predictions is
    followed K steps back. The same predictions are used at every lag. Dropout is off, products are fp32 (float64 for a
    float64 model); weights, `.grad`, random states and training flags are left as they were.

    *Per layer*: that layer's state is the leaf, the way up through the layers above at the same time counts. *All
    layers*: every layer's state is a leaf at once, so at lag 0 there is only what the readout reads directly.

    Args:
        model: The model; every time step's loss is −log softmax(logits)[target].
        windows: (N, W + K + m + 1) int64, from `probe_windows`.
        shape: The shape they were made with.
    """
    device = next(model.parameters()).device
    windows = windows.to(device)
    start, steps = shape.warm_up, shape.max_lag + shape.end_points
    with _measuring(model):
        states = model.initial_state(len(windows))
        if start:
            with torch.no_grad():
                _, states = model(windows[:, :start], states)
        end_points = torch.arange(shape.max_lag, steps, device=device)
        gradients = model.state_gradients(
            windows[:, start : start + steps], states, windows[:, start + shape.max_lag + 1 :], end_points
        )
        norms: Norms = {}
        for number, (layer, gradient) in enumerate(zip(model.layers, gradients, strict=True)):
            parts = {name: getattr(gradient.entering, name)[1:] for name in gradient.entering._fields}
            alone = {name: _by_lag(part, shape) for name, part in parts.items()}
            way_up = alone
            own = layer.output_component
            if own is not None:
                way_up = alone | {own: _by_lag(parts[own] + gradient.outputs, shape)}
            for name, values in way_up.items():
                norms[number, name] = values
            norms[number, JOINT] = _root_of_squares(list(way_up.values()))
            # With every state held at once, at lag 0 there is only what the readout takes of a layer's output itself.
            direct = alone
            if own is not None and gradient.readout is not None:
                direct = alone | {own: _by_lag(parts[own] + gradient.readout, shape)}
            for name, values in direct.items():
                norms[ALL, name] = _root_of_squares([norms[ALL, name], values] if (ALL, name) in norms else [values])
    norms[ALL, JOINT] = _root_of_squares([values for (layer, _), values in norms.items() if layer == ALL])
    return Decay(norms, shape)


@contextmanager
def _measuring(model: "RecurrentModel") -> Iterator[None]:
    """Evaluation mode and full precision for a while; every module gets back its own flag."""
    flags = [(module, module.training) for module in model.modules()]
    precision = model.compute_dtype
    model.eval()
    model.compute_dtype = torch.float32
    try:
        yield
    finally:
        model.compute_dtype = precision
        for module, flag in flags:
            module.training = flag


def _by_lag(gradient: Tensor, shape: ProbeShape) -> np.ndarray:
    """Norms of a (T, P, H) gradient, by lag before each pair's end point: (K+1, P) float64."""
    # In float64, because the squares of small fp32 entries would vanish and count as exact zeros; some steps at a time,
    # because torch copies what it is given.
    pieces = [torch.linalg.vector_norm(steps, dim=-1, dtype=torch.float64) for steps in gradient.split(64)]
    norms = torch.cat(pieces).cpu().numpy()
    pairs = np.arange(norms.shape[1])
    ends = shape.max_lag + pairs % shape.end_points
    return norms[ends - np.arange(shape.max_lag + 1)[:, None], pairs]


def _root_of_squares(norms: list[np.ndarray]) -> np.ndarray:
    return norms[0] if len(norms) == 1 else np.hypot.reduce(norms)


# What it says


class Figure(NamedTuple):
    """A lag in time steps; `censored` says that the window ended first and the true value is greater than it."""

    value: float
    censored: bool

    def __str__(self) -> str:
        return f"> {self.value:g}" if self.censored else f"{self.value:.3g}"


@dataclass(frozen=True)
class Curve:
    """Gradient against lag, of one layer (or all) and one component.

    Attributes:
        lags: (K+1,) 0..K.
        G: (K+1,) mean gradient norm over the pairs.
        R: (K+1,) geometric mean over the pairs of the ratio to the *joint* norm at the reference lag, taken over the
            ratios that are not 0; 0 where all are. Below the reference lag it is 0.
        zero_share: (K+1,) share of the ratios that are exactly 0.
        reference_lag: k₀, the first lag at which the joint gradient is not zero for every pair.
        pairs: Pairs averaged over.
        left_out: Pairs left out because their gradient at the reference lag is 0 or one of their gradients not finite.
    """

    lags: np.ndarray
    G: np.ndarray
    R: np.ndarray
    zero_share: np.ndarray
    reference_lag: int
    pairs: int
    left_out: int

    @property
    def half_life(self) -> Figure:
        """Lag at which R first falls to 1/2."""
        return self._crossing(HALF)

    @property
    def horizon(self) -> Figure:
        """Lag at which R first falls to 1/100."""
        return self._crossing(HORIZON)

    @property
    def rate(self) -> float | None:
        """Factor per step: exp of the least-squares slope of log R over the lags where it is not 0; None below two."""
        lags = self.lags[self.R > 0]
        if len(lags) < 2:
            return None
        x = lags - lags.mean()
        return math.exp(float(x @ np.log(self.R[self.R > 0]) / (x @ x)))

    @property
    def lag_99(self) -> Figure | None:
        """Smallest lag up to which 99 % of Σ R lies; None if Σ R is 0.

        Censored if the curve ends above 1 % of its largest value: a geometric curve that does has more than 1 % of its
        sum beyond K.
        """
        sums = np.cumsum(self.R)
        if sums[-1] == 0:
            return None
        if self.R[-1] > HORIZON * self.R.max():
            return Figure(float(self.lags[-1]), True)
        return Figure(float(self.lags[np.argmax(sums >= (1 - HORIZON) * sums[-1])]), False)

    def at(self, lag: int) -> float | None:
        """R at a lag; None if it was not measured that far."""
        return float(self.R[lag]) if lag < len(self.R) else None

    def _crossing(self, level: float) -> Figure:
        """First fall to a level, log-linear between lags (to the lag itself where R falls to exactly 0).

        A component's curve may begin below the level and rise through it (c's part is 0 at lag 0); its fall afterwards
        counts. A curve that never rises above the level is below it from the reference lag on.
        """
        above = level < self.R
        if not above.any():
            return Figure(float(self.reference_lag), False)
        fallen = ~above & (self.lags > np.argmax(above))
        if not fallen.any():
            return Figure(float(self.lags[-1]), True)
        lag = int(np.argmax(fallen))
        if self.R[lag] == 0:
            return Figure(float(lag), False)
        before, after = math.log(self.R[lag - 1]), math.log(self.R[lag])
        return Figure(lag - 1 + (before - math.log(level)) / (before - after), False)


def lost_share(R: np.ndarray, most: int, fewest: int = 1) -> float | None:
    """Mean share of summed gradient norm that is cut, over losses that look back j = fewest..most steps.

    A loss that looks back j steps has its lags k ≥ j cut. Under block truncation j goes from 1 to τ, its offset in the
    block: (1/τ) Σ_{j=1..τ} Σ_{k≥j} R_k / Σ R_k. It is a share of norms: gradients of different lags can point in
    opposite directions.

    Args:
        R: (K+1,) from lag 0. The sums end at K: what lies beyond counts neither as kept nor as lost.
        most: The most steps looked back; τ under block truncation.
        fewest: The fewest; each number from there on is equally frequent.

    Returns:
        0 to 1; None if R is 0 everywhere.
    """
    total = float(R.sum())
    if total == 0:
        return None
    tails = np.cumsum(R[::-1])[::-1][fewest : most + 1]
    return float(tails.sum()) / total / (most - fewest + 1)


@dataclass(frozen=True)
class Decay:
    """One measurement: gradient norms by layer, component, lag and pair.

    Attributes:
        norms: For each (layer or "all", "joint" or a component's name) a (K+1, P) float64 array.
        shape: Where it was measured.
    """

    norms: Norms
    shape: ProbeShape

    @cached_property
    def curves(self) -> dict[tuple[Layer, str], Curve]:
        """All curves, those over all layers first, then layer by layer, each joint before its components."""
        keys = sorted(self.norms, key=lambda key: (-1 if key[0] == ALL else key[0], key[1] != JOINT))
        return {key: self._curve(*key) for key in keys}

    def curve(self, layer: Layer = ALL, component: str = JOINT) -> Curve:
        """One curve; by default the one to quote."""
        return self.curves[layer, component]

    def _curve(self, layer: Layer, component: str) -> Curve:
        norms, joint = self.norms[layer, component], self.norms[layer, JOINT]
        finite = np.isfinite(joint).all(axis=0)
        non_zero = np.flatnonzero((joint[:, finite] > 0).any(axis=1))
        reference_lag = int(non_zero[0]) if len(non_zero) else 0
        used = finite & (joint[reference_lag] > 0)
        pairs = int(used.sum())
        lags = np.arange(len(norms))
        zeros = norms[:, used] == 0
        counts = pairs - zeros.sum(axis=1)
        # Differences of logarithms: the ratio itself, of a small to a large norm, may be too small for float64.
        logs = np.log(np.where(zeros, 1.0, norms[:, used])) - np.where(zeros, 0.0, np.log(joint[reference_lag, used]))
        means = logs.sum(axis=1) / np.maximum(counts, 1)
        return Curve(
            lags=lags,
            G=norms[:, finite].mean(axis=1) if finite.any() else np.zeros(len(norms)),
            R=np.where(counts > 0, np.exp(means), 0.0),
            zero_share=zeros.mean(axis=1) if pairs else np.ones(len(norms)),
            reference_lag=reference_lag,
            pairs=pairs,
            left_out=norms.shape[1] - pairs,
        )

    def scalars(self) -> dict[str, float]:
        """Figures by the names they are logged under, such as `decay/half_life` and `decay/layer0/joint/half_life`.

        Lags are in steps, with `…_censored` = 1 where the window ended first. A figure that is not defined (a rate
        through one lag, R at a τ beyond K) has no name here.
        """
        named: dict[str, float] = {}
        fewest, most = self.shape.look_back or (1, self.shape.truncation_length)
        for (layer, component), curve in self.curves.items():
            if layer == ALL and component != JOINT:
                continue
            prefix = "decay" if layer == ALL else f"decay/layer{layer}/{component}"
            for name in ("half_life", "horizon", "lag_99"):
                figure: Figure | None = getattr(curve, name)
                if figure is not None:
                    named[f"{prefix}/{name}"] = figure.value
                    named[f"{prefix}/{name}_censored"] = float(figure.censored)
            undefined_where_none = {
                "rate": curve.rate,
                "at_truncation": curve.at(self.shape.truncation_length),
                "lost_share": lost_share(curve.R, most, fewest),
            }
            named |= {f"{prefix}/{name}": value for name, value in undefined_where_none.items() if value is not None}
        return named

    def records(self, step: int) -> list[dict[str, int | str | list[int] | list[float]]]:
        """The curves as JSON can hold them, one dictionary a layer and component.

        Args:
            step: Optimiser steps done when it was measured.
        """
        return [
            {
                "step": step,
                "layer": layer,
                "component": component,
                "reference_lag": curve.reference_lag,
                "pairs": curve.pairs,
                "left_out": curve.left_out,
                "lags": curve.lags.tolist(),
                "G": curve.G.tolist(),
                "R": curve.R.tolist(),
                "zero_share": curve.zero_share.tolist(),
            }
            for (layer, component), curve in self.curves.items()
        ]


def verdict(decay: Decay, truncation: Truncation) -> str:
    """What the truncation costs, in plain sentences.

    Args:
        decay: The measurement.
        truncation: Of the training.
    """
    curve, last = decay.curve(), decay.shape.max_lag
    if curve.pairs == 0:
        return "No gradient reaches any state, or none is finite: there is nothing to say about the truncation length."

    def lost(length: int) -> str:
        fewest, most = replace(truncation, length=length).look_back
        return f"{100 * (lost_share(curve.R, most, fewest) or 0.0):.1f} %"

    length = truncation.length
    half, twice = max(1, length // 2), 2 * length
    match truncation.mode:
        case "full":
            cost = "Nothing is cut: every loss looks back to the beginning of its row."
        case "sliding":
            more = f" to {length + truncation.stride - 1}" if truncation.stride > 1 else ""
            cost = (
                f"With losses that look back {length}{more} steps, on average {lost(length)} of the summed gradient "
                f"norm is cut off; with {half} steps it would be {lost(half)}, with {twice} steps {lost(twice)}."
            )
        case "randomised":
            cost = (
                f"Inside a window nothing is cut on average: gradients look back {truncation.mean_look_back:.3g} steps "
                f"in the mean, and those that are let through make up for the others (an unbiased estimate). Where a "
                f"window of {truncation.window} steps begins they end, which cuts off {lost(length)} of the summed "
                f"gradient norm."
            )
        case _:
            cost = (
                f"With the gradient cut every {length} steps, on average {lost(length)} of the summed gradient norm "
                f"is cut off; every {half} steps it would be {lost(half)}, every {twice} steps {lost(twice)}."
            )
    return (
        f"{cost} The gradient's half-life is {curve.half_life} steps (lags up to {last} were measured and summed, what "
        f"lies beyond is not counted). This is a share of norms, not of the weights' gradient: directions can cancel."
    )


def cut_recurrence_warning(decay: Decay) -> str | None:
    """What is wrong if no gradient at all goes back in time, else None.

    Only the joint gradient is judged: h alone may rightly be 0 at every lag where c carries everything.
    """
    curve = decay.curve()
    if not curve.pairs or curve.R[curve.reference_lag + 1 :].any():
        return None
    return (
        f"The recurrence is cut: the gradient is exactly 0 at every lag from {curve.reference_lag + 1} to "
        f"{decay.shape.max_lag}, so no weight learns from anything further back. "
        f"Look for a detached or overwritten state between time steps, or recurrent weights that are 0."
    )
