"""Ω in whole runs: what it adds and where, what is logged, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lmapp
from lmapp import checkpoint
from lmapp.config import ModelConfig, TrainConfig, build
from lmapp.errors import UsageError
from lmapp.gradients.truncation import Truncation
from lmapp.models import make_model
from lmapp.training import memory
from lmapp.training.module import LanguageModule

ROWS, WIDTH, RATE, WEIGHT = 4, 8, 0.1, 0.7


@pytest.fixture(scope="module")
def text(real_text: str) -> str:
    """430 characters: in four rows an epoch has fourteen windows of 8, the last of 4 steps with shorter rows."""
    return "".join(c for c in real_text if c.isascii())[:430]


def settings(directory: Path, text: str, **sections: Any) -> dict[str, Any]:
    """Plain steps down the gradient of a run of which every step is logged."""
    (directory / "text.txt").write_text(text, encoding="utf-8")
    plain = {"optimizer": "sgd", "schedule": "constant", "warmup_steps": 0, "weight_decay": 0, "clip_norm": None}
    return {
        "data": {
            "path": [str(directory / "text.txt")],
            "batch_size": ROWS,
            "sequence_length": WIDTH,
            "val_fraction": 0,
            "cache_dir": str(directory / "cache"),
            **sections.get("data", {}),
        },
        "model": {"cell": "vanilla", "hidden_size": 16, **sections.get("model", {})},
        "train": {"max_steps": 1, "learning_rate": RATE, "precision": "fp32", "device": "cpu", "omega": WEIGHT, **plain}
        | sections.get("train", {}),
        "gradients": {"every_steps": 0},
        "logging": {"wandb": "disabled", "every_steps": 1, **sections.get("logging", {})},
        "runs_dir": str(directory / "runs"),
    }


def train(directory: Path, text: str, **sections: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The weights and the figures of a run."""
    run = lmapp.train(settings(directory, text, **sections), quiet=True)
    lines = (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return checkpoint.read(run.path / "checkpoints" / "last.ckpt")["state_dict"], [json.loads(line) for line in lines]


@pytest.mark.parametrize("train_", [{}, {"bptt": "full"}, {"truncation_length": 3}], ids=str)
def test_a_step_moves_the_recurrent_matrices_alone_by_the_weight(
    tmp_path: Path, text: str, train_: dict[str, Any]
) -> None:
    model = {"num_layers": 2, "dropout": 0.3}
    moved = []
    for weight in (0.0, WEIGHT, 2 * WEIGHT):
        weights, figures = train(tmp_path, text, model=model, train={**train_, "omega": weight})
        moved.append(weights)
        assert ("train/omega" in figures[0]) == (weight > 0)
    none, once, twice = moved
    for name, plain in none.items():
        first, second = once[name] - plain, twice[name] - once[name]
        assert bool(first.any()) == name.endswith("weight_hh"), name
        torch.testing.assert_close(first, second, rtol=1e-3, atol=2e-7)


def test_it_is_added_before_clipping(tmp_path: Path, text: str) -> None:
    lengths = {}
    for weight in (0.0, 20.0):
        before, _ = train(tmp_path, text, train={"omega": weight, "learning_rate": 1e-30, "clip_norm": 0.01})
        after, (line,) = train(tmp_path, text, train={"omega": weight, "clip_norm": 0.01})
        length = torch.cat([(after[name] - before[name]).flatten() for name in before]).double().norm().item()
        assert length == pytest.approx(RATE * 0.01, rel=1e-3)
        lengths[weight] = line["gradient/norm"]
    assert lengths[20.0] > 1.5 * lengths[0.0]


def test_training_with_it_keeps_the_gradient_s_length(tmp_path: Path, text: str) -> None:
    ends = {}
    for weight in (1e-9, 20.0):  # the smaller one for what is logged
        _, lines = train(
            tmp_path,
            text,
            train={"omega": weight, "max_steps": 80},
            model={"init": "torch"},
            logging={"every_steps": 8},
        )
        ends[weight] = [line["train/omega"] for line in lines]
    assert ends[1e-9][-1] > ends[1e-9][0]
    assert max(ends[20.0][1:]) < 0.3 * ends[1e-9][0]


def test_the_figure_is_the_mean_since_the_last_time(tmp_path: Path, text: str) -> None:
    _, each = train(tmp_path, text, train={"max_steps": 10})
    _, some = train(tmp_path, text, train={"max_steps": 10}, logging={"every_steps": 4})
    values = [line["train/omega"] for line in each]
    assert len(set(values)) == 10
    means = [sum(values[:4]) / 4, sum(values[4:8]) / 4, sum(values[8:]) / 2]
    assert [line["step"] for line in some] == [4, 8, 10]
    assert [line["train/omega"] for line in some] == pytest.approx(means, rel=1e-9)


def test_a_run_that_goes_on_equals_one_that_did_not_stop(tmp_path: Path, text: str) -> None:
    sections = {"model": {"num_layers": 2, "dropout": 0.3}, "logging": {"every_steps": 4}}
    weights, lines = train(tmp_path, text, train={"max_steps": 19}, **sections)
    first = lmapp.train({**settings(tmp_path, text, train={"max_steps": 6}, **sections), "name": "cut"}, quiet=True)
    run = lmapp.train(resume="cut", runs_dir=str(first.path.parent), changes={"train": {"max_steps": 19}}, quiet=True)
    again = checkpoint.read(run.path / "checkpoints" / "last.ckpt")["state_dict"]
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    with open(run.path / "metrics.jsonl", encoding="utf-8") as file:
        found = {line["step"]: line["train/omega"] for line in map(json.loads, file)}
    assert all(found[line["step"]] == line["train/omega"] for line in lines if line["step"] > 8)


def test_bf16_is_close(tmp_path: Path, text: str) -> None:
    _, (exact,) = train(tmp_path, text)
    _, (close,) = train(tmp_path, text, train={"precision": "bf16"})
    assert close["train/omega"] == pytest.approx(exact["train/omega"], rel=0.02)
    assert close["gradient/norm"] == pytest.approx(exact["gradient/norm"], rel=0.02)


def test_resets_of_the_state(tmp_path: Path, text: str) -> None:
    data = {"reset_state": True, "separator": ""}
    sections = settings(tmp_path, text, data=data)
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(text[number * 80 : (number + 1) * 80], encoding="utf-8")
    sections["data"]["path"] = [str(tmp_path / f"{number}.txt") for number in range(5)]
    sections["train"]["max_steps"] = 12
    run = lmapp.train(sections, quiet=True)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(0 < line["train/omega"] < 1 for line in lines)


def test_a_gradient_that_is_not_finite_leaves_no_trace(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = LanguageModule.training_step

    def broken(module: LanguageModule, batch: Any, batch_idx: int) -> Any:
        loss = step(module, batch, batch_idx)
        return loss * float("nan") if batch_idx == 2 else loss

    monkeypatch.setattr(LanguageModule, "training_step", broken)
    weights, lines = train(tmp_path, text, train={"max_steps": 5}, logging={"every_steps": 5})
    assert lines[-1]["gradient/nonfinite"] == 1
    assert 0 < lines[-1]["train/omega"] < 1
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_it_is_said(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for weight in (0.0, WEIGHT):
        lmapp.train(settings(tmp_path, text, train={"omega": weight}))
        assert ("regulariser Ω with weight 0.7" in " ".join(capsys.readouterr().out.split())) == (weight > 0)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"cell": "gru"}}, "--train.omega is an option of vanilla cells; one here is gru"),
        ({"model": {"cell": ["vanilla", "lstm"]}}, "one here is lstm"),
        ({"model": {"cell": "concatenated"}}, "one here is concatenated"),
        ({"model": {"kind": "window"}}, "an option of kind recurrent; --model.kind is window"),
        ({"model": {"kind": "infill"}}, "an option of kind recurrent; --model.kind is infill"),
        ({"train": {"bptt": "sliding"}}, "--train.bptt sliding"),
        ({"train": {"bptt": "randomised"}}, "--train.bptt randomised"),
        ({"model": {"weight_drop": 0.1}}, "--train.omega and --model.weight-drop exclude each other"),
        ({"model": {"zoneout": 0.1}}, "--train.omega and --model.zoneout exclude each other"),
    ],
    ids=str,
)
def test_what_it_is_not_defined_for_is_refused(sections: dict[str, Any], words: str) -> None:
    model = {"cell": "vanilla"} | sections.get("model", {})
    if model.get("kind") == "window":
        del model["cell"]
    with pytest.raises(UsageError) as caught:
        build({"model": model, "train": {"omega": 0.5, **sections.get("train", {})}})
    assert words in str(caught.value)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 3
    assert max(map(len, lines)) <= 120
    build({"model": model, "train": sections.get("train", {})})


def test_a_weight_is_not_negative() -> None:
    with pytest.raises(UsageError, match=r"--train\.omega is a number at least 0, not -1"):
        build({"model": {"cell": "vanilla"}, "train": {"omega": -1}})


def test_memory_is_counted_for_it() -> None:
    model = make_model(20, ModelConfig(cell=["vanilla"], hidden_size=64))
    step = {
        weight: memory.needed(model, TrainConfig(omega=weight), Truncation(8, "block", 8), 4, 8, 8).step
        for weight in (0.0, 0.5)
    }
    assert step[0.5] - step[0.0] == 4 * 8 * 2 * 64 * 4  # two more numbers of every unit, as measured of real steps
