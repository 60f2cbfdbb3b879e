"""Recurrent cells: one recurrence a file, found by name. Nothing here imports torch until a cell is asked for."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from lmapp.errors import UsageError

if TYPE_CHECKING:
    from lmapp.cells.protocol import Cell

CELLS: dict[str, str] = {
    "vanilla": "lmapp.cells.vanilla:Vanilla",
    "lstm": "lmapp.cells.lstm:LSTM",
    "gru": "lmapp.cells.gru:GRU",
    "gru_before": "lmapp.cells.gru_before:GRUBefore",
    "lstm_linear": "lmapp.cells.lstm_linear:LinearLSTM",
    "concatenated": "lmapp.cells.concatenated:Concatenated",
    "mingru": "lmapp.cells.mingru:MinGRU",
    "minlstm": "lmapp.cells.minlstm:MinLSTM",
}


def find(name: str) -> type[Cell]:
    """The cell class called `name`: a key of `CELLS`, or `package.module:Class` for one from elsewhere.

    Raises:
        UsageError: no such cell; the message names the nearest known one.
    """
    path = name if ":" in name else CELLS.get(name)
    if path is None:
        near = difflib.get_close_matches(name.lower(), CELLS, n=1, cutoff=0.3)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"--model.cell: no cell is called {name!r}.{hint}\nKnown: {', '.join(CELLS)}.")
    module_name, _, class_name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"--model.cell: {path!r} cannot be imported ({error}).") from error
    from lmapp.cells.protocol import Cell

    if not (isinstance(found, type) and issubclass(found, Cell) and found.step is not Cell.step):
        raise UsageError(f"--model.cell: {path!r} is no cell: it does not implement lmapp.cells.protocol.Cell.")
    return found
