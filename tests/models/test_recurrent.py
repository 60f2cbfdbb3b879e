"""The stacked model: its two ways over time, its table, its precisions."""

import copy
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lmapp.cells
import lmapp.models
from lmapp.cells.lstm import LSTM
from lmapp.cells.protocol import Cell, HiddenState
from lmapp.config import _OPTIONS_OF_KINDS, ModelConfig
from lmapp.errors import UsageError
from lmapp.models import InfillModel, RecurrentModel, WindowModel, detach
from lmapp.models.inputs import gather

CELLS = list(lmapp.cells.CELLS)
TORCHS = ["vanilla", "lstm", "gru"]
"""Those that torch.nn has too."""

STACKS = {
    **{cell: {"cell": cell, "num_layers": 1 if cell == "concatenated" else 2} for cell in CELLS},
    "mixed": {"cell": ["lstm", "gru", "vanilla"], "num_layers": None},
    "concatenated on top": {"cell": ["gru", "concatenated"], "num_layers": None},
    "residual": {"cell": "gru", "num_layers": 3, "connections": "residual"},
    "residual from the embedding": {"cell": "mingru", "connections": "residual", "embedding_size": 8},
    "dense": {"cell": ["lstm", "gru", "vanilla"], "num_layers": None, "connections": "dense"},
    "dense with embedding": {"cell": "gru", "connections": "dense", "embedding_size": 5},
    "tied": {"cell": "gru", "embedding_size": 8, "tie_embeddings": True},
    "without biases": {"cell": ["lstm", "gru", "vanilla"], "num_layers": None, "bias": False},
    "embedded": {"cell": "lstm", "embedding_size": 5},
    **{activation: {"cell": "vanilla", "activation": activation} for activation in ("relu", "sigmoid", "identity")},
}


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
    named = STACKS.get(cell, {"cell": cell}) if isinstance(cell, str) else {"cell": cell}
    return RecurrentModel(11, **({"hidden_size": 8, "num_layers": 2} | named | options))


def stepped(model, tokens, states):
    logits = []
    for token in tokens.unbind(1):
        row, states = model.step(token, states)
        logits.append(row)
    return torch.stack(logits, 1), states


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("zoneout", [0.0, 0.3])
@pytest.mark.parametrize(("batch", "steps"), [(3, 7), (1, 1), (2, 100)])
def test_forward_is_step_after_step(stack, zoneout, batch, steps):
    model = make(stack, zoneout=zoneout).double().eval()
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


@pytest.mark.parametrize("stack", STACKS)
def test_windows_join(stack):
    model = make(stack).double()
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
        model = make(cell, dropout=0.0 if cell == "concatenated" else 0.5)
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
@pytest.mark.parametrize("stack", STACKS)
def test_gradients_on_real_text_keep_their_direction(stack, kernel, dtype, real_text, monkeypatch):
    symbols, ids = np.unique(np.array(list(real_text[:4112])), return_inverse=True)
    ids = torch.as_tensor(ids[: 63 * 65].reshape(63, 65))
    torch.manual_seed(0)
    options = {"num_layers": 2, **STACKS[stack]}
    options |= {"embedding_size": 48} if options.get("embedding_size") == 8 else {}
    model = RecurrentModel(len(symbols), hidden_size=48, **options)
    kinds = [type(layer) for layer in model.layers]
    if kernel == "scan":
        for kind in kinds:
            monkeypatch.setattr(kind, "kernel", lambda *_: "scan")
    else:
        assert model.kernels(63, 64) == [
            "torch" if kind is LSTM else "table+scan" if index == 0 else "scan" for index, kind in enumerate(kinds)
        ]
    twin = copy.deepcopy(model).double()
    model.compute_dtype = dtype
    found = gradients(model, ids[:, :-1], ids[:, 1:])
    for name, expected in gradients(twin, ids[:, :-1], ids[:, 1:]).items():
        cosine = F.cosine_similarity(found[name].flatten(), expected.flatten(), dim=0)
        assert cosine >= (0.999 if dtype == torch.bfloat16 else 1 - 1e-6), (name, float(cosine))


@pytest.mark.parametrize("cell", TORCHS)
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
    gather(table, tokens, torch.bfloat16).sum().backward()
    assert table.grad.tolist() == [[0, 0], [4096, 4096], [0, 0]]


@pytest.mark.parametrize("stack", STACKS)
def test_keep_and_credit_are_batch_first(stack):
    model = make(stack).double()
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
    weights = [p for n, p in model.named_parameters() if n.endswith("weight_hh")] or [model.layers[0].weight_ih]
    found = torch.autograd.grad(cut[:, 4:].sum(), weights)
    _, between = model(tokens[:, :4], model.initial_state(3))
    second, _ = model(tokens[:, 4:], detach(between))
    expected = torch.autograd.grad(second.sum(), weights)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


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
    mixed = make(["gru", "vanilla"], num_layers=None, activation="relu")
    assert mixed.layers[1].activation == "relu"
    with pytest.raises(UsageError, match=r"activation is an option of the vanilla cell; --model.cell is GRU\."):
        make("gru", activation="relu")
    with pytest.raises(UsageError, match="activation"):
        make("vanilla", activation="swish")


def test_init_is_handed_on():
    assert make("gru").layers[1].bias_ih.eq(0).all()
    assert torch.equal(make("vanilla", init="identity").layers[1].weight_hh, torch.eye(8))
    assert make("gru", init="torch").layers[1].bias_ih.ne(0).any()


@pytest.mark.parametrize("cell", TORCHS)
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


def test_a_stack_is_of_the_cells_named():
    names = [type(layer).__name__ for layer in make(["lstm", "gru_before"], num_layers=None).layers]
    assert names == ["LSTM", "GRUBefore"]
    with pytest.raises(UsageError, match="can only be the top layer"):
        make(["concatenated", "gru"], num_layers=None)


def test_the_concatenated_cell_needs_no_readout():
    model = make("concatenated").double()
    assert model.head is None
    first = model.layers[0]
    h, x = torch.randn(1, 8).double(), F.one_hot(torch.tensor([4]), 11).double()
    logits, states = model.step(torch.tensor([4]), (HiddenState(h),))
    both = torch.cat((first.weight_ih, first.weight_hh), 1) @ torch.cat((x, h), 1)[0] + first.bias_ih
    torch.testing.assert_close(states[0].h[0], both[:8])
    torch.testing.assert_close(logits[0], both[8:])
    assert sum(p.numel() for p in model.parameters()) == (8 + 11) * (11 + 8) + (8 + 11)


def test_connections_read_what_they_say():
    tokens = torch.randint(11, (2, 3))
    for connections in ("plain", "residual", "dense"):
        model = make("gru", num_layers=3, connections=connections, embedding_size=8).double()
        x = model.embedding(tokens.t())
        outputs = []
        for layer in model.layers:
            outputs.append(layer(x, layer.initial_state(2))[0])
            x = {"plain": lambda x, y: y, "residual": lambda x, y: x + y, "dense": lambda x, y: torch.cat((x, y), -1)}[
                connections
            ](x, outputs[-1])
        read = torch.cat(outputs, -1) if connections == "dense" else x
        logits, _ = model(tokens, model.initial_state(2))
        torch.testing.assert_close(logits, model.head(read).transpose(0, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hidden_size", [8, 11])
def test_residual_adds_outputs_and_no_one_hot_vector(hidden_size):
    model = make("gru", connections="residual", hidden_size=hidden_size).double()
    tokens = torch.randint(11, (2, 3))
    first, last = model.layers
    y, _ = first(F.one_hot(tokens.t(), 11).double(), first.initial_state(2))
    z, _ = last(y, last.initial_state(2))
    logits, _ = model(tokens, model.initial_state(2))
    torch.testing.assert_close(logits, model.head(y + z).transpose(0, 1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stepped(model, tokens, model.initial_state(2))[0], logits, rtol=1e-12, atol=1e-12)
    tokens = tokens.repeat(1, 5)  # by table
    logits, _ = model(tokens, model.initial_state(2))
    torch.testing.assert_close(stepped(model, tokens, model.initial_state(2))[0], logits, rtol=1e-12, atol=1e-12)


def test_tied_embeddings_are_one_matrix():
    model = make("tied")
    assert model.embedding.weight is model.head.weight
    assert len({id(p) for p in model.parameters()}) == len(list(model.parameters()))
    again = make("tied", hidden_size=8)
    again.load_state_dict(model.state_dict())
    assert again.embedding.weight is again.head.weight
    assert torch.equal(again.head.weight, model.head.weight)
    # The inputs are short, and the first layer's weights make up for it.
    wide = make("tied", hidden_size=256, embedding_size=256)
    table = wide.layers[0].project(wide.embedding.weight)
    assert (table - table.mean(0)).std().item() == pytest.approx(1, abs=0.15)
    for options in ({"embedding_size": 5}, {"embedding_size": 0}, {"hidden_size": 9}):
        with pytest.raises(UsageError, match=r"--model.embedding-size"):
            make("tied", **options)


@pytest.mark.parametrize("cell", ["vanilla", "lstm", "gru", "gru_before", "concatenated"])
def test_weight_drop_leaves_out_recurrent_weights_for_a_window(cell):
    model = make(cell, weight_drop=0.5).double()
    names = [name for name, _ in model.named_parameters()]
    whole = copy.deepcopy(model.state_dict())
    tokens = torch.randint(11, (3, 7))
    torch.manual_seed(3)
    logits, _ = model(tokens, model.initial_state(3))
    logits.square().sum().backward()
    assert [name for name, _ in model.named_parameters()] == names
    assert all(map(torch.equal, model.state_dict().values(), whole.values()))
    torch.manual_seed(3)
    masks = [torch.ones_like(layer.weight_hh) for layer in model.layers]
    for layer, mask in zip(model.layers, masks, strict=True):
        recurrent = mask[: layer.blocks * layer.hidden_size]  # below it the concatenated cell's readout, left whole
        recurrent.copy_(F.dropout(torch.ones_like(recurrent), 0.5))
    twin = make(cell).double()
    twin.load_state_dict(whole)
    with torch.no_grad():
        for layer, mask in zip(twin.layers, masks, strict=True):
            layer.weight_hh *= mask
    expected, _ = twin(tokens, twin.initial_state(3))
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    expected.square().sum().backward()
    for ours, theirs, mask in zip(model.layers, twin.layers, masks, strict=True):
        torch.testing.assert_close(ours.weight_hh.grad, theirs.weight_hh.grad * mask, rtol=1e-10, atol=1e-12)
    model.eval()
    twin.load_state_dict(whole)
    torch.testing.assert_close(model(tokens, model.initial_state(3))[0], twin(tokens, twin.initial_state(3))[0])


def test_weight_drop_reaches_torchs_kernel():
    model = make("lstm", weight_drop=0.5)
    assert model.kernels(3, 7) == ["torch", "torch"]
    tokens = torch.randint(11, (3, 7))
    torch.manual_seed(3)
    logits, _ = model(tokens, model.initial_state(3))
    logits.square().sum().backward()
    torch.manual_seed(3)
    twin = copy.deepcopy(model).double()
    twin.zero_grad()
    with torch.no_grad():
        masks = [F.dropout(torch.ones_like(layer.weight_hh).float(), 0.5).double() for layer in twin.layers]
        for layer, mask in zip(twin.layers, masks, strict=True):
            layer.weight_hh *= mask
    twin.weight_drop = 0.0
    expected, _ = twin(tokens, twin.initial_state(3))
    expected.square().sum().backward()
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-5)
    for ours, theirs, mask in zip(model.layers, twin.layers, masks, strict=True):
        torch.testing.assert_close(ours.weight_hh.grad.double(), theirs.weight_hh.grad * mask, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cell": "gru", "connections": "dense", "num_layers": 1}, "dense joins layers; there is one"),
        ({"cell": "gru", "connections": "residual", "num_layers": 1}, "where both have one width; no layer here"),
        ({"cell": "gru", "connections": "residual", "num_layers": 1, "embedding_size": 5}, "no layer here"),
        ({"cell": ["gru", "concatenated"], "connections": "residual"}, "no layer here"),
        ({"cell": "concatenated", "num_layers": 1, "dropout": 0.1}, "those of Concatenated are the logits"),
        ({"cell": "concatenated", "num_layers": 1, "embedding_size": 8, "tie_embeddings": True}, "has no readout"),
        ({"cell": ["mingru", "minlstm"], "init": "identity"}, "MinGRU and MinLSTM has none"),
        ({"cell": "somewhere:Leaky", "bias": False}, "Leaky has its biases"),
        ({"cell": ["gru", "lstm"], "num_layers": 3}, "2 cells are named for 3 layers"),
    ],
)
def test_what_would_do_nothing_is_refused(options, said, leaky):
    with pytest.raises(UsageError, match=said):
        RecurrentModel(11, hidden_size=8, **options)


def test_residual_from_an_embedding_of_the_same_width_is_a_connection():
    RecurrentModel(11, cell="gru", hidden_size=8, num_layers=1, embedding_size=8, connections="residual")


def test_the_configuration_knows_which_kind_reads_which_option():
    kinds = {"recurrent": RecurrentModel, "window": WindowModel, "infill": InfillModel}
    for name in ModelConfig.__dataclass_fields__:
        reading = tuple(kind for kind, network in kinds.items() if name in lmapp.models.options(network))
        if name not in ("kind", "bidirectional", "mask_fraction"):
            assert reading == _OPTIONS_OF_KINDS.get(name, tuple(kinds)), name


def test_weight_drop_needs_a_recurrent_matrix():
    with pytest.raises(UsageError, match=r"--model.weight-drop acts on recurrent matrices; MinGRU has none"):
        make("mingru", weight_drop=0.5)
    make(["mingru", "gru"], num_layers=None, weight_drop=0.5)


@pytest.mark.parametrize("cell", CELLS)
def test_zoneout_draws_a_mask_for_every_step(cell):
    model = make(cell, zoneout=0.5).double()
    tokens = torch.randint(11, (3, 40))
    torch.manual_seed(3)
    logits, after = model(tokens, model.initial_state(3))
    torch.manual_seed(3)
    states, rows = list(model.initial_state(3)), []
    masks = [type(s)(*(torch.empty(40, 3, 8, dtype=torch.float64).bernoulli_(0.5) for _ in s)) for s in states]
    for t in range(40):
        x = F.one_hot(tokens[:, t], 11).double()
        for index, layer in enumerate(model.layers):
            old = states[index]
            x, new = layer.step(layer.project(x), old)
            x, states[index] = layer.zone(x, old, new, type(old)(*(m[t] for m in masks[index])))
        rows.append(x if model.head is None else model.head(x))
    torch.testing.assert_close(logits, torch.stack(rows, 1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(after, tuple(states), rtol=1e-10, atol=1e-12)
    unmasked, _ = make(cell).double()(tokens, model.initial_state(3))
    assert not torch.allclose(unmasked, logits)


def test_memory_biases_reach_the_cells_that_have_one():
    model = make(["vanilla", "lstm", "gru"], num_layers=None, forget_bias=2.0)
    assert model.layers[1].bias_ih[8:16].eq(2).all()
    assert model.layers[2].bias_ih[8:16].eq(2).all()
    chrono = make("lstm", num_layers=1, chrono=100.0, hidden_size=64).layers[0]
    forget, inputs = chrono.bias_ih[64:128], chrono.bias_ih[:64]
    assert forget.exp().max() <= 99
    assert forget.min() >= 0
    assert torch.equal(inputs, -forget)
    assert not chrono.bias_hh[:128].any()
    with pytest.raises(UsageError, match=r"--model.chrono"):
        make("vanilla", chrono=10.0)
