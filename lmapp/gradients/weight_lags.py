"""From which lags the recurrent weights learn: ∂J/∂W_hh summed by lag (the gradient of BPTT, regrouped).

For an end point i, D_k is the part of ∂J^(i)/∂W_hh that comes from the use of W_hh at step i−k, in which the gradient
of J^(i) has come k steps back: for the vanilla network (Π Jacobians)-pulled δ_{i−k} h_{i−k−1}ᵀ. Here D_k is summed over
all windows and end points, so Σ_k D_k = D is the gradient of the summed losses, each with its history cut K steps
before its end point, where the state of every layer is a constant. Unlike a curve of state gradients this is about the
weights: D_k has the states in it, and contributions of different windows and lags can cancel.

Shapes: N windows, m end points a window, P = N·m pairs (window-major), K the largest lag, W warm-up steps, T = K + m
steps, H hidden; R rows of the weight. Lags are in time steps (symbols).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lmapp.cells.protocol import Cell, GatedCell, Masks, map_state, map_states
from lmapp.gradients.decay import Figure, ProbeShape, measuring, warmed_up

if TYPE_CHECKING:
    from lmapp.models.recurrent import LayerGradients, LayerInput, RecurrentModel, States

ELEMENTS = 2**22
"""Numbers in float64 that are taken out of the gradients at once, about."""


@dataclass(frozen=True)
class WeightLags:
    """How the gradient of one layer's recurrent weight divides into lags.

    Attributes:
        layer: Its number, from 0.
        cell: The name of its class.
        weight: The parameter's name. Of a cell that reads out, only its recurrent rows are meant.
        lags: (K+1,) 0..K.
        size: (K+1,) ‖D_k‖_F/Σ_k ‖D_k‖_F, a share of norms; 0 everywhere where no gradient reaches the weight.
        share: (K+1,) ⟨D_k, D⟩/‖D‖², what D_k adds to the gradient along its own direction; negative where it goes
            against it. Sums to 1, single ones may be far larger where lags cancel; 0 everywhere where D is 0.
        pairs: Pairs summed over.
        left_out: Pairs left out because their gradient is not finite.
    """

    layer: int
    cell: str
    weight: str
    lags: np.ndarray
    size: np.ndarray
    share: np.ndarray
    pairs: int
    left_out: int

    @property
    def cumulative_size(self) -> np.ndarray:
        """(K+1,) the part of `size` up to each lag."""
        return np.cumsum(self.size)

    def lag_holding(self, part: float) -> Figure | None:
        """Smallest lag up to which a part of `size`, such as 0.99, lies; None if it is 0 everywhere.

        Only the lags measured count. Censored if the curve ends above 1 − part of its largest value: a geometric curve
        that does has more than that part of its sum beyond K.
        """
        sums = self.cumulative_size
        if sums[-1] == 0:
            return None
        if self.size[-1] > (1 - part) * self.size.max():
            return Figure(float(self.lags[-1]), True)
        return Figure(float(self.lags[np.argmax(sums >= part * sums[-1])]), False)


class Sums(NamedTuple):
    """Of D_k, for each k, in float64."""

    squares: Tensor
    """(K+1,) ‖D_k‖²."""
    products: Tensor
    """(K+1,) ⟨D_k, D⟩."""


@torch.no_grad()
def measure_weight_lags(
    model: RecurrentModel, windows: Tensor, shape: ProbeShape, *, step_by_step: bool = False
) -> list[WeightLags]:
    """Divide ∂J/∂W_hh into lags, for the same end points at every lag and over every way through the layers above.

    Dropout is off, products are fp32 (float64 for a float64 model); weights, `.grad`, random states and training flags
    are left as they were. It costs about twice a measurement of the decay. A cell without a backward pass of its own
    (`GatedCell`) takes K + 1 steps of the whole network under automatic differentiation instead, back twice.

    Args:
        model: The model; every time step's loss is −log softmax(logits)[target].
        windows: (N, W + K + m + 1) int64, from `probe_windows`.
        shape: The shape they were made with.
        step_by_step: Whether every cell is differentiated so: slow, and by other means the same.

    Returns:
        One entry for each layer whose cell names a `recurrent_weight`, from the bottom up.
    """
    device = next(model.parameters()).device
    windows = windows.to(device)
    tokens, targets = windows[:, shape.warm_up : shape.length - 1], windows[:, shape.length - shape.end_points :]
    end_points = torch.arange(shape.max_lag, tokens.shape[1], device=device)
    found = []
    with measuring(model):
        states = warmed_up(model, windows, shape)
        gradients = model.state_gradients(tokens, states, targets, end_points).layers
        given = model.layer_inputs(tokens, states)
        for number, (inputs, gradient) in enumerate(zip(given, gradients, strict=True)):
            layer = inputs.layer
            if layer.recurrent_weight is None:
                continue
            finite = _finite(gradient)
            if not step_by_step and has_factors(layer):
                sums = by_factors(_factors(inputs, gradient.outputs), finite, shape)
            else:
                used = finite.view(targets.shape)
                sums = by_steps(model, layer, tokens, states, targets, used)
            found.append(_weight_lags(number, layer, sums, finite))
    return found


def _finite(gradient: LayerGradients) -> Tensor:
    """(P,) the pairs whose gradients with respect to the layer's states and outputs are finite."""
    parts = (*gradient.entering, gradient.outputs)
    return torch.stack([part.isfinite().all(-1).all(0) for part in parts]).all(0)


def _weight_lags(number: int, layer: Cell, sums: Sums, used: Tensor) -> WeightLags:
    norms, products = sums.squares.sqrt().cpu().numpy(), sums.products.cpu().numpy()
    # What a sum of zeros is divided by does not matter.
    total, square = norms.sum() or 1.0, products.sum()
    pairs = int(used.sum())
    return WeightLags(
        layer=number,
        cell=type(layer).__name__,
        weight=str(layer.recurrent_weight),
        lags=np.arange(len(norms)),
        size=norms / total,
        share=products / square if square > 0 else np.zeros(len(norms)),
        pairs=pairs,
        left_out=len(used) - pairs,
    )


# From the cell's own backward pass


def has_factors(layer: Cell) -> bool:
    """Whether the layer's backward pass says what its weight's gradient is made of."""
    return isinstance(layer, GatedCell) and type(layer).recurrent_factors is not GatedCell.recurrent_factors


def _factors(inputs: LayerInput, output_gradients: Tensor) -> list[tuple[Tensor, Tensor]]:
    """As `GatedCell.recurrent_factors`, of P rows of which m belong to each window."""
    layer, masks = inputs.layer, Masks(zoneout=inputs.zoneout)
    assert isinstance(layer, GatedCell)
    weights = layer.weights()
    _, _, trace = layer.run(weights, inputs.gates, inputs.state, masks)
    last = map_state(lambda s: s.new_zeros(output_gradients.shape[1], layer.hidden_size), inputs.state)
    deltas, _ = layer.back(weights, trace, output_gradients.contiguous(), last, None, masks)
    return layer.recurrent_factors(trace, deltas)


@torch.no_grad()
def by_factors(factors: list[tuple[Tensor, Tensor]], used: Tensor, shape: ProbeShape) -> Sums:
    """The sums without any D_k: it is Δ_kᵀ H_k, of P rows δ_{i−k} and h_{i−k−1}, one for each pair.

    ‖D_k‖² = Σ (Δ_k Δ_kᵀ)∘(H_k H_kᵀ), a sum of P×P numbers, and ⟨D_k, D⟩ = Σ_p δ_pᵀ D h_p.

    Args:
        factors: δ (T, P, R) and h (T, N, H) for each block of the weight's rows.
        used: (P,) the pairs to sum over.
        shape: Of the windows.
    """
    lags = shape.max_lag + 1
    squares = products = torch.zeros(lags, dtype=torch.float64, device=used.device)
    for deltas, inputs in factors:
        total = torch.zeros(deltas.shape[-1], inputs.shape[-1], dtype=torch.float64, device=used.device)
        found = []
        for delta, h in _by_lag(deltas, inputs, used, shape):
            total += delta.flatten(0, 1).t() @ h.flatten(0, 1)
            found.append(((delta @ delta.mT) * (h @ h.mT)).sum((1, 2)))
        squares = squares + torch.cat(found)
        along = [((delta @ total) * h).sum((1, 2)) for delta, h in _by_lag(deltas, inputs, used, shape)]
        products = products + torch.cat(along)
    # A sum of rows that cancel may come out below 0 in its last digit.
    return Sums(squares.clamp_min(0), products)


def _by_lag(deltas: Tensor, inputs: Tensor, used: Tensor, shape: ProbeShape) -> Iterator[tuple[Tensor, Tensor]]:
    """Some lags at a time, from 0 on: δ (lags, pairs, R) and h (lags, pairs, H), in float64."""
    pairs = used.nonzero().squeeze(1)
    windows, ends = pairs // shape.end_points, shape.max_lag + pairs % shape.end_points
    length = max(1, ELEMENTS // max(1, len(pairs) * deltas.shape[-1]))
    for lags in torch.arange(shape.max_lag + 1, device=used.device).split(length):
        times = ends - lags.unsqueeze(1)
        yield deltas[times, pairs].double(), inputs[times, windows].double()


# Step by step


@torch.no_grad()
def by_steps(model: RecurrentModel, layer: Cell, tokens: Tensor, states: States, targets: Tensor, used: Tensor) -> Sums:
    """The sums by automatic differentiation of `model.step`, all pairs side by side, of which one D_k at a time exists.

    Every step reads a view of the weight that is its own, so the gradient of that view is D_k. The first pass back
    adds them up, the second multiplies each with their sum.

    Args:
        model: The model, while `measuring`.
        layer: One of its layers, which has a `recurrent_weight`.
        tokens: (N, T).
        states: One State a layer, entering the first step.
        targets: (N, m), those of the last m steps.
        used: (N, m), the pairs to sum over.
    """
    name = str(layer.recurrent_weight)
    weight = layer._parameters[name]
    assert weight is not None
    end_points = targets.shape[1]
    lags = tokens.shape[1] - end_points + 1
    squares = torch.zeros(lags, dtype=torch.float64, device=used.device)
    products = torch.zeros_like(squares)
    if not used.any():
        return Sums(squares, products)
    entering = [states]
    for first in range(end_points - 1):
        entering.append(model.step(tokens[:, first], entering[-1])[1])
    current = tuple(
        map_states(lambda *parts: torch.stack(parts, 1)[used], *layers) for layers in zip(*entering, strict=True)
    )
    read = tokens.unfold(1, lags, 1)[used]  # (pairs, K+1)
    total = torch.zeros_like(weight[: layer.recurrent_rows], dtype=torch.float64)

    def first_pass(lag: int, gradient: Tensor) -> None:
        total.add_(gradient)
        squares[lag] = gradient.square().sum()

    def second_pass(lag: int, gradient: Tensor) -> None:
        products[lag] = (gradient * total).sum()

    take = first_pass

    def watch(view: Tensor, lag: int) -> None:
        view.register_hook(lambda gradient: take(lag, gradient[: layer.recurrent_rows].double()))

    with torch.enable_grad():
        leaf = weight.detach().requires_grad_()
        for step in range(lags):
            view = leaf.view_as(leaf)
            watch(view, lags - 1 - step)
            with _in_its_place(layer, name, view):
                logits, current = model.step(read[:, step], current)
        loss = F.cross_entropy(logits, targets[used], reduction="sum")
    torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)
    take = second_pass
    torch.autograd.grad(loss, leaf, allow_unused=True)
    return Sums(squares, products)


@contextmanager
def _in_its_place(layer: Cell, name: str, weight: Tensor) -> Iterator[None]:
    """The layer with another tensor as a parameter."""
    whole = layer._parameters[name]
    layer._parameters[name] = weight  # type: ignore[assignment]
    try:
        yield
    finally:
        layer._parameters[name] = whole
