"""Who may import whom, read from the sources; and what must stay importable without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "lmapp"

# What everyone may import.
BASE = {"errors", "units", "config", "vocabulary", "checkpoint", "resets"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "units": set(),
    "config": {"errors"},
    "vocabulary": {"errors"},
    "checkpoint": {"errors"},
    "resets": set(),
    "data": BASE,
    "cells": BASE,
    "models": {*BASE, "cells"},
    "gradients": {*BASE, "cells", "models"},
    "inference": {*BASE, "models", "data"},
    "loggers": {"errors", "units", "config", "experiments"},
    "training": {*BASE, "data", "models", "gradients", "loggers"},
    "callbacks": {*BASE, "data", "gradients", "inference", "training", "loggers"},
    "experiments": {"errors", "units"},
    "describe": {*BASE, "data", "gradients", "training"},
}
"""Each part of lmapp and the other parts it may import."""

ASSEMBLE = {"__init__", "__main__", "cli", "run", "laboratory", "demonstration"}
"""These put the parts together."""


def part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_names(path: Path) -> list[str]:
    """The full names of all that a file imports, wherever in it."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imports(path: Path) -> set[str]:
    """The parts of lmapp that a file imports."""
    split = [name.split(".") for name in imported_names(path)]
    return {[*name, "__init__"][1] for name in split if name[0] == "lmapp"}


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    own = part(path)
    assert own in MAY_IMPORT or own in ASSEMBLE, f"{own} has no place in the order yet"
    if own in MAY_IMPORT:
        assert imports(path) - {own} <= MAY_IMPORT[own]


def test_the_order_is_one() -> None:
    """Without cycles: every part stands after all that it may import. And it names no part that is gone."""
    placed: list[str] = []
    while len(placed) < len(MAY_IMPORT):
        ready = [own for own, others in MAY_IMPORT.items() if own not in placed and others <= set(placed)]
        assert ready, set(MAY_IMPORT) - set(placed)
        placed += ready
    assert {part(path) for path in FILES} == set(MAY_IMPORT) | ASSEMBLE


def test_every_kind_of_import_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "import lmapp.cells.gru\nimport os, lmapp.run as r\nfrom lmapp import data, checkpoint as c\n"
        "from lmapp.models.recurrent import RecurrentModel\nimport lmapp\nimport lmapping\n"
        "def f():\n    from lmapp.inference import load\n"
    )
    assert imports(path) == {"cells", "run", "data", "checkpoint", "models", "__init__", "inference"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_few_know_lightning_and_one_knows_wandb(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    libraries = {imported.partition(".")[0] for imported in imported_names(path)}
    if part(path) not in ("loggers", "training", "callbacks", "run") and name != "data/datamodule.py":
        assert "lightning" not in libraries
    if name != "loggers/wandb.py":
        assert "wandb" not in libraries


def test_torch_is_not_imported_before_it_is_needed() -> None:
    script = """
import sys
import lmapp, lmapp.cli, lmapp.errors, lmapp.config, lmapp.vocabulary, lmapp.checkpoint, lmapp.cells
import lmapp.data.sources, lmapp.data.encoded, lmapp.experiments.compare, lmapp.experiments.history
heavy = {"torch", "lightning", "wandb", "datasets", "tokenizers", "matplotlib"} & set(sys.modules)
sys.exit(" ".join(sorted(heavy)) or None)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_lazy_names_of_the_package() -> None:
    import lmapp

    assert set(lmapp.__all__) == {"Run", "load", "train"}
    assert all(hasattr(lmapp, name) for name in lmapp.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        lmapp.nonsense  # noqa: B018
