"""Gradient decay during training: when it is measured, what is written, and that it is what the measure says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lmapp
from lmapp import checkpoint
from lmapp.callbacks import decay as decay_callback
from lmapp.config import build
from lmapp.errors import UsageError
from lmapp.gradients.decay import measure
from lmapp.training.module import LanguageModule
from lmapp.training.plan import TIMED_STEPS

TAU = 12
WINDOW = {"kind": "window", "window": 5, "cell": "gru", "num_layers": None}


def run(directory: Path, text: str, *, quiet: bool = True, **sections: dict[str, Any]) -> Path:
    (directory / "text.txt").write_text(text, encoding="utf-8")
    options = {
        "data": {
            "path": [str(directory / "text.txt")],
            "batch_size": 4,
            "sequence_length": TAU,
            "cache_dir": str(directory / "cache"),
        },
        "model": {"cell": "lstm", "hidden_size": 16, "num_layers": 2, **sections.get("model", {})},
        "train": {"max_steps": 18, "val_every_steps": 0, "precision": "fp32", **sections.get("train", {})},
        "gradients": {"every_steps": 7, "windows": 3, **sections.get("gradients", {})},
        "logging": {"wandb": "disabled"},
        "runs_dir": str(directory / "runs"),
    }
    return lmapp.train(options, quiet=quiet).path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


@pytest.mark.parametrize(("cell", "components"), [("lstm", ["h", "c"]), ("gru", ["h"]), ("vanilla", ["h"])])
def test_it_is_measured_before_the_first_step_every_few_steps_and_at_the_end(
    tmp_path: Path, real_text: str, cell: str, components: list[str]
) -> None:
    found = lines(run(tmp_path, real_text[:8000], model={"cell": cell}) / "decay.jsonl")
    curves = [("all", "joint"), *((layer, part) for layer in (0, 1) for part in ("joint", *components))]
    curves.append(("inputs", "joint"))
    steps = sorted({line["step"] for line in found})
    assert steps == [0, 7, 14, 18]
    for step in steps:
        measured = [(line["layer"], line["component"]) for line in found if line["step"] == step]
        assert [curve for curve in measured if curve in curves] == curves
        assert len(measured) == len(set(measured))
    for line in found:
        assert line["lags"] == list(range(2 * TAU + 1))
        assert len(line["G"]) == len(line["R"]) == len(line["zero_share"]) == 2 * TAU + 1
        if line["component"] == "joint":
            assert line["R"][line["reference_lag"]] == pytest.approx(1)
    first, last = (next(x for x in found if (x["step"], x["layer"]) == (s, "all")) for s in (0, 18))
    assert first["G"] != last["G"]


def test_a_measurement_is_that_of_the_network_at_its_step_on_the_same_windows(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def watch(model: Any, windows: torch.Tensor, shape: Any) -> Any:
        measured.append((windows.clone(), shape, model.state_dict()["head.weight"].clone(), model.training))
        return measure(model, windows, shape)

    monkeypatch.setattr(decay_callback, "measure", watch)
    path = run(tmp_path, real_text[:8000])
    assert len(measured) == 4
    windows, shape, _, _ = measured[0]
    assert windows.shape == (3, shape.length)
    assert all(torch.equal(w, windows) and s == shape for w, s, _, _ in measured)
    # The windows are validation text.
    language = lmapp.load(path / "checkpoints" / "last.ckpt")
    validation = language.vocabulary.decode(language.text()[0])
    assert all(language.vocabulary.decode(window.numpy()) in validation for window in windows)
    # The last one is that of the network that was saved.
    assert torch.equal(measured[-1][2], language.model.head.weight)
    expected = measure(language.model, windows, shape).records(18)
    written = [line for line in lines(path / "decay.jsonl") if line["step"] == 18]
    assert [line["layer"] for line in written] == [record["layer"] for record in expected]
    for line, record in zip(written, expected, strict=True):
        np.testing.assert_allclose(line["G"], record["G"], rtol=1e-6)
        np.testing.assert_allclose(line["R"], record["R"], rtol=1e-6)


def test_what_is_logged_is_what_is_written(tmp_path: Path, real_text: str) -> None:
    path = run(tmp_path, real_text[:8000])
    logged = {line["step"]: line for line in lines(path / "metrics.jsonl") if "decay/at_truncation" in line}
    for line in lines(path / "decay.jsonl"):
        if line["component"] != "joint":
            continue
        prefixes = {"all": "decay", "inputs": "decay/inputs"}
        prefix = prefixes.get(line["layer"], f"decay/layer{line['layer']}/joint")
        assert logged[line["step"]][f"{prefix}/at_truncation"] == pytest.approx(line["R"][TAU])
        half = next((k for k, r in zip(line["lags"], line["R"], strict=True) if r < 0.5), None)
        figure = logged[line["step"]][f"{prefix}/half_life"]
        assert half is None or half - 1 <= figure <= half
        assert logged[line["step"]][f"{prefix}/half_life_censored"] == (half is None)


@pytest.mark.parametrize("model", [{"dropout": 0.4}, {"dropout": 0.4, **WINDOW}])
def test_measuring_changes_no_weight(tmp_path: Path, real_text: str, model: dict[str, Any]) -> None:
    ends = []
    for every in (3, 0):
        path = run(tmp_path, real_text[:8000], model=model, gradients={"every_steps": every})
        ends.append(checkpoint.read(path / "checkpoints" / "last.ckpt")["state_dict"])
        assert (path / "decay.jsonl").exists() == (every > 0)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])


def test_without_validation_text_it_is_measured_on_the_end_of_the_training_text(tmp_path: Path, real_text: str) -> None:
    (tmp_path / "text.txt").write_text(real_text[:4000], encoding="utf-8")
    options = {
        "data": {
            "path": [str(tmp_path / "text.txt")],
            "batch_size": 4,
            "sequence_length": TAU,
            "val_fraction": 0,
            "cache_dir": str(tmp_path / "cache"),
        },
        "model": {"hidden_size": 8},
        "train": {"max_steps": 2, "precision": "fp32"},
        "logging": {"wandb": "disabled"},
        "runs_dir": str(tmp_path / "runs"),
    }
    found = lines(lmapp.train(options, quiet=True).path / "decay.jsonl")
    assert {line["step"] for line in found} == {0, 2}


def test_a_text_too_short_to_measure_on_trains_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcab", encoding="utf-8")
    options = {
        "data": {"path": [str(tmp_path / "text.txt")], "val_fraction": 0, "cache_dir": str(tmp_path / "cache")},
        "model": {"hidden_size": 8},
        "train": {"max_steps": 3, "precision": "fp32"},
        "logging": {"wandb": "disabled"},
        "runs_dir": str(tmp_path / "runs"),
    }
    path = lmapp.train(options, quiet=True).path
    assert not (path / "decay.jsonl").exists()
    assert lines(path / "metrics.jsonl")[-1]["step"] == 3


# A window model


def test_a_window_model_s_inputs_are_measured(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    charts = []

    class Watched(decay_callback.DecayProbe):
        def _measure(self, module: LanguageModule) -> None:
            super()._measure(module)
            charts.append(list(module.figures[decay_callback.DECAY_CURVES]))

    monkeypatch.setattr("lmapp.run.DecayProbe", Watched)
    path = run(tmp_path, real_text[:8000], model=WINDOW, quiet=False)
    output = " ".join(capsys.readouterr().out.split())
    assert "carries no state" in output
    assert "The recurrence is cut" not in output
    assert "no gradient decay is measured" not in output
    found = lines(path / "decay.jsonl")
    assert [(line["step"], line["layer"], line["component"]) for line in found] == [
        (step, "inputs", "joint") for step in (0, 7, 14, 18)
    ]
    for line in found:
        assert line["lags"] == list(range(2 * 5 + 1))
        assert all(line["R"][:5])
        assert not any(line["R"][5:])
        assert line["zero_share"][5:] == [1] * 6
    assert [len(chart) for chart in charts] == [1, 2, 3, 4]
    measured = [line for line in lines(path / "metrics.jsonl") if "decay/inputs/half_life" in line]
    assert [line["step"] for line in measured] == [0, 7, 14, 18]
    assert not any(name.startswith("decay/") and "inputs" not in name for line in measured for name in line)
    from lmapp import laboratory

    (again,) = laboratory.measure_checkpoints([str(path)], windows=3)
    np.testing.assert_allclose(again.decay.curve().R, found[-1]["R"], rtol=1e-6)
    assert again.verdict.endswith("what lies beyond its window has no gradient.")


# A budget


class Clock:
    """Time that passes only where the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: float, costs: list[float]) -> None:
        self.now, self.measured = 0.0, 0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        train = LanguageModule.training_step

        def training_step(module: LanguageModule, *arguments: Any) -> Any:
            self.now += step
            return train(module, *arguments)

        def measuring(*arguments: Any) -> Any:
            self.now += costs[min(self.measured, len(costs) - 1)]
            self.measured += 1
            return measure(*arguments)

        monkeypatch.setattr(LanguageModule, "training_step", training_step)
        monkeypatch.setattr(decay_callback, "measure", measuring)


def measured_steps(path: Path) -> list[int]:
    return sorted({line["step"] for line in lines(path / "decay.jsonl")})


@pytest.mark.parametrize(
    ("every", "cost", "interval"),
    [
        (20, 1.0, 40),  # 1 s / (0.1 · 0.25 s) = 40 steps
        (7, 1.0, 42),
        (7, 0.01, 7),
    ],
)
def test_a_budget_raises_the_interval_to_the_smallest_multiple_that_fits(
    tmp_path: Path,
    real_text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    every: int,
    cost: float,
    interval: int,
) -> None:
    clock = Clock(monkeypatch, step=0.25, costs=[99.0, cost])  # the first one, which warms up, is not what counts
    path = run(
        tmp_path,
        real_text[:8000],
        model={"hidden_size": 4, "num_layers": 1},
        train={"max_steps": 130},
        gradients={"every_steps": every, "budget": 0.1},
        quiet=False,
    )
    decided = every * -(-TIMED_STEPS // every)  # the first multiple by which enough steps were timed
    later = [step for step in range(interval, 131, interval) if step > decided]
    assert measured_steps(path) == sorted({0, decided, *later, 130})
    assert clock.measured == len(measured_steps(path))
    assert checkpoint.read(path / "checkpoints" / "last.ckpt")["lmapp"]["progress"]["decay_every_steps"] == interval
    output = " ".join(capsys.readouterr().out.split())
    instead = "" if interval == every else f" instead of {every}"
    assert f"Gradient decay is measured every {interval} steps{instead}: that takes {cost:.2g} s each time" in output
    assert output.count("Gradient decay is measured every") == 1


def test_what_can_be_afforded() -> None:
    for every in (1, 3, 500):
        for cost, step, budget in ((1.0, 0.25, 0.1), (3.7, 0.013, 0.02), (0.001, 0.5, 0.5)):
            found = decay_callback.affordable(every, cost, step, budget)
            assert found % every == 0
            assert cost / (found * step) <= budget * (1 + 1e-12)
            assert found == every or cost / ((found - every) * step) > budget


@pytest.mark.parametrize("stop", [30, 70])
def test_a_resumed_run_goes_on_with_its_interval_or_decides_it_anew(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    sections: dict[str, Any] = {
        "model": {"hidden_size": 4, "num_layers": 1},
        "train": {"max_steps": stop, "schedule": "constant"},
        "gradients": {"every_steps": 10, "budget": 0.1},
    }
    Clock(monkeypatch, step=0.25, costs=[99.0, 0.5])  # every 20 steps
    path = run(tmp_path, real_text[:8000], **sections)
    assert measured_steps(path) == ([0, 30] if stop == 30 else [0, 50, 60, 70])
    clock = Clock(monkeypatch, step=0.25, costs=[99.0, 1.0])  # every 40 steps, if it were decided now
    lmapp.train(resume=str(path), changes={"train": {"max_steps": 130}}, quiet=True)
    steps = [step for step in measured_steps(path) if step > stop]
    if stop == 30:  # after so many steps of this process, and after a measurement that warms it up
        assert steps == [80, 120, 130]
        assert clock.measured == 4
    else:
        assert steps == [80, 100, 120, 130]
        assert clock.measured == 4


def test_a_budget_of_a_run_too_short_to_time_it(tmp_path: Path, real_text: str) -> None:
    path = run(tmp_path, real_text[:8000], gradients={"budget": 0.5})
    assert measured_steps(path) == [0, 18]


def test_a_budget_where_nothing_is_measured_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--gradients\.budget does nothing to --gradients\.every-steps 0"):
        build({"gradients": {"budget": 0.02, "every_steps": 0}})
    with pytest.raises(UsageError, match=r"--gradients\.budget: .*--model\.kind infill"):
        build({"gradients": {"budget": 0.02}, "model": {"kind": "infill"}})
    for value in (0, 1, -0.1, "x"):
        with pytest.raises(UsageError, match=r"--gradients\.budget is a number more than 0 and less than 1"):
            build({"gradients": {"budget": value}})
    assert build({}).gradients.budget is None
    assert build({"gradients": {"budget": "0.02"}}).gradients.budget == 0.02
    assert build({"gradients": {"budget": "none", "every_steps": 0}}).gradients.budget is None
