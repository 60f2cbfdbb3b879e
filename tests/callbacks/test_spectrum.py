"""When spectra are measured, what they are called, and that measuring changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lmapp
from lmapp import checkpoint

NAMES = {"spectrum/norm", "spectrum/radius", "spectrum/lyapunov"}


def train(directory: Path, text: str, **options: Any) -> Path:
    path = directory / "text.txt"
    path.write_text(text, encoding="utf-8")
    config = {
        "data": {"path": [str(path)], "batch_size": 4, "sequence_length": 12, "cache_dir": str(directory / "cache")},
        "model": {"cell": ["lstm", "gru"], "hidden_size": 10, "dropout": 0.25},
        "train": {"max_steps": 13, "precision": "fp32"},
        "logging": {"wandb": "disabled", "every_steps": 1000},
        "runs_dir": str(directory / "runs"),
    }
    for section, values in options.items():
        config[section] = {**config.get(section, {}), **values}  # type: ignore[dict-item]
    return lmapp.train(config, quiet=True).path


def measured(run: Path) -> dict[int, dict[str, float]]:
    """Steps and figures of the spectrum."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: {name: line[name] for name in line if name.startswith("spectrum/")}
        for line in lines
        if NAMES & line.keys()
    }


def test_at_the_start_when_due_and_at_the_end(tmp_path: Path, real_text: str) -> None:
    found = measured(train(tmp_path, real_text[:6000], gradients={"spectrum_every_steps": 5, "every_steps": 100}))
    # What is measured before the first step is logged with it, as gradient decay is.
    assert sorted(found) == [0, 5, 10, 13]
    assert all(figures.keys() == NAMES for figures in found.values())
    assert found[0] != found[5]
    assert found[5]["spectrum/radius"] <= found[5]["spectrum/norm"] * (1 + 1e-5)


def test_measuring_changes_no_weight_and_twice_the_same_is_measured(tmp_path: Path, real_text: str) -> None:
    places = [tmp_path / name for name in ("one", "two", "without", "nothing")]
    for place in places:
        place.mkdir()
    often = {"spectrum_every_steps": 2, "every_steps": 100}
    one, two = (train(place, real_text[:6000], gradients=often) for place in places[:2])
    without = train(places[2], real_text[:6000], gradients={"spectrum_every_steps": 0})
    nothing = train(places[3], real_text[:6000], gradients={"every_steps": 0})
    assert measured(one) == measured(two)
    assert measured(without) == measured(nothing) == {}
    weights = [checkpoint.read(run / "checkpoints" / "last.ckpt")["state_dict"] for run in (one, without, nothing)]
    for name, weight in weights[0].items():
        assert all(torch.equal(weight, other[name]) for other in weights[1:]), name


def test_a_resumed_run_measures_as_if_it_had_never_stopped(tmp_path: Path, real_text: str) -> None:
    settings = {"spectrum_every_steps": 4, "every_steps": 100}
    places = [tmp_path / name for name in ("whole", "parts")]
    for place in places:
        place.mkdir()
    schedule = {"schedule": "constant"}
    whole = train(places[0], real_text[:6000], gradients=settings, train={"max_steps": 12, **schedule})
    parts = train(places[1], real_text[:6000], gradients=settings, train={"max_steps": 6, **schedule})
    lmapp.train(resume=str(parts), changes={"train": {"max_steps": 12}}, quiet=True)
    first, second = measured(whole), measured(parts)
    assert second.pop(6).keys() == NAMES  # the end of the first part
    assert first == second


@pytest.mark.parametrize("kind", ["window", "infill"])
def test_a_model_without_a_state_has_no_spectrum(tmp_path: Path, real_text: str, kind: str) -> None:
    options = {"kind": kind, "hidden_size": 8, "dropout": 0.0, **({"cell": "gru"} if kind == "infill" else {})}
    model = {**options, "cell": "gru"}
    assert measured(train(tmp_path, real_text[:4000], model=model, train={"max_steps": 2})) == {}
