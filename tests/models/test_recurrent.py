"""The stacked model: its two ways over time, its table, its precisions."""

import copy
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lmapp.cells.protocol import Cell, HiddenState
from lmapp.errors import UsageError
from lmapp.models import RecurrentModel, detach
from lmapp.models.recurrent import _Gather

CELLS = ["vanilla", "lstm", "gru"]


class Leaky(Cell):
    """A cell of somebody else's: only what the protocol asks for."""

    state_type = HiddenState

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.gate_size = hidden_size
        self.inputs = nn.Linear(input_size, hidden_size)
        self.rate = nn.Parameter(torch.rand(hidden_size))

    def reset_parameters(self, init="orthogonal", fan_in=None):
        nn.init.uniform_(self.rate, 0.5, 1)

    def project(self, x):
        return F.linear(x, self.inputs.weight.to(x.dtype), self.inputs.bias.to(x.dtype))

    def step(self, gates, state):
        h = self.rate * state.h + gates.tanh()
        return h.to(gates.dtype), HiddenState(h)


@pytest.fixture
def leaky(monkeypatch):
    module = types.ModuleType("somewhere")
    module.Leaky = Leaky
    monkeypatch.setitem(sys.modules, "somewhere", module)
    return "somewhere:Leaky"


def make(cell, **options):
    torch.manual_seed(0)
    return RecurrentModel(11, **({"cell": cell, "hidden_size": 8, "num_layers": 2} | options))


def stepped(model, tokens, states):
    logits = []
    for token in tokens.unbind(1):
        row, states = model.step(token, states)
        logits.append(row)
    return torch.stack(logits, 1), states


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("embedding_size", [0, 5])
@pytest.mark.parametrize(("batch", "steps"), [(3, 7), (1, 1), (2, 400)])
def test_forward_is_step_after_step(cell, embedding_size, batch, steps):
    model = make(cell, embedding_size=embedding_size).double()
    tokens = torch.randint(11, (batch, steps))
    states = model.initial_state(batch)
    logits, after = model(tokens, states)
    expected, expected_after = stepped(model, tokens, states)
    assert logits.shape == (batch, steps, 11)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after, expected_after, rtol=1e-12, atol=1e-12)


def test_a_cell_from_elsewhere_works(leaky):
    model = make(leaky).double()
    tokens = torch.randint(11, (3, 7))
    logits, _ = model(tokens, model.initial_state(3))
    torch.testing.assert_close(logits, stepped(model, tokens, model.initial_state(3))[0])
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("cell", CELLS)
def test_windows_join(cell):
    model = make(cell).double()
    tokens = torch.randint(11, (3, 9))
    whole, end = model(tokens, model.initial_state(3))
    first, between = model(tokens[:, :4], model.initial_state(3))
    second, after = model(tokens[:, 4:], between)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after, end, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cell", CELLS)
def test_the_same_seed_gives_the_same_bits(cell, dtype):
    runs = []
    for _ in range(2):
        model = make(cell, dropout=0.5)
        model.compute_dtype = dtype
        tokens = torch.randint(11, (3, 7))
        logits, _ = model(tokens, model.initial_state(3))
        logits.square().sum().backward()
        runs.append((logits, *(p.grad for p in model.parameters())))
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("cell", CELLS)
def test_dtypes(cell):
    model = make(cell)
    tokens = torch.randint(11, (3, 7))
    model.compute_dtype = torch.bfloat16
    logits, states = model(tokens, model.initial_state(3))
    assert logits.dtype == torch.float32
    assert {s.dtype for state in states for s in state} == {torch.float32}
    logits.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert model.step(tokens[:, 0], states)[0].dtype == torch.float32
    logits, states = model.double()(tokens, model.initial_state(3))
    assert {logits.dtype, states[0][0].dtype} == {torch.float64}


def gradients(model, tokens, targets, state_scale=0.0):
    states = tuple(type(s)(*(state_scale * torch.ones_like(x) for x in s)) for s in model.initial_state(len(tokens)))
    logits, _ = model(tokens, states)
    model.zero_grad()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["rule", "scan"])
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_on_real_text_keep_their_direction(cell, kernel, dtype, real_text, monkeypatch):
    symbols, ids = np.unique(np.array(list(real_text[:4112])), return_inverse=True)
    ids = torch.as_tensor(ids.reshape(16, 257))
    torch.manual_seed(0)
    model = RecurrentModel(len(symbols), cell=cell, hidden_size=48, num_layers=2)
    if kernel == "scan":
        monkeypatch.setattr(type(model.layers[0]), "kernel", lambda *_: "scan")
    elif cell != "lstm":
        assert model.kernels(16, 256) == ["table+scan", "scan"]
    else:
        assert model.kernels(16, 256) == ["torch", "torch"]
    twin = copy.deepcopy(model).double()
    model.compute_dtype = dtype
    found = gradients(model, ids[:, :-1], ids[:, 1:])
    for name, expected in gradients(twin, ids[:, :-1], ids[:, 1:]).items():
        cosine = F.cosine_similarity(found[name].flatten(), expected.flatten(), dim=0)
        assert cosine >= (0.999 if dtype == torch.bfloat16 else 1 - 1e-6), (name, float(cosine))


@pytest.mark.parametrize("cell", CELLS)
def test_table_gives_the_gradients_of_one_hot_inputs(cell):
    model = make(cell, num_layers=1).double()
    tokens, targets = torch.randint(11, (2, 4, 6)).unbind()
    found = gradients(model, tokens, targets)
    x = F.one_hot(tokens.t(), 11).double()
    first = model.layers[0]
    outputs, _ = Cell.scan(first, first.project(x), model.initial_state(4)[0])
    model.zero_grad()
    F.cross_entropy(model.head(outputs).transpose(0, 1).flatten(0, 1), targets.flatten()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-11, atol=1e-13)


def test_embedding_gradients_do_not_depend_on_the_table():
    model = make("gru", embedding_size=5).double()
    tokens, targets = torch.randint(11, (2, 4, 6)).unbind()
    assert model.kernels(4, 6) == ["table+scan", "scan"]
    assert model.kernels(1, 6) == ["scan", "scan"]
    whole = gradients(model, tokens, targets)
    parts = [gradients(model, tokens[b : b + 1], targets[b : b + 1]) for b in range(4)]
    for name, gradient in whole.items():
        torch.testing.assert_close(gradient, sum(p[name] for p in parts) / 4, rtol=1e-11, atol=1e-13)


def test_gathering_in_bf16_adds_up_in_fp32():
    table = torch.zeros(3, 2, requires_grad=True)
    tokens = torch.ones(64, 64, dtype=torch.int64)
    _Gather.apply(table, tokens, torch.bfloat16).sum().backward()
    assert table.grad.tolist() == [[0, 0], [4096, 4096], [0, 0]]


@pytest.mark.parametrize("cell", CELLS)
def test_keep_and_credit_are_batch_first(cell):
    model = make(cell).double()
    tokens = torch.randint(11, (3, 7))
    keep = torch.ones(3, 7)
    keep[1, 4] = 0
    logits, _ = model(tokens, model.initial_state(3), keep)
    alone, _ = model(tokens[1:2, 4:], model.initial_state(1))
    torch.testing.assert_close(logits[1:2, 4:], alone, rtol=1e-12, atol=1e-12)
    rest, _ = model(tokens, model.initial_state(3))
    assert torch.equal(logits[[0, 2]], rest[[0, 2]])

    credit = torch.ones(3, 7)
    credit[:, 4] = 0
    cut, _ = model(tokens, model.initial_state(3), credit=credit)
    torch.testing.assert_close(cut, rest, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(cut[:, 4:].sum(), model.layers[0].weight_hh)[0]
    _, between = model(tokens[:, :4], model.initial_state(3))
    second, _ = model(tokens[:, 4:], detach(between))
    expected = torch.autograd.grad(second.sum(), model.layers[0].weight_hh)[0]
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_dropout_is_one_mask_over_time():
    model = make("vanilla", num_layers=1, hidden_size=64, dropout=0.5, activation="identity").double()
    nn.init.eye_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    nn.init.zeros_(model.layers[0].weight_hh)
    nn.init.ones_(model.layers[0].weight_ih)
    tokens = torch.randint(11, (5, 6))
    logits, _ = model(tokens, model.initial_state(5))
    assert set(logits.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(logits, logits[:, :1].expand_as(logits))
    assert not torch.equal(logits[0], logits[1])
    again, _ = model(tokens, model.initial_state(5))
    assert not torch.equal(again, logits)
    logits, _ = model.eval()(tokens, model.initial_state(5))
    assert set(logits.unique().tolist()) == {1.0}


def test_kernels_are_named():
    model = make("gru")
    assert model.kernels(4, 8) == ["table+scan", "scan"]
    assert make("lstm").kernels(4, 8) == ["torch", "torch"]
    assert make("lstm", hidden_size=5).kernels(4, 8) == ["table+scan", "torch"]
    assert make("lstm").double().kernels(4, 8) == ["table+scan", "scan"]


def test_activations_reach_vanilla_only():
    assert make("vanilla", activation="relu").layers[1].activation == "relu"
    assert make("gru", activation="relu").layers[1].hidden_size == 8
    with pytest.raises(UsageError, match="activation"):
        make("vanilla", activation="swish")


def test_init_is_handed_on():
    assert make("gru").layers[1].bias_ih.eq(0).all()
    assert make("gru", init="torch").layers[1].bias_ih.ne(0).any()


@pytest.mark.parametrize("cell", CELLS)
def test_inputs_make_gates_of_variance_one(cell):
    for embedding_size in (0, 16):
        model = make(cell, embedding_size=embedding_size, hidden_size=256)
        table = model.layers[0].table() if not embedding_size else model.layers[0].project(model.embedding.weight)
        assert (table - table.mean(0)).std().item() == pytest.approx(1, abs=0.15)


def test_detach_cuts_the_graph():
    model = make("lstm")
    _, states = model(torch.randint(11, (3, 7)), model.initial_state(3))
    assert states[1].c.requires_grad
    cut = detach(states)
    assert not any(x.requires_grad for state in cut for x in state)
    assert [type(s) for s in cut] == [type(s) for s in states]
