"""How far a gradient can reach at most: bounds on the decay of a vanilla layer, and what its weights alone say.

For a one-layer vanilla network, or the top layer of a plain stack (Pascanu et al. 2013, arXiv:1211.5063):

    ‖∂J^(i)/∂h_{i−k}‖ ≤ ‖∂J^(i)/∂h_i‖ · Π_{i−k<t≤i} ‖diag(φ′(a_t)) W_hh‖ ≤ ‖∂J^(i)/∂h_i‖ · (γ σ_max(W_hh))^k

with γ = max φ′: 1 for tanh, ReLU and the identity, 1/4 for the logistic sigmoid. A lower layer's gradient also takes
the way up, and a gated cell's Jacobian has no such form: there no bound is given.

Shapes: N windows, m end points a window, P = N·m pairs (window-major), K the largest lag, T = K + m steps, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lmapp.cells.concatenated import Concatenated
from lmapp.cells.vanilla import Vanilla
from lmapp.gradients.decay import JOINT, Decay, ProbeShape, measuring, warmed_up
from lmapp.gradients.spectrum import largest_modulus
from lmapp.units import jsonable

if TYPE_CHECKING:
    from lmapp.models.recurrent import RecurrentModel

GAMMA = {"tanh": 1.0, "relu": 1.0, "sigmoid": 0.25, "identity": 1.0}
"""max φ′."""

MOST_EXACT = 128  # H up to which every step's norm is that of all singular values
TOLERANCE = 1e-3  # by how much, relative, a norm is raised beyond that, where Lanczos's method finds it from below
_SETTLED = TOLERANCE / 10  # what its square settles to; what is still missed is in practice less than the raise
_MOST_VECTORS = 64  # of its basis
_ROWS = 256  # that it treats together, each with a basis of its own

_SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda h: 1 - h * h,
    "relu": lambda h: (h > 0).to(h),
    "sigmoid": lambda h: h * (1 - h),
    "identity": torch.ones_like,
}
"""φ′(a) from h = φ(a)."""


@dataclass(frozen=True)
class Bounds:
    """A layer's measured decay and its two bounds, against lag, all relative to lag 0.

    Attributes:
        layer: Which, from 0.
        activation: Its φ.
        gamma: max φ′.
        sigma_max: The largest singular value of its W_hh.
        lags: (K+1,) 0..K.
        R: (K+1,) as the decay's curve has it: geometric mean over the pairs whose ratio is not 0, 0 where all are.
        product: (K+1,) Π ‖diag(φ′(a_t)) W_hh‖, in the geometric mean over the same pairs at every lag.
        uniform: (K+1,) (γ σ_max)^k; infinite where that overflows.
    """

    layer: int
    activation: str
    gamma: float
    sigma_max: float
    lags: np.ndarray
    R: np.ndarray
    product: np.ndarray
    uniform: np.ndarray

    def as_dict(self) -> dict[str, Any]:
        """What bounds the decay, not the decay itself; a number that is not finite becomes "inf", "-inf" or "nan"."""
        return jsonable(
            {
                "layer": self.layer,
                "activation": self.activation,
                "gamma": self.gamma,
                "sigma_max": self.sigma_max,
                "product": self.product.tolist(),
                "uniform": self.uniform.tolist(),
            }
        )


def why_not(model: RecurrentModel, layer: int | None = None) -> str | None:
    """Why a layer's gradient has no bound of this kind, to stand after "not defined: "; None if it has.

    Args:
        model: of any cells.
        layer: which, from 0; the top one if not given.
    """
    top = len(model.layers) - 1
    layer = top if layer is None else layer
    cell = model.layers[layer]
    if layer != top:
        return f"layer {layer} reaches the loss through the layers above it too, not by its own recurrence alone"
    if type(cell) is Concatenated:
        return "the concatenated network's logits read the state before, so there is no gradient at lag 0 to start from"
    if type(cell) is not Vanilla:
        return f"the bound is that of a vanilla layer, and layer {layer} is {type(cell).__name__}"
    if model.connections != "plain":
        return f"the bound is that of a plain stack, and the connections are {model.connections}"
    if model.zoneout:
        return "under zoneout a share of the state stays, which is no part of the bound"
    if not bool(cell.weight_hh.isfinite().all()):
        return "the recurrent weights are not finite"
    return None


def measure_bounds(
    model: RecurrentModel, windows: Tensor, shape: ProbeShape, decay: Decay, layer: int | None = None
) -> Bounds | str:
    """The bounds on a layer's measured decay, over the same predictions.

    Up to H = 128 every ‖diag(φ′(a_t)) W_hh‖ is exact to rounding. Beyond, Lanczos's method finds it from below until
    its square settles to 1e-4, and it is raised by 1e-3. That proves nothing: settling says how much a value still
    changes, not how much is missed. In practice that is some 1e-4, most where W_hh is orthogonal, so that the singular
    values lie close. Where it does not settle γ σ_max stands in for it.

    Args:
        model: as `decay` was measured on it; nothing of it is changed.
        windows: (N, W + K + m + 1) int64, the same as for `decay`.
        shape: likewise.
        decay: from `measure`.
        layer: which, from 0; the top one if not given.

    Returns:
        The bounds, or why they are not defined.
    """
    reason = why_not(model, layer)
    if reason is not None:
        return reason
    layer = len(model.layers) - 1
    joint = decay.norms[layer, JOINT]
    used = np.isfinite(joint).all(axis=0) & (joint[0] > 0)
    if not used.any():
        return "no finite gradient reaches the state at lag 0"
    cell = model.layers[layer]
    assert isinstance(cell, Vanilla)
    gamma, sigma = GAMMA[cell.activation], _sigma_max(cell)
    logs = _step_logs(model, cell, windows, shape, gamma * sigma)
    # Entry t of a window is that of the step to S_t; from the pair's end point back, their sum over k of them.
    pairs, lags = np.arange(joint.shape[1]), np.arange(shape.max_lag + 1)
    ends = shape.max_lag + pairs % shape.end_points
    back = logs[pairs // shape.end_points, ends - lags[:-1, None]]
    products = np.concatenate((np.zeros((1, len(pairs))), np.cumsum(back, axis=0)))
    there = used & (joint > 0)
    counts = there.sum(axis=1)
    means = np.where(there, products, 0.0).sum(axis=1) / np.maximum(counts, 1)
    with np.errstate(over="ignore"):
        return Bounds(
            layer=layer,
            activation=cell.activation,
            gamma=gamma,
            sigma_max=sigma,
            lags=lags,
            R=decay.curve(layer).R,
            product=np.where(counts > 0, np.exp(means), 0.0),
            uniform=np.power(gamma * sigma, lags),
        )


def _sigma_max(cell: Vanilla) -> float:
    return float(torch.linalg.matrix_norm(cell.weight_hh.detach().double(), 2))


@torch.no_grad()
def _step_logs(model: RecurrentModel, cell: Vanilla, windows: Tensor, shape: ProbeShape, most: float) -> np.ndarray:
    """log ‖diag(φ′(a_t)) W_hh‖ of the top layer for every window and step after the warm-up: (N, T)."""
    steps = shape.max_lag + shape.end_points
    if cell.activation == "identity":
        with np.errstate(divide="ignore"):
            return np.full((len(windows), steps), np.log(most))
    windows = windows.to(cell.weight_hh.device)
    slopes = []
    with measuring(model):
        states = warmed_up(model, windows, shape)
        for step in range(steps):
            _, states = model.step(windows[:, shape.warm_up + step], states)
            slopes.append(_SLOPES[cell.activation](states[-1].h))
    rows = torch.stack(slopes, 1).flatten(0, 1)
    weight = cell.weight_hh.detach()
    if cell.hidden_size <= MOST_EXACT:
        wide = weight.double()
        norms = torch.cat(
            [torch.linalg.matrix_norm(some.double().unsqueeze(2) * wide, 2) for some in rows.split(_ROWS)]
        )
        found = norms.cpu().numpy()
    else:
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(cell.hidden_size, generator=generator, dtype=torch.float64).to(weight)
        found = np.concatenate([_lanczos(weight, some, start, most) for some in rows.split(_ROWS)])
    with np.errstate(divide="ignore"):
        return np.log(np.minimum(found, most)).reshape(len(windows), steps)


class _Gram:
    """Wᵀ D² W for R diagonal D, (R, H)."""

    def __init__(self, weight: Tensor, slopes: Tensor) -> None:
        self.weight, self.squares = weight, slopes * slopes

    def jvp(self, v: Tensor) -> Tensor:
        return (v @ self.weight.t() * self.squares) @ self.weight

    vjp = jvp


def _lanczos(weight: Tensor, slopes: Tensor, start: Tensor, most: float) -> np.ndarray:
    """‖diag(slopes) W‖ of R rows, in practice from above."""
    squares, settled = largest_modulus(_Gram(weight, slopes), start.expand_as(slopes), _SETTLED, _MOST_VECTORS)
    return np.where(settled, np.sqrt(squares) * (1 + TOLERANCE), most)


def conditions(model: RecurrentModel) -> list[str]:
    """What the weights of the layer that has bounds say by themselves about vanishing and exploding: true sentences.

    There are none where `why_not` has a reason. Only in a linear network an eigenvalue has something to say: with tanh
    the product of Jacobians may grow though W_hh² = 0, and vanish though W_hh has large eigenvalues.
    """
    if why_not(model) is not None:
        return []
    top = len(model.layers) - 1
    cell = model.layers[top]
    assert isinstance(cell, Vanilla)
    gamma, sigma = GAMMA[cell.activation], _sigma_max(cell)
    gradient = f"the gradient through layer {top}'s recurrence" if top else "the gradient"
    norm, limit = f"the largest singular value of W_hh is {sigma:.4g}", f"1/γ = {1 / gamma:g}"
    if math.isclose(gamma * sigma, 1, rel_tol=1e-6):
        found = [
            f"{gradient} cannot explode: {norm}, and that would have to be above {limit}.",
            f"Whether it vanishes the norm does not say: being below {limit} would suffice for that.",
        ]
    elif gamma * sigma < 1:
        found = [
            f"{gradient} must vanish: {norm}, and being below {limit} suffices; every step back multiplies it by "
            f"{gamma * sigma:.4g} at most, whatever the text.",
            f"It cannot explode: for that the value would have to be above {limit}.",
        ]
    else:
        found = [
            f"{gradient} can explode, but need not: {norm}, and being above {limit} is necessary, not sufficient.",
            f"Whether it vanishes the norm does not say: being below {limit} would suffice for that.",
        ]
    if cell.activation == "identity":
        radius = float(np.abs(np.linalg.eigvals(cell.weight_hh.detach().cpu().double().numpy())).max())
        if math.isclose(radius, 1, rel_tol=1e-6):
            end = "it neither vanishes nor explodes exponentially"
        elif radius < 1:
            end = "it vanishes, though it may grow at first"
        else:
            end = "it explodes, unless it has no share of the leading eigenvectors"
        found.append(
            f"The recurrence is linear, so in the long run the spectral radius of W_hh decides: it is {radius:.4g}, "
            f"the gradient goes as {radius:.4g}^k with the lag k, up to powers of k, so {end}."
        )
    return [sentence[0].upper() + sentence[1:] for sentence in found]
