"""Long short-term memory with a forget gate (Hochreiter & Schmidhuber 1997; Gers et al. 2000)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lmapp.cells.products import Product, cast
from lmapp.cells.protocol import GatedCell, Masks, blocks_backward, state_buffers

_aten = torch.ops.aten


class LSTMState(NamedTuple):
    """Output h and memory c, each (B, H)."""

    h: Tensor
    c: Tensor


class LSTM(GatedCell):
    """i, f, o = σ(W_i· x + W_h· h + b), g = tanh(…), c_t = f∘c_{t−1} + i∘g, h_t = o∘tanh(c_t).

    Gate order i, f, g, o.
    """

    state_type: ClassVar[type[Any]] = LSTMState
    blocks = 4
    remembers = True
    memory_gates: ClassVar[dict[int, int]] = {0: -1, 1: 1}
    retention = "f"
    gate_functions: Mapping[str, str] = {"i": "sigmoid", "f": "sigmoid", "g": "tanh", "o": "sigmoid"}
    squash: ClassVar[bool] = True
    """Whether the output reads tanh(c), or c itself."""

    @torch.no_grad()
    def reset_parameters(self, init: str = "orthogonal", fan_in: float | None = None) -> None:
        """As every cell; unless "torch", the forget gate's bias is 1, all of it in bias_ih (Jozefowicz et al. 2015)."""
        super().reset_parameters(init, fan_in)
        if init != "torch" and self.bias_ih is not None:
            self.set_memory_bias(1.0, None)

    def gate_values(self, gates: Tensor, state: LSTMState) -> dict[str, Tensor]:  # noqa: D102
        h = state.h.to(gates.dtype)
        i, f, g, o = (gates + F.linear(h, self.weight_hh.to(h.dtype))).chunk(4, -1)
        return {"i": i.sigmoid(), "f": f.sigmoid(), "g": g.tanh(), "o": o.sigmoid()}

    def step(self, gates: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:  # noqa: D102
        i, f, g, o = self.gate_values(gates, state).values()
        c = f * state.c + i * g
        h = o * (c.tanh() if self.squash else c)
        return h.to(gates.dtype), LSTMState(h, c)

    def kernel(self, device_type: str, dtype: torch.dtype, masks: bool) -> str:
        """torch.nn's where nothing is masked: cuDNN on a GPU, oneDNN's fused LSTM in fp32 and bf16 on a CPU.

        The latter runs at the speed of its products, which plain torch operations do not reach. Inputs much wider than
        the state (one-hot over a large alphabet) are ours: through a table they cost nothing.
        """
        if not self.squash:
            return "scan"
        fused = dtype != torch.float64 and self.input_size <= 2 * self.hidden_size
        return "torch" if not masks and (device_type == "cuda" or (device_type == "cpu" and fused)) else "scan"

    def torch_forward(self, x: Tensor, hidden: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:  # noqa: D102
        return torch._VF.lstm(x, hidden, weights, len(weights) > 2, 1, 0.0, torch.is_grad_enabled(), False, False)

    def run(  # noqa: D102
        self, weights: tuple[Tensor, ...], gates: Tensor, state: LSTMState, masks: Masks
    ) -> tuple[Tensor, LSTMState, tuple[Tensor, ...]]:
        steps, batch, _ = gates.shape
        size, keep, zoneout = self.hidden_size, masks.keep, masks.zoneout
        recur = Product(weights[0].to(gates.dtype), batch)
        entering, outputs = state_buffers(gates, state.h, keep)
        memory, memory_after = state_buffers(gates, state.c, keep)
        # What the output gate lets out after each step: tanh(c), or c, which is kept anyway.
        apart = self.squash or zoneout is not None
        squashed = gates.new_empty(steps, batch, size) if apart else memory_after
        values = torch.empty_like(gates)  # i, f, g, o
        values_ifg, values_o = (block.unbind() for block in values.split((3 * size, size), -1))
        values_g = values[..., 2 * size : 3 * size].unbind()
        c = state.c.clone()
        wide = c.new_empty(batch, 3 * size)
        steps_views = zip(gates.unbind(), entering.unbind(), outputs.unbind(), strict=True)
        for t, (gate, before, after) in enumerate(steps_views):
            if keep is not None:
                mask = keep[t].unsqueeze(1)
                torch.mul(outputs[t - 1] if t else state.h, mask, out=before)
                memory[t] = c.mul_(mask)
            pre = recur(before, addend=gate)
            torch.sigmoid(pre, out=values[t])
            torch.tanh(pre[:, 2 * size : 3 * size], out=values_g[t])
            i, f, g = cast(values_ifg[t], wide).chunk(3, 1)
            if zoneout is not None:
                new = torch.addcmul(i * g, c, f)
                squashed[t] = new.tanh() if self.squash else new
                memory_after[t] = torch.lerp(new, c, zoneout.c[t], out=c)
                torch.lerp(values_o[t] * squashed[t], before, zoneout.h[t].to(before.dtype), out=after)
                continue
            c.mul_(f).addcmul_(i, g)
            memory_after[t].copy_(c)
            if self.squash:
                torch.tanh(memory_after[t], out=squashed[t])
            torch.mul(values_o[t], squashed[t], out=after)
        last = LSTMState(outputs[-1].to(c.dtype, copy=True), c)
        return outputs, last, (entering, memory, values, squashed)

    def back(  # noqa: D102
        self,
        weights: tuple[Tensor, ...],
        trace: tuple[Tensor, ...],
        output_gradients: Tensor,
        last: LSTMState,
        entering: LSTMState | None,
        masks: Masks,
    ) -> tuple[Tensor, LSTMState]:
        _, memory, values, squashed = trace
        steps, rows, size = output_gradients.shape
        batch = memory.shape[1]
        grouped = (batch, rows // batch, size)
        recur = Product(weights[0].to(values.dtype).t(), rows)
        deltas = values.new_empty(steps, rows, 4 * size)
        spread = deltas.view(steps, batch, rows // batch, 4, size)
        deltas_ifg, deltas_o = spread[..., :3, :].unbind(), spread[..., 3, :].unbind()
        through_h = (last.h + output_gradients[-1]).to(values.dtype)
        carry = last.c.view(grouped)
        narrow, wide = values.new_empty(grouped), torch.empty_like(carry)
        zoned = masks.zoneout is not None
        # Alone, ∂J/∂h_t's two parts meet inside the product; otherwise the recurrent part is wanted by itself.
        alone = entering is None and masks.none
        for block in blocks_backward(steps, 4 * batch * size):
            span = slice(block.start, block.stop)
            factors_ifg, factors_o, factors_c, forget = self._factors(
                memory[span], values[span], squashed[span], carry.dtype
            )
            for t in reversed(block):
                here = t - block.start
                gradient = through_h.view(grouped)
                if zoned:
                    kept_h, kept_c = (mask[t].unsqueeze(1) for mask in masks.zoneout)  # type: ignore[union-attr]
                    stays_h, stays_c = gradient * kept_h, carry * kept_c
                    gradient = gradient - stays_h.to(gradient.dtype)
                    carry.sub_(stays_c)
                torch.mul(gradient, factors_o[here], out=deltas_o[t])
                carry.addcmul_(cast(gradient, wide), factors_c[here])
                torch.mul(cast(carry, narrow).unsqueeze(2), factors_ifg[here], out=deltas_ifg[t])
                carry.mul_(forget[here])
                if alone and t:
                    through_h = recur(deltas[t], addend=output_gradients[t - 1])
                    continue
                through_h = recur(deltas[t])
                if zoned:
                    through_h.view(grouped).add_(stays_h)
                    carry.add_(stays_c)
                for mask in masks.factors:
                    column = mask[t].unsqueeze(1)
                    through_h.mul_(column)
                    last.c.mul_(column)
                if entering is not None:
                    entering.h[t], entering.c[t] = through_h, last.c
                if t:
                    through_h += output_gradients[t - 1]
        return deltas, LSTMState(through_h.to(last.c.dtype), last.c)

    def _factors(
        self, memory: Tensor, values: Tensor, squashed: Tensor, wide: torch.dtype
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What ∂J/∂c_t and ∂J/∂h_t meet, whatever they are, for each step.

        ∂J/∂c_t at i, f, g, (B, 1, 3, H); ∂J/∂h_t at o and c, (B, 1, H); ∂J/∂c_t at c_{t−1}, (B, 1, H). The last two
        are in `wide`.
        """
        i, f, g, o = values.chunk(4, -1)
        factors = values.new_empty(*i.shape[:2], 1, 4, self.hidden_size)
        factor_i, factor_f, factor_g, factor_o = factors.squeeze(2).unbind(2)
        _aten.sigmoid_backward.grad_input(g, i, grad_input=factor_i)
        _aten.sigmoid_backward.grad_input(memory, f, grad_input=factor_f)
        _aten.tanh_backward.grad_input(i, g, grad_input=factor_g)
        _aten.sigmoid_backward.grad_input(squashed, o, grad_input=factor_o)
        factor_c = (_aten.tanh_backward(o, squashed) if self.squash else o).to(wide).unsqueeze(2)
        forget = f.to(wide).unsqueeze(2)
        return factors[..., :3, :].unbind(), factors[..., 3, :].unbind(), factor_c.unbind(), forget.unbind()

    def recurrent_factors(self, trace: tuple[Tensor, ...], deltas: Tensor) -> list[tuple[Tensor, Tensor]]:  # noqa: D102
        return [(deltas, trace[0])]
