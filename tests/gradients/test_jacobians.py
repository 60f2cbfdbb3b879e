"""Products with Jacobians: against torch's own jacobian, against differences, and by hand."""

import gc
import sys
import types
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lmapp.cells import CELLS
from lmapp.cells.protocol import Cell, HiddenState
from lmapp.gradients.jacobians import flatten, network_jacobian, unflatten
from lmapp.models import RecurrentModel

V, ROWS = 6, 3


class Memory(NamedTuple):
    """A state that has no h."""

    s: Tensor
    r: Tensor


class Doubling(Cell):
    """Only what is owed; its output is not its state."""

    state_type = Memory

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.gate_size = hidden_size
        self.output_size = 2 * hidden_size
        self.inputs = nn.Linear(input_size, hidden_size)
        self.weight = nn.Parameter(torch.empty(hidden_size, hidden_size).normal_())

    def project(self, x):
        return self.inputs(x).sin()

    def step(self, gates, state):
        s = (gates + state.s @ self.weight * state.r).tanh()
        return torch.cat((s, state.r * gates), 1), Memory(s, state.s)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class Sealed(Doubling):
    """Its backward pass is its own."""

    def step(self, gates, state):
        output, new = super().step(gates, state)
        return output, Memory(_Cube.apply(new.s), new.r)


class Forgetting(Doubling):
    """It does not read its state."""

    state_type = HiddenState

    def step(self, gates, state):
        return torch.cat((gates, gates), 1), HiddenState(gates.tanh())


NETWORKS = {
    **{cell: {"cell": cell, "num_layers": 1} for cell in CELLS},
    **{f"{cell} stacked": {"cell": cell, "num_layers": 2} for cell in CELLS if cell != "concatenated"},
    **{name: {"cell": "vanilla", "activation": name} for name in ("relu", "sigmoid", "identity")},
    "doubling": {"cell": "somewhere:Doubling", "num_layers": 2},
    "sealed": {"cell": ["somewhere:Sealed", "gru"], "num_layers": None},
    "forgetting": {"cell": "somewhere:Forgetting", "num_layers": 2},
    "mixed": {"cell": ["lstm", "gru", "vanilla"], "num_layers": None},
    "residual": {"cell": ["gru", "lstm"], "num_layers": None, "connections": "residual", "embedding_size": 4},
    "dense": {"cell": ["vanilla", "mingru", "lstm"], "num_layers": None, "connections": "dense"},
    "dense, concatenated on top": {"cell": ["gru", "concatenated"], "num_layers": None, "connections": "dense"},
    "zoneout": {"cell": ["lstm", "gru"], "num_layers": None, "zoneout": 0.3, "connections": "residual"},
    "tied": {"cell": "gru", "tie_embeddings": True, "embedding_size": 4},
}


@pytest.fixture(autouse=True)
def _somewhere(monkeypatch):
    module = types.ModuleType("somewhere")
    module.__dict__.update({name: value for name, value in globals().items() if isinstance(value, type)})
    monkeypatch.setitem(sys.modules, "somewhere", module)


@pytest.fixture(params=NETWORKS)
def model(request):
    torch.manual_seed(0)
    options = {"hidden_size": 4, "num_layers": 1, "dropout": 0.5, **NETWORKS[request.param]}
    if "concatenated" in options["cell"]:
        options["dropout"] = 0.0
    model = RecurrentModel(V, **options).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    return model


def random_states(model, rows=ROWS):
    return tuple(type(s)(*(torch.randn_like(x) for x in s)) for s in model.initial_state(rows))


def reference(model, tokens, states):
    """(R, n, n) by torch's own jacobian, row by row, component by component."""
    rows = []
    for row in range(len(tokens)):
        components = tuple(x[row] for state in states for x in state)

        def after(*components, row=row):
            given = iter(components)
            before = tuple(type(state)(*(next(given).unsqueeze(0) for _ in state)) for state in states)
            _, new = model.step(tokens[row : row + 1], before)
            return tuple(x.squeeze(0) for state in new for x in state)

        blocks = torch.autograd.functional.jacobian(after, components)
        rows.append(torch.cat([torch.cat(line, 1) for line in blocks]))
    return torch.stack(rows)


def test_against_torchs_jacobian(model):
    tokens, states = torch.tensor([1, 4, 4]), random_states(model)
    expected = reference(model, tokens, states)
    jacobian = network_jacobian(model, tokens, states)
    n = expected.shape[-1]
    assert jacobian.states.shape == jacobian.after.shape == (ROWS, n)
    torch.testing.assert_close(jacobian.dense(), expected, atol=1e-12, rtol=1e-12)
    for _ in range(2):  # a second product is made from the same graph
        v, u = torch.randn(ROWS, n).double(), torch.randn(ROWS, n).double()
        torch.testing.assert_close(jacobian.jvp(v), torch.einsum("rij,rj->ri", expected, v), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(jacobian.vjp(u), torch.einsum("rij,ri->rj", expected, u), atol=1e-12, rtol=1e-12)


def test_against_differences_of_a_step(model):
    torch.manual_seed(3)
    tokens, states = torch.tensor([0, 2, 5]), random_states(model)
    jacobian = network_jacobian(model, tokens, states)
    flat = flatten(states)
    with torch.no_grad():
        after = flatten(model.step(tokens, states)[1])
        assert torch.equal(jacobian.after, after)
        v, epsilon = torch.randn_like(flat), 1e-6
        up, down = (flatten(model.step(tokens, unflatten(flat + e * v, states))[1]) for e in (epsilon, -epsilon))
    torch.testing.assert_close(jacobian.jvp(v), (up - down) / (2 * epsilon), atol=1e-8, rtol=1e-7)


def test_many_vectors_for_each_point(model):
    tokens, states = torch.tensor([1, 4, 4]), random_states(model)
    alone, jacobian = network_jacobian(model, tokens, states), network_jacobian(model, tokens, states, 2)
    matrices = alone.dense()
    n = matrices.shape[-1]
    assert jacobian.states.shape == jacobian.after.shape == (ROWS, n)
    torch.testing.assert_close(jacobian.after, alone.after, atol=1e-14, rtol=1e-14)
    torch.testing.assert_close(jacobian.dense(), matrices, atol=1e-14, rtol=1e-14)
    v = torch.randn(2 * ROWS, n).double()
    every = matrices.repeat_interleave(2, 0)
    torch.testing.assert_close(jacobian.jvp(v), torch.einsum("rij,rj->ri", every, v), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(jacobian.vjp(v), torch.einsum("rij,ri->rj", every, v), atol=1e-12, rtol=1e-12)
    assert jacobian.sealed == any(type(cell) is Sealed for cell in model.layers)
    assert not jacobian.sealed or jacobian._matrices.shape == (ROWS, n, n)


def test_order_of_the_state():
    model = RecurrentModel(V, cell=["lstm", "gru"], hidden_size=2)
    states = random_states(model)
    flat = flatten(states)
    assert torch.equal(flat, torch.cat((states[0].h, states[0].c, states[1].h), 1))
    again = unflatten(flat, states)
    assert [type(state) for state in again] == [type(state) for state in states]
    assert all(torch.equal(a, b) for x, y in zip(again, states, strict=True) for a, b in zip(x, y, strict=True))


def test_vanilla_in_closed_form():
    """diag(φ′(a_t)) W_hh."""
    torch.manual_seed(0)
    model = RecurrentModel(V, cell="vanilla", hidden_size=4).double()
    jacobian = network_jacobian(model, torch.tensor([1, 4, 4]), random_states(model))
    expected = (1 - jacobian.after**2).unsqueeze(2) * model.layers[0].weight_hh
    torch.testing.assert_close(jacobian.dense(), expected.detach(), atol=1e-14, rtol=1e-14)


@pytest.mark.parametrize("cell", ["gru", "lstm", "somewhere:Doubling"])
def test_many_points_in_fp32(cell):
    """From 256 rows on fp32 has products of its own, which are differentiated once only."""
    torch.manual_seed(0)
    model = RecurrentModel(V, cell=cell, hidden_size=4, num_layers=2)
    tokens, states = torch.arange(600) % V, random_states(model, 600)
    jacobian = network_jacobian(model, tokens, states)
    v = torch.randn_like(jacobian.states)
    some = [0, 254, 255, 256, 599]
    few = network_jacobian(model, tokens[some], tuple(type(s)(*(x[some] for x in s)) for s in states))
    torch.testing.assert_close(jacobian.jvp(v)[some], few.jvp(v[some]), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(jacobian.vjp(v)[some], few.vjp(v[some]), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(jacobian.after[some], few.after, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cell", CELLS)
def test_no_matrix_is_made_for_our_cells(cell):
    """Nor where symbols are embedded, by a function with a backward pass of its own that no state goes through."""
    model = RecurrentModel(V, cell=["gru", cell], hidden_size=4, embedding_size=3)
    jacobian = network_jacobian(model, torch.arange(300) % V, model.initial_state(300))
    jacobian.dense = None
    assert jacobian.jvp(jacobian.states).shape == jacobian.states.shape


def test_weights_gradients_and_graphs_are_left_alone(model):
    model.train()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    next(model.parameters()).grad = torch.full_like(next(model.parameters()), 3.0)
    states = random_states(model)
    random_state = torch.get_rng_state()
    with torch.no_grad():  # needs no graph from outside either
        jacobian = network_jacobian(model, torch.tensor([1, 4, 4]), states)
        products = jacobian.jvp(jacobian.after), jacobian.vjp(jacobian.after), jacobian.dense(), jacobian.after
    assert torch.equal(random_state, torch.get_rng_state())
    assert not any(product.requires_grad for product in products)
    assert not any(x.requires_grad for state in states for x in state)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert (next(model.parameters()).grad == 3).all()
    assert sum(parameter.grad is not None for parameter in model.parameters()) == 1


def test_nothing_is_kept():
    """With the operator its graphs go, at once: no cycle of references holds them."""
    model = RecurrentModel(V, cell="lstm", hidden_size=4)
    gc.disable()
    try:
        jacobian = network_jacobian(model, torch.tensor([1]), model.initial_state(1))
        jacobian.jvp(jacobian.states)
        (piece,) = jacobian._pieces
        kept = [weakref.ref(x) for x in (piece, piece._value, piece._pulled, piece._states)]
        del jacobian, piece
        assert not any(reference() is not None for reference in kept)
    finally:
        gc.enable()


def test_frozen_weights_are_no_obstacle():
    model = RecurrentModel(V, cell="gru", hidden_size=3).double().requires_grad_(False)
    tokens, states = torch.tensor([1, 4, 4]), random_states(model)
    torch.testing.assert_close(
        network_jacobian(model, tokens, states).dense(), reference(model, tokens, states), atol=1e-12, rtol=1e-12
    )
