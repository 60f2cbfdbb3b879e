"""A run that is stopped, at any moment and in any way, and goes on, equals the uninterrupted one bit for bit."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lmapp
from lmapp import checkpoint
from lmapp.config import read_yaml
from lmapp.errors import UsageError
from lmapp.run import Interrupted
from lmapp.training.module import LanguageModule
from lmapp.training.saving import EndOfStep

TIMED = ("seconds", "train/seconds", "train/chars_per_second")


def make_config(directory: Path, text: str, name: str, **train: Any) -> dict[str, Any]:
    """A small run with everything on: dropout, clipping, decay, samples, several epochs, an uneven last batch."""
    path = directory / "text.txt"
    path.write_text(text, encoding="utf-8")
    return {
        "data": {
            "path": [str(path)],
            "batch_size": 4,
            "sequence_length": 16,
            "val_fraction": 0.3,
            "cache_dir": str(directory / "cache"),
        },
        "model": {"hidden_size": 12, "num_layers": 2, "dropout": 0.2},
        "train": {"val_every_steps": 4, "warmup_steps": 3, "clip_norm": 0.25, **train},
        "gradients": {"every_steps": 7, "max_lag": 8, "windows": 2},
        "logging": {"wandb": "disabled", "every_steps": 3},
        "name": name,
        "runs_dir": str(directory / "runs"),
    }


def outcome(run: Path) -> dict[str, Any]:
    """Everything a run leaves that does not depend on the clock."""
    content = checkpoint.read(run / "checkpoints" / "last.ckpt")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    progress = dict(content["lmapp"]["progress"])
    since = progress.pop("since_log")
    since.pop("from_seconds", None)
    return {
        "weights": content["state_dict"],
        "optimizer": content["optimizer_states"],
        "states": content["lmapp"]["states"],
        "tokens": content["lmapp"]["tokens"],
        "keep": content["lmapp"]["keep"],
        "random": content["lmapp"]["random"]["torch"],
        "progress": {k: v for k, v in progress.items() if "seconds" not in k},
        "since": since,
        "best": checkpoint.read(run / "checkpoints" / "best.ckpt")["state_dict"],
        "metrics": [{k: v for k, v in line.items() if k not in TIMED} for line in metrics],
        **{name: (run / name).read_text() for name in ("decay.jsonl", "clip_events.jsonl", "samples.txt")},
    }


def assert_same(expected: Any, got: Any, where: str = "") -> None:
    assert type(expected) is type(got), where
    if isinstance(expected, dict):
        assert expected.keys() == got.keys(), where
        for key in expected:
            assert_same(expected[key], got[key], f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(got), where
        for number, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert_same(a, b, f"{where}/{number}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(expected, got), where
    else:
        assert expected == got, where


class Kept:
    """A run of `config` that keeps a copy of its directory at every save, to go on from."""

    def __init__(self, tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.runs_dir = Path(config["runs_dir"]) / config["name"], config["runs_dir"]
        self.copies = tmp_path / "kept"
        save = EndOfStep._save
        keeping = True

        def save_and_keep(end: EndOfStep, trainer: Any, module: Any) -> None:
            save(end, trainer, module)
            if keeping and not module.progress.finished:
                shutil.copytree(self.path, self.copies / str(module.progress.step))

        monkeypatch.setattr(EndOfStep, "_save", save_and_keep)
        lmapp.train(config, quiet=True)
        keeping = False
        self.outcome = outcome(self.path)

    def assert_same_after(self, step: int) -> None:
        """Cut after `step`, it ends as it did."""
        shutil.rmtree(self.path)
        shutil.copytree(self.copies / str(step), self.path)
        lmapp.train(resume=self.path.name, runs_dir=self.runs_dir, quiet=True)
        assert_same(self.outcome, outcome(self.path), f"cut after step {step}: ")


def test_resumed_from_any_step_of_three_epochs(tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut after each step that is saved, epoch ends and the steps around them among them."""
    config = make_config(tmp_path, real_text[:900], "run", max_steps=34, val_every_steps=1)
    kept = Kept(tmp_path, config, monkeypatch)
    epochs = kept.outcome["progress"]["epoch"]
    assert epochs == 3
    steps_per_epoch = 34 // epochs
    edges = {e * steps_per_epoch + d for e in range(epochs + 1) for d in (-2, -1, 0, 1, 2)} | {1, 2, 33}
    for step in sorted(edges & set(range(1, 34))):
        kept.assert_same_after(step)


@pytest.mark.parametrize("cuts", [(11, 15), (11, 22, 27), (5, 11, 12, 13, 22, 23, 33)])
def test_resumed_again_and_again(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...]
) -> None:
    """At an epoch's end and in the middle of the next; epochs have 11 steps, each cut at other places."""
    config = make_config(tmp_path, real_text[:900], "run", max_steps=34, val_every_steps=1)
    config["data"]["shift_epochs"] = True
    whole = lmapp.train({**config, "name": "whole"}, quiet=True)
    step = LanguageModule.optimizer_step

    def cut(self: LanguageModule, *arguments: Any) -> None:
        step(self, *arguments)
        self.stop_requested = self.progress.step in cuts

    monkeypatch.setattr(LanguageModule, "optimizer_step", cut)
    with pytest.raises(Interrupted):
        lmapp.train(config, quiet=True)
    for _ in cuts[1:]:
        with pytest.raises(Interrupted):
            lmapp.train(resume="run", runs_dir=config["runs_dir"], quiet=True)
    parts = lmapp.train(resume="run", runs_dir=config["runs_dir"], quiet=True)
    assert outcome(whole.path)["progress"]["epoch"] == 3
    assert_same(outcome(whole.path), outcome(parts.path), f"cut at {cuts}: ")


@pytest.mark.parametrize(
    ("train", "model"),
    [
        ({"bptt": "sliding", "truncation_length": 20, "stride": 3}, {}),
        ({"bptt": "sliding", "truncation_length": 5}, {"cell": "lstm", "zoneout": 0.1, "weight_drop": 0.1}),
        ({"bptt": "randomised", "truncation_length": 6}, {}),
        ({"bptt": "block", "truncation_length": 6}, {"cell": "vanilla"}),
        ({"bptt": "full"}, {}),
    ],
    ids=["sliding, strides", "sliding", "randomised", "blocks", "full"],
)
def test_resumed_under_every_truncation(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch, train: dict[str, Any], model: dict[str, Any]
) -> None:
    """Ten steps an epoch, but one under "full"; the gradient of the fifth is not finite, so the sixth starts cold."""
    step = LanguageModule.training_step

    def training_step(module: LanguageModule, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = step(module, batch, batch_idx)
        return loss * float("nan") if module.progress.step == 4 else loss

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    often = {"val_every_steps": 8, "checkpoint_minutes": 1e-9}
    config = make_config(tmp_path, real_text[:900], "run", max_steps=24, **often, **train)
    config["model"] |= model
    kept = Kept(tmp_path, config, monkeypatch)
    assert kept.outcome["progress"]["nonfinite_events"] == 1
    for cut in (3, 5, 6, 10, 11, 13):
        kept.assert_same_after(cut)


def kill_plan() -> list[dict[str, Any]]:
    """32 kills: in validation, while a checkpoint is written, around its renaming, in a step, and at random times."""
    rng = random.Random(7)
    kills = [{"where": "validation", "visit": rng.randint(2, 6)} for _ in range(6)]
    kills += [{"where": "writing", "visit": rng.randint(1, 3)} for _ in range(6)]
    kills += [{"where": "before-replace", "visit": rng.randint(2, 6)} for _ in range(3)]
    kills += [{"where": "between-last-and-best", "visit": 1} for _ in range(3)]
    kills += [{"where": "decay", "visit": rng.randint(1, 2)} for _ in range(2)]
    kills += [{"where": "step", "visit": rng.randint(1, 9)} for _ in range(4)]
    kills += [{"where": "seconds", "after": rng.uniform(0.3, 1.2)} for _ in range(8)]
    rng.shuffle(kills)
    return kills


def test_killed_32_times(tmp_path: Path, real_text: str) -> None:
    config = make_config(tmp_path, real_text[:20_000], "run", max_steps=600, checkpoint_minutes=0.002)
    config["model"]["num_layers"] = 1
    lmapp.train({**config, "name": "whole"}, quiet=True)
    plan = kill_plan()
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    script = Path(__file__).with_name("killing.py")
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "config.json"), str(tmp_path / "plan.json")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:] + result.stdout[-3000:]
    struck = json.loads(result.stdout.splitlines()[-1])
    assert len(struck) == 32
    assert_same(outcome(tmp_path / "runs" / "whole"), outcome(tmp_path / "runs" / "run"))
    left = [p.name for p in (tmp_path / "runs" / "run" / "checkpoints").iterdir()]
    assert sorted(left) == ["best.ckpt", "last.ckpt"]


def test_limits_may_change_and_nothing_else(tmp_path: Path, real_text: str) -> None:
    config = make_config(tmp_path, real_text[:2000], "run", max_steps=10, schedule="constant")
    runs = config["runs_dir"]
    lmapp.train(config, quiet=True)
    with pytest.raises(UsageError, match="finished"):
        lmapp.train(resume="run", runs_dir=runs, quiet=True)
    with pytest.raises(UsageError, match=r"--train\.learning-rate cannot change"):
        lmapp.train(resume="run", runs_dir=runs, changes={"train": {"learning_rate": 1e-3}}, quiet=True)
    with pytest.raises(UsageError, match="nothing left to do"):
        lmapp.train(resume="run", runs_dir=runs, changes={"train": {"max_steps": 5}}, quiet=True)
    with pytest.raises(UsageError, match=r"In force are --train\.max-steps 10 and"):
        lmapp.train(resume="run", runs_dir=runs, changes={"train": {"max_minutes": 5}}, quiet=True)
    longer = lmapp.train(resume="run", runs_dir=runs, changes={"train": {"max_steps": 20}}, quiet=True)
    assert longer.metrics["steps"] == 20
    assert read_yaml(longer.path / "config.yaml")["train"]["max_steps"] == 20
    whole = lmapp.train({**config, "name": "whole", "train": {**config["train"], "max_steps": 20}}, quiet=True)
    expected = outcome(whole.path)["weights"]
    assert_same(expected, outcome(longer.path)["weights"])


@pytest.fixture
def _many_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_many_threads")
def test_the_caller_s_threads_are_given_back(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the run ends well or not; while it goes on it has those it began with."""
    config = make_config(tmp_path, real_text[:2000], "run", max_steps=4, schedule="constant")
    torch.set_num_threads(1)
    lmapp.train(config, quiet=True)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(3)
    step, seen = LanguageModule.training_step, []

    def training_step(module: LanguageModule, batch: Any, batch_idx: int) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        if len(seen) == 3:
            raise ZeroDivisionError
        return step(module, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    resumed = {"resume": "run", "runs_dir": config["runs_dir"]}
    lmapp.train(**resumed, changes={"train": {"max_steps": 6}})
    assert "bit for bit" not in capsys.readouterr().out
    assert torch.get_num_threads() == 3
    with pytest.raises(ZeroDivisionError):
        lmapp.train(**resumed, changes={"train": {"max_steps": 8}}, quiet=True)
    assert torch.get_num_threads() == 3
    assert seen == [1, 1, 1]


def test_another_processor_is_noticed(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, real_text[:2000], "run", max_steps=4, device="cpu")
    run = lmapp.train(config, quiet=True)
    here = run.metrics["cpu"]
    assert torch.backends.cpu.get_cpu_capability() in here
    resumed = {"resume": "run", "runs_dir": config["runs_dir"]}
    lmapp.train(**resumed, changes={"train": {"max_steps": 5}})
    assert "bit for bit" not in capsys.readouterr().out
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NEON")
        lmapp.train(**resumed, changes={"train": {"max_steps": 6}})
    there = here.replace(torch.backends.cpu.get_cpu_capability(), "NEON")
    said = " ".join(capsys.readouterr().out.split())
    assert f"Going on, but not bit for bit: cpu {here} is {there} now." in said
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    lmapp.train(**resumed, changes={"train": {"max_steps": 7}})
    without = f"{torch.backends.cpu.get_cpu_capability()} without oneDNN"
    assert f"cpu {there} is {without} now" in " ".join(capsys.readouterr().out.split())


def test_a_changed_text_is_noticed(tmp_path: Path, real_text: str) -> None:
    config = make_config(tmp_path, real_text[:2000], "run", max_steps=4)
    lmapp.train(config, quiet=True)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "text.txt").write_text(real_text[1000:3000])
    with pytest.raises(lmapp.errors.LmappError, match="changed since"):
        lmapp.train(resume="run", runs_dir=config["runs_dir"], changes={"train": {"max_steps": 8}}, quiet=True)


def test_a_run_has_one_writer(tmp_path: Path, real_text: str) -> None:
    config = make_config(tmp_path, real_text[:2000], "run", max_steps=4)
    lmapp.train(config, quiet=True)
    before = (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes()
    holder = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    lock = str(tmp_path / "runs" / "run" / ".lock")
    with subprocess.Popen([sys.executable, "-c", holder, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        changes = {"train": {"max_steps": 8}}
        with pytest.raises(UsageError, match="another process"):
            lmapp.train(resume="run", runs_dir=config["runs_dir"], changes=changes, quiet=True)
        other.kill()
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes() == before
    lmapp.train(resume="run", runs_dir=config["runs_dir"], changes=changes, quiet=True)


def test_arguments_of_train_are_taken_or_refused(tmp_path: Path, real_text: str) -> None:
    config = make_config(tmp_path, real_text[:2000], "run", max_steps=3)
    changes = {"train": {"max_steps": 5}}
    run = lmapp.train(config, changes=changes, runs_dir=str(tmp_path / "elsewhere"), quiet=True)
    assert run.path == tmp_path / "elsewhere" / "run"
    assert run.metrics["steps"] == 5
    with pytest.raises(UsageError, match="leave out the source"):
        lmapp.train(config, resume="run", quiet=True)


def test_a_run_that_never_saved_says_how_to_start_again(tmp_path: Path, real_text: str) -> None:
    config = make_config(tmp_path, real_text[:2000], "run", max_steps=3)
    run = lmapp.train(config, quiet=True).path
    for file in (run / "checkpoints").iterdir():
        file.unlink()
    for attempt in ({"source": config}, {"resume": "run", "runs_dir": config["runs_dir"]}):
        with pytest.raises(lmapp.errors.LmappError, match=f"rm -r {run}"):
            lmapp.train(**attempt, quiet=True)
