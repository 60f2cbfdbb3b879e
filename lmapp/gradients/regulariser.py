"""Pascanu's regulariser Ω, which keeps the length of the gradient from step to step (Pascanu et al. 2013).

Ω = Σ_t (‖W_hhᵀ δ_t‖ / ‖g_t‖ − 1)², δ_t = φ′(a_t)∘g_t, g_t = ∂J/∂h_t (arXiv:1211.5063, section 3.3): step t hands
W_hhᵀ δ_t on to h_{t−1}, and Ω is 0 where that is as long as what has reached h_t. J is the loss trained on, g_t the
whole of its gradient, on every way up and forward. g_t and h_t are held constant, so that W_hh alone has a gradient.

The paper has one row and a sum over its steps. Here each row has its own ratios, and Ω is the mean over the rows and
steps that count, so that its weight depends neither on T nor on B: the paper's weight is that of the mean divided by
the T steps. So it is in its authors' code too, whose ratio however is of squared norms: its weights do not carry over.

What it costs beside a step: two products of all T·B rows with an H×H matrix for each layer. The recurrence has three
of that size, two of them in T pieces. Where torch.nn's kernel runs, which keeps its δ to itself, one more in T pieces.

Shapes: T steps, B rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lmapp.cells.products import product, stacked_product
from lmapp.cells.protocol import HiddenState, Masks, State
from lmapp.cells.vanilla import Vanilla
from lmapp.models.recurrent import RecurrentModel

SMALLEST_SQUARE = 1e-20
"""Of ‖g_t‖²: below it the direction is noise, and the step does not count."""


class Omega(NamedTuple):
    """Ω of one layer, as sums over the rows and steps that count; their quotients are the mean and its gradient.

    Attributes:
        total: scalar in float64, Σ (‖W_hhᵀ δ_t‖/‖g_t‖ − 1)².
        counted: scalar in float64, the rows and steps that count.
        gradient: (H, H) in the dtype of W_hh, ∂total/∂W_hh.
    """

    total: Tensor
    counted: Tensor
    gradient: Tensor


@torch.no_grad()
def omega(weight: Tensor, deltas: Tensor, upstream: Tensor, factors: Sequence[Tensor] = ()) -> Omega:
    """Ω of a vanilla layer and its gradient on W_hh, Σ 2 (‖n_t‖/‖g_t‖ − 1)/‖g_t‖ · δ_t (n_t/‖n_t‖)ᵀ, n_t = W_hhᵀ δ_t.

    All rows of all steps are one product each way: n_t is that of every δ_t at once, and from it follows g_t, which is
    what comes from above and n_{t+1}. Where the gradient is cut or the state reset between two steps, g_t is that of
    the loss so cut; the ratio of the step after, which no gradient leaves, counts like any other: it is W_hh's.

    Args:
        weight: (H, H), W_hh.
        deltas: (T, B, H), δ_t = ∂J/∂a_t.
        upstream: (T, B, H), the part of ∂J/∂h_t that does not come through h_{t+1}.
        factors: (T, B) each, what the gradient of the state entering a step was multiplied by.
    """
    rows = deltas.flatten(0, 1)
    leaving = product(rows, weight.to(deltas.dtype).t()).view(deltas.shape)
    gradients = upstream.clone()
    onward = leaving[1:]
    for factor in factors:
        onward = onward * factor[1:].unsqueeze(-1).to(onward.dtype)
    gradients[:-1] += onward
    before, after = _norms(gradients), _norms(leaving)
    del gradients, onward
    counted = before.square() >= SMALLEST_SQUARE
    excess = torch.where(counted, after / before - 1, 0)
    # A step that hands on nothing has no direction to hand it on in.
    along = torch.where(after > 0, 1 / after, 0).to(deltas.dtype)
    across = torch.where(counted, 2 * excess / before, 0).to(deltas.dtype)
    gradient = stacked_product(deltas * across.unsqueeze(-1), leaving.mul_(along.unsqueeze(-1)))
    return Omega(excess.square().sum(), counted.sum(dtype=torch.float64), gradient.to(weight.dtype))


def _norms(vectors: Tensor) -> Tensor:
    """(T, B, H) to (T, B)."""
    # In float64, whose squares neither vanish nor overflow; some steps at a time, because torch copies what it takes.
    return torch.cat([torch.linalg.vector_norm(piece, dim=-1, dtype=torch.float64) for piece in vectors.split(64)])


Taken: TypeAlias = list[tuple[Vanilla, Omega]]
"""Layers, each with its Ω for a window."""


@contextmanager
def watching(model: RecurrentModel) -> Iterator[Taken]:
    """Take Ω of all windows that the model reads meanwhile, from the pass that trains it: its dropout, its precision.

    A model of vanilla cells only, without weight drop and zoneout.

    Yields:
        What is empty until the backward pass of a window comes by, then has an entry for each layer, from the top down.
    """
    taken: Taken = []
    layers: Any = list(model.layers)
    for layer in layers:
        layer.scan, layer.torch_forward = _watched_scan(layer, taken), _watched_kernel(layer, taken)
    try:
        yield taken
    finally:
        for layer in layers:
            del layer.scan, layer.torch_forward  # the instance's; those of its class are there again


def add_gradients(taken: Taken, weight: float, sum_up: Callable[[Sequence[float]], list[float]] = list) -> float:
    """Add the gradient of λΩ to those of the recurrent matrices.

    Args:
        taken: from `watching`, after the backward pass.
        weight: λ.
        sum_up: where several processes have rows of the batch: from numbers of each to their sums. Each then adds its
            own rows' part of the gradient.

    Returns:
        Ω: of each layer the mean over the rows and steps that count, 0 where none does; of several layers the sum.
    """
    own = [sum_ for _, found in taken for sum_ in (found.total, found.counted)]
    sums = sum_up(torch.stack(own).tolist())
    value = 0.0
    for (layer, found), total, counted in zip(taken, sums[::2], sums[1::2], strict=True):
        assert layer.weight_hh.grad is not None
        if counted:
            value += total / counted
            layer.weight_hh.grad.add_(found.gradient, alpha=weight / counted)
    return value


def _watched_scan(layer: Vanilla, taken: Taken) -> Callable[..., tuple[Tensor, State]]:
    """The layer's `scan`: the gradient of its gates is δ, that of its outputs what comes from above."""
    scan = layer.scan

    def watched(
        gates: Tensor,
        state: State,
        keep: Tensor | None = None,
        credit: Tensor | None = None,
        zoneout: State | None = None,
    ) -> tuple[Tensor, State]:
        outputs, last = scan(gates, state, keep, credit, zoneout)
        if gates.requires_grad:
            factors, above = Masks(keep, credit).factors, list[Tensor]()

            def take(deltas: Tensor) -> None:
                taken.append((layer, omega(layer.weight_hh, deltas, above.pop(), factors)))

            outputs.register_hook(above.append)  # called before the other
            gates.register_hook(take)
        return outputs, last

    return watched


def _watched_kernel(layer: Vanilla, taken: Taken) -> Callable[..., tuple[Tensor, ...]]:
    """The layer's `torch_forward`, whose δ has to be made once more: by the layer's own backward pass."""
    torch_forward = layer.torch_forward

    def watched(x: Tensor, hidden: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        outputs, *last = torch_forward(x, hidden, weights)
        values = outputs.detach()

        @torch.no_grad()
        def take(upstream: Tensor) -> None:
            # No loss reads the state after the last step but through its output.
            after = HiddenState(layer.initial_state(values.shape[1]).h)
            deltas, _ = layer.back(layer.weights(), (values, values), upstream.contiguous(), after, None, Masks())
            taken.append((layer, omega(layer.weight_hh, deltas, upstream)))

        if outputs.requires_grad:
            outputs.register_hook(take)
        return outputs, *last

    return watched
