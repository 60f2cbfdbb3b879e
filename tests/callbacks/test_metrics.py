"""The figures of a run: their names, and that they are means over exactly the steps since the last time."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lmapp
from lmapp.loggers.records import LocalLogger
from lmapp.loggers.wandb import NORMS
from lmapp.models.infill import choose_masked
from lmapp.training import infill
from lmapp.training.module import LanguageModule
from lmapp.units import perplexity

TRAIN = {
    "train/loss", "train/perplexity", "train/bits_per_char", "train/chars_per_second", "train/learning_rate",
    "train/characters", "train/seconds", "gradient/norm", "gradient/norm_clipped", "gradient/clip_fraction",
    "gradient/nonfinite", "gradient/norm_p50", "gradient/norm_p90", "gradient/norm_p99",
}  # fmt: skip
VALIDATION = {"val/loss", "val/perplexity", "val/bits_per_char", "val/bits_per_byte"}
FIGURES = [
    "half_life", "half_life_censored", "horizon", "horizon_censored", "lag_99", "lag_99_censored", "rate",
    "at_truncation", "lost_share",
]  # fmt: skip
AXES = {"step", "characters", "seconds"}


def run(directory: Path, text: str, **sections: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a short run."""
    (directory / "text.txt").write_text(text, encoding="utf-8")
    options = {
        "data": {
            "path": [str(directory / "text.txt")],
            "batch_size": 4,
            "sequence_length": 16,
            "cache_dir": str(directory / "cache"),
            **sections.get("data", {}),
        },
        "model": {"cell": "lstm", "hidden_size": 16, **sections.get("model", {})},
        "train": {"max_steps": 25, "val_every_steps": 10, "precision": "fp32", **sections.get("train", {})},
        "gradients": {"every_steps": 10, "windows": 2, **sections.get("gradients", {})},
        "logging": {"wandb": "disabled", "every_steps": 5, **sections.get("logging", {})},
        "runs_dir": str(directory / "runs"),
    }
    path = lmapp.train(options, quiet=True).path / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def decay_names(layers: int, components: str) -> set[str]:
    prefixes = ["decay", "decay/inputs"]
    prefixes += [f"decay/layer{layer}/{part}" for layer in range(layers) for part in ("joint", *components)]
    interval = {"decay/half_life_low", "decay/half_life_high"}
    return interval | {f"{prefix}/{figure}" for prefix in prefixes for figure in FIGURES}


SPECTRUM = {"spectrum/norm", "spectrum/radius", "spectrum/lyapunov"}


def group_names(layers: int) -> set[str]:
    parts = ("weight_ih", "weight_hh", "bias")
    groups = ["head", *(f"layer{layer}/{part}" for layer in range(layers) for part in parts)]
    return {f"{figure}/{group}" for figure in ("gradient/group", "update") for group in groups}


@pytest.mark.parametrize(("cell", "components", "layers"), [("lstm", "hc", 1), ("gru", "h", 2), ("vanilla", "h", 1)])
def test_every_name_of_the_contract_is_logged_when_it_is_due_and_no_other(
    tmp_path: Path, real_text: str, cell: str, components: str, layers: int
) -> None:
    lines = run(tmp_path, real_text[:8000], model={"cell": cell, "num_layers": layers})
    assert [line["step"] for line in lines] == [0, 5, 10, 15, 20, 25]
    decay = decay_names(layers, components)
    totals = {"train/characters", "train/seconds"}
    for line in lines:
        names = set(line) - AXES
        measured = {name for name in names if name.startswith("decay/")}
        if line["step"] in (0, 10, 20, 25):
            # At lag 0 nothing of an LSTM's c reaches the readout, so that its own curve may lack figures.
            assert measured <= decay
            assert {name for name in decay if "/c/" not in name} <= measured
        else:
            assert not measured
        others = names - measured
        if line["step"] == 0:
            assert others == totals | SPECTRUM
        else:
            expected = TRAIN | group_names(layers) | (SPECTRUM if line["step"] == 25 else set())
            assert others == expected | (VALIDATION if line["step"] in (10, 20, 25) else set())


def test_figures_follow_from_one_another(tmp_path: Path, real_text: str) -> None:
    for line in run(tmp_path, real_text[:8000], gradients={"every_steps": 0}):
        assert line["train/perplexity"] == pytest.approx(math.exp(line["train/loss"]))
        assert line["train/bits_per_char"] == pytest.approx(line["train/loss"] / math.log(2))
        assert line["train/characters"] == line["characters"] == 64 * line["step"]
        assert line["train/seconds"] == line["seconds"] > 0
        if "val/loss" in line:
            assert line["val/perplexity"] == pytest.approx(math.exp(line["val/loss"]))
            assert line["val/bits_per_char"] == pytest.approx(line["val/loss"] / math.log(2))
            assert line["val/bits_per_byte"] <= line["val/bits_per_char"]


def test_a_mean_is_over_all_steps_since_the_last_time_weighted_by_characters(tmp_path: Path, real_text: str) -> None:
    text = "".join(c for c in real_text if c.isascii())[:900]  # an epoch of 15 steps, the last one narrower
    options: dict[str, Any] = {"data": {"val_fraction": 0}, "gradients": {"every_steps": 0}}
    (tmp_path / "single").mkdir()
    single = run(tmp_path / "single", text, logging={"every_steps": 1}, **options)
    together = run(tmp_path, text, logging={"every_steps": 7}, **options)
    assert [line["step"] for line in together] == [7, 14, 21, 25]
    counted = [b["characters"] - a["characters"] for a, b in zip([{"characters": 0}, *single], single, strict=False)]
    assert len(set(counted)) == 2
    start = 0
    for line in together:
        steps = range(start, line["step"])
        total = sum(counted[i] for i in steps)
        mean = sum(single[i]["train/loss"] * counted[i] for i in steps) / total
        assert line["train/loss"] == pytest.approx(mean, rel=1e-9)
        norm = sum(single[i]["gradient/norm"] for i in steps) / len(steps)
        assert line["gradient/norm"] == pytest.approx(norm, rel=1e-9)
        before = together[together.index(line) - 1]["seconds"] if start else 0.0
        assert line["train/chars_per_second"] == pytest.approx(total / (line["seconds"] - before), rel=1e-6)
        start = line["step"]


def test_quantiles_are_of_the_whole_run_so_far(tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all steps, not of those since the last time; the loggers get the histogram at the end, the file does not."""
    given: list[dict[str, Any]] = []
    log = LocalLogger.log_metrics

    def logging(logger: LocalLogger, metrics: dict[str, Any], step: int | None = None) -> None:
        given.append(metrics)
        log(logger, metrics, step)

    options: dict[str, Any] = {"data": {"val_fraction": 0}, "gradients": {"every_steps": 0}}
    (tmp_path / "single").mkdir()
    single = run(tmp_path / "single", real_text[:8000], logging={"every_steps": 1}, **options)
    norms = [line["gradient/norm"] for line in single]
    monkeypatch.setattr(LocalLogger, "log_metrics", logging)
    together = run(tmp_path, real_text[:8000], logging={"every_steps": 10}, **options)
    assert [line["step"] for line in together] == [10, 20, 25]
    for line in together:
        for percentage in (50, 90, 99):
            expected = np.percentile(norms[: line["step"]], percentage)
            assert line[f"gradient/norm_p{percentage}"] == pytest.approx(expected, rel=0.005)
    assert [NORMS in metrics for metrics in given] == [False, False, True]
    counts, edges = given[-1][NORMS]
    assert sum(counts) == 25
    assert counts == np.histogram(norms, edges)[0].tolist()
    assert not any(NORMS in line for line in together)


def test_without_a_finite_norm_there_is_no_quantile_and_no_mean(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = LanguageModule.training_step
    monkeypatch.setattr(
        LanguageModule,
        "training_step",
        lambda module, *args: step(module, *args) * (math.nan if module.progress.step < 2 else 1),
    )
    lines = run(tmp_path, real_text[:8000], train={"max_steps": 3}, logging={"every_steps": 1})
    after = [line for line in lines if line["step"] > 0]
    assert ["gradient/norm_p50" in line for line in after] == [False, False, True]
    assert after[2]["gradient/norm_p50"] == after[2]["gradient/norm_p99"] == after[2]["gradient/norm"]


def test_the_loss_of_an_infill_model_is_weighted_by_what_was_masked(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose share of a batch differs: each step masks another one here, and the last of them nothing."""
    text = "".join(c for c in real_text if c.isascii())[:900]
    masked: list[int] = []

    def choose(tokens: torch.Tensor, starts: torch.Tensor, fraction: float) -> torch.Tensor:
        share = (len(masked) % 5 + 1) * 0.15 if len(masked) < 20 else 0.0
        chosen = choose_masked(tokens, starts, share) if share else torch.zeros_like(tokens, dtype=torch.bool)
        masked.append(int(chosen.sum()))
        return chosen

    monkeypatch.setattr(infill, "choose_masked", choose)
    options: dict[str, Any] = {"data": {"val_fraction": 0}, "model": {"kind": "infill"}}
    (tmp_path / "single").mkdir()
    single = run(tmp_path / "single", text, logging={"every_steps": 1}, **options)
    counted = masked.copy()
    masked.clear()
    together = run(tmp_path, text, logging={"every_steps": 5}, **options)
    assert masked == counted
    for start, line in zip(range(0, 20, 5), together, strict=False):
        steps = range(start, start + 5)
        mean = sum(single[i]["train/infill_loss"] * counted[i] for i in steps) / sum(counted[i] for i in steps)
        assert line["train/infill_loss"] == pytest.approx(mean, rel=1e-9)
        assert line["characters"] == single[start + 4]["characters"]
    assert [line["step"] for line in together] == [5, 10, 15, 20, 25]
    assert "train/infill_loss" not in together[-1]
    assert together[-1]["gradient/norm"] == 0


def test_a_loss_too_large_for_a_perplexity_is_infinite() -> None:
    assert perplexity(1.0) == pytest.approx(math.e)
    assert perplexity(708.0) < math.inf
    assert perplexity(1e6) == math.inf
