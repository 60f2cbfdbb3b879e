"""What is offered against gradients that vanish, each by its equation: in the biases drawn and in what it is for."""

import math

import pytest
import torch

from lmapp.cells.gru import GRU
from lmapp.cells.gru_before import GRUBefore
from lmapp.cells.lstm import LSTM
from lmapp.cells.lstm_linear import LinearLSTM
from lmapp.cells.protocol import HiddenState
from lmapp.cells.vanilla import Vanilla
from lmapp.models import RecurrentModel

GATES = {LSTM: "ifgo", LinearLSTM: "ifgo", GRU: "rzn", GRUBefore: "rzn"}
"""The order of a cell's blocks."""


def biases(cell):
    """By gate, what is added to it, having looked that all of it is in the first of the two biases."""
    assert not cell.bias_hh.any()
    return dict(zip(GATES[type(cell)], cell.bias_ih.detach().split(cell.hidden_size), strict=True))


# Recurrent matrices ---------------------------------------------------------------------------------------------------


def test_the_identity_and_rectifiers_keep_the_state_and_its_gradient():
    """Le, Jaitly & Hinton 2015, arXiv:1504.00941: h_t = ReLU(h_{t−1} + W_hx x_t) at first, so nothing fades."""
    cell = Vanilla(3, 6, activation="relu").double()
    cell.reset_parameters("identity")
    assert torch.equal(cell.weight_hh.detach(), torch.eye(6, dtype=torch.float64))
    assert not cell.bias_ih.any()
    assert not cell.bias_hh.any()
    h = torch.rand(2, 6, dtype=torch.float64, requires_grad=True)
    outputs, _ = cell(torch.zeros(50, 2, 3, dtype=torch.float64), HiddenState(h))
    assert torch.equal(outputs.detach(), h.detach().expand(50, 2, 6))
    upstream = torch.randn(2, 6, dtype=torch.float64)
    outputs[-1].backward(upstream)
    torch.testing.assert_close(h.grad, upstream, rtol=0, atol=0)


@pytest.mark.parametrize("init", ["orthogonal", "identity"])
def test_a_linear_network_of_either_start_keeps_the_gradient_s_length(init):
    cell = Vanilla(3, 16, activation="identity").double()
    torch.manual_seed(2)
    cell.reset_parameters(init)
    weight = torch.nn.init.orthogonal_(cell.weight_hh.data) if init == "orthogonal" else cell.weight_hh
    torch.testing.assert_close(weight @ weight.T, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-12)
    h = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    outputs, _ = cell(torch.randn(60, 2, 3, dtype=torch.float64), HiddenState(h))
    upstream = torch.randn(2, 16, dtype=torch.float64)
    outputs[-1].backward(upstream)
    torch.testing.assert_close(h.grad.norm(dim=1), upstream.norm(dim=1), rtol=1e-10, atol=0)


def test_rectifiers_pass_a_gradient_whole_or_not_at_all():
    cell = Vanilla(1, 1, activation="relu").double()
    cell.reset_parameters("identity")
    for gate, expected, slope in ((0.7, 0.7 + 0.2, 1.0), (-0.1, 0.2 - 0.1, 1.0), (-0.3, 0.0, 0.0)):
        h = torch.full((1, 1), 0.2, dtype=torch.float64, requires_grad=True)
        outputs, _ = cell.scan(torch.full((1, 1, 1), gate, dtype=torch.float64), HiddenState(h))
        outputs.backward(torch.ones_like(outputs))
        assert (outputs.item(), h.grad.item()) == pytest.approx((expected, slope), abs=1e-15)


# Biases ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["orthogonal", "identity"])
@pytest.mark.parametrize("kind", [LSTM, LinearLSTM])
def test_an_lstm_s_forget_gate_starts_with_a_bias_of_one(kind, init):
    """So that it starts at σ(1): c keeps 0.73 of itself at a step without input, and its gradient too."""
    cell = kind(3, 6).double()
    cell.reset_parameters(init)
    found = biases(cell)
    assert found["f"].eq(1).all()
    assert not any(found[gate].any() for gate in "igo")
    state = cell.initial_state(1)._replace(c=torch.full((1, 6), 0.5, dtype=torch.float64, requires_grad=True))
    _, last = cell.step(cell.project(torch.zeros(1, 3, dtype=torch.float64)), state)
    last.c.sum().backward()
    torch.testing.assert_close(last.c, state.c / (1 + math.exp(-1)))
    torch.testing.assert_close(state.c.grad, torch.full_like(state.c, 1 / (1 + math.exp(-1))))


@pytest.mark.parametrize("kind", GATES)
def test_chrono_initialisation(kind):
    """arXiv:1804.11188: b_f = log U(1, T_max − 1), b_i = −b_f; of a GRU the same on z, which keeps."""
    cell, longest = kind(2, 500), 30.0
    torch.manual_seed(6)
    cell.set_memory_bias(None, longest)
    found = biases(cell)
    keeps = found.pop("f" if "f" in found else "z")
    times = keeps.double().exp()
    assert times.min() >= 1
    assert times.max() <= longest - 1 + 1e-4
    assert times.min() < 1.3
    assert times.max() > longest - 1.3
    assert times.mean().item() == pytest.approx(longest / 2, abs=1)
    assert times.std().item() == pytest.approx((longest - 2) / math.sqrt(12), abs=0.6)  # uniform, not its logarithm
    if "i" in found:
        assert torch.equal(found.pop("i"), -keeps)
    assert not any(bias.any() for bias in found.values())


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_chrono_initialisation_keeps_u_of_u_plus_one(name):
    """σ(log u) = u/(1 + u): a memory of 1 + u steps; what is new comes in by 1/(1 + u)."""
    torch.manual_seed(6)
    (cell,) = RecurrentModel(5, cell=name, hidden_size=8, chrono=40.0).double().layers
    found = biases(cell)
    u = found["f" if name == "lstm" else "z"].exp()
    torch.nn.init.zeros_(cell.weight_hh)
    memory = torch.full((1, 8), 0.25, dtype=torch.float64, requires_grad=True)
    state = cell.initial_state(1)
    state = type(state)(*state[:-1], memory)
    candidate = torch.tensor(0.5, dtype=torch.float64)
    gates = cell.project(torch.zeros(1, 5, dtype=torch.float64))
    gates = gates + torch.cat(
        [torch.full((8,), float(candidate) if gate in "gn" else 0.0) for gate in GATES[type(cell)]]
    )
    _, last = cell.step(gates, state)
    torch.testing.assert_close(last[-1][0], (u * 0.25 + candidate.tanh()) / (1 + u))
    last[-1].sum().backward()
    torch.testing.assert_close(memory.grad[0], u / (1 + u))


# Connections ----------------------------------------------------------------------------------------------------------


def test_a_residual_connection_adds_a_way_down_that_nothing_shrinks():
    """Y = x + h: what the readout hands down reaches the layer below whole, beside what the cell above lets by."""
    for connections, own in (("plain", 0.0), ("residual", 1.0)):
        torch.manual_seed(3)
        model = RecurrentModel(5, cell="gru", num_layers=2, hidden_size=5, connections=connections).double()
        torch.nn.init.eye_(model.head.weight)
        top = model.layers[1]
        for parameter in top.parameters():
            torch.nn.init.zeros_(parameter)  # so that nothing passes through it
        seen = []
        model.layers[1].register_forward_pre_hook(lambda _, arguments, seen=seen: seen.append(arguments[0]))
        logits, _ = model(torch.tensor([[1, 2, 3]]), model.initial_state(1))
        (gradient,) = torch.autograd.grad(logits.sum(), seen)
        torch.testing.assert_close(gradient, torch.full_like(gradient, own), rtol=0, atol=1e-15)
