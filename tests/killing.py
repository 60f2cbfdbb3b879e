"""Trains a run while killing it: imports everything once, then forks a child for every life of the run.

Run as a script: `python killing.py CONFIG.json PLAN.json`. Each entry of the plan is one SIGKILL: where in the
code, at which of its visits, or after how many seconds. Prints as JSON which of them struck.
"""

import io
import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import wandb

import lmapp.callbacks.decay
import lmapp.run
from lmapp import checkpoint
from lmapp.errors import LmappError
from lmapp.models import evaluation
from lmapp.training import saving


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def visits(function: Any, number: int, *, half_way: bool = False) -> Any:
    """`function`, killed before (or, for a writer, in the middle of) its visit `number`."""
    count = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            if half_way:
                content = args[0]
                whole = io.BytesIO()
                function(content, whole)
                args[1].write(whole.getvalue()[: len(whole.getvalue()) // 2])
                args[1].flush()
            die()
        return function(*args, **kwargs)

    return counted


def arm(kill: dict[str, Any]) -> None:
    """Prepare this process to be killed as the plan says."""
    where, number = kill["where"], kill.get("visit", 1)
    if where == "validation":
        evaluation._Tally.add = visits(evaluation._Tally.add, number)
    elif where == "writing":
        torch.save = visits(torch.save, number, half_way=True)
    elif where == "before-replace":
        os.replace = visits(os.replace, number)
    elif where == "between-last-and-best":
        saving.keep_as_best = visits(saving.keep_as_best, number)
    elif where == "decay":
        lmapp.callbacks.decay.measure = visits(lmapp.callbacks.decay.measure, number)
    elif where == "finish":
        wandb.sdk.wandb_run.Run.finish = visits(wandb.sdk.wandb_run.Run.finish, number)
    elif where == "step":
        torch.optim.AdamW.step = visits(torch.optim.AdamW.step, number)
    # "seconds" is the parent's work


def live(config: dict[str, Any], kill: dict[str, Any] | None) -> int:
    """One life of the run; returns how it ended (the wait status)."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            if kill is not None:
                arm(kill)
            name = config["name"]
            if (Path(config["runs_dir"]) / name / "checkpoints" / checkpoint.LAST).exists():
                lmapp.run.train(resume=name, runs_dir=config["runs_dir"], quiet=True)
            else:
                # Killed before its first checkpoint: it starts again.
                shutil.rmtree(Path(config["runs_dir"]) / name, ignore_errors=True)
                lmapp.run.train(config, quiet=True)
            os._exit(0)
        except LmappError as error:
            print(error, file=sys.stderr)
            os._exit(3)
        except BaseException:
            traceback.print_exc()
            os._exit(4)
    if kill is not None and kill["where"] == "seconds":
        time.sleep(kill["after"])
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    plan = json.loads(Path(sys.argv[2]).read_text())

    struck: list[str] = []
    for kill in [*plan, None]:
        status = live(config, kill)
        if os.WIFSIGNALED(status):
            struck.append(kill["where"])
        elif os.WEXITSTATUS(status) != 0:
            raise SystemExit(f"a life ended with exit code {os.WEXITSTATUS(status)}")
        elif kill is not None:
            raise SystemExit(f"the run was finished before {kill}: {len(struck)} kills struck")
    print(json.dumps(struck))


if __name__ == "__main__":
    main()
