"""Minimal GRU: gates that read the input alone, so that all steps of a window run at once (Feng et al. 2024)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from lmapp.cells.linear_recurrence import LinearCell


class MinGRU(LinearCell):
    """z = σ(W_z x + b_z), h̃ = W_h x + b_h, h_t = (1−z)∘h_{t−1} + z∘h̃ (arXiv:2410.01201).

    Gate order z, h̃. Note that here 1−z keeps the state, where it is z in torch.nn's GRU.
    """

    blocks = 2
    memory_signs: ClassVar[tuple[int, ...]] = (-1,)

    def coefficients(self, gates: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        z, candidate = gates.chunk(2, -1)
        # σ(−z) is 1 − σ(z), and exact where little is kept.
        return (-z).sigmoid(), z.sigmoid() * candidate
