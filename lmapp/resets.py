"""Where the records of a text begin, as the masks that reset a network's state there.

Shapes: M records, N symbols, R pieces of the text, T time steps.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def inner_starts(starts: NDArray[np.int64] | None, count: int) -> NDArray[np.int64] | None:
    """The starts of a text's records, None if there is nothing to reset: no symbol that is read after another is one.

    Args:
        starts: (M,) int64, in order; None: they are not asked for.
        count: N, of whose symbols the last is only predicted.
    """
    if starts is None:
        return None
    # A plain view, as of the ids.
    starts = np.asarray(starts)
    first, end = np.searchsorted(starts, (1, count - 1))
    return starts if first < end else None


def keep_mask(starts: NDArray[np.int64], firsts: NDArray[np.int64], steps: int) -> Tensor:
    """What the states entering each step of R pieces of a text are multiplied by: (R, T) float32.

    0 where a symbol begins a record, which makes of the state the initial one, else 1.

    Args:
        starts: (M,) int64, in order, the symbols at which records begin.
        firsts: (R,) int64, the symbol at which each piece begins.
        steps: T.
    """
    keep = np.ones((len(firsts), steps), dtype=np.float32)
    bounds = np.searchsorted(starts, (firsts, firsts + steps))
    for row, (first, end) in enumerate(bounds.T.tolist()):
        keep[row, starts[first:end] - firsts[row]] = 0
    return torch.from_numpy(keep)
