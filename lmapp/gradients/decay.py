"""Long-range gradient decay: how the gradient of a prediction's loss shrinks, or grows, k steps back in time.

For an end point i and a lag k the gradient is ∂J^(i)/∂S_{i−k}, where S is what the next step really reads: h, or h and
c, which become leaves together. Beside it stands ∂J^(i)/∂x_{i−k}, x being the vector that the first layer reads: all
that a model without a state has. Three pure steps: `probe_shape` and `probe_windows` fix where to measure, `measure`
takes the norms, and `Decay` turns them into curves G_k and R_k, figures, and intervals that these lie in.

Shapes: N windows, m end points a window, P = N·m pairs (window-major), K the largest lag, W warm-up steps, T = K + m
steps, H hidden, L layers. All lengths and lags are in time steps (symbols), τ is the truncation length.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmapp.cells.protocol import Cell
from lmapp.gradients.truncation import UNLIMITED, Truncation
from lmapp.models import LanguageNetwork, LayerGradients, WindowModel
from lmapp.models.recurrent import States

HALF = 0.5  # the level whose crossing is the half-life
HORIZON = 0.01  # the level whose crossing is the horizon; 1 − HORIZON is the share that `lag_99` holds
JOINT = "joint"
ALL: Literal["all"] = "all"
INPUTS: Literal["inputs"] = "inputs"
SMALLEST_MAX_LAG = 2
USUAL_MAX_LAG = 512  # K at most, unless a longer one is asked for: the measurement's memory grows with it
RESAMPLES = 500
RESAMPLING_SEED = 1
LEVEL = 0.95

FIGURES = ("half_life", "horizon", "rate", "lag_99", "at_truncation", "lost_share")
"""By their logged names: lags in steps, a factor per step, R at τ, and the share that the truncation cuts."""
LAGS = ("half_life", "horizon", "lag_99")

Layer = int | Literal["all", "inputs"]
Norms = dict[tuple[Layer, str], np.ndarray]


# Where it is measured


def not_defined(kind: str) -> str:
    """Why a kind of model that reads the text both ways has no gradient decay."""
    return f"it is that of a state carried from left to right, which an {kind} model does not have"


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
        record: Whether each window is a record of a task, whose states are initial at its beginning.
    """

    windows: int
    warm_up: int
    max_lag: int
    end_points: int
    truncation_length: int
    source: Literal["validation", "train"] = "validation"
    look_back: tuple[int, int] | None = None
    record: bool = False

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
        look_back: as `ProbeShape` has it; (N, N) of a model that reads N symbols and carries no state.

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


def measure(model: LanguageNetwork, windows: Tensor, shape: ProbeShape) -> "Decay":
    """Take ‖∂J^(i)/∂S_{i−k}‖₂ for every end point i and lag k = 0..K, per layer and over all layers, and the inputs'.

    Each window is warmed up over W steps from the initial state, then the gradient of each of its last m predictions is
    followed K steps back. The same predictions are used at every lag. Dropout is off, products are fp32 (float64 for a
    float64 model); weights, `.grad`, random states and training flags are left as they were.

    *Per layer*: that layer's state is the leaf, the way up through the layers above at the same time counts. *All
    layers*: every layer's state is a leaf at once, so at lag 0 there is only what the readout reads directly. *Inputs*:
    the vector that the first layer reads of x_{i−k} is the leaf (its embedding, or its one-hot vector), all ways up
    count. A window model has nothing else.

    Args:
        model: The model; every time step's loss is −log softmax(logits)[target].
        windows: (N, W + K + m + 1) int64, from `probe_windows`.
        shape: The shape they were made with.
    """
    device = next(model.parameters()).device
    windows = windows.to(device)
    start, steps = shape.warm_up, shape.max_lag + shape.end_points
    with measuring(model):
        states = warmed_up(model, windows, shape)
        end_points = torch.arange(shape.max_lag, steps, device=device)
        tokens, targets = windows[:, start : start + steps], windows[:, start + shape.max_lag + 1 :]
        norms: Norms = {}
        if isinstance(model, WindowModel):
            inputs = model.input_gradients(tokens, states, targets, end_points)
        else:
            layers, inputs = model.state_gradients(tokens, states, targets, end_points)
            cells: list[Cell] = list(model.layers)  # type: ignore[arg-type]
            norms = _of_states([cell.output_component for cell in cells], layers, shape)
        norms[INPUTS, JOINT] = _by_lag(inputs, shape)
    return Decay(norms, shape)


def _of_states(own: Sequence[str | None], gradients: Sequence[LayerGradients], shape: ProbeShape) -> Norms:
    """Norms per layer, whose output is the component `own` of its state, and over all layers."""
    norms: Norms = {}
    for number, (name, gradient) in enumerate(zip(own, gradients, strict=True)):
        parts = {field: getattr(gradient.entering, field)[1:] for field in gradient.entering._fields}
        alone = {field: _by_lag(part, shape) for field, part in parts.items()}
        way_up = alone if name is None else alone | {name: _by_lag(parts[name] + gradient.outputs, shape)}
        for field, values in way_up.items():
            norms[number, field] = values
        norms[number, JOINT] = _root_of_squares(list(way_up.values()))
        # With every state held at once, at lag 0 there is only what the readout takes of a layer's output itself.
        direct = alone
        if name is not None and gradient.readout is not None:
            direct = alone | {name: _by_lag(parts[name] + gradient.readout, shape)}
        for field, values in direct.items():
            norms[ALL, field] = _root_of_squares([norms[ALL, field], values] if (ALL, field) in norms else [values])
    norms[ALL, JOINT] = _root_of_squares([values for (layer, _), values in norms.items() if layer == ALL])
    return norms


@torch.no_grad()
def warmed_up(model: LanguageNetwork, windows: Tensor, shape: ProbeShape) -> States:
    """The states after W steps of each window, from the initial one: (N, H) each. To be called while `measuring`."""
    states = model.initial_state(len(windows))
    if shape.warm_up:
        _, states = model(windows[:, : shape.warm_up], states)
    return states


@contextmanager
def measuring(model: LanguageNetwork) -> Iterator[None]:
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
    pieces = [
        torch.linalg.vector_norm(steps, dim=-1, dtype=torch.float64)
        for steps in gradient.split(max(1, 2**20 // max(1, gradient[0].numel())))
    ]
    norms = torch.cat(pieces).cpu().numpy()
    pairs = np.arange(norms.shape[1])
    ends = shape.max_lag + pairs % shape.end_points
    return norms[ends - np.arange(shape.max_lag + 1)[:, None], pairs]


def _root_of_squares(norms: list[np.ndarray]) -> np.ndarray:
    return norms[0] if len(norms) == 1 else np.hypot.reduce(norms)


# What it says


class Figure(NamedTuple):
    """A figure; `censored` says that it is a lag, that the window ended first and the true value is greater."""

    value: float
    censored: bool

    def __str__(self) -> str:
        return f"> {self.value:g}" if self.censored else f"{self.value:.3g}"


class Interval(NamedTuple):
    """The ends of an interval that a figure lies in; a censored end is greater than K."""

    low: Figure
    high: Figure

    def __str__(self) -> str:
        return f"{self.low} to {self.high}"


class Quoted(NamedTuple):
    """A figure under its name in `FIGURES`, and its interval, if there is one."""

    name: str
    figure: Figure
    interval: Interval | None


def _crossings(R: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """First fall of each curve to a level, log-linear between lags (to the lag itself where R falls to exactly 0).

    A component's curve may begin below the level and rise through it (c's part is 0 at lag 0); its fall afterwards
    counts. A curve that never rises above the level does not fall to it: that has no lag.

    Args:
        R: (S, K+1).
        level: more than 0.

    Returns:
        lags (S,), NaN where there is none, and where they are censored.
    """
    above = level < R
    lags, curves = np.arange(R.shape[1]), np.arange(len(R))
    fallen = ~above & (lags > above.argmax(axis=1)[:, None])
    lag = fallen.argmax(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):  # of what is then not taken
        before, after = np.log(R[curves, lag - 1]), np.log(R[curves, lag])
        part = np.where(np.isneginf(after), 1.0, (before - math.log(level)) / (before - after))
    rises, censored = above.any(axis=1), above.any(axis=1) & ~fallen.any(axis=1)
    return np.where(censored, lags[-1], np.where(rises, lag - 1 + part, np.nan)), censored


def _rates(R: np.ndarray) -> np.ndarray:
    """Factor per step of each curve (S, K+1): exp of the least-squares slope of log R over the lags where it is not 0.

    NaN where there are fewer than two of these.
    """
    used = R > 0
    count = used.sum(axis=1, keepdims=True)
    lags = np.arange(R.shape[1])
    x = np.where(used, lags - (used * lags).sum(axis=1, keepdims=True) / np.maximum(count, 1), 0.0)
    products = (x * np.log(np.where(used, R, 1.0))).sum(axis=1)
    enough = count[:, 0] > 1
    return np.where(enough, np.exp(products / np.where(enough, (x * x).sum(axis=1), 1.0)), np.nan)


def _lags_99(R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Smallest lag up to which 99 % of Σ R lies, of each curve (S, K+1), and where it is censored; NaN if Σ R is 0.

    Censored if the curve ends above 1 % of its largest value: a geometric curve that does has more than 1 % of its sum
    beyond K.
    """
    sums = np.cumsum(R, axis=1)
    lag = (sums >= (1 - HORIZON) * sums[:, -1:]).argmax(axis=1)
    censored = R[:, -1] > HORIZON * R.max(axis=1)
    return np.where(sums[:, -1] > 0, np.where(censored, R.shape[1] - 1, lag), np.nan), censored


def _lost_shares(R: np.ndarray, most: int, fewest: int) -> np.ndarray:
    """`lost_share` of each curve (S, K+1); NaN where R is 0 everywhere."""
    tails = np.cumsum(R[:, ::-1], axis=1)[:, ::-1][:, fewest : most + 1].sum(axis=1)
    total = R.sum(axis=1)
    return np.where(total > 0, tails / np.where(total > 0, total, 1.0) / (most - fewest + 1), np.nan)


def _figure(values: np.ndarray, censored: np.ndarray | None = None) -> Figure | None:
    """That of the only curve; None where it is not defined."""
    (value,) = values.tolist()
    return None if math.isnan(value) else Figure(value, censored is not None and bool(censored[0]))


@dataclass(frozen=True)
class Curve:
    """Gradient against lag, of one layer (or all, or the inputs) and one component.

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
    def half_life(self) -> Figure | None:
        """Lag at which R first falls to 1/2; None if it is never above."""
        return self._crossing(HALF)

    @property
    def horizon(self) -> Figure | None:
        """Lag at which R first falls to 1/100; None if it is never above."""
        return self._crossing(HORIZON)

    @property
    def rate(self) -> float | None:
        """Factor per step: exp of the least-squares slope of log R over the lags where it is not 0; None below two."""
        figure = _figure(_rates(self.R[None]))
        return None if figure is None else figure.value

    @property
    def lag_99(self) -> Figure | None:
        """Smallest lag up to which 99 % of Σ R lies; None if Σ R is 0."""
        return _figure(*_lags_99(self.R[None]))

    def at(self, lag: int) -> float | None:
        """R at a lag; None if it was not measured that far."""
        return float(self.R[lag]) if lag < len(self.R) else None

    def _crossing(self, level: float) -> Figure | None:
        return _figure(*_crossings(self.R[None], level))


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
    figure = _figure(_lost_shares(R[None], most, fewest))
    return None if figure is None else figure.value


def resamples(windows: int, end_points: int) -> np.ndarray:
    """Pairs drawn anew, (500, N·m) indices: N windows with replacement, and in each m of its end points likewise.

    The two-level bootstrap for clustered data (Davison & Hinkley 1997, section 3.8): end points of one window share
    text and state, so they are not drawn apart from it. The same at every call.
    """
    generator = np.random.default_rng(RESAMPLING_SEED)
    window = generator.integers(windows, size=(RESAMPLES, windows, 1))
    end_point = generator.integers(end_points, size=(RESAMPLES, windows, end_points))
    return (window * end_points + end_point).reshape(RESAMPLES, -1)


class _Ratios(NamedTuple):
    """What a curve is the mean of.

    logs: (K+1, p), of each used pair's ratio to the joint norm at the reference lag, 0 where the ratio is. non_zero
    (K+1, p): 1 where it is not. finite, used: (P,), which of all pairs have finite gradients and which are averaged.
    """

    logs: np.ndarray
    non_zero: np.ndarray
    reference_lag: int
    finite: np.ndarray
    used: np.ndarray

    def means(self, weights: np.ndarray) -> np.ndarray:
        """R (S, K+1), the geometric means in which pair p counts weights (S, p) times; 0 where all ratios are."""
        # By torch: numpy's products have threads of their own, which go on waiting while torch's are at work.
        times = torch.from_numpy(weights)
        counts = (times @ torch.from_numpy(self.non_zero.T)).numpy()
        sums = (times @ torch.from_numpy(self.logs.T)).numpy()
        return np.where(counts > 0, np.exp(sums / np.maximum(counts, 1)), 0.0)


@dataclass(frozen=True)
class Decay:
    """One measurement: gradient norms by layer, component, lag and pair.

    Attributes:
        norms: For each (layer or "all", "joint" or a component's name), and for ("inputs", "joint"), a (K+1, P) float64
            array. A model without a state has the inputs' alone.
        shape: Where it was measured.
    """

    norms: Norms
    shape: ProbeShape

    @cached_property
    def curves(self) -> dict[tuple[Layer, str], Curve]:
        """All curves: those over all layers, then layer by layer, each joint before its components; inputs last."""

        def place(key: tuple[Layer, str]) -> tuple[float, bool]:
            layer, component = key
            return (layer if isinstance(layer, int) else {ALL: -1, INPUTS: math.inf}[layer]), component != JOINT

        return {key: self._curve(*key) for key in sorted(self.norms, key=place)}

    @property
    def quoted(self) -> Layer:
        """Whose joint curve is the one to quote: that of all layers together, or of the inputs if there are none."""
        return ALL if (ALL, JOINT) in self.norms else INPUTS

    def curve(self, layer: Layer | None = None, component: str = JOINT) -> Curve:
        """One curve; by default the one to quote."""
        return self.curves[self.quoted if layer is None else layer, component]

    def figure(self, name: str, layer: Layer | None = None, component: str = JOINT) -> Figure | None:
        """One of `FIGURES`; None if it is not defined: a rate through one lag, R at a τ beyond K, all without pairs."""
        curve = self.curve(layer, component)
        return _figure(*self._values(name, curve.R[None])) if curve.pairs else None

    def interval(
        self, name: str, layer: Layer | None = None, component: str = JOINT, level: float = LEVEL
    ) -> Interval | None:
        """In what a figure lies, by the percentiles of the figure over the `resamples` (Efron 1979).

        It tells how far the figure depends on which text was measured, not on the training's seed. A resample in which
        the window ended first counts as greater than all others; the reference lag stays the curve's. With few windows
        it is rough: on made data with 8 of them, which differed as much as their end points, a 95 % interval held the
        truth 9 times in 10; where end points differ more than windows it is too wide, and of windows that overlap too
        narrow.

        Args:
            name: of `FIGURES`.
            layer: of the curve; by default the one to quote.
            component: of the curve.
            level: share of the resamples between its ends.

        Returns:
            None if the figure is not defined, or there is but one window to draw from.
        """
        layer = self.quoted if layer is None else layer
        if self.shape.windows < 2 or self.figure(name, layer, component) is None:
            return None
        ratios = self._ratios(layer, component)
        drawn = resamples(self.shape.windows, self.shape.end_points)
        pairs = drawn.shape[1]
        places = drawn + pairs * np.arange(RESAMPLES)[:, None]
        weights = np.bincount(places.ravel(), minlength=RESAMPLES * pairs).reshape(RESAMPLES, pairs)[:, ratios.used]
        weights = weights[weights.any(axis=1)].astype(np.float64)  # as products of whole numbers are slow
        values, censored = self._values(name, ratios.means(weights))
        ordered = np.sort(np.where(censored, np.inf, values)[~np.isnan(values)])
        if not len(ordered):
            return None
        # The α-quantile is the (S+1)α-th in order, or the next one outwards.
        beyond = max(0, math.floor((len(ordered) + 1) * (1 - level) / 2 + 1e-9) - 1)
        low, high = (
            Figure(float(self.shape.max_lag), True) if math.isinf(value) else Figure(float(value), False)
            for value in (ordered[beyond], ordered[-1 - beyond])
        )
        return Interval(low, high)

    def summary(self, layer: Layer | None = None, component: str = JOINT) -> list[Quoted]:
        """Every figure of a curve that is defined, with its 95 % interval; by default of the curve to quote."""
        found = ((name, self.figure(name, layer, component)) for name in FIGURES)
        return [
            Quoted(name, figure, self.interval(name, layer, component)) for name, figure in found if figure is not None
        ]

    def _values(self, name: str, R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A figure of each curve (S, K+1), NaN where it is not defined, and where it is censored: (S,) each."""
        match name:
            case "half_life":
                return _crossings(R, HALF)
            case "horizon":
                return _crossings(R, HORIZON)
            case "lag_99":
                return _lags_99(R)
        values = np.full(len(R), np.nan)
        if name == "rate":
            values = _rates(R)
        elif self.quoted == ALL:  # without a state there is nothing to truncate
            length = self.shape.truncation_length
            if name == "lost_share":
                fewest, most = self.shape.look_back or (1, length)
                values = _lost_shares(R, most, fewest)
            elif length < R.shape[1]:
                values = R[:, length]
        return values, np.zeros(len(R), dtype=bool)

    def _ratios(self, layer: Layer, component: str) -> _Ratios:
        norms, joint = self.norms[layer, component], self.norms[layer, JOINT]
        finite = np.logical_and.reduce(np.isfinite(joint))
        reached = np.flatnonzero((joint[:, finite] > 0).any(axis=1))
        reference_lag = int(reached[0]) if len(reached) else 0
        used = finite & (joint[reference_lag] > 0)
        non_zero = norms[:, used] > 0
        # Differences of logarithms: the ratio itself, of a small to a large norm, may be too small for float64.
        reference = np.where(non_zero, np.log(joint[reference_lag, used]), 0.0)
        logs = np.log(np.where(non_zero, norms[:, used], 1.0)) - reference
        return _Ratios(logs, non_zero.astype(np.float64), reference_lag, finite, used)

    def _curve(self, layer: Layer, component: str) -> Curve:
        norms, ratios = self.norms[layer, component], self._ratios(layer, component)
        pairs = int(ratios.used.sum())
        return Curve(
            lags=np.arange(len(norms)),
            G=norms[:, ratios.finite].mean(axis=1) if ratios.finite.any() else np.zeros(len(norms)),
            R=ratios.means(np.ones((1, pairs)))[0],
            zero_share=(1 - ratios.non_zero).mean(axis=1) if pairs else np.ones(len(norms)),
            reference_lag=ratios.reference_lag,
            pairs=pairs,
            left_out=norms.shape[1] - pairs,
        )

    def scalars(self) -> dict[str, float]:
        """Figures by the names they are logged under, such as `decay/half_life` and `decay/layer0/joint/half_life`.

        Lags are in steps, with `…_censored` = 1 where the window ended first; `…/half_life_low` and `…_high`, of the
        curve to quote, are the ends of its 95 % interval, K where they are beyond. A figure that is not defined has no
        name here.
        """
        named: dict[str, float] = {}
        for layer, component in self.curves:
            if layer == ALL and component != JOINT:
                continue
            names: dict[Layer, str] = {ALL: "decay", INPUTS: "decay/inputs"}
            prefix = names.get(layer, f"decay/layer{layer}/{component}")
            for name in FIGURES:
                figure = self.figure(name, layer, component)
                if figure is not None:
                    named[f"{prefix}/{name}"] = figure.value
                    if name in LAGS:
                        named[f"{prefix}/{name}_censored"] = float(figure.censored)
            interval = self.interval("half_life", layer, component) if layer == self.quoted else None
            if interval is not None:
                named[f"{prefix}/half_life_low"] = interval.low.value
                named[f"{prefix}/half_life_high"] = interval.high.value
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
    if decay.quoted == INPUTS:
        half_life = (
            "No gradient reaches what it reads, or none is finite."
            if curve.pairs == 0
            else f"The half-life of the gradient of what it reads is {curve.half_life} steps (lags up to {last} were "
            "measured)."
        )
        return (
            f"{half_life} This model carries no state, so there is nothing to truncate: what lies beyond its window "
            "has no gradient."
        )
    if curve.pairs == 0 and not all(np.isfinite(norms).all() for norms in decay.norms.values()):
        return (
            f"The gradients overflow within {last} steps: they explode. There is nothing to say about the truncation "
            "length. Measure fewer steps (--max-lag), and train with a lower --train.learning-rate."
        )
    if curve.pairs == 0:
        return "No gradient reaches any state: there is nothing to say about the truncation length."

    def lost(length: int) -> str:
        fewest, most = replace(truncation, length=length).look_back
        return f"{100 * (lost_share(curve.R, most, fewest) or 0.0):.1f} %"

    if decay.shape.record:
        share = decay.figure("lost_share")
        cost = "Nothing is cut between a record's beginning and its answer."
        if share is not None and share.value:
            cost = (
                f"Of the summed gradient norm between a record's beginning and its answer, on average "
                f"{100 * share.value:.1f} % is cut off."
            )
        return f"{cost} The gradient's half-life is {curve.half_life} steps (lags up to {last} were measured)."
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

    Only the joint gradient of the states is judged: h alone may rightly be 0 at every lag where c carries everything,
    and beyond the window of a model without a state the inputs' is.
    """
    curve = decay.curve()
    if decay.quoted == INPUTS or not curve.pairs or curve.R[curve.reference_lag + 1 :].any():
        return None
    return (
        f"The recurrence is cut: the gradient is exactly 0 at every lag from {curve.reference_lag + 1} to "
        f"{decay.shape.max_lag}, so no weight learns from anything further back. "
        f"Look for a detached or overwritten state between time steps, or recurrent weights that are 0."
    )
