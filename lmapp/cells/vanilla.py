"""The Elman network: one non-linearity over input and previous state (Elman 1990)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lmapp.cells.products import Product
from lmapp.cells.protocol import GatedCell, HiddenState, Masks, state_buffers
from lmapp.errors import UsageError

_aten = torch.ops.aten


class Activation(NamedTuple):
    """φ in three forms."""

    function: Callable[[Tensor], Tensor]
    write: Callable[[Tensor, Tensor], Tensor]
    """φ(a) into the second tensor."""
    pull: Callable[[Tensor, Tensor, Tensor], Tensor]
    """φ′ ∘ gradient into the third tensor, from the gradient and φ's value."""


ACTIVATIONS = {
    "tanh": Activation(
        torch.tanh,
        lambda a, out: torch.tanh(a, out=out),
        lambda gradient, value, out: _aten.tanh_backward.grad_input(gradient, value, grad_input=out),
    ),
    "relu": Activation(
        torch.relu,
        lambda a, out: torch.clamp_min(a, 0, out=out),
        lambda gradient, value, out: _aten.threshold_backward.grad_input(gradient, value, 0, grad_input=out),
    ),
    "sigmoid": Activation(
        torch.sigmoid,
        lambda a, out: torch.sigmoid(a, out=out),
        lambda gradient, value, out: _aten.sigmoid_backward.grad_input(gradient, value, grad_input=out),
    ),
    "identity": Activation(torch.clone, lambda a, out: out.copy_(a), lambda gradient, _, out: out.copy_(gradient)),
}


class Vanilla(GatedCell):
    """h_t = φ(W_ih x_t + b_ih + W_hh h_{t−1} + b_hh)."""

    options = ("bias", "activation")
    blocks = 1

    def __init__(self, input_size: int, hidden_size: int, *, activation: str = "tanh", bias: bool = True) -> None:
        if activation not in ACTIVATIONS:
            raise UsageError(f"--model.activation is one of {', '.join(ACTIVATIONS)}, not {activation!r}.")
        self.activation = activation
        self.gate_functions = {"h": activation}
        super().__init__(input_size, hidden_size, bias=bias)

    def gate_values(self, gates: Tensor, state: HiddenState) -> dict[str, Tensor]:  # noqa: D102
        h = state.h.to(gates.dtype)
        return {"h": ACTIVATIONS[self.activation].function(gates + F.linear(h, self.weight_hh.to(h.dtype)))}

    def step(self, gates: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:  # noqa: D102
        h = self.gate_values(gates, state)["h"]
        return h, HiddenState(h.to(state.h.dtype))

    def kernel(self, device_type: str, dtype: torch.dtype, masks: bool) -> str:
        """Ours on a CPU; on a GPU cuDNN, where it has the activation and nothing is masked."""
        known = self.activation in ("tanh", "relu")
        return "torch" if device_type == "cuda" and known and not masks else "scan"

    def torch_forward(self, x: Tensor, hidden: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:  # noqa: D102
        kernel = torch._VF.rnn_tanh if self.activation == "tanh" else torch._VF.rnn_relu
        return kernel(x, hidden[0], weights, len(weights) > 2, 1, 0.0, torch.is_grad_enabled(), False, False)

    def run(  # noqa: D102
        self, weights: tuple[Tensor, ...], gates: Tensor, state: HiddenState, masks: Masks
    ) -> tuple[Tensor, HiddenState, tuple[Tensor, ...]]:
        write = ACTIVATIONS[self.activation].write
        recur = Product(weights[0].to(gates.dtype), gates.shape[1])
        entering, outputs = state_buffers(gates, state.h, masks.keep)
        values = outputs if masks.zoneout is None else torch.empty_like(outputs)
        steps = zip(gates.unbind(), entering.unbind(), values.unbind(), strict=True)
        for t, (gate, h, value) in enumerate(steps):
            if masks.keep is not None:
                torch.mul(outputs[t - 1] if t else state.h, masks.keep[t].unsqueeze(1), out=h)
            write(recur(h, addend=gate), value)
            if masks.zoneout is not None:
                torch.lerp(value, h, masks.zoneout.h[t].to(h.dtype), out=outputs[t])
        last = HiddenState(outputs[-1].to(state.h.dtype, copy=True))
        return outputs, last, (entering, values)

    def back(  # noqa: D102
        self,
        weights: tuple[Tensor, ...],
        trace: tuple[Tensor, ...],
        output_gradients: Tensor,
        last: HiddenState,
        entering: HiddenState | None,
        masks: Masks,
    ) -> tuple[Tensor, HiddenState]:
        pull = ACTIVATIONS[self.activation].pull
        values = trace[1]
        steps, rows, width = output_gradients.shape
        grouped = (values.shape[1], rows // values.shape[1], width)
        recur = Product(weights[0].to(values.dtype).t(), rows)
        deltas = values.new_empty(steps, rows, width)
        kept = None if masks.zoneout is None else masks.zoneout.h.to(values.dtype).unsqueeze(2)
        # Alone, ∂J/∂h_t's two parts meet inside the product; otherwise the recurrent part is wanted by itself.
        alone = entering is None and masks.none
        gradient = carry = (last.h + output_gradients[-1]).to(values.dtype)
        for t in reversed(range(steps)):
            delta, whole = deltas[t].view(grouped), gradient.view(grouped)
            new = whole if kept is None else whole * (1 - kept[t])
            pull(new, values[t].unsqueeze(1), delta)
            if alone and t:
                gradient = recur(deltas[t], addend=output_gradients[t - 1])
                continue
            carry = recur(deltas[t])
            if kept is not None:
                carry.view(grouped).addcmul_(kept[t], whole)
            for mask in masks.factors:
                carry.mul_(mask[t].unsqueeze(1))
            if entering is not None:
                entering.h[t] = carry
            if t:
                gradient = carry + output_gradients[t - 1]
        return deltas, HiddenState(carry.to(last.h.dtype))

    def recurrent_factors(self, trace: tuple[Tensor, ...], deltas: Tensor) -> list[tuple[Tensor, Tensor]]:  # noqa: D102
        return [(deltas, trace[0])]
