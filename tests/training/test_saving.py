"""When a run saves, what it never saves, and how it is interrupted."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import lmapp
import lmapp.run
from lmapp import checkpoint, cli
from lmapp.errors import LmappError, UsageError
from lmapp.training import saving
from lmapp.training.module import LanguageModule

TIMED = ("seconds", "train/seconds", "train/chars_per_second")
STEPS_PER_EPOCH = 11


@pytest.fixture(scope="module")
def text(real_text: str) -> str:
    """1,000 characters, of which 300 are for validation: an epoch has eleven steps."""
    return "".join(c for c in real_text if c.isascii())[:1000]


def settings(directory: Path, text: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A short run with everything on: clipping, decay, validation, samples, dropout."""
    path = directory / "text.txt"
    path.write_text(text, encoding="utf-8")
    return {
        "data": {
            "path": [str(path)],
            "batch_size": 4,
            "sequence_length": 16,
            "val_fraction": 0.3,
            "byte_fallback": "true",
            "cache_dir": str(directory / "cache"),
            **sections.get("data", {}),
        },
        "model": {"cell": "gru", "hidden_size": 16, "dropout": 0.2, **sections.get("model", {})},
        "train": {
            "max_steps": 40,
            "learning_rate": 0.02,
            "clip_norm": 0.3,
            "warmup_steps": 5,
            "val_every_steps": 10,
            "precision": "fp32",
            **sections.get("train", {}),
        },
        "gradients": {"every_steps": 7, "windows": 2, **sections.get("gradients", {})},
        "logging": {"wandb": "disabled", "every_steps": 3},
        "runs_dir": str(directory / "runs"),
    }


def read(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [{k: v for k, v in line.items() if k not in TIMED} for line in lines]


def same(a: Path, b: Path) -> None:
    """The two runs wrote the same and ended with the same weights, optimiser, random state and carried state."""
    for name in ("metrics.jsonl", "clip_events.jsonl", "decay.jsonl"):
        assert read(a / name) == read(b / name), name
    assert (a / "samples.txt").read_text(encoding="utf-8") == (b / "samples.txt").read_text(encoding="utf-8")
    for name in ("last.ckpt", "best.ckpt"):
        one, other = (checkpoint.read(d / "checkpoints" / name) for d in (a, b))
        for key in ("state_dict", "optimizer_states"):
            torch.testing.assert_close(one[key], other[key], rtol=0, atol=0)
        for key in ("states", "random"):
            torch.testing.assert_close(one["lmapp"][key], other["lmapp"][key], rtol=0, atol=0)


def interrupting(monkeypatch: pytest.MonkeyPatch, at: dict[int, int], number: int = signal.SIGINT) -> None:
    """Sends this process a signal in the middle of chosen steps (counted from 1), so many times."""
    original = LanguageModule.training_step

    def training_step(module: LanguageModule, batch: Any, batch_idx: int) -> Any:
        for _ in range(at.get(module.progress.step + 1, 0)):
            signal.raise_signal(number)
        return original(module, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)


# A learning rate of a thousand ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "train"),
    [
        ({}, {"optimizer": "adamw", "learning_rate": 1e3}),
        ({}, {"optimizer": "sgd", "learning_rate": 1e3, "clip_norm": None}),
        ({"cell": "lstm"}, {"optimizer": "rmsprop", "learning_rate": 1e3}),
        ({"cell": "vanilla", "activation": "relu"}, {"optimizer": "adamw", "learning_rate": 1e3}),
        ({"cell": "vanilla", "activation": "identity"}, {"optimizer": "sgd", "learning_rate": 1e3, "clip_norm": None}),
        ({}, {"optimizer": "adam", "learning_rate": 1e30, "val_every_steps": 1}),
        ({}, {"optimizer": "sgd", "learning_rate": 1e38, "clip_norm": None}),
    ],
)
def test_no_saved_network_is_ever_not_finite(
    tmp_path: Path,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: dict[str, Any],
    train: dict[str, Any],
) -> None:
    written = []
    write = saving._write

    def watch(path: Path, content: dict[str, Any]) -> None:
        assert all(torch.isfinite(weight).all() for weight in content["state_dict"].values())
        written.append(content["lmapp"]["progress"]["step"])
        write(path, content)

    monkeypatch.setattr(saving, "_write", watch)
    options = settings(tmp_path, text, model=model, train={"max_steps": 100, **train})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    code = 0
    try:
        cli.main(["train", str(tmp_path / "config.yaml"), "--name", "run"])
    except SystemExit as end:
        code = int(end.code or 0)
    message = capsys.readouterr().err
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text(encoding="utf-8"))
    if code:
        assert code == 1
        assert summary["state"] == "stopped"
        assert "not finite" in message
        assert "--train.learning-rate" in message
        assert len(message.splitlines()) <= 3
    else:
        assert (summary["state"], summary["steps"]) == ("finished", 100)
        assert message == ""
    kept = sorted(p.name for p in (tmp_path / "runs" / "run" / "checkpoints").iterdir())
    assert ("last.ckpt" in kept) == bool(written)
    for name in kept:
        content = checkpoint.read(tmp_path / "runs" / "run" / "checkpoints" / name)
        assert all(torch.isfinite(weight).all() for weight in content["state_dict"].values())
        assert content["lmapp"]["progress"]["step"] == (written[-1] if name == "last.ckpt" else summary["best"]["step"])


def test_a_network_that_got_worse_does_not_replace_the_best(tmp_path: Path, text: str) -> None:
    options = settings(tmp_path, text, train={"learning_rate": 1e3, "warmup_steps": 100})
    directory = lmapp.train(options, quiet=True).path
    losses = {line["step"]: line["val/loss"] for line in read(directory / "metrics.jsonl") if "val/loss" in line}
    best = min(losses, key=losses.__getitem__)
    assert best != 40
    assert losses[40] > 2 * losses[best]
    for name, step in (("best.ckpt", best), ("last.ckpt", 40)):
        assert checkpoint.read(directory / "checkpoints" / name)["lmapp"]["progress"]["step"] == step
    assert lmapp.load(directory).evaluate().carried.loss == losses[best]


# When it is saved -----------------------------------------------------------------------------------------------------


def watch_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps at which something is saved from now on."""
    saved: list[int] = []
    write = saving._write

    def watch(path: Path, content: dict[str, Any]) -> None:
        saved.append(content["lmapp"]["progress"]["step"])
        write(path, content)

    monkeypatch.setattr(saving, "_write", watch)
    return saved


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({}, [10, 20, 30, 40]),
        ({"val_every_steps": 0}, [40]),
        ({"max_steps": 4, "checkpoint_minutes": 1e-9}, [1, 2, 3, 4]),
    ],
)
def test_it_saves_at_validations_in_time_and_at_the_end(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, train: dict[str, Any], expected: list[int]
) -> None:
    saved = watch_steps(monkeypatch)
    directory = lmapp.train(settings(tmp_path, text, train=train), quiet=True).path
    assert saved == expected
    assert not list((directory / "checkpoints").glob(".*"))


def test_it_saves_when_the_plan_is_made(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmapp.training import module, plan

    monkeypatch.setattr(plan, "pace", lambda seconds: 0.01)
    clock = iter(i * 0.005 for i in range(10**6))  # asked twice a step: a step takes 5 ms
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    saved = watch_steps(monkeypatch)
    train = {"max_steps": None, "max_minutes": 0.655 / 60, "val_every_steps": 0}
    run = lmapp.train(settings(tmp_path, text, train=train), quiet=True)
    assert saved == [plan.TIMED_STEPS, plan.TIMED_STEPS + 40]
    assert run.metrics["total_steps"] == plan.TIMED_STEPS + 40


def test_without_validation_the_best_is_the_last(tmp_path: Path, text: str) -> None:
    run = lmapp.train(settings(tmp_path, text, data={"val_fraction": 0}, train={"max_steps": 6}), quiet=True)
    steps = [
        checkpoint.read(run.path / "checkpoints" / name)["lmapp"]["progress"]["step"]
        for name in ("best.ckpt", "last.ckpt")
    ]
    assert steps == [6, 6]
    assert run.metrics["best"] is None


def test_the_best_is_kept_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = tmp_path / "last.ckpt"
    for links in (True, False):
        if not links:
            monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("not supported")))
        last.write_bytes(b"first" if links else b"second")
        saving.keep_as_best(last)
        expected = (tmp_path / "best.ckpt").read_bytes()
        assert expected == last.read_bytes()
        checkpoint.write(last, {"later": 1})
        assert (tmp_path / "best.ckpt").read_bytes() == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt"]


# Ctrl-C ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    """The uninterrupted run."""
    return lmapp.train(settings(tmp_path_factory.mktemp("whole"), text), quiet=True).path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [1, STEPS_PER_EPOCH, 16, 20])
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, whole: Path, step: int, number: int
) -> None:
    interrupting(monkeypatch, {step: 1}, number)
    before = signal.getsignal(number)
    with pytest.raises(lmapp.run.Interrupted) as caught:
        lmapp.train({**settings(tmp_path, text), "name": "run"}, quiet=True)
    assert signal.getsignal(number) == before
    assert caught.value.exit_code == 130
    directory = tmp_path / "runs" / "run"
    assert str(caught.value).splitlines() == [
        f"Interrupted at step {step} and saved.",
        f"Go on with: lmapp train --resume {directory}",
    ]
    progress = checkpoint.read(directory / "checkpoints" / "last.ckpt")["lmapp"]["progress"]
    assert (progress["step"], progress["state"]) == (step, "interrupted")
    assert json.loads((directory / "summary.json").read_text(encoding="utf-8"))["state"] == "interrupted"
    monkeypatch.undo()
    run = lmapp.train(resume=str(directory), quiet=True)
    assert run.metrics["state"] == "finished"
    same(run.path, whole)


def test_interrupted_twice_in_a_row_it_goes_on_twice(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    interrupting(monkeypatch, {4: 1, 5: 1, 39: 1})
    with pytest.raises(lmapp.run.Interrupted):
        lmapp.train({**settings(tmp_path, text), "name": "run"}, quiet=True)
    for _ in range(2):
        with pytest.raises(lmapp.run.Interrupted):
            lmapp.train(resume="run", runs_dir=str(tmp_path / "runs"), quiet=True)
    same(lmapp.train(resume="run", runs_dir=str(tmp_path / "runs"), quiet=True).path, whole)


def test_an_interrupt_during_the_last_step_finishes_the_run(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    interrupting(monkeypatch, {40: 1})
    run = lmapp.train({**settings(tmp_path, text), "name": "run"}, quiet=True)
    assert run.metrics["state"] == "finished"
    same(run.path, whole)
    with pytest.raises(UsageError, match="is finished"):
        lmapp.train(resume=str(run.path), quiet=True)


def test_a_second_interrupt_ends_at_once_and_loses_only_what_was_not_saved(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    interrupting(monkeypatch, {25: 2})
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(lmapp.run.Interrupted, match="at once"):
        lmapp.train({**settings(tmp_path, text), "name": "run"}, quiet=True)
    assert signal.getsignal(signal.SIGINT) == before
    directory = tmp_path / "runs" / "run"
    assert checkpoint.read(directory / "checkpoints" / "last.ckpt")["lmapp"]["progress"]["step"] == 20
    monkeypatch.undo()
    same(lmapp.train(resume=str(directory), quiet=True).path, whole)


def test_ctrl_c_at_the_command_line(tmp_path: Path, text: str) -> None:
    options = settings(tmp_path, text, train={"max_steps": 3000, "val_every_steps": 0})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "lmapp", "train", str(tmp_path / "config.yaml"), "--name", "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    directory = tmp_path / "runs" / "run"
    deadline = time.monotonic() + 60
    while not ((metrics := directory / "metrics.jsonl").exists() and metrics.stat().st_size > 2000):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, message = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in output + message
    step = checkpoint.read(directory / "checkpoints" / "last.ckpt")["lmapp"]["progress"]["step"]
    assert 0 < step < 3000
    assert message.splitlines() == [
        f"Interrupted at step {step:,} and saved.",
        f"Go on with: lmapp train --resume {directory}",
    ]
    resumed = lmapp.train(resume=str(directory), changes={"train": {"max_steps": step + 30}}, quiet=True)
    assert resumed.metrics["steps"] == step + 30


# Weights that are not finite ------------------------------------------------------------------------------------------


def test_what_stopped_a_run_is_said_rightly(tmp_path: Path, text: str) -> None:
    options = settings(tmp_path, text, train={"optimizer": "adam", "learning_rate": 1e30, "val_every_steps": 1})
    with pytest.raises(LmappError) as caught:
        lmapp.train(options, quiet=True)
    assert caught.value.exit_code == 1
    assert "weights" in str(caught.value)
    assert "0 gradients" not in str(caught.value)


def test_a_validation_that_is_not_finite_is_never_the_best(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmapp.models.evaluation import Score
    from lmapp.training import validation

    losses = iter([5.0, math.nan, math.inf, 6.0])
    monkeypatch.setattr(validation, "evaluate", lambda *_, **__: Score(next(losses), 1, 1))
    run = lmapp.train(settings(tmp_path, text), quiet=True)
    assert run.metrics["best"]["step"] == 10
    assert run.metrics["last"]["step"] == 40
    logged = [line["val/loss"] for line in read(run.path / "metrics.jsonl") if "val/loss" in line]
    assert logged == [5.0, "nan", "inf", 6.0]
