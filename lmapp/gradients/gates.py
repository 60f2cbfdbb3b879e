"""What the gates of a trained network do on natural states, and how long what they keep would last.

Shapes: N windows, K the largest lag, W warm-up steps, m end points, T = K + m steps, H hidden, G gate_size. Times are
in time steps (symbols).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lmapp.cells.protocol import State, at, map_states
from lmapp.gradients.decay import ProbeShape, measuring, warmed_up
from lmapp.units import jsonable

if TYPE_CHECKING:
    from lmapp.models.recurrent import LayerInput, RecurrentModel

LIMITS: dict[str, tuple[float, float]] = {"sigmoid": (0.1, 0.9), "tanh": (-0.9, 0.9)}
"""Below the first and above the second a value counts as saturated (Karpathy et al. 2015, arXiv:1506.02078)."""
QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Gate:
    """The values of one gate, over all units, steps and windows.

    Attributes:
        name: As the cell calls it.
        function: The non-linearity that made the values, "" if the cell does not say.
        mean: Of the values.
        deviation: Their standard deviation.
        low: Share of values below 0.1 (sigmoid) or −0.9 (tanh), or that are exactly 0 (relu); None without limits.
        high: Share of values above 0.9 (sigmoid, tanh); None without an upper limit.
        dead: Share of units that are 0 at every step of every window (relu); None for the others.
    """

    name: str
    function: str
    mean: float
    deviation: float
    low: float | None
    high: float | None
    dead: float | None


@dataclass(frozen=True)
class Retention:
    """How much of its old state a layer keeps from one step to the next, by the gate that multiplies it.

    The times are those that a gate which always has its *mean* value would have. They are not measured: the product of
    means is not the mean of products (a gate that is 1 and 0 by turns keeps nothing over two steps, where its mean 1/2
    would keep a quarter), and a gradient goes through the gates besides. The half-life is there to stand beside that of
    the measured gradient, which is the one to believe.

    Attributes:
        gate: Which of the gates it is.
        means: (H,) mean over steps and windows for each unit. Under zoneout with probability p a gate z keeps
            p + (1−p)·z, and that is what is averaged.
    """

    gate: str
    means: np.ndarray

    @property
    def mean(self) -> float:
        """Over the units."""
        return float(self.means.mean())

    @property
    def time_constant(self) -> float:
        """Steps after which 1/e is left: −1/ln(mean)."""
        return time_constant(self.mean)

    @property
    def half_life(self) -> float:
        """Steps after which a half is left: ln 2 · the time constant."""
        return math.log(2) * self.time_constant

    @property
    def time_constants(self) -> tuple[float, ...]:
        """The 10, 50 and 90 % quantiles of the units' time constants, which rise with the quantiles of their means."""
        return tuple(time_constant(float(mean)) for mean in np.quantile(self.means, QUANTILES))


@dataclass(frozen=True)
class LayerGates:
    """The gates of one layer.

    Attributes:
        layer: Its number, from 0.
        cell: The name of its class.
        gates: In the cell's order; none if it has none, or does not say what they are.
        retention: None if no gate multiplies the old state.
    """

    layer: int
    cell: str
    gates: tuple[Gate, ...]
    retention: Retention | None

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it: an infinite time becomes "inf"."""
        kept = self.retention
        return jsonable(
            {
                "layer": self.layer,
                "cell": self.cell,
                "gates": [vars(gate) for gate in self.gates],
                "retention": kept
                and {
                    "gate": kept.gate,
                    "mean": kept.mean,
                    "time_constant": kept.time_constant,
                    "half_life": kept.half_life,
                    "quantiles": QUANTILES,
                    "time_constants": kept.time_constants,
                    "means": kept.means.tolist(),
                },
            }
        )


def time_constant(retention: float) -> float:
    """Steps after which r^t = 1/e: −1/ln r; infinite where r ≥ 1 (nothing is lost), 0 where r ≤ 0 (all is)."""
    if retention >= 1:
        return math.inf
    return 0.0 if retention <= 0 else -1 / math.log(retention)


@torch.no_grad()
def measure_gates(model: RecurrentModel, windows: Tensor, shape: ProbeShape) -> list[LayerGates]:
    """The gates of every layer, on natural states: each window's T steps after its warm-up.

    Dropout is off, products are fp32 (float64 for a float64 model); weights, random states and training flags are left
    as they were.

    Args:
        model: The model.
        windows: (N, W + K + m + 1) int64, from `probe_windows`.
        shape: The shape they were made with.

    Returns:
        One entry a layer, from the bottom up; a cell that has no gates has an entry without any.
    """
    windows = windows.to(next(model.parameters()).device)
    tokens = windows[:, shape.warm_up : shape.length - 1]
    with measuring(model):
        states = warmed_up(model, windows, shape)
        return [
            _layer_gates(number, given, model.zoneout)
            for number, given in enumerate(model.layer_inputs(tokens, states))
        ]


def _layer_gates(number: int, given: LayerInput, zoneout: float) -> LayerGates:
    layer = given.layer
    values = {
        name: value.double().cpu() for name, value in layer.gate_values(given.gates, _entering_states(given)).items()
    }
    retention = None
    if layer.retention in values:
        kept = zoneout + (1 - zoneout) * values[layer.retention]
        retention = Retention(layer.retention, kept.flatten(0, -2).mean(0).numpy())
    gates = tuple(_gate(name, layer.gate_functions.get(name, ""), value) for name, value in values.items())
    return LayerGates(number, type(layer).__name__, gates, retention)


def _entering_states(given: LayerInput) -> State:
    """The states that each step reads, a State of (T, N, H)."""
    state, found = given.state, []
    for t, gates in enumerate(given.gates):
        found.append(state)
        output, new = given.layer.step(gates, state)
        zoneout = at(given.zoneout, t)
        state = new if zoneout is None else given.layer.zone(output, state, new, zoneout)[1]
    return map_states(lambda *parts: torch.stack(parts), *found)


def _gate(name: str, function: str, values: Tensor) -> Gate:
    """Of float64 values (T, N, H)."""

    def share(which: Tensor) -> float:
        return float(which.double().mean())

    low = high = dead = None
    if function in LIMITS:
        lower, upper = LIMITS[function]
        low, high = share(values < lower), share(values > upper)
    elif function == "relu":
        zero = values == 0
        low, dead = share(zero), share(zero.flatten(0, -2).all(0))
    return Gate(name, function, float(values.mean()), float(values.std(correction=0)), low, high, dead)
