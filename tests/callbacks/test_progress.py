"""What the terminal shows."""

import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import lmapp.run
from lmapp.callbacks import progress
from lmapp.config import build
from lmapp.training.module import LanguageModule


def shown(directory: Path, text: str, *, terminal: bool, **train: Any) -> str:
    """What a short run prints."""
    (directory / "text.txt").write_text(text, encoding="utf-8")
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=200, highlight=False, soft_wrap=True)
    options = {
        "data": {
            "path": [str(directory / "text.txt")],
            "batch_size": 4,
            "sequence_length": 16,
            "cache_dir": str(directory / "cache"),
        },
        "model": {"hidden_size": 16},
        "train": {"max_steps": 25, "val_every_steps": 10, "precision": "fp32", **train},
        "gradients": {"every_steps": 0},
        "logging": {"wandb": "disabled"},
        "runs_dir": str(directory / "runs"),
    }
    lmapp.run._Assembly(build(options), console).run()
    return output.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_every_validation_gets_a_line_that_stays(tmp_path: Path, real_text: str, terminal: bool) -> None:
    output = shown(tmp_path, real_text[:8000], terminal=terminal)
    found = re.findall(r"step +(\d+)  train ([\d.]+)  validation ([\d.]+) nats  perplexity ([\d.]+)", output)
    assert [int(step) for step, *_ in found] == [10, 20, 25]
    for _, _, loss, perplexity in found:
        assert float(perplexity) == pytest.approx(math.exp(float(loss)), rel=1e-3)
    assert "  best" in output


def test_without_a_terminal_there_is_a_line_now_and_then(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    output = shown(tmp_path, real_text[:8000], terminal=False, val_every_steps=0)
    line = r"^step (\d+)/25  loss ([\d.]+)  ppl ([\d.]+)  ([\d,]+) chars/s  \d+:\d\d left"
    found = re.findall(line, output, re.MULTILINE)
    assert [int(step) for step, *_ in found] == list(range(1, 26))


def test_after_a_step_that_was_not_finite_the_loss_is_shown_again(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LanguageModule.training_step

    def training_step(module: LanguageModule, batch: Any, batch_idx: int) -> Any:
        loss = original(module, batch, batch_idx)
        if module.progress.step == 4:
            module._loss = loss.detach() * math.nan
            loss = loss * math.nan
        return loss

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    output = shown(tmp_path, real_text[:8000], terminal=False)
    assert re.findall(r"train (\S+)  validation", output)
    assert "train nan" not in output
