"""Training on a task: what is scored of it, its accuracy, where decay is measured, and that it goes on exactly."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lmapp
from lmapp import checkpoint
from lmapp.config import build
from lmapp.data.datamodule import TextDataModule
from lmapp.errors import LmappError, UsageError
from lmapp.gradients.decay import measure
from lmapp.gradients.records import record_shape, record_windows
from lmapp.models import make_model
from lmapp.models.answers import AnswerScore, evaluate_answers
from lmapp.training.probe import SEED
from lmapp.training.saving import EndOfStep

TIMED = ("seconds", "train/seconds", "train/chars_per_second")


def settings(directory: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, dict[str, Any]] = {
        "data": {
            "task": "copy",
            "task_delay": 5,
            "task_length": 2,
            "task_records": 44,
            "batch_size": 4,
            "cache_dir": str(directory / "cache"),
        },
        "model": {"cell": "gru", "hidden_size": 12},
        "train": {"max_steps": 24, "val_every_steps": 8, "warmup_steps": 3, "precision": "fp32", "device": "cpu"},
        "gradients": {"every_steps": 0},
        "logging": {"wandb": "disabled", "every_steps": 1},
    }
    for name, options in sections.items():
        own[name] |= options
    return {**own, "name": "run", "runs_dir": str(directory / "runs")}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_step_and_its_figures_are_what_a_plain_loop_finds(tmp_path: Path) -> None:
    options = settings(tmp_path, train={"clip_norm": None, "schedule": "constant"})
    lines = read(lmapp.train(options, quiet=True).path / "metrics.jsonl")
    config = build(options)
    data = TextDataModule(config.data)
    data.setup()
    assert data.corpus is not None
    torch.manual_seed(config.seed)
    model = make_model(len(data.vocabulary), config.model)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.99),
    )
    records = torch.from_numpy(data.corpus.train.astype(np.int64)).view(44, 9)
    validation = torch.from_numpy(data.corpus.validation.astype(np.int64)).view(100, 9)

    def answers(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, _ = model(rows, model.initial_state(len(rows)))  # type: ignore[operator]
        return logits[:, 6:8].reshape(-1, len(data.vocabulary)), rows[:, 7:9].reshape(-1)

    for step in range(24):
        logits, wanted = answers(records[step % 11 :: 11])
        loss = F.cross_entropy(logits, wanted)
        found = lines[step]
        assert found["step"] == step + 1
        assert found["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert found["train/accuracy"] == sum(int(o.argmax() == y) for o, y in zip(logits, wanted, strict=True)) / 8
        assert found["characters"] == 36 * (step + 1) - (step + 1) // 11
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1, (step + 1) / 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 8 == 0:
            with torch.no_grad():
                logits, wanted = answers(validation)
            right = sum(int(o.argmax() == y) for o, y in zip(logits, wanted, strict=True))
            assert found["val/loss"] == pytest.approx(F.cross_entropy(logits, wanted).item(), abs=1e-5)
            assert found["val/perplexity"] == pytest.approx(np.exp(found["val/loss"]))
            assert found["val/accuracy"] == right / 200
    assert "val/bits_per_byte" not in lines[7]


class Scripted:
    """Puts all its weight on the symbol that it read `lag` steps before; training is what the evaluation asks of it."""

    training = False

    def __init__(self, lag: int) -> None:
        self.lag = lag

    def train(self, mode: bool = True) -> None:
        pass

    def eval(self) -> None:
        pass

    def initial_state(self, rows: int) -> Any:
        return ((torch.full((rows, self.lag), 0),),)

    def __call__(self, tokens: torch.Tensor, states: Any) -> Any:
        read = torch.cat((states[0][0], tokens), 1)
        return 9.0 * F.one_hot(read[:, : tokens.shape[1]], 5).float(), ((read[:, tokens.shape[1] :],),)


@pytest.mark.parametrize(("batch_size", "chunk"), [(1, 256), (2, 3), (7, 2)])
def test_accuracy_is_a_count_over_answers_alone(batch_size: int, chunk: int) -> None:
    # The answer at places 4 and 5 repeats what stands 3 places before: in the record's second half of the cases.
    records = np.array(
        [[0, 1, 2, 3, 1, 2], [0, 3, 3, 1, 3, 4], [0, 4, 1, 2, 2, 3], [0, 2, 2, 4, 2, 2], [0, 1, 1, 1, 2, 1]]
    )
    scored = np.array([False] * 4 + [True] * 2)
    model = Scripted(lag=2)
    score = evaluate_answers(model, records.astype(np.uint8).ravel(), scored, batch_size=batch_size, chunk=chunk)
    assert (score.characters, score.correct) == (10, 6)
    assert score.accuracy == 0.6
    sure, wrong = np.log(1 + 4 * np.exp(-9)), 9 + np.log(1 + 4 * np.exp(-9))
    assert score.loss_sum == pytest.approx(6 * sure + 4 * wrong, rel=1e-5)
    shares = [evaluate_answers(model, records.ravel(), scored, batch_size=batch_size, share=(r, 3)) for r in range(3)]
    assert sum(s.correct for s in shares) == 6
    assert sum(s.characters for s in shares) == 10
    assert np.isnan(AnswerScore(0.0, 0, 0, 0).accuracy)


def test_training_ends_when_the_accuracy_sought_is_found(tmp_path: Path) -> None:
    train = {"max_steps": 400, "val_every_steps": 20, "target_accuracy": 0.8, "learning_rate": 0.02}
    data = {"task_length": 1, "task_delay": 2}
    run = lmapp.train(settings(tmp_path, data=data, train=train, gradients={"every_steps": 500}), quiet=True)
    lines = read(run.path / "metrics.jsonl")
    accuracies = [line["val/accuracy"] for line in lines if "val/accuracy" in line]
    assert accuracies[-1] >= 0.8
    assert max(accuracies[:-1], default=0) < 0.8
    assert run.metrics["state"] == "finished"
    assert run.metrics["steps"] == run.metrics["total_steps"] == lines[-1]["step"] < 400
    assert run.metrics["last"]["val/accuracy"] == accuracies[-1]
    assert {record["step"] for record in read(run.path / "decay.jsonl")} == {0, run.metrics["steps"]}
    steps = run.metrics["steps"]
    with pytest.raises(lmapp.errors.UsageError, match="is finished"):
        lmapp.train(resume=str(run.path), quiet=True)
    changes = {"train": {"target_accuracy": None, "max_steps": steps + 5}}
    assert lmapp.train(resume=str(run.path), changes=changes, quiet=True).metrics["steps"] == steps + 5


@pytest.mark.parametrize("bptt", [{}, {"bptt": "sliding", "truncation_length": 6, "stride": 4}, {"bptt": "randomised"}])
def test_a_run_that_was_cut_off_goes_on_exactly(
    tmp_path: Path, bptt: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From saves in the middle of records: windows are shorter than they."""
    options = settings(
        tmp_path,
        data={"sequence_length": 7, "task": "adding", "task_length": 3},
        train={**bptt, "val_every_steps": 6, "max_steps": 26},
        logging={"every_steps": 3},
    )
    path, copies, save, keeping = tmp_path / "runs" / "run", tmp_path / "copies", EndOfStep._save, True

    def save_and_keep(end: EndOfStep, trainer: Any, module: Any) -> None:
        save(end, trainer, module)
        if keeping and not module.progress.finished:
            shutil.copytree(path, copies / str(module.progress.step))

    monkeypatch.setattr(EndOfStep, "_save", save_and_keep)
    lmapp.train(options, quiet=True)
    keeping = False

    def outcome() -> tuple[Any, Any]:
        content = checkpoint.read(path / "checkpoints" / "last.ckpt")
        metrics = [{k: v for k, v in line.items() if k not in TIMED} for line in read(path / "metrics.jsonl")]
        return content["state_dict"], metrics

    weights, metrics = outcome()
    assert any("train/accuracy" in line for line in metrics)
    for step in (6, 18):
        shutil.rmtree(path)
        shutil.copytree(copies / str(step), path)
        lmapp.train(resume=str(path), quiet=True)
        again, lines = outcome()
        assert lines == metrics
        assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_decay_is_measured_on_whole_records_up_to_beyond_the_delay(tmp_path: Path) -> None:
    options = settings(tmp_path, gradients={"every_steps": 500, "windows": 6})
    run = lmapp.train(options, quiet=True)
    curves = [r for r in read(run.path / "decay.jsonl") if (r["layer"], r["component"]) == ("all", "joint")]
    assert [curve["step"] for curve in curves] == [0, 24]
    assert all(curve["lags"] == list(range(7)) and curve["pairs"] == 12 for curve in curves)
    data = TextDataModule(build(options).data)
    data.setup()
    assert data.corpus is not None
    shape, note = record_shape(9, 100, 2, truncation_length=9, windows=6)
    assert (shape.warm_up, shape.max_lag, note) == (0, 6, "")
    windows = record_windows(data.corpus.validation, shape, seed=SEED)
    texts = [data.vocabulary.decode(row) for row in windows]
    assert all(text[0] == "\n" and text[-2:] == text[1:3] for text in texts)
    model = lmapp.load(str(run.path / "checkpoints" / "last.ckpt")).model
    found = measure(model, torch.from_numpy(windows), shape).curve().R  # type: ignore[arg-type]
    assert curves[-1]["R"] == pytest.approx(found.tolist(), rel=1e-4)


def test_a_shorter_lag_and_fewer_windows_are_said() -> None:
    shape, note = record_shape(9, 4, 2, truncation_length=9, windows=6, max_lag=20)
    assert (shape.windows, shape.max_lag, shape.warm_up) == (4, 6, 0)
    assert note == (
        "gradient decay: the largest lag is 6 instead of 20, because a record has no more; "
        "there are only 4 of 6 windows, a record each"
    )
    shape, note = record_shape(9, 40, 2, truncation_length=9, max_lag=4)
    assert (shape.length, shape.max_lag, shape.warm_up, note) == (9, 4, 2, "")
    assert record_shape(1000, 40, 1, truncation_length=9)[0].max_lag == 512


def test_what_a_run_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = settings(tmp_path, train={"max_steps": 2})
    lmapp.train(options)
    said = capsys.readouterr().out
    assert "copy, a task of delay 5: records of 9 characters, 44 to train on, 100 for validation" in said
    assert "(scored: 2 characters at the end)" in said
    assert "accuracy 1/8, 2.0794 nats, perplexity 8" in said
    assert "4 rows × 9 characters, 11 steps a pass, state carried on, initial at every record" in said
    assert "No gradient bridges" not in said
    last = said.split("step ")[-1]
    assert "accuracy 0." in said
    assert "bits per character" not in last
    lmapp.train({**options, "name": "short", "data": {**options["data"], "sequence_length": 5}})
    windows = "Windows of --data.sequence-length 9 are a record each."
    assert f"No gradient bridges the delay of 5 steps. {windows}" in capsys.readouterr().out
    lmapp.train({**options, "name": "some", "data": {**options["data"], "sequence_length": 7}})
    some = re.search(
        r"The gradient bridges the delay of 5 steps for (\d+) % of the answers only\. ", capsys.readouterr().out
    )
    # Answers are predicted at the steps 6 and 7 of each record: of 63 steps, 9 windows, count those 5 into theirs.
    at = [9 * record + step for record in range(7) for step in (6, 7)]
    assert some is not None
    assert int(some[1]) == round(100 * sum(step % 7 >= 5 for step in at) / len(at))


def test_commands_take_a_task_s_run_and_score_its_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lmapp import cli

    def command(*words: str) -> str:
        with pytest.raises(SystemExit):
            cli.main(words)
        found = capsys.readouterr()
        return found.out or found.err

    path = lmapp.train(settings(tmp_path), quiet=True).path
    last = read(path / "metrics.jsonl")[-1]
    assert json.loads(command("evaluate", str(path / "checkpoints" / "last.ckpt"), "--json")) == {
        "text": "the run's validation split",
        "characters": 200,
        "loss": pytest.approx(last["val/loss"]),
        "perplexity": pytest.approx(last["val/perplexity"]),
        "bits_per_char": pytest.approx(last["val/bits_per_char"]),
        "bits_per_byte": pytest.approx(last["val/bits_per_char"]),
        "accuracy": pytest.approx(last["val/accuracy"]),
    }
    said = command("evaluate", str(path))
    assert "200 characters of answers, each record from the initial state\n  accuracy 0." in said
    assert len(command("generate", str(path), "--length", "9", "--seed", "1")) == 10
    (row,) = json.loads(command("compare", str(path), "--json"))["runs"]
    assert row["best_accuracy"] == lmapp.load(str(path)).saved["progress"]["best"]["val/accuracy"]
    assert "accuracy" in command("compare", str(path))
    assert "order (a task of delay 9)" in command("corpus", "--data.task", "order", "--data.task-delay", "9")
    refused = command("train", "--data.task", "copy", "--data.corpus", "shakespeare")
    assert refused.startswith("--data.corpus and --data.task exclude each other")


def test_a_task_s_run_needs_no_cache_to_be_evaluated(tmp_path: Path) -> None:
    """Its records are made again, and have to be those that it was trained on."""
    path = lmapp.train(settings(tmp_path), quiet=True).path
    model = lmapp.load(str(path))
    before = model.evaluate().as_dict()
    shutil.rmtree(tmp_path / "cache")
    assert model.evaluate(cache_dir=str(tmp_path / "other")).as_dict() == before
    model.saved["corpus"]["fingerprint"] = "0" * 64
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(LmappError, match="is no longer in"):
        model.evaluate(cache_dir=str(tmp_path / "other"))


def test_a_record_starts_from_the_initial_state_and_that_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"every record of --data\.task starts"):
        build(settings(tmp_path, data={"reset_state": False}))


def test_the_last_line_of_a_run_that_ends_by_its_accuracy_has_its_figures(tmp_path: Path) -> None:
    """The validation that ends it comes after a step at which no figures would be due."""
    train = {"target_accuracy": 1e-9, "val_every_steps": 5, "max_steps": 100}
    path = lmapp.train(settings(tmp_path, train=train, logging={"every_steps": 4}), quiet=True).path
    lines = read(path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [4, 5]
    assert {"train/accuracy", "train/loss", "gradient/norm", "val/accuracy"} <= lines[-1].keys()


def test_gradients_of_a_task_s_run_are_measured_on_whole_records(tmp_path: Path) -> None:
    from lmapp import laboratory

    path = lmapp.train(settings(tmp_path, gradients={"every_steps": 500}), quiet=True).path
    curves = [r for r in read(path / "decay.jsonl") if (r["layer"], r["component"]) == ("all", "joint")]
    (measured,) = laboratory.measure_checkpoints([str(path / "checkpoints" / "last.ckpt")])
    assert measured.decay.curve().R.tolist() == pytest.approx(curves[-1]["R"], rel=1e-4)
