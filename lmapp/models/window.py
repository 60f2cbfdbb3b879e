"""The fixed-window neural language model (Bengio et al. 2003): embed the last N characters, one hidden layer, softmax.

Shapes: B batch, T time, N window, D embedding, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmapp.cells.products import linear
from lmapp.cells.vanilla import ACTIVATIONS
from lmapp.errors import UsageError


class WindowState(NamedTuple):
    """What is carried from one character to the next: the last N−1 ids, (B, N−1) int64."""

    ids: Tensor


class WindowModel(nn.Module):
    """Characters to logits of the next character, each from the last N characters, the current one included.

    It is used as a `RecurrentModel` is: its state is the N−1 ids that it will read again. Before a text begins they are
    a symbol of their own, id V, which is only ever read and starts as zeros. Each further character of the window costs
    (V+1)·H parameters, or D·H with an embedding; a recurrent model's memory costs none.

    `compute_dtype` is that of the products; sums of one-hot inputs, logits and parameters stay in fp32.

    Args:
        vocabulary_size: V.
        window: N.
        hidden_size: H.
        embedding_size: D; 0 for one-hot inputs.
        activation: of the hidden layer.
        bias: whether the hidden layer and the readout have biases.
        dropout: of the hidden layer, one mask over time.
        init: "orthogonal": the hidden layer uniform, so that its pre-activations have variance 1, biases 0; "torch": as
            nn.Linear has it.

    Raises:
        UsageError: the options do not go together.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        vocabulary_size: int,
        *,
        window: int,
        hidden_size: int,
        embedding_size: int = 0,
        activation: str = "tanh",
        bias: bool = True,
        dropout: float = 0.0,
        init: str = "orthogonal",
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise UsageError(f"--model.activation is one of {', '.join(ACTIVATIONS)}, not {activation!r}.")
        if init not in ("orthogonal", "torch"):
            raise UsageError(f"--model.init {init} is of recurrent matrices; the window model has none.")
        self.vocabulary_size = vocabulary_size
        self.window = window
        self.activation = activation
        self.dropout = dropout
        self.compute_dtype = torch.float32
        symbols = vocabulary_size + 1
        self.embedding = nn.Embedding(symbols, embedding_size) if embedding_size else None
        # One-hot inputs need rows of it: (N·(V+1), H), those of the oldest place first. Else (H, N·D), as nn.Linear's.
        shape = (hidden_size, window * embedding_size) if embedding_size else (window * symbols, hidden_size)
        self.weight = nn.Parameter(torch.empty(shape))
        self.register_parameter("bias", nn.Parameter(torch.empty(hidden_size)) if bias else None)
        self.head = nn.Linear(hidden_size, vocabulary_size, bias=bias)
        self._reset_hidden(init)

    @torch.no_grad()
    def _reset_hidden(self, init: str) -> None:
        symbols = self.vocabulary_size + 1
        if init == "torch":
            bound = (len(self.weight) if self.embedding is None else self.weight.shape[1]) ** -0.5
        else:
            bound = (3 / (self.window if self.embedding is None else self.weight.shape[1])) ** 0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound) if init == "torch" else nn.init.zeros_(self.bias)
        padding = self.weight[symbols - 1 :: symbols] if self.embedding is None else self.embedding.weight[-1]
        padding.zero_()

    def initial_state(self, batch_size: int) -> tuple[WindowState]:
        """The beginning of a text: nothing but padding."""
        ids = torch.full((batch_size, self.window - 1), self.vocabulary_size, device=self.weight.device)
        return (WindowState(ids),)

    def forward(
        self, tokens: Tensor, states: tuple[WindowState], keep: Tensor | None = None, credit: Tensor | None = None
    ) -> tuple[Tensor, tuple[WindowState]]:
        """Tokens (B, T) to logits (B, T, V), in fp32 or float64, and the state after the last token.

        Args:
            tokens: int64 ids.
            states: as from `initial_state` or an earlier call.
            keep: (B, T); 0 where a new document starts, for which all before it is padding.
            credit: as a `RecurrentModel` takes it. It has nothing to act on: no gradient passes from step to step.
        """
        before = self.window - 1
        ids = torch.cat((states[0].ids, tokens), 1)
        windows, last = ids.unfold(1, self.window, 1), ids[:, tokens.shape[1] :]
        if keep is not None:
            times = torch.arange(-before, tokens.shape[1], device=tokens.device)
            starts = torch.where(keep == 0, times[before:], -before).cummax(1).values  # (B, T), of each one's document
            old = times.unfold(0, self.window, 1) < starts.unsqueeze(2)
            windows = windows.masked_fill(old, self.vocabulary_size)
            last = last.masked_fill(times[tokens.shape[1] :] < starts[:, -1:], self.vocabulary_size)
        hidden = self._hidden(windows, self._dtype())
        if self.training and self.dropout:
            hidden = hidden * F.dropout(hidden.new_ones(len(hidden), 1, hidden.shape[2]), self.dropout)
        return self._read_out(hidden), (WindowState(last.contiguous()),)

    def step(self, token: Tensor, states: tuple[WindowState]) -> tuple[Tensor, tuple[WindowState]]:
        """One token a row, (B,), to logits (B, V) and the state after it; fp32 (float64), as in evaluation."""
        window = torch.cat((states[0].ids, token.unsqueeze(1)), 1)
        return self._read_out(self._hidden(window, self.weight.dtype)), (WindowState(window[:, 1:]),)

    @torch.no_grad()
    def input_gradients(
        self, tokens: Tensor, states: tuple[WindowState], targets: Tensor, end_points: Tensor
    ) -> Tensor:
        """How single losses depend on the symbols before them; as `RecurrentModel.state_gradients` has it.

        Row b·m + e belongs to J = −log softmax(o at time end_points[e] of window b)[targets[b, e]].

        Args:
            tokens: (B, T).
            states: entering the first step.
            targets: (B, m).
            end_points: (m,), times in 0..T−1.

        Returns:
            (T, R, D), D = V+1 without an embedding: ∂J/∂(the vector of the symbol read at t), exactly 0 outside the
            window. fp32 (float64), as in evaluation, no parameter's gradient is touched.
        """
        ids = torch.cat((states[0].ids, tokens), 1).unfold(1, self.window, 1)[:, end_points]  # (B, m, N)
        hidden = self._hidden(ids, self.weight.dtype)
        error = self._read_out(hidden).softmax(-1) - F.one_hot(targets, self.vocabulary_size)
        error = (error.to(hidden.dtype) @ self.head.weight).contiguous()
        delta = ACTIVATIONS[self.activation].pull(error, hidden, torch.empty_like(hidden))
        weight = self.weight.t() if self.embedding is None else self.weight
        places = (delta @ weight).unflatten(-1, (self.window, -1))  # (B, m, N, D)
        found = places.new_zeros(tokens.shape[1], *places.shape[:2], places.shape[-1])
        for number, end in enumerate(end_points.tolist()):
            reach = min(self.window, end + 1)
            found[end + 1 - reach : end + 1, :, number] = places[:, number, -reach:].transpose(0, 1)
        return found.flatten(1, 2)

    def kernels(self, batch_size: int, sequence_length: int, masks: bool = False) -> list[str]:
        """How the hidden layer reads its window: "rows", sums of them, or "product"."""
        return ["rows" if self.embedding is None else "product"]

    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.weight.dtype == torch.float64 else self.compute_dtype

    def _hidden(self, windows: Tensor, dtype: torch.dtype) -> Tensor:
        """Windows of ids (…, N) to the hidden layer (…, H) in `dtype`."""
        if self.embedding is not None:
            # Cast after gathering, so that what an id gets from its places is added up in fp32.
            inputs = F.embedding(windows, self.embedding.weight).to(dtype).flatten(-2)
            before = linear(inputs, self.weight, self.bias)
        else:
            places = torch.arange(self.window, device=windows.device) * (self.vocabulary_size + 1)
            rows = (windows + places).flatten(0, -2)
            before = F.embedding_bag(rows, self.weight, mode="sum").view(*windows.shape[:-1], -1)
            before = before if self.bias is None else before + self.bias
        return ACTIVATIONS[self.activation].function(before).to(dtype)

    def _read_out(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.head.weight, self.head.bias).to(self.weight.dtype)
