"""The fixed-window model: what it reads at each place, and that it is used as a recurrent model is."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lmapp.config import build
from lmapp.errors import UsageError
from lmapp.models import WindowModel, make_model
from lmapp.models.evaluation import evaluate, evaluate_cold

V = 11


def make(window=4, **options):
    """A network whose padding is not nothing, as it would be after training."""
    torch.manual_seed(0)
    model = WindowModel(V, **({"window": window, "hidden_size": 8} | options))
    with torch.no_grad():
        padding = model.weight[V :: V + 1] if model.embedding is None else model.embedding.weight[V]
        padding.normal_()
    return model


def naive(model, tokens, window, padding=V):
    """Logits (B, T, V), one place at a time, from the parameters alone."""
    rows = []
    for row in tokens.tolist():
        logits = []
        for t in range(len(row)):
            ids = ([padding] * window + row[: t + 1])[-window:]
            if model.embedding is None:
                x = torch.cat([F.one_hot(torch.tensor(i), V + 1) for i in ids]).double()
                before = x @ model.weight
            else:
                x = torch.cat([model.embedding.weight[i] for i in ids])
                before = model.weight @ x
            before = before if model.bias is None else before + model.bias
            h = {"tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid, "identity": lambda a: a}
            logits.append(model.head(h[model.activation](before)))
        rows.append(torch.stack(logits))
    return torch.stack(rows)


def gradients(model, logits, targets):
    model.zero_grad()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid", "identity"])
@pytest.mark.parametrize("embedding_size", [0, 5])
@pytest.mark.parametrize(("window", "steps"), [(1, 6), (4, 7), (6, 3)])
def test_it_is_the_textbook_s_network(activation, embedding_size, window, steps):
    model = make(window, embedding_size=embedding_size, activation=activation).double()
    tokens, targets = torch.randint(V, (2, 3, steps)).unbind()
    logits, _ = model(tokens, model.initial_state(3))
    expected = naive(model, tokens, window)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    wanted = gradients(model, expected, targets)
    for name, gradient in gradients(model, model(tokens, model.initial_state(3))[0], targets).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("embedding_size", [0, 5])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_forward_is_step_after_step_and_windows_join(embedding_size, window):
    model = make(window, embedding_size=embedding_size).double()
    tokens = torch.randint(V, (3, 9))
    whole, end = model(tokens, model.initial_state(3))
    states, logits = model.initial_state(3), []
    for token in tokens.unbind(1):
        row, states = model.step(token, states)
        logits.append(row)
    torch.testing.assert_close(whole, torch.stack(logits, 1), rtol=1e-12, atol=1e-12)
    assert torch.equal(end[0].ids, states[0].ids)
    assert end[0].ids.shape == (3, window - 1)
    states, parts = model.initial_state(3), []
    for part in tokens.split([1, 3, 5], 1):
        row, states = model(part, states)
        parts.append(row)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)
    assert torch.equal(end[0].ids, states[0].ids)


@pytest.mark.parametrize("embedding_size", [0, 5])
@pytest.mark.parametrize("starts", [[4], [0], [6], [2, 3], [1, 5]])
def test_a_document_that_starts_hides_what_is_before_it(embedding_size, starts):
    model = make(5, embedding_size=embedding_size).double()
    before, tokens, after = torch.randint(V, (3, 3, 7)).unbind()
    keep = torch.ones(3, 7)
    keep[1, starts] = 0
    _, entering = model(before, model.initial_state(3))
    logits, states = model(tokens, entering, keep)
    following, _ = model(after, states)
    for first, stop in zip(starts, [*starts[1:], 7], strict=True):
        alone, _ = model(tokens[1:2, first:stop], model.initial_state(1))
        torch.testing.assert_close(logits[1:2, first:stop], alone, rtol=1e-12, atol=1e-12)
    last, _ = model(torch.cat((tokens[1:2, starts[-1] :], after[1:2]), 1), model.initial_state(1))
    torch.testing.assert_close(following[1:2], last[:, -7:], rtol=1e-12, atol=1e-12)
    rest, rest_states = model(tokens, entering)
    assert torch.equal(logits[[0, 2]], rest[[0, 2]])
    assert torch.equal(logits[1, : starts[0]], rest[1, : starts[0]])
    assert torch.equal(states[0].ids[[0, 2]], rest_states[0].ids[[0, 2]])


def test_a_prediction_rests_on_the_last_characters_only_and_on_padding_at_the_beginning_only():
    model = make(4).double().eval()
    tokens = torch.randint(V, (1, 12))
    logits, _ = model(tokens, model.initial_state(1))
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % V
    changed = (model(other, model.initial_state(1))[0] != logits).any(-1)[0]
    assert changed.tolist() == [5 <= t < 9 for t in range(12)]
    with torch.no_grad():
        model.weight[V :: V + 1].normal_()
    changed = (model(tokens, model.initial_state(1))[0] != logits).any(-1)[0]
    assert changed.tolist() == [t < 3 for t in range(12)]


def test_padding_is_read_and_never_written():
    model = WindowModel(V, window=4, hidden_size=8, embedding_size=5)
    assert model.initial_state(2)[0].ids.tolist() == [[V, V, V]] * 2
    assert model(torch.randint(V, (2, 6)), model.initial_state(2))[0].shape == (2, 6, V)
    assert model.embedding.weight[V].eq(0).all()
    assert WindowModel(V, window=4, hidden_size=8).weight[V :: V + 1].eq(0).all()


@pytest.mark.parametrize("embedding_size", [0, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_grow_with_the_window(embedding_size, bias):
    def count(window):
        model = WindowModel(V, window=window, hidden_size=8, embedding_size=embedding_size, bias=bias)
        return sum(p.numel() for p in model.parameters())

    each = 8 * embedding_size if embedding_size else 8 * (V + 1)
    assert [count(n) - count(n - 1) for n in (2, 3, 9)] == [each] * 3
    rest = V * 8 + embedding_size * (V + 1) + (V + 8 if bias else 0)
    assert count(1) == each + rest


@pytest.mark.parametrize("embedding_size", [0, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_on_real_text_keep_their_direction(embedding_size, dtype, real_text):
    symbols, ids = np.unique(np.array(list(real_text[:4112])), return_inverse=True)
    ids = torch.as_tensor(ids.reshape(16, 257))
    torch.manual_seed(0)
    model = WindowModel(len(symbols), window=8, hidden_size=48, embedding_size=embedding_size)
    twin = copy.deepcopy(model).double()
    model.compute_dtype = dtype
    found = gradients(model, model(ids[:, :-1], model.initial_state(16))[0], ids[:, 1:])
    wanted = gradients(twin, twin(ids[:, :-1], twin.initial_state(16))[0], ids[:, 1:])
    for name, expected in wanted.items():
        cosine = F.cosine_similarity(found[name].flatten(), expected.flatten(), dim=0)
        assert cosine >= (0.999 if dtype == torch.bfloat16 else 1 - 1e-6), (name, float(cosine))


@pytest.mark.parametrize("embedding_size", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_seed_gives_the_same_bits(embedding_size, dtype):
    runs = []
    for _ in range(2):
        model = make(embedding_size=embedding_size, dropout=0.5)
        model.compute_dtype = dtype
        tokens = torch.randint(V, (3, 400))
        logits, _ = model(tokens, model.initial_state(3))
        logits.square().sum().backward()
        runs.append((logits, *(p.grad for p in model.parameters())))
    assert all(map(torch.equal, *runs))


def test_dtypes():
    for embedding_size in (0, 5):
        model = make(embedding_size=embedding_size)
        tokens = torch.randint(V, (3, 7))
        model.compute_dtype = torch.bfloat16
        logits, states = model(tokens, model.initial_state(3))
        assert (logits.dtype, states[0].ids.dtype) == (torch.float32, torch.int64)
        logits.sum().backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        assert model.step(tokens[:, 0], states)[0].dtype == torch.float32
        assert model.double()(tokens, model.initial_state(3))[0].dtype == torch.float64


def test_dropout_is_one_mask_over_time():
    model = make(1, hidden_size=V, dropout=0.5, activation="identity", bias=False).double()
    nn.init.ones_(model.weight)
    nn.init.eye_(model.head.weight)
    tokens = torch.randint(V, (5, 6))
    logits, _ = model(tokens, model.initial_state(5))
    assert set(logits.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(logits, logits[:, :1].expand_as(logits))
    assert not torch.equal(logits[0], logits[1])
    assert set(model.eval()(tokens, model.initial_state(5))[0].unique().tolist()) == {1.0}


@pytest.mark.parametrize("embedding_size", [0, 16])
def test_the_hidden_layer_begins_with_variance_one(embedding_size):
    torch.manual_seed(0)
    model = WindowModel(60, window=12, hidden_size=256, embedding_size=embedding_size, activation="identity")
    nn.init.eye_(model.head.weight)
    hidden = model._hidden(torch.randint(60, (50, 12)), torch.float32)
    assert hidden.std().item() == pytest.approx(1, abs=0.1)
    assert model.bias.eq(0).all()


def test_torch_s_init_is_that_of_nn_linear():
    model = make(25, hidden_size=64, init="torch")
    bound = (25 * (V + 1)) ** -0.5
    nn.init.zeros_(model.weight[V :: V + 1])
    for parameter in (model.weight, model.bias):
        assert parameter.abs().max().item() == pytest.approx(bound, rel=0.05)
        assert parameter.abs().max() <= bound
    embedded = make(25, hidden_size=64, init="torch", embedding_size=4)
    assert embedded.weight.abs().max().item() == pytest.approx(0.1, rel=0.01)


def test_what_it_does_not_offer_is_refused():
    with pytest.raises(UsageError, match="init identity is of recurrent matrices; the window model has none"):
        make(init="identity")
    for option, value in (("cell", "lstm"), ("num_layers", 2), ("tie_embeddings", True), ("zoneout", 0.1)):
        with pytest.raises(UsageError, match=f"--model.{option.replace('_', '-')} is an option of kind recurrent"):
            build({"model": {"kind": "window", option: value}})


def test_the_configuration_s_network():
    model = make_model(V, build({"model": {"kind": "window", "window": 5, "hidden_size": 7, "dropout": 0.25}}).model)
    assert isinstance(model, WindowModel)
    assert (model.window, model.dropout, model.head.in_features) == (5, 0.25, 7)
    assert model.kernels(2, 3) == ["rows"]
    assert make(embedding_size=3).kernels(2, 3) == ["product"]


def test_evaluation_reads_every_character_after_those_before_it(real_text):
    """Whatever the rows: only the few characters behind a cold start are predicted from less."""
    ids = np.array([ord(c) % V for c in real_text[:6000]])
    starts, sizes = np.ones(V, dtype=bool), np.ones(V, dtype=int)
    model = make(6).eval()
    with torch.no_grad():
        logits, _ = model(torch.tensor(ids[None, :-1]), model.initial_state(1))
    expected = F.cross_entropy(logits[0].double(), torch.tensor(ids[1:])).item()
    for rows in (1, 3, 11):
        assert evaluate(model, ids, starts, sizes, batch_size=rows).loss == pytest.approx(expected, rel=1e-6)
    assert evaluate_cold(model, ids, starts, sizes, window=64).loss != pytest.approx(expected, rel=1e-6)
