"""Several processes train what one does, go on exactly, and fail and stop together.

A launch takes seconds, most of them to import torch twice, so each does a lot.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

import lmapp
import lmapp.run
from lmapp import checkpoint
from lmapp.config import build
from lmapp.errors import UsageError
from lmapp.models.evaluation import evaluate, evaluate_infill
from lmapp.models.infill import InfillModel
from lmapp.models.recurrent import RecurrentModel
from lmapp.training import processes
from lmapp.training.processes import Ranks

TIMED = ("seconds", "train/seconds", "train/chars_per_second")
KILLED_AT, SAVED_AT = 17, 10
OURS = "lmapp/run.py"
"""In a traceback of our own; torchrun prints one of its own for whatever ends badly."""
DROPPING = {"dropout": 0.2, "weight_drop": 0.1, "zoneout": 0.1}

SCRIPT = f"""
import json, os, signal, sys

import lmapp
from lmapp.training.module import LanguageModule

step = LanguageModule.optimizer_step


def killing(self, *arguments):
    step(self, *arguments)
    if self.progress.step == {KILLED_AT}:
        os.kill(os.getpid(), signal.SIGKILL)


for job in json.loads(sys.argv[1]):
    if job.pop("killed", False):
        LanguageModule.optimizer_step = killing
    lmapp.train(**job)
"""


def together(directory: Path, *words: str) -> subprocess.Popen[str]:
    """Two processes of `python WORDS` in a directory."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *words],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(lmapp.__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def settings(name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A short run of four rows with everything on: clipping, decay, validation, samples."""
    data = {"path": ["text.txt"], "batch_size": 4, "sequence_length": 16, "val_fraction": 0.4, "cache_dir": "cache"}
    train = {"max_steps": 30, "learning_rate": 0.02, "clip_norm": 0.3, "val_every_steps": 10, "precision": "fp32"}
    return {
        "name": name,
        "data": data | sections.get("data", {}),
        "model": {"cell": "gru", "hidden_size": 16, **sections.get("model", {})},
        "train": train | {"device": "cpu", "checkpoint_minutes": 1000} | sections.get("train", {}),
        "gradients": {"every_steps": 7, "windows": 2},
        "logging": {"wandb": "disabled", "every_steps": 1},
    }


STREAM: dict[str, Any] = {
    "data": {"streaming": True, "stream_steps": 10, "reset_state": True, "val_fraction": None},
    "model": {"cell": "lstm"},
    "train": {"bptt": "sliding", "truncation_length": 20, "stride": 5},
}
INFILL = {"kind": "infill"}
RANDOM: dict[str, Any] = {"model": DROPPING, "train": {"bptt": "randomised"}}
MORE = {"train": {"max_steps": 40}}


@pytest.fixture(scope="module")
def trained(real_text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs of two processes are: once all through, and one that was killed; the other cases read them."""
    directory = tmp_path_factory.mktemp("processes")
    text = "".join(c for c in real_text if c.isascii())[:3000]
    (directory / "text.txt").write_text(text, encoding="utf-8")
    (directory / "script.py").write_text(SCRIPT, encoding="utf-8")
    timed = settings("timed", model=INFILL, train={"max_steps": None, "max_minutes": 0.003})
    new = [settings("two"), settings("stream", **STREAM), timed, settings("whole", **RANDOM)]
    jobs: list[dict[str, Any]] = [{"source": source} for source in new]
    jobs.append({"source": settings("cut", **RANDOM), "killed": True})
    run = together(directory, "script.py", json.dumps(jobs))
    _, errors = run.communicate()
    assert "SIGKILL" in errors, errors
    assert OURS not in errors
    return directory


@pytest.fixture(scope="module")
def gone_on(trained: Path) -> str:
    """Once these went on, with what was printed: the killed run, and in two processes what one had begun."""
    here = Path.cwd()
    os.chdir(trained)
    try:
        for name in ("one", "alone"):
            lmapp.train(settings(name), quiet=True)
    finally:
        os.chdir(here)
    jobs = [{"resume": "cut"}, {"resume": "alone", "changes": MORE}]
    run = together(trained, "script.py", json.dumps(jobs))
    output, errors = run.communicate()
    assert run.returncode == 0, errors
    return output


@pytest.fixture
def place(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs, and this process where they are."""
    monkeypatch.chdir(trained)
    return trained / "runs"


def read(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMED} for line in lines]


def assert_close(a: Path, b: Path) -> None:
    """The two runs logged the same, their numbers to 1e-5, and had the same clip events, texts and all."""
    for name in ("metrics.jsonl", "clip_events.jsonl", "decay.jsonl"):
        lines = read(a / name), read(b / name)
        assert len(lines[0]) == len(lines[1]) > 0, name
        for one, other in zip(*lines, strict=True):
            assert one.keys() == other.keys()
            for key in one:
                # A list of numbers, a number, or a text.
                wanted = other[key] if isinstance(other[key], str) else pytest.approx(other[key], rel=1e-5, abs=1e-5)
                assert one[key] == wanted, (name, key)


def content(directory: Path) -> dict[str, Any]:
    return checkpoint.read(directory / "checkpoints" / "last.ckpt")


# What a process shares out and evaluates ------------------------------------------------------------------------------


def test_rows_are_shared_out_in_order() -> None:
    rows = torch.arange(12).view(6, 2)
    shares = [Ranks(rank, 3).rows(rows) for rank in range(3)]
    assert torch.equal(torch.cat(shares), rows)
    assert {share.shape for share in shares} == {(2, 2)}
    assert Ranks().rows(rows) is rows
    assert Ranks(1, 2).rows(None) is None


def test_alone_nothing_is_copied_or_told() -> None:
    ranks, tensor = Ranks(), torch.ones(2)
    ranks.sum_([tensor])
    assert ranks.gather_rows(tensor) is tensor
    assert ranks.sum([1.5, True]) == [1.5, 1]
    assert ranks.of_first("a") == "a"


def test_processes_draw_differently_and_at_every_step() -> None:
    assert len({Ranks(rank, 4).seed(seed, step) for rank in range(4) for seed in (0, 1) for step in (0, 7)}) == 16


def test_tasks_of_slurm_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_JOB_NAME": "train"}.items():
        monkeypatch.setenv(name, value)
    assert processes._environment() is None  # in a batch script, where nothing has been started four times
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(UsageError, match="--ntasks-per-node"):
        processes._environment()
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    environment = processes._environment()
    assert environment is not None
    assert (environment.global_rank(), environment.world_size()) == (3, 4)


@pytest.mark.parametrize(
    ("rows", "asked", "way"),
    [
        (10, 10, "Set --data.batch-size 8 or 12."),
        (3, 3, "Set --data.batch-size 4."),
        (6, 32, "Set --data.batch-size 4."),
        (3, 32, "Use more text, or fewer processes."),
    ],
)
def test_rows_that_cannot_be_shared_out(rows: int, asked: int, way: str) -> None:
    config = build({"data": {"batch_size": asked}})
    with pytest.raises(UsageError, match=f"^{rows} rows cannot be divided evenly among 4 processes.\n{way}$"):
        lmapp.run._check_rows(rows, config, 4)
    lmapp.run._check_rows(8, config, 4)


def test_standard_input_is_no_stream_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: [value] * ranks.world)
    config = build({"data": {"path": ["-"], "streaming": True}})
    with pytest.raises(UsageError, match="reads standard input once, and every process reads the text"):
        lmapp.run._Assembly(config, Console(quiet=True), Ranks(0, 2)).run()


@pytest.mark.parametrize("world", [2, 3, 9])
def test_the_shares_of_an_evaluation_add_up(world: int) -> None:
    torch.manual_seed(0)
    ids = torch.randint(7, (3000,)).numpy()
    symbols = torch.ones(7).bool().numpy(), torch.ones(7).int().numpy()
    model = RecurrentModel(7, cell="gru", hidden_size=8)
    infill = InfillModel(7, cell="gru", hidden_size=8)
    masking: dict[str, Any] = {"mask_fraction": 0.3, "window": 50, "batch_size": 8}
    for score in (
        lambda share: evaluate(model, ids, *symbols, batch_size=5, share=share),
        lambda share: evaluate(model, ids, *symbols, batch_size=64, warm_up=100, chunk=30, share=share),
        lambda share: evaluate_infill(infill, ids, *symbols, **masking, share=share),
    ):
        whole = score((0, 1))
        parts = [score((rank, world)) for rank in range(world)]
        assert sum(part.loss_sum for part in parts) == pytest.approx(whole.loss_sum, rel=1e-6)
        assert sum(part.characters for part in parts) == whole.characters
        assert sum(part.bytes for part in parts) == whole.bytes


# Two processes --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gone_on")
def test_two_processes_train_as_one(place: Path) -> None:
    assert_close(place / "one", place / "two")
    kinds = [event["kind"] for event in read(place / "two" / "clip_events.jsonl")]
    assert 0 < len(kinds) <= 30 and set(kinds) == {"clip"}
    one, two = content(place / "one"), content(place / "two")
    torch.testing.assert_close(one["state_dict"], two["state_dict"], rtol=0, atol=1e-5)
    torch.testing.assert_close(one["lmapp"]["states"], two["lmapp"]["states"], rtol=0, atol=1e-5)
    assert one["lmapp"]["progress"]["characters"] == two["lmapp"]["progress"]["characters"]
    assert [run["lmapp"]["plan"]["processes"] for run in (one, two)] == [1, 2]


def test_a_stream_and_kept_tokens_are_divided_too(place: Path) -> None:
    lmapp.train(settings("stream-alone", **STREAM), quiet=True)
    assert_close(place / "stream-alone", place / "stream")
    one, two = content(place / "stream-alone")["lmapp"], content(place / "stream")["lmapp"]
    assert two["tokens"].shape == (4, 19)
    for key in ("tokens", "keep"):
        assert torch.equal(one[key], two[key])


def test_a_plan_in_minutes_is_the_same_for_all(place: Path) -> None:
    summary = json.loads((place / "timed" / "summary.json").read_text(encoding="utf-8"))
    assert summary["state"] == "finished"
    assert summary["steps"] == summary["total_steps"] > 0


def test_a_killed_run_goes_on_bit_for_bit(place: Path, gone_on: str) -> None:
    assert f"goes on after step {SAVED_AT} of 30" in gone_on
    for name in ("metrics.jsonl", "clip_events.jsonl", "decay.jsonl"):
        assert read(place / "whole" / name) == read(place / "cut" / name), name
    one, other = content(place / "whole"), content(place / "cut")
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=0)
    for key in ("states", "random"):
        torch.testing.assert_close(one["lmapp"][key], other["lmapp"][key], rtol=0, atol=0)
    first, second = one["lmapp"]["random"]["torch"]
    assert not torch.equal(first, second)  # the rows of the two share no masks


def test_what_one_process_began_two_go_on_with(place: Path, gone_on: str) -> None:
    assert "Going on, but not bit for bit: processes 1 is 2 now." in gone_on
    lmapp.train(resume="one", changes=MORE, quiet=True)
    assert_close(place / "one", place / "alone")
    assert content(place / "alone")["lmapp"]["progress"]["step"] == 40


def test_what_two_processes_began_one_goes_on_with(
    place: Path, gone_on: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lmapp.train(resume="two", changes=MORE)
    assert "Going on, but not bit for bit: processes 2 is 1 now." in " ".join(capsys.readouterr().out.split())
    assert_close(place / "alone", place / "two")


def test_an_error_is_said_once_and_ends_all(trained: Path) -> None:
    (trained / "config.yaml").write_text(yaml.safe_dump(settings("five", data={"batch_size": 5})), encoding="utf-8")
    run = together(trained, "-m", "lmapp", "train", "config.yaml")
    output, errors = run.communicate(timeout=120)
    assert run.returncode != 0
    message = "5 rows cannot be divided evenly among 2 processes.\nSet --data.batch-size 4 or 6.\n"
    assert errors.count(message) == errors.count("divided evenly") == 1
    assert OURS not in errors
    assert not (trained / "runs" / "five").exists()
    assert output == ""


def test_ctrl_c_saves_and_ends_all(place: Path, trained: Path) -> None:
    options = settings("long", train={"max_steps": 10**6, "val_every_steps": 0})
    (trained / "config.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    run = together(trained, "-m", "lmapp", "train", "config.yaml")
    metrics = place / "long" / "metrics.jsonl"
    while run.poll() is None and not (metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") > 3):
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=120)
    assert run.returncode != 0
    summary = json.loads((place / "long" / "summary.json").read_text(encoding="utf-8"))
    assert summary["state"] == "interrupted"
    assert errors.count(f"Interrupted at step {summary['steps']:,} and saved.") == 1
    assert OURS not in errors
    saved = content(place / "long")["lmapp"]
    assert saved["progress"]["step"] == summary["steps"]
    assert saved["states"][0]["h"].shape == (4, 16)
