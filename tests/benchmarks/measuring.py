"""How the benchmarks measure: sides in turn, the machine's peak among them; and what every result says."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmapp.cells.products import Product

Result = dict[str, Any]
"""One benchmark's object in the last line; see `result`."""
Column = tuple[str, str, str]
"""A table's column: heading, key of the result, format."""

NAME, CELL = 37, 12
"""Widths in a table."""
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
PEAK_SECONDS = 1 / 8
"""Of a product for the peak, per second of a side."""


@dataclass(frozen=True)
class Settings:
    """How long and on what is measured.

    Attributes:
        seconds: per side and round.
        rounds: of all sides.
        device: "cpu" or "cuda".
        only: parts of names, whole words; none for all benchmarks.
        products: N, the N×N products that the machine's peak is taken from.
    """

    seconds: float = 1.0
    rounds: int = 5
    device: str = "cpu"
    only: tuple[str, ...] = ()
    products: tuple[int, ...] = (1024, 2048)

    def wants(self, name: str) -> bool:
        """Whether the benchmark `name` is to run."""
        return not self.only or any(f" {part} " in f" {name} " for part in self.only)

    def clock(self) -> float:
        """Seconds, when all work given to the device is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class Times:
    """What single calls took, in seconds, round by round."""

    def __init__(self, rounds: Sequence[Sequence[float]]) -> None:
        self.rounds = rounds
        self.all = np.concatenate([np.asarray(taken) for taken in rounds])
        self.medians = np.array([np.median(taken) for taken in rounds])

    @property
    def median(self) -> float:
        """Over all rounds."""
        return float(np.median(self.all))

    @property
    def low(self) -> float:
        """What a tenth of the calls stay below: the quiet moments of a busy machine."""
        return float(np.quantile(self.all, 0.1))

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        return half_range(self.all) / self.median


def half_range(values: Any) -> float:
    """Half the distance between the quartiles."""
    low, high = np.quantile(values, (0.25, 0.75))
    return float(high - low) / 2


def interleave(
    sides: Mapping[str, Callable[[], object]], settings: Settings, weights: Mapping[str, float] | None = None
) -> dict[str, Times]:
    """Time every side in every round, so that what slows the machine down meets all of them.

    Args:
        sides: what to call. The first call of each is not counted, the second says how many make a turn.
        settings: seconds of a turn, and rounds. Each round begins with another side.
        weights: turns longer or shorter than that, as factors.
    """
    repeats = {}
    for name, call in sides.items():
        call()
        started = settings.clock()
        call()
        seconds = settings.seconds * (weights or {}).get(name, 1.0)
        repeats[name] = max(1, int(seconds / (settings.clock() - started)))
    taken: dict[str, list[list[float]]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(settings.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            turn = []
            for _ in range(repeats[name]):
                started = settings.clock()
                sides[name]()
                turn.append(settings.clock() - started)
            taken[name].append(turn)
    return {name: Times(rounds) for name, rounds in taken.items()}


class Peak:
    """The machine's matrix-product peak: large square products, as torch has them and as oneDNN has them packed.

    On a GPU fp32 products are full fp32, as torch has them by default, while cuDNN's recurrent ones may be TF32.
    """

    def __init__(self, settings: Settings) -> None:
        self.sides: dict[str, Callable[[], object]] = {}
        """To be timed beside others."""
        self._flop: dict[str, int] = {}
        for precision, dtype in PRECISIONS.items():
            for size in settings.products:
                a, b = (torch.randn(size, size, device=settings.device).to(dtype) for _ in range(2))
                for way, product in (("mm", partial(torch.mm, mat2=b)), ("packed", Product(b, size))):
                    name = f"peak {precision} {way} {size}"
                    self.sides[name] = partial(product, a)
                    self._flop[name] = 2 * size**3

    @property
    def weights(self) -> dict[str, float]:
        """Of the turns."""
        return dict.fromkeys(self.sides, PEAK_SECONDS)

    def gflop_per_second(self, times: Mapping[str, Times], precision: str) -> float:
        """Of the best product in that precision."""
        prefix = f"peak {precision} "
        return max(self._flop[n] / times[n].median / 1e9 for n in self.sides if n.startswith(prefix))


def result(
    settings: Settings,
    name: str,
    figure: float,
    unit: str,
    *,
    figure_fp32: float | None = None,
    peer_fp32: float | None = None,
    peer_bf16: float | None = None,
    less_is_better: bool = False,
    **more: Any,
) -> Result:
    """What every benchmark tells.

    Args:
        settings: it was measured with.
        name: of the benchmark.
        figure: ours in bf16.
        unit: of `figure` and of the three others.
        figure_fp32: ours in fp32.
        peer_fp32: torch.nn's.
        peer_bf16: torch.nn's under autocast.
        less_is_better: a ratio is the peer's to ours, so that more than 1 speaks for ours.
        more: what else there is to tell, the keys that are None here among it.
    """

    def ratio(ours: float | None, peer: float | None) -> float | None:
        if ours is None or peer is None:
            return None
        return peer / ours if less_is_better else ours / peer

    return {
        "name": name,
        "figure": figure,
        "unit": unit,
        "figure_fp32": figure_fp32,
        "peer_fp32": peer_fp32,
        "peer_bf16": peer_bf16,
        "ratio": ratio(figure, peer_fp32),
        "ratio_to_bf16": ratio(figure, peer_bf16),
        "ratio_fp32": ratio(figure_fp32, peer_fp32),
        "gflop_per_second": None,
        "peak_gflop_per_second": None,
        "peak_share": None,
        "spread": None,
        **more,
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else "cpu",
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "versions": {"lmapp": version("lmapp"), "torch": torch.__version__, "python": platform.python_version()},
    }


def cpu_model() -> str | None:
    """What the processor calls itself, if the system says so."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def row(entry: Result, columns: Sequence[Column]) -> str:
    """A line of a table: name and figures, a dash where there is none."""
    cells = [entry[key] for _, key, _ in columns]
    texts = ["-" if cell is None else f"{cell:{form}}" for cell, (_, _, form) in zip(cells, columns, strict=True)]
    return f"{entry['name']:<{NAME}}" + "".join(f"{text:>{CELL}}" for text in texts)


def heading(title: str, columns: Sequence[Column]) -> str:
    """A table's title and the line over its columns."""
    return f"\n{title}\n{'':<{NAME}}" + "".join(f"{name:>{CELL}}" for name, _, _ in columns)
