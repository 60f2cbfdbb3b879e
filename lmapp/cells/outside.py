"""Cells from outside lmapp, made with care: what they do against the protocol is said before it does harm.

Shapes: B batch, D input, H hidden, G gate_size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmapp.cells import is_outside, reason
from lmapp.cells.protocol import Cell
from lmapp.errors import UsageError


def make(kind: type[Cell], input_size: int, hidden_size: int, **options: Any) -> Cell:
    """The cell of that class; one from outside is drawn and takes one step of two rows, to see what it keeps to.

    Raises:
        UsageError: it cannot be made, or breaks the protocol; the message names the class and the defect.
    """
    if not is_outside(kind):
        return kind(input_size, hidden_size, **options)
    what, doing = f"--model.cell: {kind.__module__}:{kind.__qualname__}", "its constructor"
    try:
        cell = kind(input_size, hidden_size, **options)
        doing = "reset_parameters(init, fan_in)"
        cell.reset_parameters("orthogonal", None)
    except (UsageError, MemoryError):
        raise
    except Exception as error:
        raise UsageError(f"{what}: {doing} fails ({reason(error)}).") from error
    defect = _defect(cell, options.get("output_size"))
    if defect:
        raise UsageError(f"{what} breaks the protocol of cells: {defect}.")
    return cell


def _defect(cell: Cell, output_size: int | None) -> str | None:
    """What one step of two rows shows to be wrong, in words."""
    for name in ("state_type", "gate_size", "output_size", "hidden_size"):
        if not hasattr(cell, name):
            return f"it has no {name}"
    fields = getattr(cell.state_type, "_fields", ())
    if not fields:
        return "its state_type is no NamedTuple of tensors"
    if output_size not in (None, cell.output_size):
        return f"it reads out, so its output_size is to be {output_size}, not {cell.output_size}"
    parameter = next(cell.parameters(), None)
    if parameter is None:
        return "it has no parameters"
    dtype, doing = parameter.dtype, "project"
    try:
        with torch.no_grad():
            x = torch.linspace(-1, 1, 2 * cell.input_size, dtype=dtype, device=parameter.device)
            gates = cell.project(x.view(2, -1))
            if wrong := _unlike(gates, (2, cell.gate_size), dtype):
                return f"what project gives is {wrong}"
            doing = "initial_state"
            state = cell.initial_state(2)
            doing = "step"
            given = cell.step(gates, state)
    except MemoryError:
        raise
    except Exception as error:
        # On the meta device what looks at values may fail; the network that is trained is made elsewhere.
        return None if parameter.is_meta else f"{doing} fails ({reason(error)})"
    if not isinstance(given, tuple) or len(given) != 2:
        return f"step gives a {type(given).__name__}, not an output and a state"
    output, new = given
    if wrong := _unlike(output, (2, cell.output_size), dtype):
        return f"the output of step is {wrong}"
    for which, found in (("initial_state", state), ("step", new)):
        if not isinstance(found, cell.state_type):
            return f"the state from {which} is a {type(found).__name__}, not a {cell.state_type.__name__}"
        for name, part in zip(fields, found, strict=True):
            if wrong := _unlike(part, (2, cell.hidden_size), dtype):
                return f"{name} in the state from {which} is {wrong}"
    return None


def _unlike(found: Any, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """What was given and what it is to be, unless it is that."""
    if not isinstance(found, Tensor):
        return f"a {type(found).__name__}, not a tensor"
    if tuple(found.shape) != shape:
        return f"of shape {tuple(found.shape)}, not {shape}"
    return None if found.dtype == dtype else f"in {found.dtype}, not in {dtype}"
