"""Gradients with respect to states: against leaves put into a naive loop, against differences, and by hand."""

import itertools
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lmapp.cells import CELLS
from lmapp.cells.gru import GRU
from lmapp.cells.lstm import LSTM
from lmapp.cells.protocol import Cell, HiddenState
from lmapp.cells.vanilla import Vanilla
from lmapp.models import RecurrentModel

STEPS, V = 7, 6


class Doubling(Cell):
    """The protocol's defaults: a cell with a step only, whose output is not its state."""

    state_type = HiddenState

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.gate_size = hidden_size
        self.output_size = 2 * hidden_size
        self.inputs = nn.Linear(input_size, hidden_size)
        self.weight = nn.Parameter(torch.empty(hidden_size, hidden_size))

    def reset_parameters(self, init="orthogonal", fan_in=None):
        nn.init.orthogonal_(self.weight)

    def project(self, x):
        return self.inputs(x).sin()

    def step(self, gates, state):
        h = (gates + state.h @ self.weight).tanh()
        return torch.cat((h, state.h * gates), 1), HiddenState(h)


NETWORKS = {
    **{cell: {"cell": cell} for cell in CELLS if cell != "concatenated"},
    "relu": {"cell": "vanilla", "activation": "relu"},
    "doubling": {"cell": "somewhere:Doubling"},
    "mixed": {"cell": ["lstm", "gru", "vanilla"], "num_layers": None},
    "concatenated on top": {"cell": ["gru", "mingru", "concatenated"], "num_layers": None},
    "residual": {"cell": "gru", "connections": "residual", "embedding_size": 4},
    "residual above": {"cell": "lstm", "connections": "residual"},
    "residual, concatenated on top": {
        "cell": ["gru", "lstm", "concatenated"],
        "num_layers": None,
        "connections": "residual",
    },
    "dense": {"cell": ["vanilla", "lstm", "gru"], "num_layers": None, "connections": "dense"},
    "dense one-hot": {"cell": "gru", "connections": "dense", "embedding_size": 0},
    "dense, concatenated on top": {
        "cell": ["gru", "gru", "concatenated"],
        "num_layers": None,
        "connections": "dense",
    },
    "zoneout": {"cell": ["lstm", "gru", "vanilla"], "num_layers": None, "zoneout": 0.3, "connections": "residual"},
    "one-hot": {"cell": ["gru", "vanilla", "lstm"], "num_layers": None, "embedding_size": 0},
    "one-hot as wide as the layers": {
        "cell": "gru",
        "connections": "residual",
        "hidden_size": V,
        "embedding_size": 0,
    },
    "tied": {"cell": "gru", "tie_embeddings": True, "embedding_size": 4},
}


@pytest.fixture(params=NETWORKS)
def model(request, monkeypatch):
    module = types.ModuleType("somewhere")
    module.Doubling = Doubling
    monkeypatch.setitem(sys.modules, "somewhere", module)
    torch.manual_seed(0)
    options = {"hidden_size": 4, "num_layers": 3, "embedding_size": 3, "dropout": 0.5, **NETWORKS[request.param]}
    model = RecurrentModel(V, **options).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def random_states(model, batch):
    return tuple(type(s)(*(torch.randn_like(x) for x in s)) for s in model.initial_state(batch))


def naive(model, tokens, states, target, end, cut, layers):
    """For J at time `end` of one window: ∂J/∂(states that step `cut` reads), with `layers` as leaves together."""
    with torch.enable_grad():
        leaves = []
        for t in range(end + 1):
            if t == cut:
                states = list(states)
                for index in layers:
                    states[index] = type(states[index])(*(x.detach().requires_grad_() for x in states[index]))
                    leaves.extend(states[index])
                states = tuple(states)
            logits, states = model.step(tokens[:, t], states)
        loss = F.cross_entropy(logits, target)
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def test_against_leaves_in_a_loop(model):
    """Layer by layer and all together the recurrent part is the same: what a step reads, the layers above included."""
    torch.manual_seed(1)
    tokens, ends = torch.randint(V, (2, STEPS)), torch.tensor([3, STEPS - 1])
    targets, states = torch.randint(V, (2, 2)), random_states(model, 2)
    found = model.state_gradients(tokens, states, targets, ends).layers
    assert len(found) == 3
    for b, e in itertools.product(range(2), range(2)):
        row, end = 2 * b + e, int(ends[e])
        start = tuple(type(s)(*(x[b : b + 1] for x in s)) for s in states)
        for cut in range(STEPS):
            if cut > end:
                assert not any(x[cut, row].any() for layer in found for x in layer.entering)
                continue
            arguments = (model, tokens[b : b + 1], start, targets[b, e : e + 1], end, cut)
            expected = naive(*arguments, range(3))
            together = [x[cut, row] for layer in found for x in layer.entering]
            for ours, theirs in zip(together, expected, strict=True):
                torch.testing.assert_close(ours, theirs[0], rtol=1e-10, atol=1e-12)
            for index in range(3):
                alone = naive(*arguments, [index])
                for ours, theirs in zip(found[index].entering, alone, strict=True):
                    torch.testing.assert_close(ours[cut, row], theirs[0], rtol=1e-10, atol=1e-12)
    width = model.layers[0].hidden_size
    for layer in found:
        assert all(x.shape == (STEPS + 1, 4, width) and not x[-1].any() for x in layer.entering)


def test_inputs_against_leaves_in_a_loop(model, monkeypatch):
    """∂J/∂(what the first layer reads at t), with every input of a window a leaf, embedded or one-hot."""
    torch.manual_seed(1)
    tokens, ends = torch.randint(V, (2, STEPS)), torch.tensor([3, STEPS - 1])
    targets, states = torch.randint(V, (2, 2)), random_states(model, 2)
    found = model.state_gradients(tokens, states, targets, ends).inputs
    width = V if model.embedding is None else model.embedding.embedding_dim
    assert found.shape == (STEPS, 4, width)
    embed = model._embed
    for b, e in itertools.product(range(2), range(2)):
        leaves, end = [], int(ends[e])

        def leaf(token, dtype, leaves=leaves):
            leaves.append(embed(token, dtype).detach().requires_grad_())
            return leaves[-1]

        with monkeypatch.context() as patch:
            patch.setattr(model, "_embed", leaf)
            current = tuple(type(s)(*(x[b : b + 1] for x in s)) for s in states)
            for t in range(end + 1):
                logits, current = model.step(tokens[b : b + 1, t], current)
        expected = torch.autograd.grad(F.cross_entropy(logits, targets[b, e : e + 1]), leaves)
        assert all(x.any() for x in expected)
        torch.testing.assert_close(found[: end + 1, 2 * b + e], torch.cat(expected), rtol=1e-10, atol=1e-12)
        assert not found[end + 1 :, 2 * b + e].any()


@pytest.mark.parametrize("embedding_size", [0, 3])
def test_inputs_against_finite_differences(embedding_size):
    """The loss under inputs moved by a little, one number at a time: embedded, or one-hot."""
    torch.manual_seed(0)
    model = RecurrentModel(V, cell="gru", hidden_size=3, embedding_size=embedding_size).double()
    tokens, target = torch.randint(V, (1, STEPS)), torch.tensor([[2]])
    states = random_states(model, 1)
    found = model.state_gradients(tokens, states, target, torch.tensor([STEPS - 1])).inputs
    vectors = model.embedding(tokens) if embedding_size else F.one_hot(tokens, V).double()

    def loss(x):
        outputs, _ = model.layers[0](x.transpose(0, 1), states[0])
        return F.cross_entropy(model.head(outputs[-1]), target[0]).item()

    for t, unit in itertools.product(range(STEPS), range(vectors.shape[-1])):
        change = torch.zeros_like(vectors)
        change[0, t, unit] = 1e-6
        with torch.no_grad():
            difference = (loss(vectors + change) - loss(vectors - change)) / 2e-6
        assert found[t, 0, unit].item() == pytest.approx(difference, abs=1e-8)


def cut_output(patch, model, index, time, leaves):
    """Make layer `index`'s output at `time` a leaf, which is put into `leaves`; its new state stays what it was."""
    layer, times = model.layers[index], itertools.count()
    name = "zone" if model.zoneout else "step"
    whole = getattr(layer, name)

    def cut(*arguments):
        output, state = whole(*arguments)
        if next(times) == time:
            leaves.append(output.detach().requires_grad_())
            return leaves[0], state
        return output, state

    patch.setattr(layer, name, cut)


def test_outputs_against_leaves(model, monkeypatch):
    """∂J/∂(a layer's output at t) is what that output, made a leaf at t alone, receives from above."""
    torch.manual_seed(1)
    tokens, end = torch.randint(V, (1, STEPS)), STEPS - 2
    target, states = torch.randint(V, (1, 1)), random_states(model, 1)
    found = model.state_gradients(tokens, states, target, torch.tensor([end])).layers
    for index in range(3):
        assert found[index].outputs.shape == (STEPS, 1, model.layers[index].output_size)
        for time in range(STEPS):
            current, leaves = states, []
            with monkeypatch.context() as patch:
                cut_output(patch, model, index, time, leaves)
                for t in range(end + 1):
                    logits, current = model.step(tokens[:, t], current)
            loss, leaf = F.cross_entropy(logits, target[:, 0]), leaves[0] if leaves else None
            expected = torch.zeros_like(found[index].outputs[0])
            if leaf is not None:
                expected = torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)[0]
            torch.testing.assert_close(found[index].outputs[time], expected, rtol=1e-10, atol=1e-12)


def test_what_the_readout_takes_directly(model):
    """Each layer's output at the end point is a leaf of its own: no way leads from one through another."""
    torch.manual_seed(1)
    tokens, end = torch.randint(V, (1, STEPS)), STEPS - 2
    target, states = torch.randint(V, (1, 1)), random_states(model, 1)
    found = model.state_gradients(tokens, states, target, torch.tensor([end])).layers
    model.eval()
    _, before = model(tokens[:, :end], states)
    stack, leaves = model._stack(tokens[:, end], torch.float64), []
    for layer, state in zip(model.layers, before, strict=True):
        output, new = layer.step(layer.project(stack.read().detach()), state)
        if model.zoneout:
            mean = type(state)(*(torch.full_like(s, model.zoneout) for s in state))
            output, _ = layer.zone(output, state, new, mean)
        leaves.append(output.detach().requires_grad_())
        stack.add(leaves[-1])
    loss = F.cross_entropy(model._read_out(stack), target[:, 0])
    expected = torch.autograd.grad(loss, leaves, allow_unused=True)
    for layer, theirs in zip(found, expected, strict=True):
        assert (layer.readout is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(layer.readout[end], theirs, rtol=1e-10, atol=1e-12)
            assert not layer.readout[:end].any()


@pytest.mark.parametrize("cell", ["vanilla", "lstm", "gru"])
def test_against_finite_differences(cell):
    torch.manual_seed(0)
    model = RecurrentModel(V, cell=cell, hidden_size=3, num_layers=2).double()
    tokens, target, end = torch.randint(V, (1, STEPS)), torch.tensor([[2]]), STEPS - 1
    states = random_states(model, 1)
    found = model.state_gradients(tokens, states, target, torch.tensor([end])).layers
    _, before = model(tokens[:, :3], states)

    def loss(changed):
        logits, _ = model(tokens[:, 3:], changed)
        return F.cross_entropy(logits[:, -1], target[0]).item()

    for number, name in [(n, name) for n in range(2) for name in before[0]._fields]:
        for unit in range(3):
            values = []
            for change in (1e-6, -1e-6):
                moved = getattr(before[number], name).detach().clone()
                moved[0, unit] += change
                changed = list(before)
                changed[number] = before[number]._replace(**{name: moved})
                values.append(loss(tuple(changed)))
            difference = (values[0] - values[1]) / 2e-6
            assert getattr(found[number].entering, name)[3, 0, unit].item() == pytest.approx(difference, abs=1e-8)


def test_nothing_else_changes(model):
    tokens = torch.randint(V, (2, STEPS))
    model.train()
    model.state_gradients(tokens, model.initial_state(2), torch.randint(V, (2, 1)), torch.tensor([STEPS - 1]))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_precision_is_fp32_whatever_the_training_has():
    torch.manual_seed(0)
    model = RecurrentModel(V, cell="lstm", hidden_size=8, num_layers=2)
    arguments = (torch.randint(V, (2, STEPS)), model.initial_state(2), torch.randint(V, (2, 2)), torch.tensor([4, 6]))
    plain = model.state_gradients(*arguments)
    model.compute_dtype = torch.bfloat16
    found = model.state_gradients(*arguments)
    assert torch.equal(found.inputs, plain.inputs)
    assert found.inputs.dtype == torch.float32
    for ours, theirs in zip(found.layers, plain.layers, strict=True):
        assert torch.equal(ours.outputs, theirs.outputs)
        assert ours.outputs.dtype == torch.float32
        assert all(map(torch.equal, ours.entering, theirs.entering))


# Values known beforehand


def half_line():
    """A scalar linear network with W_hh = 1/2, inputs 0 and W_qh = [1; 0]."""
    model = RecurrentModel(2, cell="vanilla", hidden_size=1, num_layers=1, activation="identity").double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.layers[0].weight_hh.data.fill_(0.5)
    model.head.weight.data[0] = 1
    return model


def hidden_gradients(credit=None):
    """∂J/∂h_t for t = 1..3 and J the mean of three losses: with the identity it is the gates' gradient."""
    model = half_line()
    gates = torch.zeros(3, 1, 1, dtype=torch.float64, requires_grad=True)
    if credit is not None:
        credit = torch.tensor(credit).unsqueeze(1)
    outputs, _ = model.layers[0].scan(gates, model.initial_state(1)[0], None, credit)
    F.cross_entropy(model.head(outputs).flatten(0, 1), torch.zeros(3, dtype=torch.int64)).backward()
    return gates.grad.flatten().tolist()


def test_scalar_network():
    assert hidden_gradients() == pytest.approx([-7 / 24, -1 / 4, -1 / 6], abs=1e-12)


def test_scalar_network_under_block_truncation():
    assert hidden_gradients([1, 1, 0]) == pytest.approx([-1 / 4, -1 / 6, -1 / 6], abs=1e-12)


def test_scalar_network_under_randomised_truncation():
    patterns = [hidden_gradients([1, *pattern])[0] for pattern in itertools.product((0, 2), repeat=2)]
    assert sorted(patterns, reverse=True) == pytest.approx([-1 / 6, -1 / 6, -2 / 6, -3 / 6], abs=1e-12)
    assert sum(patterns) / 4 == pytest.approx(-7 / 24, abs=1e-12)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("cell", ["vanilla", "lstm", "gru"])
def test_randomised_truncation_is_unbiased(cell, layers):
    torch.manual_seed(0)
    model = RecurrentModel(V, cell=cell, hidden_size=3, num_layers=layers).double()
    tokens, targets = torch.randint(V, (2, 1, 5)).unbind()

    def gradient(credit):
        logits, _ = model(tokens, model.initial_state(1), credit=credit)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    expected, keep = torch.zeros(()), 0.3
    for pattern in itertools.product((0, 1), repeat=4):
        probability = keep ** sum(pattern) * (1 - keep) ** (4 - sum(pattern))
        credit = torch.tensor([[1.0, *pattern]], dtype=torch.float64)
        credit[:, 1:] /= keep
        expected = expected + probability * gradient(credit)
    torch.testing.assert_close(expected, gradient(None), rtol=0, atol=1e-10)


def test_lstm_without_weights_counts_its_memory_once():
    model = RecurrentModel(2, cell="lstm", hidden_size=1, num_layers=1).double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.head.weight.data[0] = 1
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    (found,), inputs = model.state_gradients(tokens, model.initial_state(1), tokens[:, :1], torch.tensor([3]))
    h = (found.entering.h[1:] + found.outputs).flip(0).flatten()
    c = found.entering.c[1:].flip(0).flatten()
    assert h[0].item() == pytest.approx(-0.5, abs=1e-12)
    assert (torch.hypot(h, c) / h[0].abs()).tolist() == pytest.approx([1, 1 / 4, 1 / 8, 1 / 16], abs=1e-12)
    assert h[1:].tolist() == [0, 0, 0]
    assert not inputs.any()  # which no weight reads


def decay(cell, steps, upstream):
    """‖∂J/∂h_{i−k}‖ for k = 0..steps−1, ∂J/∂h_i given."""
    outputs = torch.zeros(steps, 1, cell.hidden_size, dtype=torch.float64)
    outputs[-1, 0] = upstream
    gates = torch.zeros(steps, 1, cell.gate_size, dtype=torch.float64)
    entering, _ = cell.state_gradients(gates, cell.initial_state(1), outputs)
    return (entering.h[1:] + outputs).flip(0).norm(dim=-1).flatten().tolist()


def test_linear_network_with_a_hump():
    cell = Vanilla(1, 2, activation="identity").double()
    cell.weight_hh.data = torch.tensor([[0.5, 4], [0, 0.5]], dtype=torch.float64)
    expected = [1, 4.031129, 4.007805, 3.002603, 2.000976, 1.250391, 0.750163, 0.437570]
    assert decay(cell, 8, torch.tensor([1.0, 0.0])) == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize("alpha", [0.5, 0.9, 1.1])
def test_scaled_identity_decays_as_a_power(alpha):
    cell = Vanilla(1, 3, activation="identity").double()
    cell.weight_hh.data = alpha * torch.eye(3, dtype=torch.float64)
    expected = [alpha**k for k in range(20)]
    assert decay(cell, 20, torch.tensor([0.6, 0.0, -0.8], dtype=torch.float64)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", [Vanilla, LSTM, GRU])
def test_fused_outputs_are_off_the_recurrent_path(kind):
    """What the model must not do: the gradient on earlier outputs of one scan is zero."""
    torch.manual_seed(0)
    cell = kind(2, 3).double()
    gates = torch.randn(4, 1, cell.gate_size, dtype=torch.float64, requires_grad=True)
    outputs, _ = cell.scan(gates, cell.initial_state(1))
    outputs.retain_grad()
    outputs[-1].sum().backward()
    assert not outputs.grad[:-1].any()
    assert decay(cell, 4, torch.ones(3))[-1] > 0
