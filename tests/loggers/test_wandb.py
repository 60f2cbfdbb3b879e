"""Weights & Biases by its real client, offline: what was written is read back with W&B's own reader."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import wandb

import lmapp
from lmapp.loggers import wandb as wandb_runs

CONTRACT = {
    "train/loss train/perplexity train/bits_per_char train/chars_per_second train/learning_rate train/characters",
    "train/seconds val/loss val/perplexity val/bits_per_char val/bits_per_byte",
    "gradient/norm gradient/norm_clipped gradient/clip_fraction gradient/nonfinite",
    "gradient/norm_p50 gradient/norm_p90 gradient/norm_p99 gradient/group/layer0/weight_hh update/layer0/weight_hh",
    "spectrum/norm spectrum/radius spectrum/lyapunov decay/half_life_low decay/half_life_high decay/inputs/half_life",
    "decay/half_life decay/half_life_censored decay/horizon decay/horizon_censored decay/rate",
    "decay/lag_99 decay/lag_99_censored decay/at_truncation decay/lost_share",
    *(
        f"decay/layer0/{component}/{figure}"
        for component in ("joint", "h", "c")
        for figure in ("half_life", "horizon", "lost_share")
        if (component, figure) != ("c", "half_life")  # c may be below half of the joint norm everywhere
    ),
}


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def make_config(directory: Path, text: str, **logging: Any) -> dict[str, Any]:
    path = directory / "text.txt"
    path.write_text(text, encoding="utf-8")
    return {
        "data": {"path": [str(path)], "batch_size": 4, "sequence_length": 16, "cache_dir": str(directory / "cache")},
        "model": {"cell": "lstm", "hidden_size": 12},
        "train": {"max_steps": 40, "val_every_steps": 10, "clip_norm": 0.25},
        "gradients": {"every_steps": 20, "max_lag": 24, "windows": 2},
        "logging": {"every_steps": 5, "group": "cells", "tags": ["first"], **logging},
        "name": "run",
        "runs_dir": str(directory / "runs"),
    }


def offline_records(run: Path) -> list[dict[str, Any]]:
    """All records of all folders of a run, as `wandb leet inspect --json` prints them."""
    records = []
    for log in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        result = subprocess.run(
            [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)],
            capture_output=True,
            text=True,
            check=True,
        )
        records += [json.loads(line) for line in result.stdout.splitlines()]
    return records


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the steps, without those of the last curve, which have a lag for their axis."""
    rows = [r["history"]["item"] for r in records if r["type"] == "history"]
    return [row for row in rows if "trainer/global_step" in row]


def points(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = [r["history"]["item"] for r in records if r["type"] == "history"]
    return [row for row in rows if "trainer/global_step" not in row]


def test_finished_offline_run_read_back(tmp_path: Path, real_text: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = lmapp.train(make_config(tmp_path, real_text[:20_000])).path
    assert "offline (no key is configured)" in capsys.readouterr().out
    records = offline_records(run)
    rows = history(records)

    names = {name for row in rows for name in row}
    assert {name for line in CONTRACT for name in line.split()} <= names
    local = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["trainer/global_step"] for row in rows] == [line["step"] for line in local]
    for row, line in zip(rows, local, strict=True):
        for name in line.keys() - {"step", "characters", "seconds"}:
            assert row[name] == pytest.approx(line[name], rel=1e-6), name

    # The curve: one line chart with lag as x axis, whole, at each measured step.
    decay = [json.loads(line) for line in (run / "decay.jsonl").read_text().splitlines()]
    joint = [d for d in decay if (d["layer"], d["component"]) == ("all", "joint")]
    assert [d["step"] for d in joint] == [0, 20, 40]
    tables = [row["decay/curve_table.path"] for row in rows if "decay/curve_table.path" in row]
    files = next(run.glob("wandb/offline-run-*/files"))
    for path, measured in zip(tables, joint, strict=True):
        table = json.loads((files / path).read_text())
        lag, r = table["columns"].index("lag"), table["columns"].index("R")
        assert [row[lag] for row in table["data"]] == list(range(25))
        assert [row[r] for row in table["data"]] == pytest.approx(measured["R"])
    overlay = json.loads(
        (files / [row["decay/curves_table.path"] for row in rows if "decay/curves_table.path" in row][-1]).read_text()
    )
    assert {row[overlay["columns"].index("lineKey")] for row in overlay["data"]} == {"step 0", "step 20", "step 40"}
    assert len(overlay["data"]) == 3 * 25

    # The last curve once more, a row a lag, as the charts have it that lay several runs together.
    last = points(records)
    assert [point["decay_by_lag/lag"] for point in last] == joint[-1]["lags"]
    for name in ("R", "G", "zero_share"):
        assert [point[f"decay_by_lag/{name}"] for point in last] == pytest.approx(joint[-1][name])
    axes = {r["metric"].get("name"): r["metric"].get("step_metric") for r in records if r["type"] == "metric"}
    assert axes["decay_by_lag/R"] == "decay_by_lag/lag"
    # All measured steps as a picture, and the norms of all steps as a histogram, once, at the end.
    from PIL import Image

    assert ["decay/lag_by_step.path" in row for row in rows] == [False] * (len(rows) - 1) + [True]
    with Image.open(files / rows[-1]["decay/lag_by_step.path"]) as picture:
        assert picture.size == (1200, 690)
    counts, edges = rows[-1]["gradient/norms.values"], rows[-1]["gradient/norms.bins"]
    assert sum(counts) == 40
    norms = [line["gradient/norm"] for line in local if "gradient/norm" in line]
    assert edges[0] <= min(norms) <= max(norms) <= edges[-1]

    # Every clip event, with its text.
    events = [json.loads(line) for line in (run / "clip_events.jsonl").read_text().splitlines()]
    assert events
    table = json.loads((files / rows[-1]["gradient/clip_events.path"]).read_text())
    assert [dict(zip(table["columns"], row, strict=True)) for row in table["data"]] == events

    started = next(r["run"] for r in records if r["type"] == "run")
    assert started["display_name"] == "run"
    assert started["project"] == "lmapp"
    assert started["run_group"] == "cells" if "run_group" in started else started["group"] == "cells"
    assert set(started["tags"]) == {"lstm", "text", "first"}
    assert started["config"]["update"]["model"]["hidden_size"] == 12
    summary: dict[str, Any] = {}
    for record in records:
        if record["type"] == "summary":
            summary |= record["summary"]["update"]
    best = min(line["val/loss"] for line in local if "val/loss" in line)
    assert summary["best/loss"] == pytest.approx(best)
    assert {"last/loss", "parameters", "characters", "unigram_bits", "bigram_bits"} <= summary.keys()


def test_each_run_has_its_record_whatever_directory_the_first_began_in(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's own process stays where it was started."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        config = make_config(tmp_path, real_text[:3000], wandb="offline")
        config["runs_dir"] = "runs"
        config["train"]["max_steps"] = 2
        run = lmapp.train(config, quiet=True).path
        assert not run.is_absolute()
        assert list((tmp_path / name / run / "wandb").glob("*/*.wandb"))


def kill(directory: Path, config: dict[str, Any], plan: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """Train, killed as the plan says, by tests/killing.py."""
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "plan.json").write_text(json.dumps(plan))
    script = Path(__file__).parents[1] / "killing.py"
    return subprocess.run(
        [sys.executable, str(script), str(directory / "config.json"), str(directory / "plan.json")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        # Not the service of this process: every life of the run has its own, as on a user's machine.
        env={name: value for name, value in os.environ.items() if "WANDB_SERVICE" not in name},
    )


def test_killed_and_resumed_run_has_every_step_once(tmp_path: Path, real_text: str) -> None:
    plan = [{"where": "step", "visit": 14}, {"where": "writing", "visit": 2}, {"where": "decay", "visit": 1}]
    result = kill(tmp_path, make_config(tmp_path, real_text[:20_000], wandb="offline"), plan)
    assert result.returncode == 0, result.stderr[-3000:]
    run = tmp_path / "runs" / "run"
    assert len(list(run.glob("wandb/offline-run-*"))) == 4
    assert len({log.name for log in run.glob("wandb/offline-run-*/run-*.wandb")}) == 1, "it is one W&B run"
    rows = history(offline_records(run))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    local = {line["step"]: {name: line[name] for name in line if "/" in name} for line in lines}
    assert len(local) == len(lines)
    assert Counter(row["trainer/global_step"] for row in rows) == Counter(local.keys())
    for row in rows:
        expected = local[row["trainer/global_step"]]
        others = ("table", "clip_events", "gradient/norms.", "lag_by_step")  # charts, tables and pictures
        scalars = {n for n in row if not any(other in n for other in others) and not n.startswith("_")}
        assert scalars - {"trainer/global_step"} == expected.keys()
        timed = ("train/seconds", "train/chars_per_second")
        assert {n: row[n] for n in expected if n not in timed} == pytest.approx(
            {n: v for n, v in expected.items() if n not in timed}, rel=1e-6
        )


def test_a_run_killed_while_it_is_closed_is_completed(tmp_path: Path, real_text: str) -> None:
    """Its last checkpoint says that it is finished; W&B lacks its end until it is resumed."""
    result = kill(tmp_path, make_config(tmp_path, real_text[:20_000], wandb="offline"), [{"where": "finish"}])
    assert "is finished (step 40)" in result.stderr, result.stderr[-3000:]
    run = tmp_path / "runs" / "run"
    records = offline_records(run)
    local = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert Counter(row["trainer/global_step"] for row in history(records)) == Counter(local)
    summary = {k: v for r in records if r["type"] == "summary" for k, v in r["summary"]["update"].items()}
    best = json.loads((run / "summary.json").read_text())["best"]["val/loss"]
    assert summary["best/loss"] == pytest.approx(best)
    folders = len(list(run.glob("wandb/offline-run-*")))
    with pytest.raises(lmapp.errors.UsageError, match="is finished"):
        lmapp.train(resume="run", runs_dir=str(tmp_path / "runs"), quiet=True)
    assert len(list(run.glob("wandb/offline-run-*"))) == folders, "there was nothing left to complete"


def test_mode_is_online_only_with_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert wandb_runs.choose_mode("auto") == ("offline", "no key is configured")
    assert wandb_runs.choose_mode("disabled")[0] == "disabled"
    for host in (urlsplit(wandb.Settings().base_url).netloc, "api.wandb.ai"):
        (tmp_path / "netrc").write_text(f"machine {host} login user password {'0' * 40}\n")
        (tmp_path / "netrc").chmod(0o600)
        assert wandb_runs.choose_mode("auto")[0] == "online", host
    (tmp_path / "netrc").write_text("machine\n")
    assert wandb_runs.choose_mode("auto")[0] == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert wandb_runs.choose_mode("auto")[0] == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_runs.choose_mode("auto")[0] == "offline"


def test_unreachable_server_means_offline(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(wandb_runs, "SECONDS_TO_CONNECT", 3)
    started = time.monotonic()
    config = make_config(tmp_path, real_text[:5000])
    config["train"]["max_steps"] = 3
    run = lmapp.train(config).path
    assert time.monotonic() - started < 60
    said = capsys.readouterr().out
    assert "W&B cannot be reached" in said
    assert "wandb sync" in said
    assert history(offline_records(run))


def test_disabled_writes_nothing(tmp_path: Path, real_text: str) -> None:
    config = make_config(tmp_path, real_text[:5000], wandb="disabled")
    config["train"]["max_steps"] = 3
    run = lmapp.train(config, quiet=True).path
    assert not (run / "wandb").exists()


def test_an_infill_run_has_one_validation_figure(tmp_path: Path, real_text: str) -> None:
    config = make_config(tmp_path, real_text[:8000])
    config["model"] |= {"kind": "infill"}
    run = lmapp.train(config, quiet=True).path
    records = offline_records(run)
    names = {name for row in history(records) for name in row}
    assert {name for name in names if name.startswith(("val/", "decay/"))} == {"val/infill_loss"}
    assert not {"train/loss", "train/perplexity"} & names
    summary: dict[str, Any] = {}
    for record in records:
        if record["type"] == "summary":
            summary |= record["summary"]["update"]
    local = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["val/infill_loss"] for line in local if "val/infill_loss" in line]
    assert summary["best/infill_loss"] == pytest.approx(min(losses))
    assert summary["last/infill_loss"] == pytest.approx(losses[-1])
    assert not {"best/loss", "best/perplexity"} & summary.keys()
    started = next(r["run"] for r in records if r["type"] == "run")
    assert set(started["tags"]) == {"infill-lstm", "text", "first"}


def test_a_corpus_with_a_long_name_is_no_obstacle(tmp_path: Path, real_text: str) -> None:
    """W&B refuses tags of more than 64 characters, and the corpus is one."""
    text = tmp_path / f"{'long' * 30}.txt"
    text.write_text(real_text[:3000])
    options = {
        "runs_dir": str(tmp_path / "runs"),
        "data": {"path": str(text), "cache_dir": str(tmp_path / "cache"), "batch_size": 2, "sequence_length": 8},
        "model": {"hidden_size": 4, "cell": ["gru", "lstm", "vanilla", "gru_before", "mingru"]},
        "train": {"max_steps": 2},
        "gradients": {"every_steps": 0},
        "logging": {"wandb": "offline"},
    }
    assert lmapp.train(options, quiet=True).metrics["state"] == "finished"
