"""The values of each cell's gates: from them alone, and the old state, its step can be made again."""

import importlib
import inspect
import itertools
import pkgutil

import pytest
import torch
from torch import nn

import lmapp.cells
from lmapp.cells.protocol import Cell, HiddenState
from lmapp.cells.vanilla import ACTIVATIONS

# The new state by the old one, its last component, as each cell's equation has it.
RULES = {
    "Vanilla": lambda old, h: h,
    "LSTM": lambda old, i, f, g, o: f * old + i * g,
    "LinearLSTM": lambda old, i, f, g, o: f * old + i * g,
    "GRU": lambda old, r, z, n: (1 - z) * n + z * old,
    "GRUBefore": lambda old, r, z, n: (1 - z) * n + z * old,
    "MinGRU": lambda old, **v: v["1-z"] * old + v["z"] * v["candidate"],
    "MinLSTM": lambda old, f_normalised, i_normalised, candidate: f_normalised * old + i_normalised * candidate,
}
OUTPUTS = {"LSTM": lambda new, o, **_: o * new.tanh(), "LinearLSTM": lambda new, o, **_: o * new}
"""Where the output is not the new state."""
GATELESS = {"Concatenated"}
BASES = {"LinearCell"}
"""Classes with a step that are no cells by themselves."""
LIMITS = {"sigmoid": (0, 1), "tanh": (-1, 1), "relu": (0, float("inf"))}


def every_cell():
    modules = [importlib.import_module(f"lmapp.cells.{m.name}") for m in pkgutil.iter_modules(lmapp.cells.__path__)]
    kinds = {kind for module in modules for _, kind in inspect.getmembers(module, inspect.isclass)}
    cells = {kind for kind in kinds if issubclass(kind, Cell) and kind.step is not Cell.step} - {Cell}
    return sorted((kind for kind in cells if kind.__name__ not in BASES), key=lambda kind: kind.__name__)


def variants(kind):
    activations = list(ACTIVATIONS) if "activation" in kind.options else [None]
    biases = [True, False] if "bias" in kind.options else [None]
    for activation, bias in itertools.product(activations, biases):
        yield {name: value for name, value in (("activation", activation), ("bias", bias)) if value is not None}


KINDS = every_cell()
CASES = [pytest.param(kind, options, id=f"{kind.__name__}-{options}") for kind in KINDS for options in variants(kind)]


def make(kind, dtype=torch.float64, **options):
    torch.manual_seed(1)
    if kind.reads_out:
        options["output_size"] = 4
    cell = kind(5, 7, **options)
    for parameter in cell.parameters():
        nn.init.normal_(parameter)
    return cell.to(dtype)


def inputs(cell, *shape, dtype=torch.float64):
    wide = torch.promote_types(dtype, torch.float32)
    state = (torch.randn(*shape, cell.hidden_size, dtype=wide) for _ in cell.state_type._fields)
    return torch.randn(*shape, cell.gate_size, dtype=dtype), cell.state_type(*state)


def test_every_cell_has_its_rule_here_or_no_gates():
    assert {kind.__name__ for kind in KINDS} == {*RULES, *GATELESS}


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_step_can_be_made_again(kind, options):
    cell = make(kind, **options)
    gates, state = inputs(cell, 3)
    values, (output, new) = cell.gate_values(gates, state), cell.step(gates, state)
    if kind.__name__ in GATELESS:
        assert (values, cell.retention) == ({}, None)
        return
    again = RULES[kind.__name__](state[-1], **values)
    torch.testing.assert_close(again, new[-1], rtol=1e-14, atol=1e-14)
    out = OUTPUTS.get(kind.__name__, lambda new, **_: new)(again, **values)
    torch.testing.assert_close(out, output, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_retention_is_what_multiplies_the_old_state(kind):
    cell = make(kind)
    gates, state = inputs(cell, 3)
    values = cell.gate_values(gates, state)
    if not values:
        return
    old = state[-1].clone().requires_grad_()
    (factor,) = torch.autograd.grad(
        RULES[kind.__name__](old, **values).sum() + 0 * old.sum(), old, materialize_grads=True
    )
    if cell.retention is None:
        assert not factor.any()
        assert not cell.remembers
    else:
        torch.testing.assert_close(factor, values[cell.retention].detach(), rtol=1e-14, atol=1e-14)
        assert cell.remembers


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_values_lie_where_their_functions_say(kind, options):
    cell = make(kind, **options)
    gates, state = inputs(cell, 50)
    values = cell.gate_values(3 * gates, state)
    assert set(cell.gate_functions) <= set(values)
    for name, function in cell.gate_functions.items():
        low, high = LIMITS.get(function, (-float("inf"), float("inf")))
        assert low <= values[name].min() and values[name].max() <= high
        if function == "tanh":
            assert values[name].min() < 0
    unbounded = {name for name in values if cell.gate_functions.get(name, "identity") == "identity"}
    assert all(values[name].abs().max() > 1 for name in unbounded)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_all_steps_at_once(kind, options):
    cell = make(kind, **options)
    gates, state = inputs(cell, 4, 3)
    together = cell.gate_values(gates, state)
    for t in range(4):
        alone = cell.gate_values(gates[t], type(state)(*(s[t] for s in state)))
        assert together.keys() == alone.keys()
        for name, value in alone.items():
            assert value.shape == (3, cell.hidden_size)
            torch.testing.assert_close(together[name][t], value, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_in_lower_precision_too(kind):
    cell = make(kind, torch.float32)
    gates, state = inputs(cell, 3, dtype=torch.bfloat16)
    values, (_, new) = cell.gate_values(gates, state), cell.step(gates, state)
    if values:
        torch.testing.assert_close(RULES[kind.__name__](state[-1], **values).float(), new[-1], rtol=2e-2, atol=2e-2)


def test_a_cell_need_not_say():
    class Own(Cell):
        state_type = HiddenState
        gate_size = 2

        def project(self, x):
            return x

        def step(self, gates, state):
            return gates, HiddenState(gates)

    cell = Own(2, 2)
    assert cell.gate_values(torch.zeros(1, 2), HiddenState(torch.zeros(1, 2))) == {}
    assert cell.retention is None
    assert not cell.gate_functions
