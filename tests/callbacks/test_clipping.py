"""Clip events: one for each gradient that was clipped, with the text that caused it, in agreement with the metrics."""

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

import lmapp
from lmapp import checkpoint
from lmapp.callbacks import clipping as clipping_callback
from lmapp.gradients import clipping
from lmapp.gradients.norms import NormHistogram
from lmapp.run import Interrupted
from lmapp.training.module import LanguageModule

STEPS, LOGGED, STEPS_PER_EPOCH = 40, 4, 16


@pytest.fixture(scope="module")
def text(real_text: str) -> str:
    """1,003 characters: in four rows of windows of 16, an epoch has sixteen steps and uneven rows."""
    return "".join(c for c in real_text if c.isascii())[:1003]


class Recorded:
    """What every step of a run really saw: norms taken here, once more, and the rows with their losses."""

    def __init__(self, directory: Path, text: str, patch: pytest.MonkeyPatch, train: dict[str, Any]) -> None:
        self.threshold = train.get("clip_norm") or train.get("clip_value")
        self.norms: list[float] = []
        self.largest: list[float] = []
        self.rows: list[str] = []
        self.worst: list[int] = []
        self.losses: list[float] = []
        symbols = sorted(set(text))
        step, clip = LanguageModule.training_step, LanguageModule.configure_gradient_clipping

        def training_step(module: LanguageModule, batch: Any, batch_idx: int) -> Any:
            carried = module._carried if batch_idx else None
            states = module.model.initial_state(len(batch.inputs)) if carried is None else carried.states
            with torch.no_grad():
                logits, _ = module.model(batch.inputs, states)
                losses = -logits.log_softmax(-1).gather(-1, batch.targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
                losses = losses.masked_fill(batch.targets < 0, 0)
            row = int(losses.sum(1).argmax())
            ids = [int(batch.inputs[row, 0]), *(t for t in batch.targets[row].tolist() if t >= 0)]
            self.rows.append("".join(symbols[i] for i in ids))
            self.worst.append(int(losses[row].argmax()))
            self.losses.append(float(losses.sum() / batch.characters))
            return step(module, batch, batch_idx)

        def configure_gradient_clipping(module: LanguageModule, *args: Any, **kwargs: Any) -> None:
            entries = torch.cat([p.grad.double().flatten() for p in module.parameters() if p.grad is not None])
            self.norms.append(float(entries.norm()))
            self.largest.append(float(entries.abs().max()))
            clip(module, *args, **kwargs)

        patch.setattr(LanguageModule, "training_step", training_step)
        patch.setattr(LanguageModule, "configure_gradient_clipping", configure_gradient_clipping)
        (directory / "text.txt").write_text(text, encoding="utf-8")
        self.run = lmapp.train(
            {
                "data": {
                    "path": [str(directory / "text.txt")],
                    "batch_size": 4,
                    "sequence_length": 16,
                    "val_fraction": 0,
                    "cache_dir": str(directory / "cache"),
                },
                "model": {"cell": "gru", "hidden_size": 16},
                "train": {
                    "max_steps": STEPS,
                    "learning_rate": 0.05,
                    "warmup_steps": 5,
                    "precision": "fp32",
                    "optimizer": "sgd",
                    **train,
                },
                "gradients": {"every_steps": 0},
                "logging": {"wandb": "disabled", "every_steps": LOGGED},
                "runs_dir": str(directory / "runs"),
            },
            quiet=True,
        )
        self.events = _lines(self.run.path / "clip_events.jsonl")
        self.metrics = _lines(self.run.path / "metrics.jsonl")

    def steps_of(self, line: dict[str, Any]) -> range:
        """Indices of the steps that a line of the metrics is about."""
        return range(line["step"] - LOGGED, line["step"])


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory, text: str) -> Any:
    """Without clipping; its medians are thresholds that about half of the steps exceed."""
    with pytest.MonkeyPatch.context() as patch:
        yield Recorded(tmp_path_factory.mktemp("free"), text, patch, {"clip_norm": None})


@pytest.fixture(scope="module")
def by_norm(tmp_path_factory: pytest.TempPathFactory, text: str, free: Recorded) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield Recorded(tmp_path_factory.mktemp("norm"), text, patch, {"clip_norm": median(free.norms)})


@pytest.fixture(scope="module")
def by_value(tmp_path_factory: pytest.TempPathFactory, text: str, free: Recorded) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield Recorded(tmp_path_factory.mktemp("value"), text, patch, {"clip_value": median(free.largest)})


def test_there_is_an_event_for_every_norm_above_the_threshold_and_no_other(by_norm: Recorded) -> None:
    clipped = [step for step, norm in enumerate(by_norm.norms, 1) if norm > by_norm.threshold]
    assert 5 < len(clipped) < STEPS - 5
    assert [event["step"] for event in by_norm.events] == clipped
    assert by_norm.run.metrics["clip_events"] == len(clipped)


def test_an_event_says_what_was_done(by_norm: Recorded) -> None:
    rates = {line["step"]: line["train/learning_rate"] for line in by_norm.metrics}
    for event in by_norm.events:
        index = event["step"] - 1
        assert list(event) == [
            "kind", "step", "epoch", "norm", "threshold", "factor", "loss", "learning_rate", "text",
        ]  # fmt: skip
        assert event["kind"] == "clip"
        assert event["norm"] == pytest.approx(by_norm.norms[index], rel=1e-6)
        assert event["norm"] > event["threshold"] == by_norm.threshold
        assert event["factor"] == pytest.approx(by_norm.threshold / event["norm"], rel=1e-12)
        assert event["loss"] == pytest.approx(by_norm.losses[index], rel=1e-6)
        assert event["epoch"] == index // STEPS_PER_EPOCH
        if event["step"] in rates:
            assert event["learning_rate"] == rates[event["step"]]


def test_its_text_is_the_row_with_the_largest_loss_and_stands_in_the_corpus(by_norm: Recorded, text: str) -> None:
    for event in by_norm.events:
        assert event["text"] == by_norm.rows[event["step"] - 1]
        assert event["text"] in text
    assert len({event["text"] for event in by_norm.events}) > 3


def test_metrics_agree_with_the_events(by_norm: Recorded) -> None:
    clipped = {event["step"] for event in by_norm.events}
    assert [line["step"] for line in by_norm.metrics] == list(range(LOGGED, STEPS + 1, LOGGED))
    for line in by_norm.metrics:
        steps = by_norm.steps_of(line)
        norms = [by_norm.norms[i] for i in steps]
        assert line["gradient/clip_fraction"] == sum(i + 1 in clipped for i in steps) / LOGGED
        assert line["gradient/norm"] == pytest.approx(sum(norms) / LOGGED, rel=1e-6)
        assert line["gradient/norm_clipped"] == pytest.approx(
            sum(min(n, by_norm.threshold) for n in norms) / LOGGED, rel=1e-6
        )
        assert line["gradient/nonfinite"] == 0
    assert len({line["gradient/clip_fraction"] for line in by_norm.metrics}) > 2


def test_by_value_an_event_is_an_entry_above_the_threshold(by_value: Recorded, text: str) -> None:
    clipped = [step for step, largest in enumerate(by_value.largest, 1) if largest > by_value.threshold]
    assert 5 < len(clipped) < STEPS - 5
    assert [event["step"] for event in by_value.events] == clipped
    for event in by_value.events:
        assert event["norm"] == pytest.approx(by_value.largest[event["step"] - 1], rel=1e-6)
        assert event["norm"] > event["threshold"] == by_value.threshold
        assert event["factor"] == pytest.approx(by_value.threshold / event["norm"], rel=1e-12)
        assert event["text"] == by_value.rows[event["step"] - 1]
        assert event["text"] in text
    for line in by_value.metrics:
        share = sum(by_value.largest[i] > by_value.threshold for i in by_value.steps_of(line)) / LOGGED
        assert line["gradient/clip_fraction"] == share


def test_by_value_the_logged_norm_is_the_largest_entry_of_every_step(by_value: Recorded) -> None:
    for line in by_value.metrics:
        largest = [by_value.largest[i] for i in by_value.steps_of(line)]
        assert line["gradient/norm"] == pytest.approx(sum(largest) / LOGGED, rel=1e-6)
        assert line["gradient/norm_clipped"] == pytest.approx(
            sum(min(x, by_value.threshold) for x in largest) / LOGGED, rel=1e-6
        )


def short(directory: Path, text: str, **train: Any) -> dict[str, Any]:
    """The options of a run of a few steps."""
    (directory / "text.txt").write_text(text, encoding="utf-8")
    return {
        "data": {"path": [str(directory / "text.txt")], "batch_size": 4, "sequence_length": 16, "val_fraction": 0},
        "model": {"hidden_size": 8},
        "train": train,
        "gradients": {"every_steps": 0},
        "logging": {"wandb": "disabled", "every_steps": 4},
        "runs_dir": str(directory / "runs"),
    }


@pytest.mark.parametrize("how", ["free", "by_norm", "by_value"])
def test_the_summary_has_the_share_and_the_norms_of_all_steps(request: pytest.FixtureRequest, how: str) -> None:
    seen: Recorded = request.getfixturevalue(how)
    norms = (seen.largest if how == "by_value" else seen.norms)[:STEPS]  # the fixtures that follow add theirs
    summary = json.loads((seen.run.path / "summary.json").read_text(encoding="utf-8"))
    assert summary == seen.run.metrics
    assert summary["clip_share"] == len(seen.events) / STEPS
    assert summary["norm_mean"] == pytest.approx(sum(norms) / STEPS, rel=1e-6)
    for percentage in (50, 90, 99):
        assert summary[f"norm_p{percentage}"] == pytest.approx(np.percentile(norms, percentage), rel=0.005)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({}, ["0 of 4 gradients clipped (0.0 %)", "gradient norms", "mean 0.", "90 % 0.", "times the median norm"]),
        (
            {"clip_norm": 1e-3},
            ["4 of 4 gradients clipped (100.0 %)", "Every gradient was clipped", "--train.clip-norm"],
        ),
        ({"clip_value": 1e-3}, ["4 of 4 gradients clipped", "largest entries", "no rule of thumb"]),
        ({"clip_norm": None}, ["0 of 4 gradients clipped", "Without a threshold"]),
    ],
)
def test_the_closing_table_says_what_to_think_of_the_threshold(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], train: dict[str, Any], words: list[str]
) -> None:
    lmapp.train(short(tmp_path, text, max_steps=4, **train))
    cells = [line.strip("│ \n").split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    said = " ".join(" ".join(cell.split()) for row in cells for cell in row)
    for word in words:
        assert word in said, said
    assert ("largest entries" in said) is ("clip_value" in train)


@pytest.mark.parametrize("cut", [3, 6])
def test_a_run_that_is_resumed_has_the_very_same_norms(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """One of them not finite, in the first part or in the second."""
    training_step, optimizer_step = LanguageModule.training_step, LanguageModule.optimizer_step
    monkeypatch.setattr(
        LanguageModule,
        "training_step",
        lambda module, *args: training_step(module, *args) * (math.inf if module.progress.step == 4 else 1),
    )
    options = short(tmp_path, text, max_steps=10)
    whole = lmapp.train({**options, "name": "whole"}, quiet=True)

    def stop(module: LanguageModule, *args: Any) -> None:
        optimizer_step(module, *args)
        module.stop_requested = module.progress.step == cut

    monkeypatch.setattr(LanguageModule, "optimizer_step", stop)
    with pytest.raises(Interrupted):
        lmapp.train({**options, "name": "cut"}, quiet=True)
    parts = lmapp.train(resume="cut", runs_dir=options["runs_dir"], quiet=True)
    saved = [
        checkpoint.read(run.path / "checkpoints" / "last.ckpt")["lmapp"]["progress"]["norms"] for run in (whole, parts)
    ]
    assert saved[0] == saved[1]
    found = NormHistogram(**saved[0])
    assert (found.count, found.nonfinite) == (9, 1)
    names = [name for name in whole.metrics if name.startswith(("norm_", "clip_"))]
    assert len(names) == 6
    assert [whole.metrics[name] for name in names] == [parts.metrics[name] for name in names]
    quantiles = [
        [{n: v for n, v in line.items() if n.startswith("gradient/")} for line in _lines(run.path / "metrics.jsonl")]
        for run in (whole, parts)
    ]
    assert quantiles[0] == quantiles[1]
    assert "gradient/norm_p99" in quantiles[0][0]


def test_without_clipping_there_is_no_event_and_the_norm_is_logged_still(free: Recorded) -> None:
    assert free.events == []
    for line in free.metrics:
        norms = [free.norms[i] for i in free.steps_of(line)]
        assert line["gradient/norm"] == line["gradient/norm_clipped"] == pytest.approx(sum(norms) / LOGGED, rel=1e-6)
        assert line["gradient/clip_fraction"] == 0


def test_the_norm_is_computed_once_a_step(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = clipping.global_norm

    def counted(gradients: Any) -> Any:
        calls.append(1)
        return original(gradients)

    monkeypatch.setattr(clipping, "global_norm", counted)
    Recorded(tmp_path, text, monkeypatch, {"clip_norm": 0.1})
    assert len(calls) == STEPS


def test_an_event_without_a_threshold_has_none(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LanguageModule.training_step
    monkeypatch.setattr(
        LanguageModule,
        "training_step",
        lambda module, *args: original(module, *args) * (math.nan if module.progress.step == 2 else 1),
    )
    seen = Recorded(tmp_path, text, monkeypatch, {"clip_norm": None})
    (event,) = seen.events
    assert (event["kind"], event["step"], event["threshold"], event["norm"]) == ("nonfinite", 3, None, "nan")


def test_of_a_long_row_the_text_is_the_stretch_around_its_largest_loss(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clipping_callback, "LONGEST", 20)
    seen = Recorded(tmp_path, text, monkeypatch, {"clip_norm": 1e-6, "bptt": "full"})
    assert len(seen.events) == STEPS
    for event, row, worst in zip(seen.events, seen.rows, seen.worst, strict=True):
        begin = max(0, min(worst - 10, len(row) - 21))
        assert event["text"] == row[begin : begin + 21]
        assert row[worst] in event["text"]
