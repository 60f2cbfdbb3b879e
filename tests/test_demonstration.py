"""The demonstration: a tiny part of it from end to end, that it goes on, and what it makes of recorded files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import lmapp
from lmapp import demonstration
from lmapp.config import build, read_yaml
from lmapp.demonstration import CELLS, Lag, Outcome, agreement, longest, outcome, tables, truncated_runs, wanted_runs
from lmapp.run import Interrupted
from lmapp.training.module import LanguageModule


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HIDDEN": 8, "ROWS": 4, "RECORDS": 40, "VALIDATE_EVERY": 200}.items():
        monkeypatch.setattr(demonstration, name, value)


def run(*arguments: str) -> int:
    return demonstration.main(["--out", "memory", "--seeds", "1", "--seconds", "0.15", *arguments])


def forbid_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: Any, **__: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(lmapp, "train", train)


def printed(parts: Any) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


# The runs -------------------------------------------------------------------------------------------------------------


def test_a_tiny_part_of_it_from_end_to_end_and_nothing_twice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = ["--cells", "irnn", "lstm-chrono", "--delays", "4", "--characters", "0"]
    assert run(*part, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    names = ["irnn-4-seed1", "lstm-chrono-4-seed1"]
    assert [o["name"] for o in found["runs"]] == names
    assert found["truncation"] == []
    assert sorted(path.name for path in Path("memory").iterdir()) == names
    for o in found["runs"]:
        assert o["state"] == "finished"
        assert 0 <= o["accuracy"] <= 1
        assert o["steps"] > 0
        assert 0 < o["R_start"] < 10
        config = build(read_yaml(Path("memory") / o["name"] / "config.yaml"))
        assert (config.data.task, config.data.task_delay, config.data.sequence_length) == ("brackets", 4, 7)
        assert config.model.chrono == (4.0 if o["cell"] == "lstm-chrono" else None)
    lag, censored = found["runs"][0]["half_life_start"]
    assert 0 < lag <= 5 or censored  # K is one more than the delay
    forbid_training(monkeypatch)
    assert run(*part) == 0
    out = capsys.readouterr().out
    assert "Longest delay learnt" in out
    assert "lstm-chrono" in out


def test_ways_to_truncate_read_as_many_characters(capsys: pytest.CaptureFixture[str]) -> None:
    runs = truncated_runs([1], 700, Path("memory"), "gru", 10)
    assert [r.mode for r in runs] == ["block", "longer block", "sliding", "randomised", "full"]
    read = [r.config.train.max_steps * 4 * r.config.data.sequence_length for r in runs]  # type: ignore[operator]
    assert all(640 <= characters <= 700 for characters in read)
    reach = {r.mode: (r.config.data.sequence_length, r.config.train.truncation_length) for r in runs}
    assert reach["block"] == (5, None)
    assert reach["longer block"] == (15, None)  # more than the delay, and no multiple of a record
    assert reach["sliding"] == (13, 11)
    assert reach["randomised"] == (13, 5)
    assert reach["full"] == (13, None)
    console = Console(quiet=True)
    first, others = demonstration.demonstrate(
        cells=[], delays=[4], seeds=[1], seconds=1, characters=300, out=Path("memory"),
        truncated=("gru", 4), console=console,
    )  # fmt: skip
    assert first == []
    assert [o.mode for o in others] == ["block", "longer block", "sliding", "randomised", "full"]
    text = printed(tables(first, others))
    assert "Ways to truncate: gru, delay 4" in text
    assert "and randomised to 0." in " ".join(text.split())


def test_an_interrupted_run_goes_on_and_one_that_saved_nothing_begins_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demonstration, "TRUNCATED", ("gru", 4))
    part = ["--cells", "--characters", "300"]
    killed = Path("memory/truncation-block-gru-4-seed1")
    killed.mkdir(parents=True)
    (killed / "config.yaml").write_text("seed: 7\n")
    start = LanguageModule.on_train_batch_start
    begun: list[int] = []

    def stop_at_9(module: LanguageModule, batch: Any, batch_idx: int) -> None:
        begun.append(module.progress.step)
        module.stop_requested = len(begun) == 10
        start(module, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "on_train_batch_start", stop_at_9)
    assert run(*part) == Interrupted.exit_code
    error = capsys.readouterr().err
    assert "Interrupted at step 10" in error
    assert len(error.strip().splitlines()) <= 3
    assert begun == list(range(10))
    assert run(*part) == 0
    steps = 300 // (4 * 2)
    assert begun[10 : steps + 1] == [*range(10, steps), 0]


def test_a_run_of_other_options_is_not_taken_for_the_one_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--cells", "tanh", "--delays", "4", "--characters", "0") == 0
    capsys.readouterr()
    assert run("--cells", "tanh", "--delays", "4", "--characters", "0", "--seconds", "0.2") == 2
    assert capsys.readouterr().err == (
        "memory/tanh-4-seed1 is there, made with another train.max_minutes.\nName another place: --out DIR\n"
    )


@pytest.mark.parametrize(
    "arguments", [["--cells", "transformer"], ["--delays", "0"], ["--seconds", "-1"], ["--characters", "-1"]]
)
def test_wrong_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demonstration.main(arguments)
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_every_configuration_can_be_built() -> None:
    runs = wanted_runs(list(CELLS), [10, 300], [1, 2], 60, Path("x"))
    assert len({r.name for r in runs}) == len(runs) == 24
    assert all(r.config.data.sequence_length == r.config.data.record for r in runs)
    assert all(r.config.gradients.max_lag > r.delay for r in runs)  # type: ignore[operator]


# What came of them ----------------------------------------------------------------------------------------------------


def made(cell: str, delay: int, seed: int, solved: bool, start: float, **changes: Any) -> Outcome:
    fields: dict[str, Any] = {
        "name": "n", "cell": cell, "delay": delay, "seed": seed, "mode": "record", "state": "finished",
        "solved": solved, "accuracy": 1.0 if solved else 0.2, "loss": 0.01, "steps": 100, "characters": 4000,
        "seconds": 2.0, "half_life_start": Lag(2.5, False), "half_life_end": Lag(11.0, True), "R_start": start,
        "R_end": 0.5,
    }  # fmt: skip
    return Outcome(**(fields | changes))


def test_the_longest_delay_is_a_median_over_seeds() -> None:
    # Seed 1 solves 10 and 30, seed 2 only 10, seed 3 only 30.
    solved = {(10, 1): True, (30, 1): True, (10, 2): True, (30, 2): False, (10, 3): False, (30, 3): True}
    outcomes = [made("a", delay, seed, found, 0.1) for (delay, seed), found in solved.items()]
    assert longest(outcomes) == (30, 2, 3)
    assert longest([o for o in outcomes if o.seed != 3]) == (10, 2, 2)
    assert longest([made("a", 10, 1, False, 0.1), made("a", 30, 1, False, 0.1)]) == (0, 0, 1)


def test_agreement_is_the_area_under_the_roc_curve() -> None:
    runs = [made("a", 10, 1, True, R) for R in (0.5, 0.01)] + [made("b", 10, 1, False, R) for R in (0.1, 0.01)]
    # 0.5 is above both; 0.01 is below 0.1, and as large as 0.01.
    assert agreement(runs) == (1 + 1 + 0 + 0.5) / 4
    assert agreement(runs[:2]) is None


def test_the_tables_say_what_came_out() -> None:
    outcomes = [made("lstm", 10, 1, True, 0.3), made("lstm", 30, 1, True, 0.2), made("tanh", 10, 1, False, 1e-9)]
    text = printed(tables(outcomes, [made("lstm", 30, 1, False, 0.1, mode=m) for m in ("block", "randomised")]))
    lines = [line.split() for line in text.splitlines()]
    assert ["lstm", "30", "1", "of", "1", "2.5→>11", "0.2→0.5"] in lines
    assert ["tanh", "not", "10", "0", "of", "1", "2.5→>11", "1e-09→0.5"] in lines
    assert ["lstm", "10", "1", "of", "1", "1.000", "100", "2.5→>11", "0.3→0.5"] in lines
    assert "in 100 % of all such pairs" in " ".join(text.split())
    assert "block truncation came to 0.200 within 4,000 characters and randomised to 0.200 within" in " ".join(
        text.split()
    )
    assert "alike" in printed(tables(outcomes[:2], []))


def test_an_outcome_is_read_from_a_run_s_files() -> None:
    (wanted,) = wanted_runs(["lstm"], [3], [1], 60, Path("out"))
    path = Path("out") / wanted.name
    path.mkdir(parents=True)

    def write(name: str, lines: list[dict[str, Any]]) -> None:
        (path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    write("metrics.jsonl", [
        {"step": 0, "characters": 0, "decay/half_life": 1.5, "decay/half_life_censored": 0},
        {"step": 5, "characters": 50, "val/accuracy": 0.5, "val/loss": 1.0},
        {"step": 10, "characters": 100, "val/accuracy": 0.995, "val/loss": 0.1, "decay/half_life": 4.0,
         "decay/half_life_censored": 1},
    ])  # fmt: skip
    joint = {"layer": "all", "component": "joint", "lags": [0, 1, 2, 3, 4]}
    write("decay.jsonl", [
        {"step": 0, **joint, "R": [1, 0.8, 0.4, 0.2, 0.1]},
        {"step": 0, **joint, "component": "h", "R": [1, 0, 0, 0, 0]},
        {"step": 10, **joint, "R": [1, 0.9, 0.8, 0.7, 0.6]},
        {"step": 10, **joint, "layer": 0, "R": [1, 0, 0, 0, 0]},
    ])  # fmt: skip
    summary = {"state": "finished", "steps": 10, "characters": 120, "seconds": 3.5}
    (path / "summary.json").write_text(json.dumps(summary))
    assert outcome(wanted, Path("out")) == Outcome(
        "lstm-3-seed1", "lstm", 3, 1, "record", "finished", True, 0.995, 0.1, 10, 100, 3.5, Lag(1.5, False),
        Lag(4.0, True), 0.2, 0.7,
    )  # fmt: skip
    assert demonstration.is_over(path)
    (path / "metrics.jsonl").write_text('{"step": 0, "characters": 0, "decay/half_life": 1.5}\n')
    assert math.isnan(outcome(wanted, Path("out")).accuracy)
