"""The cells' equations, parameters and kernels, against torch.nn and by hand."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from lmapp.cells import CELLS, find
from lmapp.cells.gru import GRU
from lmapp.cells.gru_before import GRUBefore
from lmapp.cells.lstm import LSTM, LSTMState
from lmapp.cells.protocol import Cell, HiddenState
from lmapp.cells.vanilla import Vanilla
from lmapp.errors import UsageError

PEERS = [
    (lambda: Vanilla(4, 6), lambda: nn.RNN(4, 6)),
    (lambda: Vanilla(4, 6, activation="relu"), lambda: nn.RNN(4, 6, nonlinearity="relu")),
    (lambda: LSTM(4, 6), lambda: nn.LSTM(4, 6)),
    (lambda: GRU(4, 6), lambda: nn.GRU(4, 6)),
    (lambda: Vanilla(4, 6, bias=False), lambda: nn.RNN(4, 6, bias=False)),
    (lambda: LSTM(4, 6, bias=False), lambda: nn.LSTM(4, 6, bias=False)),
    (lambda: GRU(4, 6, bias=False), lambda: nn.GRU(4, 6, bias=False)),
]


def as_peer(state):
    parts = tuple(s.unsqueeze(0) for s in state)
    return parts if len(parts) > 1 else parts[0]


def gradients(function, leaves):
    found = function()
    generator = torch.Generator().manual_seed(3)
    loss = sum((x * torch.randn(x.shape, generator=generator).to(x.dtype)).sum() for x in found)
    return [x.detach() for x in (*found, *torch.autograd.grad(loss, leaves))]


@pytest.mark.parametrize(("ours", "theirs"), PEERS)
@pytest.mark.parametrize("direction", ["from torch", "to torch"])
def test_weights_move_to_and_from_torch(ours, theirs, direction):
    torch.manual_seed(0)
    cell, peer = ours().double(), theirs().double()
    suffixed = {f"{name}_l0": value for name, value in cell.state_dict().items()}
    if direction == "to torch":
        peer.load_state_dict(suffixed)
    else:
        cell.load_state_dict({name.removesuffix("_l0"): value for name, value in peer.state_dict().items()})
    x = torch.randn(9, 3, 4, dtype=torch.float64, requires_grad=True)
    state = cell.state_type(
        *(torch.randn(3, 6, dtype=torch.float64, requires_grad=True) for _ in range(len(cell.state_type._fields)))
    )

    def run_ours():
        outputs, last = cell(x, state)
        return outputs, *last

    def run_theirs():
        outputs, last = peer(x, as_peer(state))
        return outputs, *(s.squeeze(0) for s in (last if isinstance(last, tuple) else (last,)))

    found = gradients(run_ours, (x, *state, *cell.parameters()))
    expected = gradients(run_theirs, (x, *state, *peer.parameters()))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("ours", "theirs"), PEERS)
def test_torchs_kernel_and_ours_are_one_function(ours, theirs, monkeypatch):
    torch.manual_seed(0)
    cell = ours()
    x = torch.randn(9, 3, 4, requires_grad=True)
    state = cell.state_type(*(torch.randn(3, 6, requires_grad=True) for _ in range(len(cell.state_type._fields))))
    found = {}
    for kernel in ("scan", "torch"):
        monkeypatch.setattr(type(cell), "kernel", lambda *_, kernel=kernel: kernel)

        def run():
            outputs, last = cell(x, state)
            return outputs, *last

        found[kernel] = gradients(run, (x, *state, *cell.parameters()))
    for mine, other in zip(found["scan"], found["torch"], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_the_rule_for_kernels():
    f32, b16, f64 = torch.float32, torch.bfloat16, torch.float64
    for cell in (GRU(4, 6), Vanilla(4, 6), Vanilla(4, 6, activation="relu")):
        assert [cell.kernel("cpu", dtype, False) for dtype in (f32, b16, f64)] == ["scan"] * 3
        assert cell.kernel("cuda", f32, False) == "torch"
        assert cell.kernel("cuda", f32, True) == "scan"
    for activation in ("sigmoid", "identity"):
        assert Vanilla(4, 6, activation=activation).kernel("cuda", f32, False) == "scan"
    cell = LSTM(4, 6)
    assert [cell.kernel("cpu", dtype, False) for dtype in (f32, b16, f64)] == ["torch", "torch", "scan"]
    assert [cell.kernel("cpu", dtype, True) for dtype in (f32, b16, f64)] == ["scan"] * 3
    assert LSTM(13, 6).kernel("cpu", f32, False) == "scan"
    assert LSTM(13, 6).kernel("cuda", f32, False) == "torch"


@pytest.mark.parametrize("kind", [Vanilla, LSTM, GRU])
def test_masks_run_the_scan(kind):
    cell = kind(4, 6)
    x, keep = torch.randn(5, 2, 4), torch.tensor([[1, 1], [1, 0], [1, 1], [0, 1], [1, 1]])
    outputs, _ = cell(x, cell.initial_state(2), keep)
    expected, _ = Cell.scan(cell, cell.project(x), cell.initial_state(2), keep)
    torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize(("kind", "expected"), [(GRU, 0.231059), (GRUBefore, 0.380797)])
def test_where_the_reset_gate_acts_by_hand(kind, expected):
    cell = kind(1, 1).double()
    for parameter in cell.parameters():
        nn.init.zeros_(parameter)
    cell.bias_hh.data[2] = 1
    output, _ = cell.step(cell.project(torch.zeros(1, 1, dtype=torch.float64)), cell.initial_state(1))
    assert output.item() == pytest.approx(expected, abs=5e-7)


def test_lstm_step_by_hand():
    cell = LSTM(1, 1).double()
    gates = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    nn.init.zeros_(cell.weight_hh)
    output, after = cell.step(gates, LSTMState(*torch.tensor([[[0.5]], [[0.6]]], dtype=torch.float64)))
    c = 0.6 / (1 + math.exp(-0.2)) + math.tanh(0.3) / (1 + math.exp(-0.1))
    assert after.c.item() == pytest.approx(c, abs=1e-12)
    assert output.item() == after.h.item() == pytest.approx(math.tanh(c) / (1 + math.exp(-0.4)), abs=1e-12)


@pytest.mark.parametrize("kind", [Vanilla, LSTM, GRU])
def test_orthogonal_initialisation(kind):
    torch.manual_seed(0)
    cell = kind(5, 8)
    for block in cell.weight_hh.detach().chunk(cell.blocks):
        torch.testing.assert_close(block @ block.T, torch.eye(8), rtol=0, atol=1e-5)
    biases = (cell.bias_ih + cell.bias_hh).detach()
    expected = torch.zeros_like(biases)
    if kind is LSTM:
        expected[8:16] = 1
        assert not cell.bias_hh.any()
    assert torch.equal(biases, expected)
    torch.manual_seed(0)
    assert all(map(torch.equal, cell.parameters(), kind(5, 8).parameters()))


@pytest.mark.parametrize("kind", [Vanilla, LSTM, GRU])
def test_torchs_initialisation(kind):
    cell = kind(5, 64)
    cell.reset_parameters("torch")
    for parameter in map(torch.Tensor.detach, cell.parameters()):
        assert parameter.abs().max() <= 1 / 8
        assert parameter.std() == pytest.approx(1 / 8 / math.sqrt(3), rel=0.3)
    with pytest.raises(ValueError, match="orthogonal"):
        cell.reset_parameters("xavier")


def test_every_name_is_found():
    for name in CELLS:
        assert issubclass(find(name), Cell)
    assert find("lmapp.cells.gru:GRU") is GRU


@pytest.mark.parametrize(
    ("name", "said"), [("gruu", "'gru'"), ("LSTM", "'lstm'"), ("zzz", "vanilla"), ("nowhere.at:All", "nowhere")]
)
def test_an_unknown_name_is_refused(name, said):
    with pytest.raises(UsageError, match=said):
        find(name)


def test_an_unknown_activation_is_refused():
    with pytest.raises(UsageError, match="tanh, relu, sigmoid, identity"):
        Vanilla(4, 6, activation="gelu")


def test_looking_up_names_imports_no_torch():
    code = "import sys, lmapp.cells; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_initial_states_are_wide_zeros():
    assert isinstance(GRU(4, 6).initial_state(3), HiddenState)
    state = LSTM(4, 6).initial_state(3)
    assert [s.shape for s in state] == [(3, 6)] * 2
    assert state.c.dtype == torch.float32
    assert LSTM(4, 6).double().initial_state(3).c.dtype == torch.float64
    assert not any(s.any() for s in state)
