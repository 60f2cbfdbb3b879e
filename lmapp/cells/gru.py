"""Gated recurrent unit (Cho et al. 2014), with the reset gate after the product, as cuDNN and torch.nn have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lmapp.cells.products import Product, cast
from lmapp.cells.protocol import GatedCell, HiddenState, Masks, blocks_backward, state_buffers

_aten = torch.ops.aten


class GRU(GatedCell):
    """r, z = σ(W_i· x + W_h· h + b), n = tanh(W_in x + b_in + r∘(W_hn h + b_hn)), h_t = (1−z)∘n + z∘h_{t−1}.

    Gate order r, z, n. The bias b_hn stands inside the product with r, so it belongs to `step`, not to `project`.
    """

    blocks = 3
    remembers = True
    memory_gates: ClassVar[dict[int, int]] = {1: 1}
    retention = "z"
    gate_functions: Mapping[str, str] = {"r": "sigmoid", "z": "sigmoid", "n": "tanh"}

    def weights(self) -> tuple[Tensor, ...]:  # noqa: D102
        return (self.weight_hh,) if self.bias_hh is None else (self.weight_hh, self.bias_hh)

    def input_bias(self) -> Tensor | None:  # noqa: D102
        if self.bias_ih is None or self.bias_hh is None:
            return None
        inside = 2 * self.hidden_size
        return self.bias_ih + torch.cat((self.bias_hh[:inside], torch.zeros_like(self.bias_hh[inside:])))

    def _inner_bias(self, weights: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor | None:
        """b_hn below zeros: (G,)."""
        if len(weights) == 1:
            return None
        inside, bias = 2 * self.hidden_size, weights[1]
        return torch.cat((torch.zeros_like(bias[:inside]), bias[inside:])).to(dtype)

    def gate_values(self, gates: Tensor, state: HiddenState) -> dict[str, Tensor]:  # noqa: D102
        h = state.h.to(gates.dtype)
        hidden = F.linear(h, self.weight_hh.to(h.dtype), self._inner_bias(self.weights(), h.dtype))
        gate_r, gate_z, gate_n = gates.chunk(3, -1)
        hidden_r, hidden_z, hidden_n = hidden.chunk(3, -1)
        r, z = (gate_r + hidden_r).sigmoid(), (gate_z + hidden_z).sigmoid()
        return {"r": r, "z": z, "n": (gate_n + r * hidden_n).tanh()}

    def step(self, gates: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:  # noqa: D102
        _, z, n = self.gate_values(gates, state).values()
        new = n + z * (state.h - n)
        return new.to(gates.dtype), HiddenState(new)

    def kernel(self, device_type: str, dtype: torch.dtype, masks: bool) -> str:
        """Ours on a CPU; on a GPU cuDNN, where nothing is masked."""
        return "torch" if device_type == "cuda" and not masks else "scan"

    def torch_forward(self, x: Tensor, hidden: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:  # noqa: D102
        return torch._VF.gru(x, hidden[0], weights, len(weights) > 2, 1, 0.0, torch.is_grad_enabled(), False, False)

    def run(  # noqa: D102
        self, weights: tuple[Tensor, ...], gates: Tensor, state: HiddenState, masks: Masks
    ) -> tuple[Tensor, HiddenState, tuple[Tensor, ...]]:
        steps, batch, _ = gates.shape
        size, dtype = self.hidden_size, gates.dtype
        recur = Product(weights[0].to(dtype), batch)
        bias = self._inner_bias(weights, dtype)
        entering, outputs = state_buffers(gates, state.h, masks.keep)
        values = gates.new_empty(steps, batch, 4 * size)  # r, z, n and what r multiplies
        rz, n, inner = (block.unbind() for block in values.split((2 * size, size, size), -1))
        r, zn = values[..., :size].unbind(), values[..., size : 3 * size].unbind()
        gates_rz, gates_n = (block.unbind() for block in gates.split((2 * size, size), -1))
        h = state.h.clone()
        wide = h.new_empty(batch, 2 * size)
        for t, (before, after) in enumerate(zip(entering.unbind(), outputs.unbind(), strict=True)):
            if masks.keep is not None:
                before.copy_(h.mul_(masks.keep[t].unsqueeze(1)))
            hidden_rz, hidden_n = recur(before, bias=bias).split((2 * size, size), 1)
            torch.add(gates_rz[t], hidden_rz, out=rz[t]).sigmoid_()
            inner[t].copy_(hidden_n)
            torch.addcmul(gates_n[t], r[t], hidden_n, out=n[t]).tanh_()
            wide_z, wide_n = cast(zn[t], wide).chunk(2, 1)
            if masks.zoneout is not None:
                wide_z = torch.addcmul(wide_z, masks.zoneout.h[t], 1 - wide_z)
            torch.lerp(wide_n, h, wide_z, out=h)
            after.copy_(h)
        return outputs, HiddenState(h), (entering, values)

    def back(  # noqa: D102
        self,
        weights: tuple[Tensor, ...],
        trace: tuple[Tensor, ...],
        output_gradients: Tensor,
        last: HiddenState,
        entering: HiddenState | None,
        masks: Masks,
    ) -> tuple[Tensor, HiddenState]:
        before, values = trace
        steps, rows, size = output_gradients.shape
        batch = before.shape[1]
        grouped = (batch, rows // batch, size)
        # Rows of the weight in the order of the first three factors below.
        recur = Product(weights[0].to(values.dtype).roll(size, 0).t(), rows)
        deltas = values.new_empty(steps, rows, 4 * size)
        spread = deltas.view(steps, batch, rows // batch, 4, size).unbind()
        through = deltas[..., : 3 * size].unbind()
        carry = last.h.add_(output_gradients[-1])
        direct = carry.view(grouped)
        narrow, wide = values.new_empty(rows, size), torch.empty_like(carry)
        # Alone, ∂J/∂h_t's parts meet inside the product; otherwise the recurrent part is wanted by itself.
        alone = entering is None and not masks.factors
        for block in blocks_backward(steps, 4 * batch * size):
            span = slice(block.start, block.stop)
            zoneout = None if masks.zoneout is None else masks.zoneout.h[span]
            factors, wide_z = self._factors(before[span], values[span], carry.dtype, zoneout)
            for t in reversed(block):
                torch.mul(factors[t - block.start], cast(carry, narrow).view(batch, -1, 1, size), out=spread[t])
                addend = output_gradients[t - 1] if alone and t else None
                product = cast(recur(through[t], addend=addend), wide)
                torch.addcmul(product.view(grouped), direct, wide_z[t - block.start], out=direct)
                for mask in masks.factors:
                    carry.mul_(mask[t].unsqueeze(1))
                if entering is not None:
                    entering.h[t] = carry
                if t and not alone:
                    carry.add_(output_gradients[t - 1])
        return deltas, HiddenState(carry)

    def _factors(
        self, before: Tensor, values: Tensor, wide: torch.dtype, zoneout: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """What ∂J/∂h_t meets, whatever it is: for each step (B, 1, 4, H) of inner, r, z, n; and (B, 1, H) of h_{t−1}.

        Zoneout by a mask m is the gate 1 − (1−m)(1−z) in place of z.
        """
        r, z, n, inner = values.chunk(4, -1)
        factors = values.new_empty(*z.shape[:2], 1, 4, self.hidden_size)
        factor_inner, factor_r, factor_z, factor_n = factors.squeeze(2).unbind(2)
        direct, part = z.to(wide), 1 - z
        if zoneout is not None:
            renewed = 1 - zoneout
            direct = torch.addcmul(direct, zoneout, part)
            part = (part * renewed).to(z.dtype)
        _aten.tanh_backward.grad_input(part, n, grad_input=factor_n)
        torch.mul(factor_n, r, out=factor_inner)
        _aten.sigmoid_backward.grad_input(torch.mul(factor_n, inner, out=part), r, grad_input=factor_r)
        _aten.sigmoid_backward.grad_input(torch.sub(before, n, out=part), z, grad_input=factor_z)
        if zoneout is not None:
            factor_z.mul_(renewed)
        return factors.unbind(), direct.unsqueeze(2)

    def gate_gradients(self, deltas: Tensor) -> Tensor:  # noqa: D102
        return deltas[..., self.hidden_size :]

    def recurrent_factors(self, trace: tuple[Tensor, ...], deltas: Tensor) -> list[tuple[Tensor, Tensor]]:  # noqa: D102
        # Rows in the order n (what r multiplies), r, z.
        return [(deltas[..., : 3 * self.hidden_size], trace[0])]

    def parameter_gradients(self, trace: tuple[Tensor, ...], deltas: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        size = self.hidden_size
        weight = super().parameter_gradients(trace, deltas)[0].roll(-size, 0)
        if self.bias_hh is None:
            return (weight,)
        bias = torch.zeros_like(self.bias_hh)
        bias[2 * size :] = deltas[..., :size].flatten(0, 1).sum(0)
        return weight, bias
