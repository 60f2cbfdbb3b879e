"""Minimal GRU: gates that read the input alone, so that all steps of a window run at once (Feng et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from lmapp.cells.linear_recurrence import LinearCell
from lmapp.cells.protocol import HiddenState


class MinGRU(LinearCell):
    """z = σ(W_z x + b_z), h̃ = W_h x + b_h, h_t = (1−z)∘h_{t−1} + z∘h̃ (arXiv:2410.01201).

    Gate order z, h̃. Note that here 1−z keeps the state, where it is z in torch.nn's GRU.
    """

    blocks = 2
    memory_signs: ClassVar[tuple[int, ...]] = (-1,)
    retention = "1-z"
    gate_functions: Mapping[str, str] = {"1-z": "sigmoid", "z": "sigmoid"}

    def gate_values(self, gates: Tensor, state: HiddenState) -> dict[str, Tensor]:  # noqa: D102
        return self._values(gates.to(state.h.dtype))

    def _values(self, gates: Tensor) -> dict[str, Tensor]:
        z, candidate = gates.chunk(2, -1)
        # σ(−z) is 1 − σ(z), and exact where little is kept.
        return {"1-z": (-z).sigmoid(), "z": z.sigmoid(), "candidate": candidate}

    def coefficients(self, gates: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        kept, z, candidate = self._values(gates).values()
        return kept, z * candidate
