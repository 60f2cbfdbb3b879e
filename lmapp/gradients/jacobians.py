"""Jacobians of one step: how the state after it depends on the state before, as operators that hold no matrix.

A network's state S_t is here one vector a row: the states of all layers, from the bottom up, each with all its
components, one after the other. J_t = ∂S_t/∂S_{t−1} at given states and symbols; products of J_t over time carry the
gradient (for a vanilla layer J_t = diag(φ′(a_t)) W_hh). Everything is had from `step` by automatic differentiation, as
in evaluation: without dropout, with zoneout at its mean. Weights and their `.grad` are left alone.

Shapes: R points (rows), n entries of the state, G gate_size, B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lmapp.cells.protocol import map_state

if TYPE_CHECKING:
    from lmapp.models.recurrent import RecurrentModel, States

Step = Callable[[Tensor, Tensor], Tensor]
"""From what is held fixed, R rows of it, and states (R, n) to the states one step later, (R, n)."""

# In fp32 `lmapp.cells.products.linear` has from 256 rows on a backward pass that cannot be differentiated again.
_MOST_ROWS = 255


def flatten(states: States) -> Tensor:
    """States of B rows as one vector a row: (B, n)."""
    return torch.cat([component for state in states for component in state], -1)


def unflatten(flat: Tensor, like: States) -> States:
    """The states whose `flatten` is (B, n), of the kinds that `like` has."""
    parts = iter(flat.split([component.shape[-1] for state in like for component in state], -1))
    return tuple(map_state(lambda _: next(parts), state) for state in like)


class Jacobian:
    """∂step/∂states at R points, one Jacobian a row.

    The step is taken once, and its backward pass once with a graph of its own; after that a product costs one pass
    backwards through the one or the other. (Jᵀu is linear in u, so that its derivative along v, pulled back, is J v.)

    Args:
        step: takes rows independently of each other.
        fixed: (R, …), what each row's step reads beside its state.
        states: (R, n).
        copies: c, vectors that a product takes for each point.

    Attributes:
        fixed: as given.
        states: as given, without a graph.
        copies: as given.
        after: (R, n), the states one step later, without a graph.
    """

    def __init__(self, step: Step, fixed: Tensor, states: Tensor, copies: int = 1) -> None:
        self.fixed, self.states, self.copies = fixed, states.detach(), copies
        self._step = step
        rows = (x.repeat_interleave(copies, 0).split(_MOST_ROWS) for x in (fixed, self.states))
        self._pieces = [_Piece(step, *some) for some in zip(*rows, strict=True)]
        self._matrices: Tensor | None = None
        self.after = torch.cat([piece.after for piece in self._pieces])[::copies]

    @property
    def sealed(self) -> bool:
        """Whether `jvp` is by the matrices themselves; see `_Piece`."""
        return any(piece.sealed for piece in self._pieces)

    def jvp(self, v: Tensor) -> Tensor:
        """J v: (R·c, n) to (R·c, n), c rows for each point in turn."""
        if self.sealed:
            if self._matrices is None:
                self._matrices = self.dense()
            blocks = v.to(self._matrices.dtype).unflatten(0, (-1, self.copies))
            return (blocks @ self._matrices.mT).flatten(0, 1)
        return torch.cat([piece.jvp(some) for piece, some in zip(self._pieces, v.split(_MOST_ROWS), strict=True)])

    def vjp(self, u: Tensor) -> Tensor:
        """Jᵀ u: (R·c, n) to (R·c, n)."""
        return torch.cat([piece.vjp(some) for piece, some in zip(self._pieces, u.split(_MOST_ROWS), strict=True)])

    def dense(self) -> Tensor:
        """The matrices themselves, (R, n, n), where n is small; entry (i, j) is ∂(entry i after)/∂(entry j before)."""
        rows, size = self.states.shape
        unit = torch.eye(size, dtype=self.states.dtype, device=self.states.device)
        found = []
        for some in torch.arange(rows * size, device=self.states.device).split(_MOST_ROWS):
            row, entry = some // size, some % size
            found.append(_Piece(self._step, self.fixed[row], self.states[row]).vjp(unit[entry]))
        return torch.cat(found).view(rows, size, size)


class _Piece:
    """A Jacobian of few rows.

    Attributes:
        after: the value of the step.
        sealed: whether a function with a backward pass of its own lies on the way, as it may in a cell from outside.
            That pass need not be differentiable (torch leaves such a way out without a word), so only `vjp` holds.
    """

    def __init__(self, step: Step, fixed: Tensor, states: Tensor) -> None:
        self._pulled: Tensor | None = None
        with torch.enable_grad():
            self._states = states.detach().requires_grad_()
            self._value = step(fixed, self._states)
            self._left = torch.zeros_like(self._value, requires_grad=True)
            if self._value.requires_grad:
                (self._pulled,) = torch.autograd.grad(
                    self._value, self._states, self._left, create_graph=True, allow_unused=True
                )
        self.after = self._value.detach()
        self.sealed = self._pulled is not None and _has_own_backward(self._value, self._states)

    def jvp(self, v: Tensor) -> Tensor:
        return self._product(self._pulled, self._left, v)

    def vjp(self, u: Tensor) -> Tensor:
        return self._product(self._value, self._states, u)

    def _product(self, outputs: Tensor | None, inputs: Tensor, along: Tensor) -> Tensor:
        if self._pulled is None or outputs is None:  # the step does not read its state: the Jacobian is 0
            return torch.zeros_like(self.after)
        return torch.autograd.grad(outputs, inputs, along.to(self.after.dtype), retain_graph=True)[0]


def _has_own_backward(value: Tensor, leaf: Tensor) -> bool:
    """Whether a node of a class that extends torch.autograd.Function lies between a leaf and what was made of it."""
    last = torch.autograd.graph.get_gradient_edge(leaf).node
    reaches: dict[Any, bool] = {last: True}
    stack = [value.grad_fn]
    while stack:
        node = stack[-1]
        below = [child for child, _ in node.next_functions if child is not None]  # type: ignore[union-attr]
        waiting = [] if node in reaches else [child for child in below if child not in reaches]
        stack += waiting
        if not waiting:
            stack.pop()
            reaches.setdefault(node, any(reaches[child] for child in below))
    return any(found and isinstance(node, BackwardCFunction) for node, found in reaches.items())


def network_jacobian(model: RecurrentModel, tokens: Tensor, states: States, copies: int = 1) -> Jacobian:
    """J of the whole network's state.

    Args:
        model: of any cells.
        tokens: (R,) int64, the symbol each step reads.
        states: one State a layer, of R rows, entering that step.
        copies: as `Jacobian` has it.
    """

    def step(tokens: Tensor, flat: Tensor) -> Tensor:
        return flatten(model.step(tokens, unflatten(flat, states))[1])

    return Jacobian(step, tokens, flatten(states), copies)
