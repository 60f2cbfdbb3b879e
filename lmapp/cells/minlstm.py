"""Minimal LSTM: gates that read the input alone, so that all steps of a window run at once (Feng et al. 2024)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from lmapp.cells.linear_recurrence import LinearCell


class MinLSTM(LinearCell):
    """f, i = σ(W_· x + b_·), h̃ = W_h x + b_h, h_t = f/(f+i)∘h_{t−1} + i/(f+i)∘h̃ (arXiv:2410.01201).

    Gate order f, i, h̃. There is no memory cell beside h.
    """

    blocks = 3
    memory_signs: ClassVar[tuple[int, ...]] = (1, -1)

    def coefficients(self, gates: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        f, i, candidate = gates.chunk(3, -1)
        # f/(f+i) = σ(log f − log i), which is never 0/0.
        odds = F.logsigmoid(f) - F.logsigmoid(i)
        return odds.sigmoid(), (-odds).sigmoid() * candidate
