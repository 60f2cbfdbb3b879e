"""Recurrent cells: one recurrence a file, found by name. Nothing here imports torch until a cell is asked for."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
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
        UsageError: no such cell (the message names the nearest known one), or what is there is none.
    """
    path = name if ":" in name else CELLS.get(name)
    if path is None:
        near = difflib.get_close_matches(name.lower(), CELLS, n=1, cutoff=0.3)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"--model.cell: no cell is called {name!r}.{hint}\nKnown: {', '.join(CELLS)}.")
    module_name, _, class_name = path.partition(":")
    module = import_module(module_name, f"--model.cell: {path!r}")
    found = getattr(module, class_name, None)
    from lmapp.cells.protocol import Cell

    if not isinstance(found, type):
        raise UsageError(f"--model.cell: there is no class {class_name!r} in the module {module_name}.")
    if not issubclass(found, Cell):
        raise UsageError(f"--model.cell: {path!r} is no cell: it does not extend lmapp.cells.protocol.Cell.")
    lacking = [name for name in ("project", "step") if getattr(found, name) is getattr(Cell, name)]
    if lacking:
        raise UsageError(f"--model.cell: {path!r} is no cell by itself: it lacks {' and '.join(lacking)}.")
    if not is_outside(found) and f"{found.__module__}:{found.__qualname__}" not in CELLS.values():
        raise UsageError(f"--model.cell: {path!r} is no cell by itself: others are made from it.")
    return found


def is_outside(cell: type[Cell]) -> bool:
    """Whether a cell class is from elsewhere than lmapp."""
    return not cell.__module__.startswith("lmapp.")


def import_module(name: str, what: str) -> ModuleType:
    """The module called `name`, which may be anybody's; `what` asks for it, for the message.

    Raises:
        UsageError: it is not there, or fails while it is imported.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # it is code like any other
        raise UsageError(f"{what} cannot be imported ({reason(error)}).") from error


def reason(error: Exception) -> str:
    """What somebody else's code has failed with, in a line."""
    said = next(iter(str(error).splitlines()), "").rstrip(".")
    return said if said and isinstance(error, ImportError) else f"{type(error).__name__}{': ' if said else ''}{said}"


@contextmanager
def searching_here() -> Iterator[None]:
    """Modules are looked for in the current directory too, after all other places, so that it hides nothing."""
    here = os.getcwd()
    if here in sys.path:
        yield
        return
    importlib.invalidate_caches()
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)
