"""h_t = a_t∘h_{t−1} + b_t, whose factors do not depend on h, as a parallel scan; and the cells that are one.

Shapes: B batch, T time, H hidden, G gate_size, C chunks.
"""

from __future__ import annotations

from math import isqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lmapp.cells.products import linear, product
from lmapp.cells.protocol import Cell, HiddenState


def chunk_count(steps: int, elements: int, device_type: str) -> int:
    """How many chunks of the time run side by side, where one step has `elements` of them. A rule, never a timing.

    Chunks make about 3√T operations of T, each √T times as large, and read the factors twice. That pays where the start
    of an operation is what costs.
    """
    return 1 if device_type == "cpu" and elements > 2**12 else isqrt(steps)


def _loop(a: Tensor, b: Tensor, h: Tensor, out: Tensor, backwards: bool) -> Tensor:
    steps = list(zip(a.unbind(), b.unbind(), out.unbind(), strict=True))
    for factor, addend, after in reversed(steps) if backwards else steps:
        h = torch.addcmul(addend, factor, h, out=after)
    return h


def solve(a: Tensor, b: Tensor, h: Tensor, out: Tensor, backwards: bool = False) -> None:
    """The recurrence without a graph: out_t = a_t∘out_{t−1} + b_t, or with t+1 for t−1 when `backwards`.

    Nothing is divided and no logarithm taken, so any a in [0, 1] is safe.

    Args:
        a: (T, …), which may broadcast against b.
        b: (T, …).
        h: what stands before the first step; in the shape of a step of b.
        out: in the shape of b.
        backwards: whether the last step comes first.
    """
    steps = len(a)
    chunks = chunk_count(steps, b[:1].numel(), b.device.type)
    if chunks > 1:
        # The steps left over come first; then the same step of every chunk is one operation.
        odd = steps % chunks
        cut = steps - odd if backwards else odd
        parts = [(x[:cut], x[cut:]) for x in (a, b, out)]
        odds, evens = zip(*(part[::-1] if backwards else part for part in parts), strict=True)
        h = _loop(odds[0], odds[1], h, odds[2], backwards)
        a, b, out = (x.unflatten(0, (chunks, -1)).transpose(0, 1) for x in evens)
        h = _entering(a, b, h, backwards)
    _loop(a, b, h, out, backwards)


def _entering(a: Tensor, b: Tensor, h: Tensor, backwards: bool) -> Tensor:
    """What enters each chunk, (C, …), from (T/C, C, …) and what enters the first."""
    pairs = list(zip(a.unbind(), b.unbind(), strict=True))
    (factor, addend), *rest = reversed(pairs) if backwards else pairs
    share, own = factor.clone(), addend.clone()  # of what enters the chunk, in what leaves it; and the rest of that
    for factor, addend in rest:
        torch.addcmul(addend, factor, own, out=own)
        share.mul_(factor)
    _loop(share, own, h, own, backwards)
    return torch.cat((own[1:], h.unsqueeze(0)) if backwards else (h.unsqueeze(0), own[:-1]))


class _LinearRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, h: Tensor, credit: Tensor | None) -> tuple[Tensor, Tensor]:
        states = torch.empty_like(b)
        solve(a, b, h, states)
        ctx.save_for_backward(a, h, states, credit)
        return states, states[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        a, h, states, credit = ctx.saved_tensors
        factors = a if credit is None else a * credit.unsqueeze(2)
        gradients = torch.empty_like(states)
        torch.add(upstream[-1], last, out=gradients[-1])
        solve(factors[1:], upstream[:-1], gradients[-1], gradients[:-1], backwards=True)
        factor_gradients = torch.empty_like(states)
        torch.mul(gradients[0], h, out=factor_gradients[0])
        torch.mul(gradients[1:], states[:-1], out=factor_gradients[1:])
        return factor_gradients, gradients, factors[0] * gradients[0], None


def linear_recurrence(a: Tensor, b: Tensor, h: Tensor, credit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h_t = a_t∘h_{t−1} + b_t as one node of the graph, all of it in one dtype.

    Args:
        a: (T, B, H).
        b: (T, B, H).
        h: (B, H), before the first step.
        credit: (T, B), as in `Cell.scan`.

    Returns:
        h after every step, (T, B, H), and after the last one.
    """
    return _LinearRecurrence.apply(a, b, h, credit)


class LinearCell(Cell):
    """A cell whose gates depend on its input alone: h_t = a_t∘h_{t−1} + b_t with a and b made from the gates.

    Its parameters are weight_ih (G, D) and, with `bias`, bias_ih (G,), where G = blocks·H. A subclass gives
    `coefficients`. The recurrence runs in the state's dtype, whatever that of the gates.
    """

    state_type = HiddenState
    options: ClassVar[tuple[str, ...]] = ("bias",)
    output_component: ClassVar[str | None] = "h"
    remembers = True
    blocks: ClassVar[int]
    memory_signs: ClassVar[tuple[int, ...]]
    """Of the first blocks of the gates, the sign of log U in chrono initialisation; the first keeps (−1: forgets)."""

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size)
        self.gate_size = self.blocks * hidden_size
        self.weight_ih = nn.Parameter(torch.empty(self.gate_size, input_size))
        self.bias_ih = nn.Parameter(torch.empty(self.gate_size)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, init: str = "orthogonal", fan_in: float | None = None) -> None:
        """Draw the parameters anew.

        "torch": everything uniform in ±1/√H. "orthogonal" and "identity", which here differ in nothing: weight_ih
        uniform in ±√(3/fan_in), biases 0.
        """
        if init not in ("orthogonal", "identity", "torch"):
            raise ValueError(f"init is 'orthogonal', 'identity' or 'torch', not {init!r}")
        bound = self.hidden_size**-0.5 if init == "torch" else (3 / (fan_in or self.input_size)) ** 0.5
        nn.init.uniform_(self.weight_ih, -bound, bound)
        if self.bias_ih is not None:
            bound = bound if init == "torch" else 0
            nn.init.uniform_(self.bias_ih, -bound, bound)

    @torch.no_grad()
    def set_memory_bias(self, bias: float | None, longest: float | None) -> None:
        """As every cell; after chrono initialisation the share kept at input 0 is U/(1 + U), U from 1 to T_max − 1."""
        if self.bias_ih is None:
            return super().set_memory_bias(bias, longest)
        blocks = self.bias_ih.split(self.hidden_size)
        if longest is None:
            blocks[0].fill_(self.memory_signs[0] * bias)  # type: ignore[operator]
            return None
        drawn = torch.empty_like(blocks[0]).uniform_(1, longest - 1).log_()
        for block, sign in zip(blocks, self.memory_signs, strict=False):
            block.copy_(sign * drawn)
        return None

    def project(self, x: Tensor) -> Tensor:  # noqa: D102
        return linear(x, self.weight_ih, self.bias_ih)

    def table(self) -> Tensor:  # noqa: D102
        table = self.weight_ih.t().contiguous()
        return table if self.bias_ih is None else table + self.bias_ih

    def coefficients(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Of the recurrence, in plain differentiable operations: a and b, (…, H) each, from (…, G)."""
        raise NotImplementedError

    def step(self, gates: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:  # noqa: D102
        a, b = self.coefficients(gates.to(state.h.dtype))
        h = a * state.h + b
        return h.to(gates.dtype), HiddenState(h)

    def scan(  # noqa: D102
        self,
        gates: Tensor,
        state: HiddenState,
        keep: Tensor | None = None,
        credit: Tensor | None = None,
        zoneout: HiddenState | None = None,
    ) -> tuple[Tensor, HiddenState]:
        wide = state.h.dtype
        a, b = self._zoned_coefficients(gates.to(wide), zoneout)
        if keep is not None:
            a = a * keep.unsqueeze(2).to(wide)
        h, last = linear_recurrence(a, b, state.h, None if credit is None else credit.to(wide))
        return h.to(gates.dtype), HiddenState(last)

    def _zoned_coefficients(self, gates: Tensor, zoneout: HiddenState | None) -> tuple[Tensor, Tensor]:
        """m·h + (1 − m)(a∘h + b) is of the same form."""
        a, b = self.coefficients(gates)
        if zoneout is None:
            return a, b
        kept = zoneout.h.to(a.dtype)
        return torch.lerp(a, torch.ones_like(a), kept), (1 - kept) * b

    def input_gradients(self, x: Tensor, gate_gradients: Tensor) -> Tensor:  # noqa: D102
        rows = gate_gradients.flatten(0, 1)
        return product(rows, self.weight_ih.to(rows.dtype).t()).view(*gate_gradients.shape[:2], -1)

    def state_gradients(  # noqa: D102
        self, gates: Tensor, state: HiddenState, output_gradients: Tensor, zoneout: HiddenState | None = None
    ) -> tuple[HiddenState, Tensor]:
        wide = state.h.dtype
        steps, batch, _ = gates.shape
        with torch.enable_grad():
            leaf = gates.detach().to(wide).requires_grad_()
            a, b = self._zoned_coefficients(leaf, zoneout)
            with torch.no_grad():
                h, _ = linear_recurrence(a, b, state.h)
                before = torch.cat((state.h.unsqueeze(0), h[:-1]))
            # Every gate reaches one entry of h_t: the gradient of their sum is the derivative of each.
            (derivatives,) = torch.autograd.grad((a * before + b).sum(), leaf)
        with torch.no_grad():
            upstream = output_gradients.to(wide).view(steps, batch, -1, self.hidden_size)
            gradients, factors = torch.empty_like(upstream), a.unsqueeze(2)
            gradients[-1] = upstream[-1]
            solve(factors[1:], upstream[:-1], gradients[-1], gradients[:-1], backwards=True)
            entering = torch.cat((factors * gradients, torch.zeros_like(gradients[:1]))).flatten(1, 2)
            spread = derivatives.view(steps, batch, 1, self.blocks, -1) * gradients.unsqueeze(3)
            return HiddenState(entering), spread.reshape(*output_gradients.shape[:2], -1).to(gates.dtype)
