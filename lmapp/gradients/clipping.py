"""Global norm and clipping of gradients, and the record of a clip event.

A norm is judged before anything is clipped: one infinite entry would turn every other entry into 0 and itself into NaN,
and a NaN compares false with any threshold. A norm that merely overflows in fp32 (entries of 1e20) is a finite norm and
is computed and clipped as one.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from lmapp.units import jsonable

# Below this an fp32 norm has lost the squares of some entries to underflow.
_SMALLEST_TRUSTED_NORM = 1e-15


def _filled(gradients: Iterable[Tensor]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient.numel()]


def _norm_dtype(gradients: list[Tensor]) -> torch.dtype:
    """float64 if a gradient is, else fp32: left to itself torch rounds the norm of bf16 gradients to bf16."""
    return torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32


@torch.no_grad()
def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all gradients taken as one vector.

    Args:
        gradients: Tensors of any shape and floating dtype; none or only empty ones give 0.

    Returns:
        A float64 scalar on the CPU (one synchronisation here, none for reading it again), infinite or NaN exactly where
        an entry is: finite entries whose squares overflow or vanish in fp32 are scaled first. Otherwise accumulated in
        fp32, as accurate as `torch.nn.utils.clip_grad_norm_`.
    """
    tensors = _filled(gradients)
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    dtype = _norm_dtype(tensors)
    norm = _norm(tensors, dtype)
    if not _SMALLEST_TRUSTED_NORM < norm < math.inf:
        largest = _largest(tensors)
        norm = largest
        if 0 < largest < math.inf:
            norm *= _norm([tensor.to(dtype) / largest for tensor in tensors], dtype)
    return torch.tensor(norm, dtype=torch.float64)


def _norm(tensors: list[Tensor], dtype: torch.dtype) -> float:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2, dtype))).item()


def _largest(tensors: list[Tensor]) -> float:
    """Largest absolute entry; NaN if any entry is."""
    return torch.stack(torch._foreach_norm(tensors, math.inf, _norm_dtype(tensors))).max().item()


@torch.no_grad()
def clip_by_norm(gradients: Iterable[Tensor], threshold: float, norm: Tensor | float) -> float:
    """Scale all gradients in place by θ/‖g‖ if ‖g‖ > θ; at equality nothing happens (Pascanu 2013, arXiv:1211.5063).

    Args:
        gradients: The tensors whose `global_norm` is `norm`.
        threshold: θ > 0.
        norm: ‖g‖, computed once by the caller and shared with logging.

    Returns:
        The factor applied: θ/‖g‖ exactly, 1.0 where nothing was clipped.

    Raises:
        ValueError: The norm is not finite; such a gradient must be discarded, not clipped.
    """
    length = float(norm)
    if not math.isfinite(length):
        raise ValueError(f"a gradient whose norm is {length} cannot be clipped")
    if length <= threshold:
        return 1.0
    factor = threshold / length
    tensors = _filled(gradients)
    if factor > 1e-30:
        torch._foreach_mul_(tensors, factor)
    else:  # in fp32 the factor itself would lose digits as a denormal number
        torch._foreach_mul_(tensors, math.sqrt(factor))
        torch._foreach_mul_(tensors, math.sqrt(factor))
    return factor


@torch.no_grad()
def clip_by_value(gradients: Iterable[Tensor], threshold: float) -> Tensor:
    """Limit every entry in place to [−θ, θ].

    Returns:
        The largest absolute entry before clipping, a float64 scalar: an event if it exceeds θ. Where it is infinite or
        NaN nothing was changed, so that a non-finite gradient stays recognisable.
    """
    tensors = _filled(gradients)
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    largest = _largest(tensors)
    if threshold < largest < math.inf:
        torch._foreach_clamp_min_(tensors, -threshold)
        torch._foreach_clamp_max_(tensors, threshold)
    return torch.tensor(largest, dtype=torch.float64)


@dataclass(frozen=True)
class ClipEvent:
    """One optimiser step whose gradient was clipped, or was not finite and therefore not applied.

    Attributes:
        kind: What happened.
        step: Which optimiser step it was.
        epoch: Epoch, from 0.
        norm: ‖g‖ before clipping (the largest absolute entry when clipping is by value).
        threshold: θ; None without clipping.
        factor: What the gradient was multiplied by; 0 when it was discarded.
        loss: Mean loss of the batch in nats per character.
        learning_rate: Learning rate of the step.
        text: The batch row with the largest loss.
    """

    kind: Literal["clip", "nonfinite"]
    step: int
    epoch: int
    norm: float
    threshold: float | None
    factor: float
    loss: float
    learning_rate: float
    text: str

    def as_dict(self) -> dict[str, int | float | str | None]:
        """The fields as JSON can hold them: a number that is not finite becomes "inf", "-inf" or "nan"."""
        return jsonable(asdict(self))
