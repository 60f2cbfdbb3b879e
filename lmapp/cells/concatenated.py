"""The network of the well-known tutorial, which joins input and state to one vector; its state is linear."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lmapp.cells.products import Product, product, stacked_product
from lmapp.cells.protocol import GatedCell, HiddenState, Masks, state_buffers


class Concatenated(GatedCell):
    """h_t = W_h [x_t; h_{t−1}] + b_h, o_t = W_o [x_t; h_{t−1}] + b_o, where o_t (V,) is the logits.

    There is no non-linearity, and o_t reads h_{t−1}, not h_t, so a gradient first reaches the state at lag 1. Each
    parameter holds W_h's H rows above W_o's V.
    """

    reads_out: ClassVar[bool] = True
    output_component: ClassVar[str | None] = None
    blocks = 1
    biases = ("bias_ih",)

    def step(self, gates: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:  # noqa: D102
        h = state.h.to(gates.dtype)
        both = gates + F.linear(h, self.weight_hh.to(h.dtype))
        return both[:, self.hidden_size :], HiddenState(both[:, : self.hidden_size].to(state.h.dtype))

    def run(  # noqa: D102
        self, weights: tuple[Tensor, ...], gates: Tensor, state: HiddenState, masks: Masks
    ) -> tuple[Tensor, HiddenState, tuple[Tensor, ...]]:
        size = self.hidden_size
        weight = weights[0].to(gates.dtype)
        recur = Product(weight[:size], gates.shape[1])
        entering, after = state_buffers(gates, state.h, masks.keep)
        gates_h = gates[..., :size].contiguous().unbind()
        for t, (gate, h) in enumerate(zip(gates_h, entering.unbind(), strict=True)):
            if masks.keep is not None:
                torch.mul(after[t - 1] if t else state.h, masks.keep[t].unsqueeze(1), out=h)
            after[t] = recur(h, addend=gate)
            if masks.zoneout is not None:
                after[t].lerp_(h, masks.zoneout.h[t].to(h.dtype))
        read = product(entering.flatten(0, 1), weight[size:]).view(*gates.shape[:2], -1)
        return read.add_(gates[..., size:]), HiddenState(after[-1].to(state.h.dtype, copy=True)), (entering,)

    def back(  # noqa: D102
        self,
        weights: tuple[Tensor, ...],
        trace: tuple[Tensor, ...],
        output_gradients: Tensor,
        last: HiddenState,
        entering: HiddenState | None,
        masks: Masks,
    ) -> tuple[Tensor, HiddenState]:
        size, batch = self.hidden_size, trace[0].shape[1]
        steps, rows, _ = output_gradients.shape
        grouped = (batch, rows // batch, size)
        weight = weights[0].to(output_gradients.dtype)
        recur = Product(weight[:size].t(), rows)
        deltas = output_gradients.new_empty(steps, rows, self.gate_size)
        deltas[..., size:] = output_gradients
        read = product(output_gradients.flatten(0, 1), weight[size:].t()).view(steps, rows, size)
        carry = last.h.to(read.dtype)
        kept = None if masks.zoneout is None else masks.zoneout.h.to(read.dtype).unsqueeze(2)
        for t in reversed(range(steps)):
            whole = carry
            if kept is not None:
                carry = (whole.view(grouped) * (1 - kept[t])).view(rows, size)
            deltas[t, :, :size] = carry
            carry = recur(carry, addend=read[t])
            if kept is not None:
                carry.view(grouped).addcmul_(kept[t], whole.view(grouped))
            for mask in masks.factors:
                carry.mul_(mask[t].unsqueeze(1))
            if entering is not None:
                entering.h[t] = carry
        return deltas, HiddenState(carry.to(last.h.dtype))

    def recurrent_factors(self, trace: tuple[Tensor, ...], deltas: Tensor) -> list[tuple[Tensor, Tensor]]:  # noqa: D102
        return [(deltas[..., : self.hidden_size], trace[0])]

    def parameter_gradients(self, trace: tuple[Tensor, ...], deltas: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        return (stacked_product(deltas, trace[0]).to(self.weight_hh.dtype),)
