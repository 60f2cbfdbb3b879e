"""The stacked recurrent language model: embed, project, run, read out.

Shapes: B batch, T time, D input, H hidden, G gate_size, V vocabulary, L layers; R = B·m rows for m end points.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmapp import cells
from lmapp.cells.protocol import Cell, State, linear, map_state
from lmapp.cells.vanilla import Vanilla

States = tuple[State, ...]


class LayerGradients(NamedTuple):
    """One layer's gradients of J over R rows; see `RecurrentModel.state_gradients`."""

    entering: State
    outputs: Tensor


def detach(states: States) -> States:
    """The same states, cut from the graph."""
    return tuple(map_state(Tensor.detach, state) for state in states)


class _Gather(torch.autograd.Function):
    """Rows of a table in another dtype, with the gradient summed in the table's own.

    The backward pass of an ordinary gather in bf16 adds up in bf16, where 4096 ones give 256.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.table = table.shape, table.dtype
        return F.embedding(tokens, table.to(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        shape, dtype = ctx.table
        total = torch.zeros(shape, dtype=dtype, device=gradient.device)
        # Few rows at a time: their copy in the other dtype stays in the cache.
        for ids, rows in zip(tokens.reshape(-1).split(256), gradient.flatten(0, -2).split(256), strict=True):
            total.index_add_(0, ids, rows.to(dtype))
        return total, None, None


class RecurrentModel(nn.Module):
    """Characters to logits of the next character, through L recurrent layers of one kind.

    `compute_dtype` (float32 by default, bfloat16 for mixed precision) is that of the products and of what is kept for
    the backward pass; states, logits and parameters stay in fp32. A model moved to float64 computes in float64.
    """

    def __init__(
        self,
        vocabulary_size: int,
        *,
        cell: str,
        hidden_size: int,
        num_layers: int,
        embedding_size: int = 0,
        activation: str = "tanh",
        dropout: float = 0.0,
        init: str = "orthogonal",
    ) -> None:
        super().__init__()
        self.vocabulary_size = vocabulary_size
        self.dropout = dropout
        self.compute_dtype = torch.float32
        self.embedding = nn.Embedding(vocabulary_size, embedding_size) if embedding_size else None
        kind = cells.find(cell)
        options = {"activation": activation} if issubclass(kind, Vanilla) else {}
        self.layers = nn.ModuleList()
        width = embedding_size or vocabulary_size
        for index in range(num_layers):
            layer = kind(width, hidden_size, **options)
            layer.reset_parameters(init, 1 if index == 0 and self.embedding is None else None)
            self.layers.append(layer)
            width = layer.output_size
        self.head = nn.Linear(width, vocabulary_size)

    def initial_state(self, batch_size: int) -> States:
        """One zero state a layer."""
        return tuple(layer.initial_state(batch_size) for layer in self._cells())

    def forward(
        self, tokens: Tensor, states: States, keep: Tensor | None = None, credit: Tensor | None = None
    ) -> tuple[Tensor, States]:
        """Tokens (B, T) to logits (B, T, V), in fp32 or float64, and the states after the last token.

        Args:
            tokens: int64 ids.
            states: one State a layer, as from `initial_state` or an earlier call.
            keep: (B, T), multiplies the states entering step t (0: a new document starts there).
            credit: (B, T), multiplies only the gradient of those states.
        """
        dtype = self._dtype()
        keep = None if keep is None else keep.t()
        credit = None if credit is None else credit.t()
        x = tokens
        after = []
        for index, (layer, state) in enumerate(zip(self._cells(), states, strict=True)):
            if index == 0 and self._by_table(tokens.numel(), keep is not None or credit is not None):
                x, state = layer.scan(_Gather.apply(self._table(), tokens.t(), dtype), state, keep, credit)
            else:
                x, state = layer(x if index else self._embed(tokens.t(), dtype), state, keep, credit)
            if self.training and self.dropout:
                # One mask for the whole window (Gal & Ghahramani 2016).
                x = x * F.dropout(x.new_ones(x.shape[1:]), self.dropout)
            after.append(state)
        logits = linear(x, self.head.weight, self.head.bias)
        return logits.transpose(0, 1).to(self.head.weight.dtype), tuple(after)

    def step(self, token: Tensor, states: States) -> tuple[Tensor, States]:
        """One token a row, (B,), to logits (B, V) and the states after it; fp32 (float64), without dropout."""
        x = self._embed(token, self.head.weight.dtype)
        after = []
        for layer, state in zip(self._cells(), states, strict=True):
            x, state = layer.step(layer.project(x), state)
            after.append(state)
        return self.head(x), tuple(after)

    def kernels(self, batch_size: int, sequence_length: int) -> list[str]:
        """The kernel that each layer runs on (B, T) tokens without masks: "scan", "table+scan" or "torch"."""
        device = self.head.weight.device.type
        names = [layer.kernel(device, self._dtype(), False) for layer in self._cells()]
        if self._by_table(batch_size * sequence_length, False):
            names[0] = "table+scan"
        return names

    @torch.no_grad()
    def state_gradients(
        self, tokens: Tensor, states: States, targets: Tensor, end_points: Tensor
    ) -> tuple[LayerGradients, ...]:
        """How single losses depend on the states before them.

        Row b·m + e belongs to J = −log softmax(o at time end_points[e] of window b)[targets[b, e]].

        Args:
            tokens: (B, T).
            states: one State a layer, entering the first step.
            targets: (B, m).
            end_points: (m,), times in 0..T−1.

        Returns:
            One LayerGradients a layer: `entering`, a State of (T+1, R, H) whose entry t is ∂J/∂(state entering step t)
            along that layer's recurrence and all above it (entry T zero); `outputs` (T, R, output_size),
            ∂J/∂(the layer's output at t), all ways up included. fp32 (float64), no dropout, no parameter's gradient
            is touched.
        """
        batch, steps = tokens.shape
        count = len(end_points)
        x = self._embed(tokens.t(), self.head.weight.dtype)
        inputs, gates = [], []
        for layer, state in zip(self._cells(), states, strict=True):
            inputs.append(x)
            gates.append(layer.project(x))
            x, _ = layer.scan(gates[-1], state)
        probabilities = self.head(x[end_points]).transpose(0, 1).softmax(-1)  # (B, m, V)
        error = probabilities - F.one_hot(targets, self.vocabulary_size)
        outputs = x.new_zeros(steps, batch, count, x.shape[-1])
        outputs[end_points, :, torch.arange(count, device=x.device)] = (error @ self.head.weight).transpose(0, 1)
        outputs = outputs.reshape(steps, batch * count, -1)
        found: list[LayerGradients] = []
        for index in reversed(range(len(self.layers))):
            layer = self._cells()[index]
            entering, gate_gradients = layer.state_gradients(gates[index], states[index], outputs)
            found.append(LayerGradients(entering, outputs))
            if index:
                outputs = layer.input_gradients(inputs[index], gate_gradients)
        return tuple(reversed(found))

    def _cells(self) -> list[Cell]:
        return list(self.layers)  # type: ignore[arg-type]

    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.head.weight.dtype == torch.float64 else self.compute_dtype

    def _embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """(…) to (…, D) in `dtype`."""
        if self.embedding is None:
            # F.one_hot would make eight bytes an entry first.
            zeros = torch.zeros(*tokens.shape, self.vocabulary_size, dtype=dtype, device=tokens.device)
            return zeros.scatter_(-1, tokens.unsqueeze(-1), 1)
        return _Gather.apply(self.embedding.weight, tokens, dtype)

    def _table(self) -> Tensor:
        """The first layer's input gates for every symbol: (V, G)."""
        first = self._cells()[0]
        return first.table() if self.embedding is None else first.project(self.embedding.weight)

    def _by_table(self, count: int, masks: bool) -> bool:
        """Whether the first layer gathers its gates for `count` tokens from the table."""
        kernel = self._cells()[0].kernel(self.head.weight.device.type, self._dtype(), masks)
        return kernel == "scan" and (self.embedding is None or self.vocabulary_size < count)
