"""Prints as JSON what a window's passes take of memory, for each side: `python process_peak.py DEVICE CASE`.

On a CPU it is read from the process's resident size, which Linux alone tells and lets begin anew; elsewhere it is null.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import torch
from sides import Case, Training

PROCESS = Path("/proc/self")


def sizes(side: str, case: Case, device: str) -> dict[str, int | None]:
    """Bytes above what there was before: after the forward pass, and at the peaks of the backward pass and of both.

    Of the second step: the first makes what stays, such as the optimiser's moments and compiled kernels.
    """
    training = Training(side, case, device)
    training.step()
    training.optimizer.zero_grad()
    try:
        before = _restart(device)
        loss = training.loss(*training.windows[1])
        forward = _peak(device)
        between = _restart(device)
        loss.backward()
        backward = _peak(device)
    except (OSError, KeyError, AttributeError):
        return dict.fromkeys(("forward", "backward", "both"))
    return {"forward": between - before, "backward": backward - between, "both": max(forward, backward) - before}


def _restart(device: str) -> int:
    """Let the peak be what is taken now; that in bytes."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed before would be used again unseen
    (PROCESS / "clear_refs").write_text("5", encoding="utf-8")
    return _size("VmRSS")


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _size("VmHWM")


def _size(name: str) -> int:
    lines = (PROCESS / "status").read_text(encoding="utf-8").splitlines()
    kilobytes = dict(line.split(":", 1) for line in lines)[name].split()[0]
    return 1024 * int(kilobytes)


def main() -> None:
    device, case = sys.argv[1], Case(*json.loads(sys.argv[2]))
    print(json.dumps({side: sizes(side, case, device) for side in case.sides}))


if __name__ == "__main__":
    main()
