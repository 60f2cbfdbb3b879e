"""Weights & Biases: the real client, online or offline, never a prompt, and no step twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import WandbLogger

from lmapp.config import TAG_LENGTH
from lmapp.experiments.heatmaps import decay_history
from lmapp.loggers.records import METRICS, read_lines

STEP = "trainer/global_step"
SECONDS_TO_CONNECT = 20
MAX_TABLE_ROWS = 10_000
MAX_LINES = 12
"""Of one chart; W&B's have no more colours that can be told apart."""

DECAY_CURVES, DECAY_HISTORY, CLIP_TABLE, NORMS = (
    "decay/curves",
    "decay/lag_by_step",
    "gradient/clip_events",
    "gradient/norms",
)
"""Figures that are no numbers: records of decay.jsonl so far and at the end, clip events, a histogram."""
BY_LAG = "decay_by_lag"


class RunLogger(WandbLogger):
    """Lightning's logger onto a run that is already open, passing over the steps the run already holds."""

    def __init__(self, run: Any, written: Iterable[int]) -> None:
        super().__init__(experiment=run)
        self.written = set(written)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log one step's figures as one row; those that are no numbers become charts, tables and pictures."""
        if step in self.written:
            return
        row = dict(metrics)
        records = row.get(DECAY_HISTORY)
        if DECAY_CURVES in row:
            row |= decay_charts(row.pop(DECAY_CURVES))
        if records:
            row[DECAY_HISTORY] = decay_heat_map(records)
        if CLIP_TABLE in row:
            row[CLIP_TABLE] = clip_table(row[CLIP_TABLE])
        if NORMS in row:
            row[NORMS] = norm_histogram(*row[NORMS])
        super().log_metrics(row, step)
        for point in curve_points(records or []):
            self.experiment.log(point)


def choose_mode(wanted: str) -> tuple[str, str]:
    """(mode, why in a few words) for `--logging.wandb`: auto is online when a key is configured, else offline."""
    if wanted != "auto":
        return wanted, "as asked"
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "online"):
        return os.environ["WANDB_MODE"], "WANDB_MODE says so"
    if has_key():
        return "online", "a key is configured"
    return "offline", "no key is configured"


def has_key() -> bool:
    """Whether a W&B key is configured: in the environment, in W&B's settings, or in a netrc file for its server."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import wandb
    from wandb.sdk.lib import wbauth

    try:
        settings = wandb.Settings()
        settings.update_from_system_settings()
        settings.update_from_env_vars(dict(os.environ))
        return bool(settings.api_key) or wbauth.read_netrc_auth(host=settings.base_url) is not None
    except Exception:  # damaged settings or a damaged netrc file hold no key
        return False


def open_run(
    directory: Path,
    *,
    mode: str,
    project: str,
    group: str | None,
    tags: Sequence[str],
    name: str,
    config: Mapping[str, Any],
    run_id: str | None,
    secret: bool,
    say: Callable[[str], None],
) -> Any:
    """Start (or, with `run_id`, go on with) a W&B run; None when disabled.

    With `secret` it is not told how this process was started, since the command line holds a password.

    Without a network an online run becomes an offline one, which is said; nothing waits longer than
    `SECONDS_TO_CONNECT`.
    """
    if mode == "disabled":
        return None
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    def init(mode: str) -> Any:
        return wandb.init(
            dir=directory.absolute(),  # W&B's own process may have been started somewhere else
            mode=mode,  # type: ignore[arg-type]
            project=project,
            group=group,
            tags=[tag[:TAG_LENGTH] for tag in tags],  # the corpus may have a long name
            name=name,
            id=run_id,
            resume="allow" if run_id and mode == "online" else None,
            config=dict(config),
            job_type="train",
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=SECONDS_TO_CONNECT,
                login_timeout=1,
                x_disable_stats=True,
                x_disable_meta=secret,  # the command line is a part of it
            ),
        )

    try:
        run = init(mode)
    except (wandb.Error, OSError) as error:
        if mode != "online":
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        say(
            f"W&B cannot be reached ({reason}): the run is logged offline. "
            f"Send it later: wandb sync {directory / 'wandb'}/offline-*"
        )
        run = init("offline")
    run.define_metric(STEP)
    for axis in ("train", "gradient", "update", "decay", "spectrum"):
        run.define_metric(f"{axis}/*", step_metric=STEP)
    run.define_metric(f"{BY_LAG}/lag", hidden=True)
    for figure in ("R", "G", "zero_share"):
        run.define_metric(f"{BY_LAG}/{figure}", step_metric=f"{BY_LAG}/lag", summary="none")
    for figure in ("loss", "perplexity", "bits_per_char", "bits_per_byte", "infill_loss"):
        run.define_metric(f"val/{figure}", step_metric=STEP, summary="min,last")
    return run


def written_steps(directory: Path, run: Any) -> set[int]:
    """The steps a run already holds: read back from its offline files, or up to the last one the server knows."""
    if not run.settings._offline:
        last = run.summary.get(STEP)
        return set(range(int(last) + 1)) if last is not None else set()
    steps: set[int] = set()
    # Not only offline ones: a run that began online may go on without a network.
    for log in sorted((directory / "wandb").glob(f"*run-*-{run.id}/run-{run.id}.wandb")):
        if Path(run.dir).parent.resolve() != log.parent.resolve():
            steps |= {int(row[STEP]) for row in read_offline(log) if STEP in row}
    return steps


def read_offline(log: Path) -> list[dict[str, Any]]:
    """History rows of an offline run's `run-ID.wandb`, as far as they were written (a killed run may lack its end)."""
    result = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)],
        capture_output=True,
        text=True,
        env={**os.environ, "WANDB_SILENT": "true"},
        check=False,
    )
    rows = []
    for line in result.stdout.splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record.get("type") == "history":
            rows.append(record["history"]["item"])
    return rows


def fill_gaps(run: Any, directory: Path, written: set[int]) -> None:
    """Log the steps of metrics.jsonl that the run lost when it was killed."""
    for line in read_lines(directory / METRICS):
        step = line["step"]
        if step not in written:
            # The names of the contract alone: those of the lines' axes have no "/".
            run.log({**{name: value for name, value in line.items() if "/" in name}, STEP: step})
            written.add(step)


def decay_charts(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The curves R_k against lag as W&B line charts with lag as x axis.

    `decay/curve` is the latest measurement; `decay/curves` has one line a measured step, of more than `MAX_LINES` the
    first, the last and those between at equal distances, so that what is sent does not grow with their square.

    Args:
        records: lines of decay.jsonl for all layers together, joint, in order.
    """
    import wandb

    latest = records[-1]
    columns: list[str | int] = ["lag", "R", "G", "zero_share"]
    rows = zip(latest["lags"], latest["R"], latest["G"], latest["zero_share"], strict=True)
    table = wandb.Table(columns=columns, data=[list(row) for row in rows])
    lines = min(len(records), MAX_LINES)
    shown = [records[number * (len(records) - 1) // max(1, lines - 1)] for number in range(lines)]
    return {
        "decay/curve": wandb.plot.line(table, "lag", "R", title="Gradient decay R_k against lag k"),
        "decay/curves": wandb.plot.line_series(
            xs=latest["lags"],
            ys=[r["R"] for r in shown],
            keys=[f"step {r['step']}" for r in shown],
            title="Gradient decay R_k against lag k, one line a measured step",
            xname="lag",
        ),
    }


def decay_heat_map(records: Sequence[Mapping[str, Any]]) -> Any:
    """How R at each lag went through training, as a picture: the lag upwards, the measured step to the right."""
    import wandb

    history = decay_history([r["step"] for r in records], records[-1]["lags"], [r["R"] for r in records])
    return wandb.Image(history, caption="relative gradient norm R_k by lag and step")


def curve_points(records: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The last curve, a row a lag: native charts with the lag as axis, in which W&B lays the runs of a group together.

    Lines of its charts made from tables cannot be told apart by run.
    """
    if not records:
        return []
    last = records[-1]
    names = ("R", "G", "zero_share")
    points = zip(last["lags"], *(last[name] for name in names), strict=True)
    return [
        {f"{BY_LAG}/lag": lag, **{f"{BY_LAG}/{n}": v for n, v in zip(names, row, strict=True)}} for lag, *row in points
    ]


def norm_histogram(counts: Sequence[int], edges: Sequence[float]) -> Any:
    """The norms of all steps as a W&B histogram."""
    import wandb

    return wandb.Histogram(np_histogram=(np.asarray(counts), np.asarray(edges)))


def clip_table(events: Sequence[Mapping[str, Any]]) -> Any:
    """The clip events as a W&B table; of more than `MAX_TABLE_ROWS` the last ones, W&B shows no more."""
    import wandb

    columns: list[str | int] = ["kind", "step", "epoch", "norm", "threshold", "factor", "loss", "learning_rate", "text"]
    return wandb.Table(columns=columns, data=[[e[str(c)] for c in columns] for e in events[-MAX_TABLE_ROWS:]])
