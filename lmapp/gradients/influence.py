"""What a single prediction rests on: the gradient of its loss on each character before it.

Shapes: N symbols of a text, D width of the vector a symbol is read as.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmapp.gradients.decay import measuring
from lmapp.models import LanguageNetwork, RecurrentModel


def influence(model: LanguageNetwork, ids: Tensor, first: int) -> Tensor:
    """‖∂J/∂x_n‖₂ for every symbol before the predicted one, with x_n the vector that symbol n is read as.

    The network reads from its initial state. Where the predicted character takes several symbols (byte fallback), J is
    the sum of their losses.

    Args:
        model: every time step's loss is −log softmax(logits)[target].
        ids: (N,) int64, to the end of the predicted character.
        first: 1 to N − 1, where that character begins.

    Returns:
        (first,) float64. Of a model without an embedding x is the one-hot vector.
    """
    device = next(model.parameters()).device
    tokens, targets = ids[None, :-1].to(device), ids[None, first:].to(device)
    end_points = torch.arange(first - 1, len(ids) - 1, device=device)
    with measuring(model):
        states = model.initial_state(1)
        if isinstance(model, RecurrentModel):
            gradients = model.state_gradients(tokens, states, targets, end_points).inputs
        else:
            gradients = model.input_gradients(tokens, states, targets, end_points)
    # One row an end point: they add up to the gradient of the sum.
    return torch.linalg.vector_norm(gradients.sum(1)[:first], dim=-1, dtype=torch.float64).cpu()


def by_character(norms: Tensor, starts: Tensor) -> Tensor:
    """Of characters rather than symbols: the norm over all symbols of each.

    Args:
        norms: (N,) of each symbol.
        starts: (N,) bool, which symbols begin a character. Where the first does not, it counts as the beginning of one.

    Returns:
        (C,) for C characters.
    """
    begins = starts.clone()
    begins[:1] = True
    number = begins.long().cumsum(0) - 1
    return norms.new_zeros(int(begins.sum())).index_add_(0, number, norms.square()).sqrt()
