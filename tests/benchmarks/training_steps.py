"""Whole training steps (forward, loss, backward, clip, fused AdamW) beside torch.nn, interleaved in one run.

Run by `make bench`. Prints a table, then as last line one JSON array with an object a benchmark. A time is the median
of its steps, the spread half the distance between the quartiles. The peer is torch.nn's own module on one-hot input,
in fp32 and under bf16 autocast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lmapp.gradients.clipping import clip_by_norm, global_norm
from lmapp.models import RecurrentModel, detach

VOCABULARY = 65
CASES = [
    ("gru", 1, 512, 32, 64),
    ("gru", 2, 512, 64, 128),
    ("gru", 2, 256, 64, 64),
    ("lstm", 1, 512, 32, 64),
    ("lstm", 2, 512, 64, 128),
    ("lstm", 2, 256, 64, 64),
    ("vanilla", 1, 512, 64, 128),
    ("vanilla", 1, 128, 50, 50),
    ("gru", 1, 128, 50, 50),
    ("lstm", 1, 128, 50, 50),
]
SIDES = ("lmapp bf16", "lmapp fp32", "torch.nn fp32", "torch.nn bf16")
GATES = {"vanilla": 1, "gru": 3, "lstm": 4}


class Peer(nn.Module):
    """torch.nn's recurrent module between a one-hot input and a linear readout."""

    def __init__(self, cell: str, num_layers: int, hidden_size: int) -> None:
        super().__init__()
        kind = {"gru": nn.GRU, "lstm": nn.LSTM, "vanilla": nn.RNN}[cell]
        self.recurrent = kind(VOCABULARY, hidden_size, num_layers)
        self.head = nn.Linear(hidden_size, VOCABULARY)

    def forward(self, tokens: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        outputs, state = self.recurrent(functional.one_hot(tokens.t(), VOCABULARY).float(), state)
        return self.head(outputs).float(), state


def make_step(side: str, cell: str, num_layers: int, hidden_size: int, rows: int, length: int) -> Callable[[], None]:
    """One training step of one side, on random characters with the state carried on."""
    torch.manual_seed(0)
    data = torch.randint(VOCABULARY, (rows, length * 4 + 1))
    ours = side.startswith("lmapp")
    model: nn.Module
    if ours:
        model = RecurrentModel(VOCABULARY, cell=cell, hidden_size=hidden_size, num_layers=num_layers)
        model.compute_dtype = torch.bfloat16 if side.endswith("bf16") else torch.float32
        state: Any = model.initial_state(rows)
    else:
        model, state = Peer(cell, num_layers, hidden_size), None
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    parameters = list(model.parameters())
    count = 0

    def step() -> None:
        nonlocal state, count
        start = count % 4 * length
        count += 1
        inputs, targets = data[:, start : start + length], data[:, start + 1 : start + length + 1]
        if ours:
            logits, state = model(inputs, state)
            state = detach(state)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=side.endswith("bf16")):
                logits, state = model(inputs, state)
            state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.t().flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        clip_by_norm(gradients, 1.0, global_norm(gradients))
        optimizer.step()

    return step


def measure(case: tuple[str, int, int, int, int], seconds: float, rounds: int) -> dict[str, Any]:
    """Characters per second of every side of one case."""
    cell, num_layers, hidden_size, rows, length = case
    steps = {side: make_step(side, *case) for side in SIDES}
    taken: dict[str, list[float]] = {side: [] for side in SIDES}
    repeats = {}
    for side, step in steps.items():
        step()
        started = time.perf_counter()
        step()
        repeats[side] = max(1, int(seconds / (time.perf_counter() - started)))
    for _ in range(rounds):
        for side, step in steps.items():
            for _ in range(repeats[side]):
                started = time.perf_counter()
                step()
                taken[side].append(time.perf_counter() - started)
    rate = {side: rows * length / statistics.median(times) for side, times in taken.items()}
    quartiles = {side: statistics.quantiles(times, n=4) for side, times in taken.items()}
    # Multiplications and additions of the recurrent, upper input and readout products, forward and backward.
    products = GATES[cell] * hidden_size**2 * (2 * num_layers - 1) + VOCABULARY * hidden_size
    return {
        "name": f"{cell} {num_layers}x{hidden_size} {rows}x{length}",
        "chars_per_second": rate["lmapp bf16"],
        "chars_per_second_fp32": rate["lmapp fp32"],
        "peer_fp32": rate["torch.nn fp32"],
        "peer_bf16": rate["torch.nn bf16"],
        "ratio": rate["lmapp bf16"] / rate["torch.nn fp32"],
        "ratio_to_bf16": rate["lmapp bf16"] / rate["torch.nn bf16"],
        "ratio_fp32": rate["lmapp fp32"] / rate["torch.nn fp32"],
        "spread": {s: (q[2] - q[0]) / 2 / q[1] for s, q in quartiles.items()},
        "gflop_per_second": 6 * products * rate["lmapp bf16"] / 1e9,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names or parts of names, such as 'gru 1x512'")
    parser.add_argument("--seconds", type=float, default=1.0, help="per side and round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{'':<22}{'lmapp bf16':>12}{'fp32':>9}{'torch fp32':>12}{'bf16':>9}{'ratio':>8}{'to bf16':>9}{'fp32':>7}")
    results = []
    for case in CASES:
        cell, num_layers, hidden_size, rows, length = case
        name = f"{cell} {num_layers}x{hidden_size} {rows}x{length}"
        if options.only and not any(part in name for part in options.only):
            continue
        result = measure(case, options.seconds, options.rounds)
        results.append(result)
        print(
            f"{name:<22}{result['chars_per_second']:>12,.0f}{result['chars_per_second_fp32']:>9,.0f}"
            f"{result['peer_fp32']:>12,.0f}{result['peer_bf16']:>9,.0f}{result['ratio']:>8.2f}"
            f"{result['ratio_to_bf16']:>9.2f}{result['ratio_fp32']:>7.2f}",
            flush=True,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
