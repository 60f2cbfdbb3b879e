"""Norms and update-to-weight ratios during training: when they are logged, and that they are those of that step."""

import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lmapp
from lmapp import checkpoint
from lmapp.callbacks import updates as updates_callback
from lmapp.callbacks.updates import UpdateFigures
from lmapp.run import Interrupted
from lmapp.training import module, plan
from lmapp.training.module import LanguageModule

STEPS = 10
GROUPS = {"layer0/weight_ih", "layer0/weight_hh", "layer0/bias", "head"}


@pytest.fixture(scope="module")
def text(real_text: str) -> str:
    return "".join(c for c in real_text if c.isascii())[:2000]


def settings(directory: Path, text: str, **sections: dict[str, Any]) -> dict[str, Any]:
    (directory / "text.txt").write_text(text, encoding="utf-8")
    return {
        "data": {
            "path": [str(directory / "text.txt")],
            "batch_size": 4,
            "sequence_length": 16,
            "val_fraction": 0,
            "cache_dir": str(directory / "cache"),
            **sections.get("data", {}),
        },
        "model": {"cell": "gru", "hidden_size": 8, **sections.get("model", {})},
        "train": {
            "max_steps": STEPS,
            "learning_rate": 0.5,
            "warmup_steps": 0,
            "precision": "fp32",
            "optimizer": "sgd",
            **sections.get("train", {}),
        },
        "gradients": {"every_steps": 0},
        "logging": {"wandb": "disabled", "every_steps": 1, **sections.get("logging", {})},
        "runs_dir": str(directory / "runs"),
    }


def run(directory: Path, text: str, **sections: dict[str, Any]) -> Path:
    return lmapp.train(settings(directory, text, **sections), quiet=True).path


def figures(path: Path) -> dict[int, dict[str, float]]:
    """By step, what this module is about."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    ours = ("gradient/group/", "update/")
    return {line["step"]: {name: line[name] for name in line if name.startswith(ours)} for line in lines}


def weights(path: Path) -> list[torch.Tensor]:
    return list(checkpoint.read(path / "checkpoints" / "last.ckpt")["state_dict"].values())


def group(name: str) -> str:
    """Of the network here."""
    name = name.replace("layers.0.", "layer0/").replace("_ih", "").replace("_hh", "") if "bias" in name else name
    return "head" if name.startswith("head") else name.replace("layers.0.", "layer0/")


def lengths(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, tensor in tensors.items():
        squares[group(name)] = squares.get(group(name), 0.0) + float(tensor.double().square().sum())
    return {name: math.sqrt(total) for name, total in squares.items()}


class Recorded:
    """A run, with the weights before and after each of its steps and the gradients before clipping."""

    def __init__(self, directory: Path, text: str, monkeypatch: pytest.MonkeyPatch, **train: Any) -> None:
        self.before: list[dict[str, torch.Tensor]] = []
        self.after: list[dict[str, torch.Tensor]] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        clip, step = LanguageModule.configure_gradient_clipping, LanguageModule.optimizer_step

        def clipping(module: LanguageModule, *args: Any, **kwargs: Any) -> None:
            named = dict(module.model.named_parameters())
            self.before.append({name: p.detach().clone() for name, p in named.items()})
            self.gradients.append({name: p.grad.clone() for name, p in named.items()})
            clip(module, *args, **kwargs)

        def stepping(module: LanguageModule, *args: Any, **kwargs: Any) -> None:
            step(module, *args, **kwargs)
            self.after.append({name: p.detach().clone() for name, p in module.model.named_parameters()})

        monkeypatch.setattr(LanguageModule, "configure_gradient_clipping", clipping)
        monkeypatch.setattr(LanguageModule, "optimizer_step", stepping)
        self.figures = figures(run(directory, text, train=train))


@pytest.mark.parametrize(
    "train",
    [
        {"clip_norm": 0.1},
        {"clip_norm": None, "clip_value": 0.01},
        {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.5, "clip_norm": 0.1},
    ],
    ids=["clipped", "by value", "adamw"],
)
def test_figures_are_those_of_the_step(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, train: dict[str, Any]
) -> None:
    seen = Recorded(tmp_path, text, monkeypatch, **train)
    assert list(seen.figures) == list(range(1, STEPS + 1))
    for step, found in seen.figures.items():
        before, after = seen.before[step - 1], seen.after[step - 1]
        moved = lengths({name: after[name].double() - before[name].double() for name in before})
        norms, was = lengths(seen.gradients[step - 1]), lengths(before)
        nonzero = {name for name in GROUPS if was[name] > 0}
        # Biases begin at 0, where there is no ratio.
        assert nonzero == GROUPS - ({"layer0/bias"} if step == 1 else set())
        assert found.keys() == {f"gradient/group/{n}" for n in GROUPS} | {f"update/{n}" for n in nonzero}
        for name in GROUPS:
            assert found[f"gradient/group/{name}"] == pytest.approx(norms[name], rel=1e-6)
        for name in nonzero:
            assert found[f"update/{name}"] == pytest.approx(moved[name] / was[name], rel=1e-4), name


def test_of_plain_gradient_descent_they_follow_from_one_another(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Δw = −η θ/‖g‖ g: the gradient is clipped at every step, its norm is of what it was before."""
    plain = {"momentum": 0.0, "weight_decay": 0.0, "schedule": "constant"}
    seen = Recorded(tmp_path, text, monkeypatch, clip_norm=0.05, **plain)
    for step, found in seen.figures.items():
        whole = math.sqrt(sum(found[f"gradient/group/{name}"] ** 2 for name in GROUPS))
        assert whole > 0.05
        was = lengths(seen.before[step - 1])
        for name in GROUPS:
            if f"update/{name}" in found:
                expected = 0.5 * 0.05 / whole * found[f"gradient/group/{name}"] / was[name]
                assert found[f"update/{name}"] == pytest.approx(expected, rel=1e-3), (step, name)


def test_taken_and_weights_copied_at_logged_steps_only(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = figures(run(tmp_path, text))
    copied = []
    look, original = UpdateFigures._look, updates_callback.update_ratios

    def looking(self: UpdateFigures, module: LanguageModule) -> None:
        assert not self._before
        look(self, module)
        if self._before:
            copied.append(module.progress.step + 1)

    monkeypatch.setattr(UpdateFigures, "_look", looking)
    compared = []
    monkeypatch.setattr(updates_callback, "update_ratios", lambda *a: compared.append(1) or original(*a))
    found = figures(run(tmp_path, text, logging={"every_steps": 4}))
    assert copied == [4, 8, STEPS]
    assert len(compared) == 3
    assert found == {step: each[step] for step in copied}
    assert all(found.values())


def test_they_change_no_bit(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noisy: dict[str, Any] = {"model": {"dropout": 0.3, "weight_drop": 0.2}, "train": {"clip_norm": 0.1}}
    with_them = run(tmp_path, text, **noisy)
    assert all(figures(with_them).values())
    monkeypatch.setattr(UpdateFigures, "_look", lambda *_: None)
    without = run(tmp_path, text, **noisy)
    assert not any(figures(without).values())
    assert all(torch.equal(a, b) for a, b in zip(weights(with_them), weights(without), strict=True))


def test_a_discarded_step_has_none(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = LanguageModule.training_step
    monkeypatch.setattr(
        LanguageModule,
        "training_step",
        lambda module, *args: step(module, *args) * (math.nan if module.progress.step in (3, 4, STEPS - 1) else 1),
    )
    found = figures(run(tmp_path, text, train={"weight_decay": 0.1, "momentum": 0.9}))
    assert [step for step, line in found.items() if not line] == [4, 5, STEPS]
    assert all(math.isfinite(value) for line in found.values() for value in line.values())


@pytest.mark.parametrize("cuts", [(5,), (3, 4, 8)])
def test_resumed_they_are_those_of_the_whole_run(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...]
) -> None:
    options = settings(tmp_path, text, train={"clip_norm": 0.1, "momentum": 0.9}, logging={"every_steps": 2})
    whole = figures(lmapp.train(options, quiet=True).path)
    step = LanguageModule.optimizer_step

    def cut(self: LanguageModule, *arguments: Any) -> None:
        step(self, *arguments)
        self.stop_requested = self.progress.step in cuts

    monkeypatch.setattr(LanguageModule, "optimizer_step", cut)
    with pytest.raises(Interrupted):
        lmapp.train({**options, "name": "cut"}, quiet=True)
    for _ in cuts[1:]:
        with pytest.raises(Interrupted):
            lmapp.train(resume="cut", runs_dir=options["runs_dir"], quiet=True)
    parts = figures(lmapp.train(resume="cut", runs_dir=options["runs_dir"], quiet=True).path)
    assert parts == whole
    assert list(whole) == [2, 4, 6, 8, 10]
    assert all(whole.values())


LAYER = ("weight_ih", "weight_hh", "bias")


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        ({"embedding_size": 8, "tie_embeddings": True}, ["embedding", *(f"layer0/{part}" for part in LAYER), "head"]),
        ({"kind": "window", "cell": None, "window": 3}, ["weight", "bias", "head"]),
        ({"kind": "infill"}, [*(f"{way}0/{part}" for way in ("forward", "backward") for part in LAYER), "head"]),
    ],
    ids=["tied", "window", "infill"],
)
def test_every_network_has_them_by_its_own_groups(
    tmp_path: Path, text: str, model: dict[str, Any], groups: list[str]
) -> None:
    options = settings(tmp_path, text, model=model, train={"max_steps": 2})
    options["model"] = {name: value for name, value in options["model"].items() if value is not None}
    found = figures(lmapp.train(options, quiet=True).path)[2]
    assert found.keys() == {f"{figure}/{name}" for figure in ("gradient/group", "update") for name in groups}


def test_the_last_step_of_a_limit_in_minutes_has_them(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "pace", lambda seconds: 0.01)
    clock = iter(i * 0.005 for i in range(10**6))  # asked twice a step: a step takes 5 ms
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    limit = {"max_steps": None, "max_minutes": (plan.TIMED_STEPS * 0.005 + 0.075) / 60}
    found = figures(run(tmp_path, text, train=limit, logging={"every_steps": 1000}))
    assert list(found) == [plan.TIMED_STEPS + 7]
    assert all(found.values())


def test_the_last_step_of_a_stream_has_them(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    stream = {"path": ["-"], "streaming": True, "stream_steps": 4, "val_fraction": None}
    found = figures(run(tmp_path, text, data=stream, train={"max_steps": 1000}, logging={"every_steps": 1000}))
    (last,) = found.values()
    assert {name for name in last if name.startswith("update/")} == {f"update/{name}" for name in GROUPS}
