"""Gated recurrent unit with the reset gate before the product, as Cho et al. (2014) and most lecture notes have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lmapp.cells.products import Product, cast
from lmapp.cells.protocol import GatedCell, HiddenState, Masks, blocks_backward, state_buffers

_aten = torch.ops.aten


class GRUBefore(GatedCell):
    """r, z = σ(W_i· x + W_h· h + b), n = tanh(W_in x + W_hn (r∘h_{t−1}) + b_n), h_t = (1−z)∘n + z∘h_{t−1}.

    Parameters and gate order r, z, n as `GRU` has them, but a different cell: weights do not convert. A step has two
    products, one after the other.
    """

    blocks = 3
    remembers = True
    memory_gates: ClassVar[dict[int, int]] = {1: 1}
    retention = "z"
    gate_functions: Mapping[str, str] = {"r": "sigmoid", "z": "sigmoid", "n": "tanh"}

    def gate_values(self, gates: Tensor, state: HiddenState) -> dict[str, Tensor]:  # noqa: D102
        h, size = state.h.to(gates.dtype), self.hidden_size
        weight = self.weight_hh.to(h.dtype)
        gates_rz, gates_n = gates.split((2 * size, size), -1)
        r, z = (gates_rz + F.linear(h, weight[: 2 * size])).sigmoid().chunk(2, -1)
        return {"r": r, "z": z, "n": (gates_n + F.linear(r * h, weight[2 * size :])).tanh()}

    def step(self, gates: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:  # noqa: D102
        _, z, n = self.gate_values(gates, state).values()
        new = n + z * (state.h - n)
        return new.to(gates.dtype), HiddenState(new)

    def run(  # noqa: D102
        self, weights: tuple[Tensor, ...], gates: Tensor, state: HiddenState, masks: Masks
    ) -> tuple[Tensor, HiddenState, tuple[Tensor, ...]]:
        batch, size = gates.shape[1], self.hidden_size
        weight = weights[0].to(gates.dtype)
        recur, recur_n = Product(weight[: 2 * size], batch), Product(weight[2 * size :], batch)
        entering, outputs = state_buffers(gates, state.h, masks.keep)
        reset = torch.empty_like(outputs)  # r∘h
        values = torch.empty_like(gates)  # r, z, n
        rz, n = (block.unbind() for block in values.split((2 * size, size), -1))
        r, zn = values[..., :size].unbind(), values[..., size:].unbind()
        gates_rz, gates_n = (block.contiguous().unbind() for block in gates.split((2 * size, size), -1))
        h = state.h.clone()
        wide = h.new_empty(batch, 2 * size)
        for t, (before, after) in enumerate(zip(entering.unbind(), outputs.unbind(), strict=True)):
            if masks.keep is not None:
                before.copy_(h.mul_(masks.keep[t].unsqueeze(1)))
            torch.sigmoid(recur(before, addend=gates_rz[t]), out=rz[t])
            torch.mul(r[t], before, out=reset[t])
            torch.tanh(recur_n(reset[t], addend=gates_n[t]), out=n[t])
            wide_z, wide_n = cast(zn[t], wide).chunk(2, 1)
            if masks.zoneout is not None:
                wide_z = torch.addcmul(wide_z, masks.zoneout.h[t], 1 - wide_z)
            torch.lerp(wide_n, h, wide_z, out=h)
            after.copy_(h)
        return outputs, HiddenState(h), (entering, reset, values)

    def back(  # noqa: D102
        self,
        weights: tuple[Tensor, ...],
        trace: tuple[Tensor, ...],
        output_gradients: Tensor,
        last: HiddenState,
        entering: HiddenState | None,
        masks: Masks,
    ) -> tuple[Tensor, HiddenState]:
        before, _, values = trace
        steps, rows, size = output_gradients.shape
        batch = before.shape[1]
        grouped = (batch, rows // batch, size)
        weight = weights[0].to(values.dtype)
        recur, recur_n = Product(weight[: 2 * size].t(), rows), Product(weight[2 * size :].t(), rows)
        deltas = values.new_empty(steps, rows, 3 * size)  # r, z, n
        delta_r, delta_z, delta_n = (block.view(steps, *grouped[:2], size).unbind() for block in deltas.split(size, -1))
        # The products take their rows without gaps.
        whole_rz, whole_n = values.new_empty(rows, 2 * size), values.new_empty(rows, size)
        carry = last.h.add_(output_gradients[-1])
        direct = carry.view(grouped)
        narrow = values.new_empty(rows, size)
        for block in blocks_backward(steps, 4 * batch * size):
            span = slice(block.start, block.stop)
            zoneout = None if masks.zoneout is None else masks.zoneout.h[span]
            factor_r, factor_z, factor_n, r, kept = self._factors(before[span], values[span], carry.dtype, zoneout)
            for t in reversed(block):
                here = t - block.start
                gradient = cast(carry, narrow).view(grouped)
                torch.mul(gradient, factor_n[here], out=delta_n[t])
                torch.mul(gradient, factor_z[here], out=delta_z[t])
                through_reset = recur_n(whole_n.copy_(deltas[t, :, 2 * size :])).view(grouped)
                torch.mul(through_reset, factor_r[here], out=delta_r[t])
                through = recur(whole_rz.copy_(deltas[t, :, : 2 * size])).view(grouped)
                direct.mul_(kept[here]).add_(through)
                direct.addcmul_(through_reset.to(direct.dtype), r[here])
                for mask in masks.factors:
                    carry.mul_(mask[t].unsqueeze(1))
                if entering is not None:
                    entering.h[t] = carry
                if t:
                    carry.add_(output_gradients[t - 1])
        return deltas, HiddenState(carry)

    def _factors(
        self, before: Tensor, values: Tensor, wide: torch.dtype, zoneout: Tensor | None
    ) -> tuple[tuple[Tensor, ...], ...]:
        """Factors of the gradients, for each step (B, 1, H).

        ∂J/∂(r∘h) at the pre-activation of r; ∂J/∂h_t at those of z and n; ∂J/∂(r∘h) at h_{t−1}, and ∂J/∂h_t at h_{t−1},
        both in `wide`.
        """
        r, z, n = values.chunk(3, -1)
        part, kept = 1 - z, z.to(wide)
        if zoneout is not None:
            renewed = 1 - zoneout
            kept = torch.addcmul(kept, zoneout, part.to(wide))
            part = (part * renewed).to(z.dtype)
        factor_n = _aten.tanh_backward(part, n)
        factor_r = _aten.sigmoid_backward(before, r)
        factor_z = _aten.sigmoid_backward(before - n, z)
        if zoneout is not None:
            factor_z.mul_(renewed)
        return tuple(x.unsqueeze(2).unbind() for x in (factor_r, factor_z, factor_n, r.to(wide), kept))

    def recurrent_factors(self, trace: tuple[Tensor, ...], deltas: Tensor) -> list[tuple[Tensor, Tensor]]:  # noqa: D102
        before, reset, _ = trace
        size = self.hidden_size
        return [(deltas[..., : 2 * size], before), (deltas[..., 2 * size :], reset)]
