"""Minimal LSTM: gates that read the input alone, so that all steps of a window run at once (Feng et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from lmapp.cells.linear_recurrence import LinearCell
from lmapp.cells.protocol import HiddenState


class MinLSTM(LinearCell):
    """f, i = σ(W_· x + b_·), h̃ = W_h x + b_h, h_t = f/(f+i)∘h_{t−1} + i/(f+i)∘h̃ (arXiv:2410.01201).

    Gate order f, i, h̃. There is no memory cell beside h.
    """

    blocks = 3
    memory_signs: ClassVar[tuple[int, ...]] = (1, -1)
    retention = "f_normalised"
    gate_functions: Mapping[str, str] = {"f_normalised": "sigmoid", "i_normalised": "sigmoid"}

    def gate_values(self, gates: Tensor, state: HiddenState) -> dict[str, Tensor]:
        """As every cell; f/(f+i) and i/(f+i), which multiply, take the place of f and i."""
        return self._values(gates.to(state.h.dtype))

    def _values(self, gates: Tensor) -> dict[str, Tensor]:
        f, i, candidate = gates.chunk(3, -1)
        # f/(f+i) = σ(log f − log i), which is never 0/0.
        odds = F.logsigmoid(f) - F.logsigmoid(i)
        return {"f_normalised": odds.sigmoid(), "i_normalised": (-odds).sigmoid(), "candidate": candidate}

    def coefficients(self, gates: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        f, i, candidate = self._values(gates).values()
        return f, i * candidate
