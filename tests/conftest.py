"""Shared fixtures: real text that is always there, and one small finished run."""

import string
from functools import cache
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The tests' tensors are too small for two threads, which wait for each other where the machine is busy."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test writes without being told where (data/cache, runs) is not left in the project."""
    monkeypatch.chdir(tmp_path)


@cache
def _topics() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@pytest.fixture(scope="session")
def real_text() -> str:
    """About 700 kB of English prose and code: the documentation topics of the standard library."""
    return _topics()


@pytest.fixture(scope="session")
def tiny_run(real_text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run, `runs/tiny` beside `text.txt` and `cache`; not to be changed.

    A GRU of 16 units after 30 steps on 20,000 characters: the 26 small letters, space, newline, full stop and comma.
    """
    import lmapp

    root = tmp_path_factory.mktemp("tiny")
    text = root / "text.txt"
    alphabet = string.ascii_lowercase + " \n.,"
    text.write_text(alphabet + "".join(c for c in real_text if c in alphabet)[: 20_000 - len(alphabet)])
    run = lmapp.train(
        {
            "name": "tiny",
            "runs_dir": str(root / "runs"),
            "data": {
                "path": str(text),
                "batch_size": 8,
                "sequence_length": 16,
                "cache_dir": str(root / "cache"),
            },
            "model": {"hidden_size": 16},
            "train": {"max_steps": 30, "warmup_steps": 5, "precision": "fp32", "device": "cpu"},
            "logging": {"wandb": "disabled", "every_steps": 10},
        },
        quiet=True,
    )
    return run.path
