"""What gates do on natural states: against a loop that writes every value down, and by hand."""

import json
import math
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from lmapp.cells.protocol import Cell, HiddenState
from lmapp.gradients.decay import ProbeShape, measure
from lmapp.gradients.gates import Retention, measure_gates, time_constant
from lmapp.models import RecurrentModel

V = 6
SHAPE = ProbeShape(windows=3, warm_up=4, max_lag=5, end_points=2, truncation_length=3)


class Leaky(Cell):
    """All that is owed to the protocol; it says nothing of gates."""

    state_type = HiddenState

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.gate_size = hidden_size
        self.weight = nn.Parameter(torch.empty(hidden_size, input_size))

    def project(self, x):
        return x @ self.weight.to(x.dtype).t()

    def step(self, gates, state):
        h = 0.5 * state.h + gates.tanh()
        return h.to(gates.dtype), HiddenState(h)


class Said(Leaky):
    """It has a gate, of a kind that nobody knows."""

    retention = "k"

    def gate_values(self, gates, state):
        return {"k": torch.full_like(gates, 0.5)}


NETWORKS = {
    "plain": {"cell": "lstm"},
    "linear lstm": {"cell": "lstm_linear", "num_layers": 1},
    "relu": {"cell": "vanilla", "activation": "relu"},
    "minimal": {"cell": ["mingru", "minlstm"], "num_layers": None},
    "residual": {"cell": "gru", "connections": "residual"},
    "dense": {"cell": ["gru_before", "vanilla", "lstm"], "num_layers": None, "connections": "dense"},
    "one-hot": {"cell": "gru", "embedding_size": 0},
    "reads out": {"cell": ["lstm", "concatenated"], "num_layers": None},
    "zoneout": {"cell": ["lstm", "gru", "minlstm"], "num_layers": None, "zoneout": 0.3},
    "outside": {"cell": ["somewhere:Leaky", "lstm", "somewhere:Said"], "num_layers": None},
}


def model_of(monkeypatch=None, **options):
    if monkeypatch is not None:
        module = types.ModuleType("somewhere")
        module.Leaky, module.Said = Leaky, Said
        monkeypatch.setitem(sys.modules, "somewhere", module)
    torch.manual_seed(0)
    options = {"hidden_size": 5, "num_layers": 2, "embedding_size": 5, **options}
    model = RecurrentModel(V, **options).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def text(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(V, (SHAPE.windows, SHAPE.length), generator=generator)


@pytest.mark.parametrize("network", NETWORKS)
def test_against_a_loop_that_writes_every_value_down(network, monkeypatch):
    model = model_of(monkeypatch, dropout=0.5, **NETWORKS[network])
    model.train()
    found = measure_gates(model, text(), SHAPE)
    assert model.training

    model.eval()
    written = [{} for _ in model.layers]

    def watch(layer, values, step):
        def watched(gates, state):
            for name, value in layer.gate_values(gates, state).items():
                values.setdefault(name, []).append(value.detach().numpy())
            return step(gates, state)

        return watched

    states = model.initial_state(SHAPE.windows)
    for t in range(SHAPE.length - 1):
        if t == SHAPE.warm_up:
            for layer, values in zip(model.layers, written, strict=True):
                monkeypatch.setattr(layer, "step", watch(layer, values, layer.step))
        _, states = model.step(text()[:, t], states)

    assert [layer.layer for layer in found] == list(range(len(model.layers)))
    for ours, layer, values in zip(found, model.layers, written, strict=True):
        assert ours.cell == type(layer).__name__
        assert [gate.name for gate in ours.gates] == list(values)
        for gate in ours.gates:
            every = np.stack(values[gate.name])
            assert every.shape == (SHAPE.max_lag + SHAPE.end_points, SHAPE.windows, 5)
            assert gate.mean == pytest.approx(every.mean(), rel=1e-10)
            assert gate.deviation == pytest.approx(every.std(), rel=1e-10)
            limits = {"sigmoid": (0.1, 0.9), "tanh": (-0.9, 0.9)}.get(gate.function)
            if limits:
                assert gate.low == pytest.approx((every < limits[0]).mean())
                assert gate.high == pytest.approx((every > limits[1]).mean())
                assert gate.dead is None
            elif gate.function == "relu":
                assert gate.low == pytest.approx((every == 0).mean())
                assert gate.dead == pytest.approx((every == 0).all((0, 1)).mean())
                assert 0 < gate.low < 1 and gate.high is None
            else:
                assert gate.low is gate.high is gate.dead is None
        name = layer.retention
        if name is None:
            assert ours.retention is None
        else:
            kept = np.stack(values[name]) * (1 - model.zoneout) + model.zoneout
            assert ours.retention.gate == name
            np.testing.assert_allclose(ours.retention.means, kept.mean((0, 1)), rtol=1e-10)
        json.dumps(ours.as_dict(), allow_nan=False)


def test_cells_without_gates_have_an_empty_entry(monkeypatch):
    bottom, _, top = measure_gates(model_of(monkeypatch, **NETWORKS["outside"]), text(), SHAPE)
    assert bottom.as_dict() == {"layer": 0, "cell": "Leaky", "gates": [], "retention": None}
    (gate,) = top.gates
    assert (gate.name, gate.function, gate.mean, gate.low, gate.high) == ("k", "", 0.5, None, None)
    assert top.retention.mean == 0.5


def test_nothing_else_changes():
    model = model_of(cell="lstm", dropout=0.5).float()
    model.compute_dtype = torch.bfloat16
    model.train()
    before, random = [p.clone() for p in model.parameters()], torch.get_rng_state()
    first = measure_gates(model, text(), SHAPE)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training and model.compute_dtype == torch.bfloat16
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), before, strict=True))
    model.compute_dtype = torch.float32
    assert [layer.as_dict() for layer in measure_gates(model, text(), SHAPE)] == [layer.as_dict() for layer in first]


# By hand


def constant(cell, **options):
    """A network whose parameters are all 0."""
    model = RecurrentModel(V, cell=cell, hidden_size=3, **options).double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def test_the_lstm_without_weights_keeps_a_half():
    """Its memory decays by 1/2 a step, and so does the gradient that reaches it: both half-lives are one step."""
    model = constant("lstm")
    model.head.weight.data[0] = 1
    (found,) = measure_gates(model, text(), SHAPE)
    assert {gate.name: gate.mean for gate in found.gates} == {"i": 0.5, "f": 0.5, "g": 0, "o": 0.5}
    assert all(gate.deviation == gate.low == gate.high == 0 for gate in found.gates)
    assert found.retention.time_constant == pytest.approx(1 / math.log(2), rel=1e-14)
    assert found.retention.half_life == pytest.approx(1, rel=1e-14)
    assert found.retention.time_constants == pytest.approx([1 / math.log(2)] * 3, rel=1e-14)
    c = measure(model, text(), SHAPE).curve(0, "c").R
    assert c[2] / c[1] == pytest.approx(0.5 ** (1 / found.retention.half_life), rel=1e-12)


def test_a_gate_that_is_open_keeps_for_ever():
    model = constant("gru")
    model.layers[0].bias_ih.data[3:6] = torch.tensor([-1000.0, 0.0, 1000.0])
    (found,) = measure_gates(model, text(), SHAPE)
    kept = found.retention
    assert kept.means.tolist() == [0, 0.5, 1]
    assert kept.mean == 0.5
    assert kept.time_constants == pytest.approx([-1 / math.log(0.1), 1 / math.log(2), -1 / math.log(0.9)])
    z = next(gate for gate in found.gates if gate.name == "z")
    assert (z.low, z.high) == pytest.approx((1 / 3, 1 / 3))
    model.layers[0].bias_ih.data[3:6] = 1000
    (found,) = measure_gates(model, text(), SHAPE)
    assert found.retention.half_life == math.inf
    said = json.loads(json.dumps(found.as_dict(), allow_nan=False))["retention"]
    assert said["time_constant"] == said["half_life"] == "inf"
    assert said["time_constants"] == ["inf"] * 3
    assert said["means"] == [1, 1, 1]


def test_zoneout_keeps_more():
    (found,) = measure_gates(constant("mingru", zoneout=0.2), text(), SHAPE)
    assert found.retention.gate == "1-z"
    assert found.retention.mean == pytest.approx(0.2 + 0.8 * 0.5, rel=1e-14)
    assert found.gates[0].mean == 0.5


def test_tanh_and_relu_limits():
    model = constant("vanilla", activation="tanh")
    model.layers[0].bias_ih.data = torch.tensor([-2.0, 0.5, 2.0], dtype=torch.float64)
    (gate,) = measure_gates(model, text(), SHAPE)[0].gates
    assert (gate.function, gate.low, gate.high) == ("tanh", pytest.approx(1 / 3), pytest.approx(1 / 3))
    model = constant("vanilla", activation="relu")
    model.layers[0].bias_ih.data = torch.tensor([-2.0, -1.0, 2.0], dtype=torch.float64)
    (gate,) = measure_gates(model, text(), SHAPE)[0].gates
    assert (gate.low, gate.dead, gate.high) == (pytest.approx(2 / 3), pytest.approx(2 / 3), None)


def test_dead_is_never_active():
    """Of the units that are 0 somewhere only one is 0 everywhere."""
    model = constant("vanilla", activation="relu")
    model.layers[0].weight_ih.data[0, 0] = 1
    model.layers[0].bias_ih.data = torch.tensor([0.0, -1.0, 2.0], dtype=torch.float64)
    windows = torch.ones(SHAPE.windows, SHAPE.length, dtype=torch.int64)
    windows[1, SHAPE.warm_up] = 0
    (gate,) = measure_gates(model, windows, SHAPE)[0].gates
    steps = SHAPE.windows * (SHAPE.max_lag + SHAPE.end_points)
    assert gate.dead == pytest.approx(1 / 3)
    assert gate.low == pytest.approx((2 * steps - 1) / (3 * steps))
    windows[1, SHAPE.warm_up], windows[1, SHAPE.warm_up - 1], windows[:, -1] = 1, 0, 0
    (gate,) = measure_gates(model, windows, SHAPE)[0].gates
    assert gate.dead == pytest.approx(2 / 3)


def test_time_constants():
    assert time_constant(math.exp(-1 / 7)) == pytest.approx(7)
    assert (time_constant(1.0), time_constant(0.0)) == (math.inf, 0)
    assert math.isnan(time_constant(math.nan))
    kept = Retention("f", np.array([0.9, 0.5]))
    assert kept.time_constant == pytest.approx(-1 / math.log(0.7))
    assert kept.half_life == pytest.approx(math.log(0.5) / math.log(0.7))
    assert kept.mean**kept.half_life == pytest.approx(0.5)


def test_on_real_text(real_text):
    letters = sorted(set(real_text[:2000]))
    ids = torch.tensor([letters.index(c) for c in real_text[: 3 * SHAPE.length]]).view(3, -1)
    torch.manual_seed(0)
    model = RecurrentModel(len(letters), cell="lstm", hidden_size=16, num_layers=2, forget_bias=3.0)
    for layer in measure_gates(model, ids, SHAPE):
        f = next(gate for gate in layer.gates if gate.name == "f")
        assert 0.8 < f.mean < 1 and f.high > 0.5
        assert f.mean == pytest.approx(layer.retention.mean)
        low, middle, high = layer.retention.time_constants
        assert 5 < low < middle < high < 100
