"""What the lowest layer reads: one-hot or embedded symbols, or its gates for every symbol, gathered from a table.

Shapes: V symbols, D width of an input, G gate_size of the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmapp.cells.protocol import Cell


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


def gather(table: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a table (V, …) in `dtype`, for tokens of any shape; the gradient is summed in the table's own dtype."""
    return _Gather.apply(table, tokens, dtype)


def embed(tokens: Tensor, embedding: nn.Embedding | None, symbols: int, dtype: torch.dtype) -> Tensor:
    """(…) ids to (…, D) in `dtype`: one-hot over `symbols` without an embedding."""
    if embedding is not None:
        return gather(embedding.weight, tokens, dtype)
    # F.one_hot would make eight bytes an entry first.
    zeros = torch.zeros(*tokens.shape, symbols, dtype=dtype, device=tokens.device)
    return zeros.scatter_(-1, tokens.unsqueeze(-1), 1)


def by_table(embedding: nn.Embedding | None, symbols: int, count: int, kernel: str) -> bool:
    """Whether the lowest layer, which runs on `kernel`, is to gather its gates for `count` ids from its `table`."""
    return kernel == "scan" and (embedding is None or symbols < count)


def table(layer: Cell, embedding: nn.Embedding | None) -> Tensor:
    """The lowest layer's input gates for every symbol: (V, G), in the parameters' dtype."""
    return layer.table() if embedding is None else layer.project(embedding.weight)
