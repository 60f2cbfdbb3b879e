"""Every benchmark runs, and the last line says what it promises."""

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SHARED = {
    *("name", "figure", "unit", "figure_fp32", "peer_fp32", "peer_bf16", "ratio", "ratio_to_bf16", "ratio_fp32"),
    *("gflop_per_second", "peak_gflop_per_second", "peak_share", "spread", "device", "cpu", "threads", "versions"),
}


def numbers(value: Any) -> Iterator[float]:
    """All that are in a piece of JSON."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, int | float):
        yield value


def test_every_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    run, sides = (importlib.import_module(name) for name in ("run", "sides"))
    gru, mingru = sides.Case("gru", 1, 16, 4, 8), sides.Case("mingru", 1, 16, 4, 8)
    cases = {"step": [gru, mingru], "stored": [gru], "trainer": [gru], "decay": [gru, mingru], "data": [gru]}
    run.main(["--seconds", "0", "--rounds", "1"], cases, products=(64,))
    *tables, last = capsys.readouterr().out.splitlines()
    results = {entry["name"]: entry for entry in json.loads(last)}

    assert list(results) == [
        *("step gru 1x16 4x8", "step mingru 1x16 4x8", "stored gru 1x16 4x8"),
        *("trainer gru 1x16 4x8 disabled", "trainer gru 1x16 4x8 offline"),
        *("decay gru 1x16 4x8 K=16", "decay mingru 1x16 4x8 K=16", "data gru 1x16 4x8", "data 256x256"),
    ]
    for name, entry in results.items():
        assert entry.keys() >= SHARED
        assert all(math.isfinite(number) for number in numbers(entry)), entry
        assert sum(line.startswith(f"{name} ") for line in tables) == 1
        assert set(entry["versions"]) == {"lmapp", "torch", "python"}

    step, alone = results["step gru 1x16 4x8"], results["step mingru 1x16 4x8"]
    assert step["unit"] == "characters/s"
    assert step["ratio"] == pytest.approx(step["figure"] / step["peer_fp32"])
    assert step["ratio_to_bf16"] == pytest.approx(step["figure"] / step["peer_bf16"])
    assert step["ratio_fp32"] == pytest.approx(step["figure_fp32"] / step["peer_fp32"])
    products = 6 * (3 * 16 * 16 + 65 * 16)  # of the recurrence and the readout
    assert step["gflop_per_second"] == pytest.approx(products * step["figure"] / 1e9)
    assert step["peak_share"] == pytest.approx(step["gflop_per_second"] / step["peak_gflop_per_second"])
    assert len(step["spread"]) == 4
    missing = ("peer_fp32", "peer_bf16", "ratio", "ratio_to_bf16", "ratio_fp32")
    assert [alone[key] for key in missing] == [None] * 5
    assert alone["peak_share"] > 0
    assert results["data gru 1x16 4x8"]["figure"] < 100


def test_what_a_graph_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of memory once and whole, however often and in whatever part it is kept; parameters not."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    kept_bytes = importlib.import_module("stored_activations").kept_bytes
    weight, inputs = torch.randn(8, 8, requires_grad=True), torch.randn(16, 8)

    def forward() -> torch.Tensor:
        half = (inputs[:8] @ weight).tanh()
        return (half @ weight).sum() + (inputs @ weight).sum()

    assert kept_bytes(forward, [weight]) == 4 * (16 * 8 + 8 * 8)
    assert kept_bytes(forward, []) == 4 * (16 * 8 + 8 * 8 + 8 * 8)
