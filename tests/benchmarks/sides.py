"""Whole training steps of our model and of torch.nn's, on the same windows: what the benchmarks put side by side.

Shapes: B rows, T steps of a window, V symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lmapp.gradients.clipping import clip_by_norm, global_norm
from lmapp.models import RecurrentModel, detach
from lmapp.models.evaluation import losses

VOCABULARY = 65
LEARNING_RATE, CLIP_NORM = 1e-3, 1.0
LOWEST_INPUT = "layers.0.weight_ih"
WINDOWS = 4
"""That a side trains on in turn, unless it is given a text."""

OURS = OURS_BF16, OURS_FP32 = "lmapp bf16", "lmapp fp32"
PEERS = PEER_FP32, PEER_BF16 = "torch.nn fp32", "torch.nn bf16"
PEER_CELLS: dict[str, Callable[[int, int, int], nn.RNNBase]] = {"gru": nn.GRU, "lstm": nn.LSTM, "vanilla": nn.RNN}


class Case(NamedTuple):
    """A network and the windows it is trained on: B rows of T characters."""

    cell: str
    num_layers: int
    hidden_size: int
    rows: int
    length: int

    @property
    def network(self) -> str:
        """Such as "gru 1x512"."""
        return f"{self.cell} {self.num_layers}x{self.hidden_size}"

    @property
    def name(self) -> str:
        """Such as "gru 1x512 32x64"."""
        return f"{self.network} {self.rows}x{self.length}"

    @property
    def characters(self) -> int:
        """Of a window."""
        return self.rows * self.length

    @property
    def sides(self) -> tuple[str, ...]:
        """Those that have the cell."""
        return (*OURS, *PEERS) if self.cell in PEER_CELLS else OURS


CUDA_CASES = [
    Case(cell, num_layers, hidden_size, 64, 128)
    for cell in ("gru", "lstm", "vanilla")
    for num_layers, hidden_size in ((1, 512), (3, 512), (1, 1024))
]


class Peer(nn.Module):
    """torch.nn's recurrent module (on a GPU cuDNN's) between a one-hot input and a linear readout."""

    def __init__(self, cell: str, num_layers: int, hidden_size: int) -> None:
        super().__init__()
        self.recurrent = PEER_CELLS[cell](VOCABULARY, hidden_size, num_layers)
        self.head = nn.Linear(hidden_size, VOCABULARY)

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        outputs, state = self.recurrent(functional.one_hot(tokens.t(), VOCABULARY).float(), state)
        return self.head(outputs).float(), state


class Training:
    """One side in training, its state carried on from window to window.

    Args:
        side: one of `OURS` or `PEERS`.
        case: its network and windows.
        device: "cpu" or "cuda".
        text: (B, n·T + 1) ids below V; by default random ones.
    """

    def __init__(self, side: str, case: Case, device: str, text: Tensor | None = None) -> None:
        torch.manual_seed(0)
        if text is None:
            text = torch.randint(VOCABULARY, (case.rows, WINDOWS * case.length + 1))
        # Each in memory of its own: a slice would keep the whole text.
        self.windows = [
            tuple(text[:, start + shift : start + shift + case.length].clone().to(device) for shift in (0, 1))
            for start in range(0, text.shape[1] - 1, case.length)
        ]
        self.case, self.device = case, device
        self.bf16, self.ours = side in (OURS_BF16, PEER_BF16), side in OURS
        self.model: nn.Module
        if self.ours:
            self.model = RecurrentModel(
                VOCABULARY, cell=case.cell, hidden_size=case.hidden_size, num_layers=case.num_layers
            ).to(device)
            self.model.compute_dtype = torch.bfloat16 if self.bf16 else torch.float32
            self.state: Any = self.model.initial_state(case.rows)
        else:
            self.model, self.state = Peer(case.cell, case.num_layers, case.hidden_size).to(device), None
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, LEARNING_RATE, fused=True)
        self.count = 0

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """J of a window, (B, T) each: tokens in, loss out."""
        if self.ours:
            logits, state = self.model(inputs, self.state)
            self.state = detach(state)
            return losses(logits, targets).mean()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
            logits, state = self.model(inputs, self.state)
        self.state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
        return functional.cross_entropy(logits.flatten(0, 1), targets.t().flatten())

    def step(self) -> None:
        """Forward, loss, backward, clip, fused AdamW."""
        inputs, targets = self.windows[self.count % len(self.windows)]
        self.count += 1
        loss = self.loss(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        clip_by_norm(gradients, CLIP_NORM, global_norm(gradients))
        self.optimizer.step()

    def flop_per_character(self) -> int:
        """Of the recurrent, upper input and readout products, forward and backward: two, then four an entry.

        The lowest layer's input product is a look-up in a table and counts nothing, also where it is carried out.
        """
        parameters = self.model.named_parameters()
        return 6 * sum(p.numel() for name, p in parameters if p.dim() == 2 and name != LOWEST_INPUT)
