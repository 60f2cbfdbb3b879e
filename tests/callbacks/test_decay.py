"""Gradient decay during training: when it is measured, what is written, and that it is what the measure says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lmapp
from lmapp.callbacks import decay as decay_callback
from lmapp.gradients.decay import measure

TAU = 12


def run(directory: Path, text: str, **sections: dict[str, Any]) -> Path:
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
    return lmapp.train(options, quiet=True).path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


@pytest.mark.parametrize(("cell", "components"), [("lstm", ["h", "c"]), ("gru", ["h"]), ("vanilla", ["h"])])
def test_it_is_measured_before_the_first_step_every_few_steps_and_at_the_end(
    tmp_path: Path, real_text: str, cell: str, components: list[str]
) -> None:
    found = lines(run(tmp_path, real_text[:8000], model={"cell": cell}) / "decay.jsonl")
    curves = [("all", "joint"), *((layer, part) for layer in (0, 1) for part in ("joint", *components))]
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
        prefix = "decay" if line["layer"] == "all" else f"decay/layer{line['layer']}/joint"
        assert logged[line["step"]][f"{prefix}/at_truncation"] == pytest.approx(line["R"][TAU])
        half = next((k for k, r in zip(line["lags"], line["R"], strict=True) if r < 0.5), None)
        figure = logged[line["step"]][f"{prefix}/half_life"]
        assert half is None or half - 1 <= figure <= half
        assert logged[line["step"]][f"{prefix}/half_life_censored"] == (half is None)


def test_measuring_changes_no_weight(tmp_path: Path, real_text: str) -> None:
    from lmapp import checkpoint

    ends = []
    for every in (3, 0):
        path = run(tmp_path, real_text[:8000], model={"dropout": 0.4}, gradients={"every_steps": every})
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
