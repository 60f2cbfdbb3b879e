"""Spectra of a network's Jacobians on natural text: how much one step stretches a change of the state, and many steps.

J_t = ∂S_t/∂S_{t−1} is the Jacobian of all layers' states together (`jacobians`). Three figures, each of which says
something else:

- norm: σ_max(J), the most that one step stretches any change; by block power iteration on JᵀJ.
- radius: |λ|_max of J. In a linear network it decides in the long run; elsewhere the J_t differ from step to step and
  no eigenvalue of one of them says what their product does.
- lyapunov: the largest Lyapunov exponent, (1/k) Σ log ‖J_t v_{t−1}‖ with v_t = J_t v_{t−1}/‖J_t v_{t−1}‖: what the
  product really does along the text, in natural logarithm a step. Gradients go back by the same product, transposed.

And the power method's claim, as `Overlap`: the further back a gradient goes, the more it points one way.

Shapes: N windows, R rows, P points, n entries of the state, p vectors of a block, K the largest lag, W warm-up steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lmapp.gradients.decay import ProbeShape, measuring, warmed_up
from lmapp.gradients.jacobians import Jacobian, flatten, network_jacobian, unflatten
from lmapp.units import jsonable

if TYPE_CHECKING:
    from lmapp.models.recurrent import RecurrentModel

TOLERANCE = 1e-3  # what an iteration's residual, relative to what it finds, falls to before it counts as settled
MOST_ITERATIONS = 300  # of the power iteration
BLOCK = 4  # vectors that it iterates together: it converges as (σ_5/σ_1)² then, not as (σ_2/σ_1)²
MOST_KRYLOV = 256  # vectors of the largest Arnoldi basis
MOST_EIGENVALUES = 256  # n up to which the radius is that of all eigenvalues of the dense Jacobian
MOST_PICTURED = 2048  # n up to which all eigenvalues and singular values at one point are given if asked for
MOST_SEALED = 256  # n up to which a step that hides a backward pass of its own is treated, by its dense Jacobian
LARGE = 2048  # n beyond which less is measured, so that it does not take minutes:
FEW_POINTS = 4  # at most, for norm and radius,
FEW_WINDOWS = 2  # for the overlap,
FEW_LAGS = 16  # the largest of its lags,
FEW_ITERATIONS = 15  # and of these for each
MOST_FOR_A_DIRECTION = 1024  # n up to which a constant Jacobian's leading eigenvectors are sought
SETTLING = 32  # steps in which the vector of the Lyapunov exponent turns before it is counted, as far as W has them
OVERLAP_LAGS = (1, 2, 4, 8, 16, 32, 64)
MOST_ITERATIONS_A_LAG = 60  # of the overlap, each through a whole product
ANGLE = 0.02  # what a leading singular vector's angle to the true one falls to before it counts, in radians
DISTINCT = 1e-3  # by how much, relative, a singular value has to lead for its vector to be one


class Operator(Protocol):
    """R matrices (n, n) of which only products are known; rows are independent."""

    def jvp(self, v: Tensor) -> Tensor:
        """A v: (R, n) to (R, n)."""

    def vjp(self, u: Tensor) -> Tensor:
        """Aᵀ u: (R, n) to (R, n)."""


class Leading(NamedTuple):
    """The largest singular value of each of R products, and its vector.

    Attributes:
        logs: (R,) natural logarithm of σ_1; −inf where the product is 0, NaN where it is not finite.
        right: (R, n), the right singular vector: the change of the state that is stretched most.
        second: (R,) σ_2/σ_1; 0 where there is no second.
        residual: (R,) ‖AᵀA v − σ_1² v‖/σ_1². A singular value's square lies no further than that from σ_1², relatively.
        settled: (R,) whether the residual, or the angle, is within the tolerance.
    """

    logs: np.ndarray
    right: Tensor
    second: np.ndarray
    residual: np.ndarray
    settled: np.ndarray


def start_block(rows: int, size: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Orthonormal random vectors for `leading_singular`: (R, n, p), in `like`'s dtype and on its device."""
    drawn = torch.randn(rows, size, min(BLOCK, size), generator=generator, dtype=torch.float64)
    return torch.linalg.qr(drawn).Q.to(like)


def leading_singular(
    operators: Sequence[Operator],
    start: Tensor,
    tolerance: float = TOLERANCE,
    limit: int = MOST_ITERATIONS,
    *,
    directions: bool = False,
) -> Leading:
    """σ_1 and its right singular vector, of A = A_k … A_1, by block power iteration on AᵀA with Rayleigh–Ritz.

    Nothing overflows or vanishes however long the product is: it is rescaled after every factor.

    Args:
        operators: A_1 to A_k, the first to act first; each takes (R·p, n), every row of the products p times in turn.
        start: (R, n, p), orthonormal columns.
        tolerance: for the residual.
        limit: iterations at most.
        directions: whether the vectors are what is wanted. Then the tolerance is for their angles to the true ones, of
            which the residual over 1 − (σ_2/σ_1)² is a bound, and none settles whose singular value does not lead.
    """
    forwards, backwards = [a.jvp for a in operators], [a.vjp for a in reversed(operators)]
    vectors = start
    for _ in range(limit):
        images, up = _through(forwards, vectors)
        left, values, mix = torch.linalg.svd(images, full_matrices=False)
        right = (vectors @ mix.mT)[..., 0]
        pulled, down = _through(backwards, left)
        first = values[:, 0].double()
        positive = first.where(first > 0, 1.0)
        second = values[:, 1].double() / positive if values.shape[1] > 1 else torch.zeros_like(first)
        residual = torch.linalg.vector_norm(
            pulled[..., 0] * ((down - up).exp() / positive).unsqueeze(1) - (first > 0).unsqueeze(1) * right, dim=1
        )
        settled = residual <= tolerance
        if directions:
            settled = (residual <= tolerance * (1 - second**2)) & (second <= 1 - DISTINCT)
        if (settled | residual.isnan()).all():
            break
        vectors = torch.linalg.qr(pulled).Q
    found = (first.log() + up + 0 * down, second, residual, settled)
    logs, ratio, remaining, done = (x.cpu().numpy() for x in found)
    return Leading(logs, right, ratio, remaining, done)


def _through(products: Sequence[Callable[[Tensor], Tensor]], block: Tensor) -> tuple[Tensor, Tensor]:
    """A block (R, n, p) sent through products one after the other, and the logarithm (R,) of what it is short of.

    Where that is not finite the block is 0 and the logarithm NaN.
    """
    rows, size, width = block.shape
    x, logs = block.mT.reshape(rows * width, size), torch.zeros(rows, dtype=torch.float64, device=block.device)
    for product in products:
        x = product(x)
        scale = x.view(rows, -1).abs().amax(1)
        logs = torch.where(scale.isfinite(), logs + scale.where(scale > 0, 1.0).double().log(), math.nan)
        x = x.view(rows, -1) / scale.where(scale > 0, 1.0).unsqueeze(1)
        x = x.where(scale.isfinite().unsqueeze(1), 0.0).view(rows * width, size)
    return x.view(rows, width, size).mT, logs


def largest_modulus(
    operator: Operator, start: Tensor, tolerance: float = TOLERANCE, most: int = MOST_KRYLOV
) -> tuple[np.ndarray, np.ndarray]:
    """|λ|_max of each of R matrices by Arnoldi's method: the largest modulus of its Ritz values.

    A plain power iteration would never settle on a complex pair, which turns. The basis grows until each row's leading
    Ritz pair has a residual within the tolerance, or its modulus changes by no more while the basis grows by half.

    Args:
        operator: takes (R, n).
        start: (R, n), not 0.
        tolerance: for both, relative to the modulus.
        most: vectors of the basis at most.

    Returns:
        moduli (R,), NaN where an entry is not finite, and whether each settled.
    """
    rows, size = start.shape
    most = min(most, size)
    basis = start.new_zeros(rows, most + 1, size)
    basis[:, 0] = start / torch.linalg.vector_norm(start, dim=1, keepdim=True)
    ritz = torch.zeros(rows, most + 1, most, dtype=torch.float64, device=start.device)
    rounding = 10 * torch.finfo(start.dtype).eps
    radius, settled, check = np.full(rows, math.inf), np.zeros(rows, bool), min(16, most)
    for step in range(most):
        new = operator.jvp(basis[:, step])
        length = torch.linalg.vector_norm(new, dim=1)
        known = basis[:, : step + 1]
        for _ in range(2):  # twice, so that the basis stays orthogonal to rounding
            share = torch.einsum("rkn,rn->rk", known, new)
            new = new - torch.einsum("rk,rkn->rn", share, known)
            ritz[:, : step + 1, step] += share
        rest = torch.linalg.vector_norm(new, dim=1)
        rest = rest.where(~(rest <= rounding * length), 0.0)  # none is left: the basis spans an invariant subspace
        ritz[:, step + 1, step] = rest
        basis[:, step + 1] = new / rest.where(rest != 0, 1.0).unsqueeze(1) * (rest != 0).unsqueeze(1)
        if step + 1 == check:
            before = radius
            radius, residual = _ritz(ritz[:, : check + 1, :check].cpu().numpy())
            change = np.abs(radius - before)
            settled = np.minimum(residual, change) <= tolerance * radius
            if (settled | np.isnan(radius)).all():
                break
            check = min(most, check + (check + 1) // 2)
    return radius, settled


def _ritz(hessenberg: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest modulus (R,) of the Ritz values in (R, m+1, m), and that Ritz pair's residual (R,)."""
    radius, residual = np.full(len(hessenberg), math.nan), np.full(len(hessenberg), math.nan)
    for row in np.flatnonzero(np.isfinite(hessenberg).all((1, 2))):
        values, vectors = np.linalg.eig(hessenberg[row, :-1])
        leading = int(np.argmax(np.abs(values)))
        radius[row] = np.abs(values[leading])
        residual[row] = hessenberg[row, -1, -1] * np.abs(vectors[-1, leading])
    return radius, residual


# What is measured


@dataclass(frozen=True)
class Overlap:
    """How far the back-propagated gradient has turned to where the power method says it goes, against lag.

    Attributes:
        reference: What its direction is compared with. "eigenvector": Jᵀ's leading one, where J is the same at every
            step and its leading eigenvalue real and simple. "eigenplane": the plane that Jᵀ's leading complex pair
            leaves as it is. "singular vector": the leading right one of the product Π_{i−k<t≤i} J_t that was met.
        note: Why it is the last, where J is constant; and what was left out because n is large. Else "".
        lags: (L,) in steps.
        values: (L,) the length of the projection of ∂J^(i)/∂S_{i−k} on it, of its own length (with one vector: the
            absolute cosine), in the mean over pairs; NaN without pairs.
        pairs: (L,) windows averaged over; one end point, the last, a window. Left out are those whose gradient is 0 and
            those whose product's leading singular value does not lead, or did not settle.
    """

    reference: Literal["eigenvector", "eigenplane", "singular vector"]
    note: str
    lags: np.ndarray
    values: np.ndarray
    pairs: np.ndarray


@dataclass(frozen=True)
class Spectrum:
    """Spectral figures of a network on text. Averages over points are geometric, over those that are not 0.

    Attributes:
        size: n.
        norms: (P,) σ_max(J) by point.
        norms_settled: (P,) whether its power iteration reached the tolerance; where not it is an estimate from below.
        radii: (P,) |λ|_max of J by point.
        radii_settled: (P,) whether Arnoldi's method settled; all True where the eigenvalues are dense.
        radius_method: What they come from.
        exponents: (N,) the largest Lyapunov exponent by window, natural logarithm a step; −inf where the product is 0.
        steps: k, steps that each exponent is averaged over.
        settling_steps: Steps before these in which its vector could turn. Where there are none the exponent also
            holds the vector's turning, which changes it by the order of 1/k.
        eigenvalues: (n,) complex, all of J at one typical point, if asked for.
        singular_values: (n,) of the same.
        overlap: If asked for.
    """

    size: int
    norms: np.ndarray
    norms_settled: np.ndarray
    radii: np.ndarray
    radii_settled: np.ndarray
    radius_method: Literal["eigenvalues", "arnoldi"]
    exponents: np.ndarray
    steps: int
    settling_steps: int
    eigenvalues: np.ndarray | None = None
    singular_values: np.ndarray | None = None
    overlap: Overlap | None = None

    @property
    def norm(self) -> float:
        """σ_max(J) in the geometric mean; 0 where all are, NaN where one is."""
        return math.exp(_finite_mean(self._logs(self.norms)))

    @property
    def radius(self) -> float:
        """|λ|_max of J in the geometric mean; 0 where all are, NaN where one is."""
        return math.exp(_finite_mean(self._logs(self.radii)))

    @property
    def lyapunov(self) -> float:
        """Mean largest Lyapunov exponent over the windows whose product is not 0; −inf where all are, NaN if one is."""
        return _finite_mean(self.exponents)

    @property
    def lyapunov_spread(self) -> float:
        """Standard deviation over the same windows; NaN where there are none."""
        used = self.exponents[~np.isneginf(self.exponents)]
        return float(used.std()) if len(used) else math.nan

    @staticmethod
    def _logs(values: np.ndarray) -> np.ndarray:
        return np.log(values, where=values != 0, out=np.full(len(values), -math.inf))

    def scalars(self) -> dict[str, float]:
        """Figures by the names they are logged under, of all states together; without those that are not finite."""
        named = {"spectrum/norm": self.norm, "spectrum/radius": self.radius, "spectrum/lyapunov": self.lyapunov}
        return {name: value for name, value in named.items() if math.isfinite(value)}

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it; a number that is not finite becomes "inf", "-inf" or "nan"."""
        eigenvalues = None
        if self.eigenvalues is not None:
            eigenvalues = np.stack((self.eigenvalues.real, self.eigenvalues.imag), 1).tolist()
        overlap = None
        if self.overlap is not None:
            overlap = {
                name: value.tolist() if isinstance(value, np.ndarray) else value
                for name, value in vars(self.overlap).items()
            }
        return jsonable(
            {
                "size": self.size,
                "points": len(self.norms),
                "norm": self.norm,
                "norm_settled": float(self.norms_settled.mean()),
                "norm_zero_share": float((self.norms == 0).mean()),
                "radius": self.radius,
                "radius_method": self.radius_method,
                "radius_settled": float(self.radii_settled.mean()),
                "radius_zero_share": float((self.radii == 0).mean()),
                "lyapunov": self.lyapunov,
                "lyapunov_spread": self.lyapunov_spread,
                "lyapunov_zero_share": float(np.isneginf(self.exponents).mean()),
                "steps": self.steps,
                "settling_steps": self.settling_steps,
                "windows": len(self.exponents),
                "eigenvalues": eigenvalues,
                "singular_values": None if self.singular_values is None else self.singular_values.tolist(),
                "overlap": overlap,
            }
        )


def _finite_mean(logs: np.ndarray) -> float:
    """Mean over what is greater than −inf; −inf where nothing is, NaN where one is."""
    used = logs[~np.isneginf(logs)]
    return float(used.mean()) if len(used) else -math.inf


def why_not(model: RecurrentModel) -> str | None:
    """Why a network has no spectrum that could be taken, to stand after "not measured: "; None if it has.

    It costs one step of one row, and nothing up to n = 256.

    Args:
        model: of any cells.
    """
    states = model.initial_state(1)
    size = flatten(states).shape[1]
    if size <= MOST_SEALED:
        return None
    with measuring(model):
        token = torch.zeros(1, dtype=torch.int64, device=states[0][0].device)
        if not network_jacobian(model, token, states).sealed:
            return None
    return (
        "a torch.autograd.Function lies on the state's way through a step, so the Jacobian is to be had only as a "
        f"whole, and of {size:,} entries of the state it is too large (at most {MOST_SEALED})"
    )


def measure_spectrum(
    model: RecurrentModel,
    windows: Tensor,
    shape: ProbeShape,
    *,
    points: int = 16,
    seed: int = 0,
    dense: bool = False,
    overlap: bool = False,
) -> Spectrum:
    """Take the spectral figures along the windows, where the states are natural ones.

    Dropout is off, zoneout at its mean, products are fp32 (float64 for a float64 model); weights, `.grad`, the global
    random state and training flags are left as they were. The same seed gives the same figures.

    Args:
        model: of any cells, for which `why_not` has no reason.
        windows: (N, W + K + m + 1) int64, from `probe_windows`.
        shape: the shape they were made with.
        points: P, steps among the N·(K + m) after the warm-up, drawn without repetition, for norm and radius; of a
            state of n > 2048 entries 4 at most.
        seed: of the points and of the vectors that iterations start from.
        dense: whether to give all eigenvalues and singular values at the point of the middle norm, where n ≤ 2048.
        overlap: whether to follow the gradient's direction, over lags up to 64; of a state of n > 2048 entries over
            two windows and lags up to 16.

    Raises:
        ValueError: `why_not` has a reason.
    """
    if (reason := why_not(model)) is not None:
        raise ValueError(f"the spectrum cannot be measured: {reason}")
    generator = torch.Generator().manual_seed(seed)
    windows = windows.to(next(model.parameters()).device)
    with measuring(model), torch.no_grad():
        size = flatten(model.initial_state(1)).shape[1]
        points = min(points, FEW_POINTS) if size > LARGE else points
        path = _follow(model, windows, shape, points, max(OVERLAP_LAGS) if overlap else 1, generator)
        rows = len(path.states)
        start = start_block(rows, size, path.states, generator)
        norms = leading_singular([path.jacobian(path.tokens, path.states, start.shape[2])], start)
        jacobian = path.jacobian(path.tokens, path.states)
        if size <= MOST_EIGENVALUES:
            radii = np.array([_moduli(matrix).max() for matrix in jacobian.dense().cpu().double().numpy()])
            settled = np.ones(rows, bool)
        else:
            radii, settled = largest_modulus(jacobian, start[..., 0])
        values = np.exp(norms.logs)
        eigenvalues, singular_values = None, None
        if dense and size <= MOST_PICTURED and np.isfinite(values).all():
            typical = int(np.argsort(values)[(rows - 1) // 2])
            where = slice(typical, typical + 1)
            matrix = path.jacobian(path.tokens[where], path.states[where]).dense()[0].cpu().double().numpy()
            eigenvalues, singular_values = np.linalg.eigvals(matrix).astype(complex), np.linalg.svd(matrix)[1]
        return Spectrum(
            size=size,
            norms=values,
            norms_settled=norms.settled,
            radii=radii,
            radii_settled=settled,
            radius_method="eigenvalues" if size <= MOST_EIGENVALUES else "arnoldi",
            exponents=path.logs.mean(1).cpu().numpy(),
            steps=path.logs.shape[1],
            settling_steps=path.settling,
            eigenvalues=eigenvalues,
            singular_values=singular_values,
            overlap=_overlap(path, generator) if overlap else None,
        )


def _moduli(matrix: np.ndarray) -> np.ndarray:
    return np.abs(np.linalg.eigvals(matrix)) if np.isfinite(matrix).all() else np.full(1, math.nan)


class _Path(NamedTuple):
    """The windows, followed once.

    Attributes:
        model: that was followed.
        tokens: (P,) that each point's step reads.
        states: (P, n) that enter it.
        logs: (N, K + m) log ‖J_t v_{t−1}‖.
        settling: steps before those that are counted.
        last: tokens (N,) and states (N, n) of the last steps, the latest last.
        targets: (N,) what follows the last step.
    """

    model: RecurrentModel
    tokens: Tensor
    states: Tensor
    logs: Tensor
    settling: int
    last: list[tuple[Tensor, Tensor]]
    targets: Tensor

    def jacobian(self, tokens: Tensor, states: Tensor, copies: int = 1) -> Jacobian:
        """At R points, for products with `copies` vectors each."""
        return network_jacobian(self.model, tokens, unflatten(states, self.model.initial_state(1)), copies)


def _follow(
    model: RecurrentModel, windows: Tensor, shape: ProbeShape, points: int, last: int, generator: torch.Generator
) -> _Path:
    steps, settling = shape.max_lag + shape.end_points, min(SETTLING, shape.warm_up)
    first = shape.warm_up - settling
    chosen = torch.randperm(len(windows) * steps, generator=generator)[:points].sort().values
    states = warmed_up(model, windows, replace(shape, warm_up=first))
    latest: deque[tuple[Tensor, Tensor]] = deque(maxlen=last)
    flat, picked, logs = flatten(states), [], []
    drawn = torch.randn(flat.shape, generator=generator, dtype=torch.float64)
    tangent = torch.nn.functional.normalize(drawn).to(flat)
    for step in range(-settling, steps):
        tokens = windows[:, shape.warm_up + step]
        jacobian = network_jacobian(model, tokens, states)
        tangent = jacobian.jvp(tangent)
        length = torch.linalg.vector_norm(tangent, dim=1, dtype=torch.float64)
        tangent = (tangent / length.where(length > 0, 1.0).unsqueeze(1)).to(flat)
        if step >= 0:
            logs.append(length.log())
            here = (chosen[chosen % steps == step] // steps).to(tokens.device)
            picked.append((tokens[here], jacobian.states[here]))
            latest.append((tokens, jacobian.states))
        states = unflatten(jacobian.after, states)
    at_tokens, at_states = (torch.cat(column) for column in zip(*picked, strict=True))
    return _Path(
        model, at_tokens, at_states, torch.stack(logs, 1), settling, list(latest), windows[:, shape.warm_up + steps]
    )


# The gradient's direction


def _overlap(path: _Path, generator: torch.Generator) -> Overlap:
    """Follow each window's last prediction back through the steps before it.

    One step back the gradient is the model's own; from there g_{t−1} = J_tᵀ g_t, rescaled, so that no direction is lost
    where the gradient itself would vanish.
    """
    last, targets, iterations, fewer = path.last, path.targets, MOST_ITERATIONS_A_LAG, ""
    if (size := path.states.shape[1]) > LARGE:
        last = [(tokens[:FEW_WINDOWS], states[:FEW_WINDOWS]) for tokens, states in last[-FEW_LAGS:]]
        targets, iterations = targets[:FEW_WINDOWS], FEW_ITERATIONS
        fewer = f"of {size:,} entries of the state only {len(targets)} windows and {len(last)} lags were followed"
    tokens, flat = last[-1]
    like = path.model.initial_state(1)
    with torch.enable_grad():
        leaf = flat.clone().requires_grad_()
        logits, _ = path.model.step(tokens, unflatten(leaf, like))
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, leaf, materialize_grads=True)
    vectors = start_block(len(flat), flat.shape[1], flat, generator)
    width = vectors.shape[2]
    jacobians = [path.jacobian(tokens, states, width) for tokens, states in last]
    space, note = _leading_space(path, jacobians, generator)
    note = "; ".join(filter(None, (note, fewer)))
    lags = [lag for lag in OVERLAP_LAGS if lag <= len(jacobians)]
    values, pairs = [], []
    for lag in range(1, lags[-1] + 1):
        jacobian = jacobians[-lag]
        if lag > 1:
            gradient = jacobian.vjp(gradient.repeat_interleave(width, 0))[::width]
        length = torch.linalg.vector_norm(gradient, dim=1, keepdim=True, dtype=torch.float64)
        gradient = (gradient / length.where(length > 0, 1.0)).to(flat)
        used = ((length > 0) & length.isfinite()).squeeze(1).cpu().numpy()
        if space is None:  # what the product one step shorter has found, taken one step back, is a good start
            pulled, _ = _through([jacobian.vjp], vectors)
            vectors = torch.linalg.qr(pulled).Q
        if lag not in lags:
            continue
        if space is None:
            found = leading_singular(jacobians[-lag:], vectors, ANGLE, iterations, directions=True)
            share = (found.right * gradient).sum(1).abs()
            used &= found.settled
        else:
            share = torch.linalg.vector_norm(gradient.double() @ space, dim=1)
        values.append(float(share.cpu().double().numpy()[used].mean()) if used.any() else math.nan)
        pairs.append(int(used.sum()))
    reference = "singular vector"
    if space is not None:
        reference = "eigenvector" if space.shape[1] == 1 else "eigenplane"
    return Overlap(reference, note, np.array(lags), np.array(values), np.array(pairs))  # type: ignore[arg-type]


def _leading_space(path: _Path, jacobians: Sequence[Jacobian], generator: torch.Generator) -> tuple[Tensor | None, str]:
    """Orthonormal (n, 1) or (n, 2): where a constant Jacobian's transpose turns what it is applied to; or why not."""
    tokens, flat = path.last[-1]
    size = flat.shape[1]
    probe = torch.randn(1, size, generator=generator, dtype=torch.float64).to(flat)
    images = torch.stack([a.jvp(probe.expand(len(a.states) * a.copies, size)) for a in jacobians])
    apart = (images - images[-1, 0]).abs().max()
    if not apart <= 64 * torch.finfo(flat.dtype).eps * images[-1, 0].abs().max():
        return None, ""
    if size > MOST_FOR_A_DIRECTION:
        return None, f"the Jacobian is constant, but eigenvectors of {size} entries were not sought"
    matrix = path.jacobian(tokens[:1], flat[:1]).dense()[0].cpu().double().numpy()
    values, vectors = np.linalg.eig(matrix.T)
    order = np.argsort(-np.abs(values), kind="stable")
    values, vectors = values[order], vectors[:, order]
    width = 1 if values[0].imag == 0 else 2
    largest = np.abs(values[0])
    double = width == 2 and abs(values[0].imag) <= 1e-6 * largest  # rounding splits a double eigenvalue like this
    if double or (len(values) > width and np.abs(values[width]) >= (1 - 1e-6) * largest):
        return None, "the Jacobian is constant, but its leading eigenvalue is neither simple nor one of a complex pair"
    columns = vectors[:, :1].real if width == 1 else np.stack((vectors[:, 0].real, vectors[:, 0].imag), 1)
    return torch.from_numpy(np.linalg.qr(columns)[0]).to(flat.device), ""
