"""Matrix products as fast as this machine has them, and exact sums of their gradients.

Shapes: M rows, K inner, N columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def cast(tensor: Tensor, buffer: Tensor) -> Tensor:
    """`tensor` in the dtype of `buffer`: itself, or copied into it."""
    return tensor if tensor.dtype == buffer.dtype else buffer.copy_(tensor)


def _onednn(tensor: Tensor) -> bool:
    """Whether oneDNN's products, which torch itself uses through its compiler only, take this tensor.

    They are worth it: MKL's fp32 product runs at half the speed on some processors, and a packed bf16 weight saves the
    repacking that an ordinary product does at every call.
    """
    if tensor.device.type != "cpu" or not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    if tensor.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return tensor.dtype == torch.float32


class Product:
    """x (M, K) to x Wᵀ (M, N), for one W (N, K) and many x in turn."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        self.packed = _onednn(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows) if self.packed else weight.t()

    def __call__(self, x: Tensor, *, addend: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """X Wᵀ plus `addend` (M, N) or `bias` (N,), not both."""
        if self.packed and addend is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, addend, self.weight, None, "add")
        addend = bias if addend is None else addend
        return torch.mm(x, self.weight) if addend is None else torch.addmm(addend, x, self.weight)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (M, K) times weight (N, K) transposed, plus bias (N,), once."""
    if x.dtype == torch.float32 and _onednn(x):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def stacked_product(deltas: Tensor, inputs: Tensor) -> Tensor:
    """Σ over all steps and rows of δ xᵀ, as one product: (…, N) and (…, K) to (N, K)."""
    deltas, inputs = deltas.reshape(-1, deltas.shape[-1]), inputs.reshape(-1, inputs.shape[-1])
    if deltas.dtype == torch.float32 and _onednn(deltas):
        # oneDNN copies its first factor into its own order, so that is the narrower one; a second one with gaps between
        # its rows would send it to its slow reference code.
        return product(inputs.t(), deltas.contiguous().t()).t()
    return torch.mm(deltas.t(), inputs)


class _Linear(torch.autograd.Function):
    """F.linear in x's dtype with parameters in theirs. Sums run in fp32 and are rounded once, at their end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias = bias is not None
        y = product(x.reshape(-1, x.shape[-1]), weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        back = None
        if ctx.needs_input_grad[0]:
            back = product(rows, weight.to(x.dtype).t()).view(x.shape)
        bias = rows.sum(0).to(weight.dtype) if ctx.bias else None
        return back, stacked_product(gradient, x).to(weight.dtype), bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear computed in x's dtype: (…, D) to (…, N)."""
    if x.dtype != torch.float64 and x.numel() >= 256 * x.shape[-1]:
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
