"""The backward passes derived by hand: their blocks, their place in the graph, their products."""

import pytest
import torch
from torch import Tensor

from lmapp.cells import gru, lstm, products, protocol
from lmapp.cells.gru import GRU
from lmapp.cells.lstm import LSTM
from lmapp.cells.protocol import Cell, GatedCell
from lmapp.cells.vanilla import ACTIVATIONS, Vanilla

KINDS = [*(("vanilla", name) for name in ACTIVATIONS), ("lstm", ""), ("gru", "")]


def make(kind: tuple[str, str], width: int = 5, size: int = 7, dtype: torch.dtype = torch.float64) -> GatedCell:
    name, activation = kind
    torch.manual_seed(1)
    if name == "vanilla":
        cell: GatedCell = Vanilla(width, size, activation=activation)
    else:
        cell = {"lstm": LSTM, "gru": GRU}[name](width, size)
    torch.nn.init.normal_(cell.bias_hh)
    return cell.to(dtype)


def random_inputs(cell: GatedCell, steps: int, batch: int, dtype: torch.dtype = torch.float64) -> tuple:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    gates = torch.randn(steps, batch, cell.gate_size, dtype=dtype)
    state = cell.state_type(*(torch.randn(batch, cell.hidden_size, dtype=wide) for _ in cell.state_type._fields))
    return gates, state


def differentiate(cell: GatedCell, scan, gates: Tensor, state, keep=None, credit=None) -> dict[str, Tensor]:
    """Outputs, last state and the gradients of a random linear function of both."""
    gates = gates.clone().requires_grad_()
    state = cell.state_type(*(s.clone().requires_grad_() for s in state))
    cell.zero_grad()
    outputs, last = scan(gates, state, keep, credit)
    generator = torch.Generator().manual_seed(7)
    loss = sum((x.double() * torch.randn(x.shape, generator=generator).double()).sum() for x in (outputs, *last))
    loss.backward()
    found = {"outputs": outputs, "gates": gates.grad, "weight_hh": cell.weight_hh.grad}
    for name, before, after in zip(state._fields, state, last, strict=True):
        found |= {f"last {name}": after, f"first {name}": before.grad}
    if isinstance(cell, GRU):
        found["bias_hh"] = cell.bias_hh.grad
    else:
        assert cell.bias_hh.grad is None
    return {name: value.detach() for name, value in found.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        error = (value.double() - expected[name].double()).norm() / expected[name].double().norm().clamp_min(1e-6)
        assert error < tolerance, (name, float(error))


@pytest.mark.parametrize("kind", [("lstm", ""), ("gru", "")])
def test_blocks_of_the_backward_pass_join(kind, monkeypatch):
    for module in (lstm, gru):
        monkeypatch.setattr(module, "blocks_backward", lambda steps, _: protocol.blocks_backward(steps, 2**19))
    cell = make(kind)
    gates, state = random_inputs(cell, 7, 2)
    expected = differentiate(cell, lambda *a: Cell.scan(cell, *a), gates, state)
    assert_same(differentiate(cell, cell.scan, gates, state), expected, 1e-12)


def test_blocks_cover_every_step_once_and_backwards():
    blocks = list(protocol.blocks_backward(10, 2**18))
    assert [t for block in blocks for t in reversed(block)] == list(range(9, -1, -1))
    assert max(map(len, blocks)) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_carried_in_fp32(kind):
    """Two windows in bf16 are one window, to the last bit: nothing is rounded between them but where it always is."""
    cell = make(kind, size=16, dtype=torch.float32)
    gates, state = random_inputs(cell, 8, 2, torch.bfloat16)
    whole, last = cell.scan(gates, state)
    first, between = cell.scan(gates[:5], state)
    second, end = cell.scan(gates[5:], between)
    assert torch.equal(whole, torch.cat((first, second)))
    assert all(map(torch.equal, last, end))


def test_a_second_derivative_is_refused():
    cell = make(("gru", ""))
    gates, state = random_inputs(cell, 3, 2)
    outputs, _ = cell.scan(gates.requires_grad_(), state)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), gates, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_changed_weights_are_noticed():
    cell = make(("gru", ""))
    gates, state = random_inputs(cell, 3, 2)
    outputs, _ = cell.scan(gates, state)
    with torch.no_grad():
        cell.weight_hh += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_gradients_can_be_taken_twice_of_one_graph():
    cell = make(("lstm", ""))
    gates, state = random_inputs(cell, 3, 2)
    outputs, _ = cell.scan(gates.requires_grad_(), state)
    loss = outputs.sum()
    first = torch.autograd.grad(loss, gates, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, gates)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_linear_is_torchs(dtype):
    torch.manual_seed(0)
    weight = torch.randn(6, 5, requires_grad=True)
    bias = torch.randn(6, requires_grad=True)
    x = torch.randn(40, 8, 5).to(dtype).requires_grad_()
    if dtype == torch.float64:
        weight, bias = (p.detach().double().requires_grad_() for p in (weight, bias))
    upstream = torch.randn(40, 8, 6).to(dtype)
    y = products.linear(x, weight, bias)
    found = (y, *torch.autograd.grad(y, (x, weight, bias), upstream))
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = torch.nn.functional.linear(*wide)
    expected = (expected, *torch.autograd.grad(expected, wide, upstream.double()))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < {4: 1e-6, 2: 1e-2, 8: 1e-14}[dtype.itemsize]
