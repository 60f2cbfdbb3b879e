"""What the forward pass of one window keeps for its backward pass: tokens in, loss out, ours beside torch.nn's.

Counted are the tensors that the graph has saved when the loss is there: each piece of memory once, whole, if any part
of it is kept; parameters and buffers apart. The peer is the one of the training steps, with a one-hot input that its
graph keeps too, under autocast in bf16. So tokens and targets count for both, and copies of weights in another
precision do where a graph keeps them; as those do not grow with the window, there is also what each further character
adds (from a window of half the length).

Memory that is kept need not ever be written (oneDNN's LSTM reserves several times what it uses), and a graph that gives
its memory back while it goes backward needs less on top of it. So there is also what a process has really taken above
what it had before: when the loss is there, at the peak of the backward pass (gradients of the parameters included) and
of both passes; see `process_peak`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from measuring import Column, Result, Settings, result
from sides import CUDA_CASES, OURS_BF16, OURS_FP32, PEER_BF16, PEER_FP32, Case, Training
from torch import Tensor

TITLE = "stored activations, bytes a character"
COLUMNS: list[Column] = [
    ("lmapp bf16", "figure", ",.0f"),
    ("fp32", "figure_fp32", ",.0f"),
    ("torch fp32", "peer_fp32", ",.0f"),
    ("bf16", "peer_bf16", ",.0f"),
    ("ratio", "ratio", ".2f"),
    ("to bf16", "ratio_to_bf16", ".2f"),
    ("fp32", "ratio_fp32", ".2f"),
    ("peak bf16", "peak_bf16", ",.0f"),
    ("torch bf16", "peak_peer_bf16", ",.0f"),
]
CASES = [
    Case(cell, num_layers, 512, rows, length)
    for cell in ("gru", "lstm", "vanilla")
    for num_layers, rows, length in ((1, 32, 64), (2, 64, 128))
]


def results(settings: Settings, cases: Sequence[Case] | None = None) -> Iterator[Result]:
    """One result a case."""
    for case in cases or (CUDA_CASES if settings.device == "cuda" else CASES):
        name = f"stored {case.name}"
        if settings.wants(name):
            yield _count(settings, name, case)


def _count(settings: Settings, name: str, case: Case) -> Result:
    kept = {side: _kept(side, case, settings.device) for side in case.sides}
    each = {side: size / case.characters for side, size in kept.items()}
    shorter = case._replace(length=case.length // 2)
    further = {
        side: (size - _kept(side, shorter, settings.device)) / (case.characters - shorter.characters)
        for side, size in kept.items()
    }
    peaks = _process_peaks(case, settings.device)
    return result(
        settings,
        name,
        each[OURS_BF16],
        "bytes/character",
        figure_fp32=each[OURS_FP32],
        peer_fp32=each[PEER_FP32],
        peer_bf16=each[PEER_BF16],
        less_is_better=True,
        further_character=further,
        peak_bf16=peaks[OURS_BF16]["both"],
        peak_peer_bf16=peaks[PEER_BF16]["both"],
        process_peak=peaks,
    )


def _kept(side: str, case: Case, device: str) -> int:
    training = Training(side, case, device)
    inputs, targets = training.windows[0]
    return kept_bytes(lambda: training.loss(inputs, targets), [*training.parameters, *training.model.buffers()])


def kept_bytes(forward: Callable[[], Tensor], apart: Iterable[Tensor]) -> int:
    """What the graph of a loss has saved, the memory of some tensors apart."""
    own = {tensor.untyped_storage().data_ptr() for tensor in apart}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # held until all are counted: a freed one's address may be another's
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in saved.values())


def _process_peaks(case: Case, device: str) -> dict[str, dict[str, float | None]]:
    """Bytes a character of each side, as `process_peak.sizes` names them."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        # Every tensor in pages of its own, which go back to the system at once: then the process's size tells.
        "MALLOC_MMAP_THRESHOLD_": str(2**16),
    }
    script = Path(__file__).with_name("process_peak.py")
    command = [sys.executable, str(script), device, json.dumps(case)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {
        side: {what: None if size is None else size / case.characters for what, size in sizes.items()}
        for side, sizes in json.loads(done.stdout).items()
    }
