"""What a prediction rests on: gradients with respect to the inputs, of models with a state and without one."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lmapp.gradients.decay import ProbeShape, cut_recurrence_warning, measure, probe_shape, verdict
from lmapp.gradients.truncation import Truncation
from lmapp.models import RecurrentModel, WindowModel

V = 6


def recurrent(seed=0, **options):
    torch.manual_seed(seed)
    model = RecurrentModel(V, **({"cell": "gru", "hidden_size": 4} | options)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.6)
    return model


def window_model(window=4, **options):
    torch.manual_seed(0)
    model = WindowModel(V, **({"window": window, "hidden_size": 5} | options)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.6)
    return model


def windows_for(shape, seed=1):
    return torch.randint(V, (shape.windows, shape.length), generator=torch.Generator().manual_seed(seed))


def of_recurrent(model, symbols):
    """The loss of the last symbol given those before it, and the vectors that these were read as."""
    states, leaves, embed = model.initial_state(1), [], model._embed

    def leaf(token, dtype):
        leaves.append(embed(token, dtype).detach().requires_grad_())
        return leaves[-1]

    model._embed = leaf
    try:
        for token in symbols[:-1]:
            logits, states = model.step(token.view(1), states)
    finally:
        del model._embed
    return F.cross_entropy(logits, symbols[-1:]), leaves


def of_window(model, symbols):
    """The same by the textbook: the vectors of the last N symbols side by side, one hidden layer."""
    ids = torch.cat((torch.full((model.window,), V), symbols[:-1]))
    vectors = F.one_hot(ids, V + 1).double() if model.embedding is None else model.embedding(ids)
    leaves = list(vectors.detach().unsqueeze(1))
    for leaf in leaves:
        leaf.requires_grad_()
    read = torch.cat(leaves[-model.window :], 1)
    before = (read @ model.weight if model.embedding is None else read @ model.weight.t()) + model.bias
    function = {"tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid, "identity": lambda a: a}
    logits = model.head(function[model.activation](before))
    return F.cross_entropy(logits, symbols[-1:]), leaves[model.window :]


def naive_norms(loss_of, model, windows, shape):
    """(K+1, P): ‖∂J^(i)/∂x_{i−k}‖, one prediction at a time, its whole text a graph of its own."""
    norms = np.zeros((shape.max_lag + 1, shape.windows * shape.end_points))
    for window, end in np.ndindex(shape.windows, shape.end_points):
        symbols = windows[window, : shape.warm_up + shape.max_lag + end + 2]
        loss, leaves = loss_of(model, symbols)
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        for lag in range(shape.max_lag + 1):
            gradient = found[len(leaves) - 1 - lag]
            norms[lag, window * shape.end_points + end] = 0.0 if gradient is None else gradient.norm().item()
    return norms


@pytest.mark.parametrize(
    "options",
    [
        {"cell": "vanilla"},
        {"cell": "lstm", "num_layers": 2, "embedding_size": 3},
        {"num_layers": 2, "embedding_size": 4, "connections": "residual"},
        {"num_layers": 3, "connections": "dense", "dropout": 0.5},
    ],
)
def test_norms_of_a_recurrent_model_s_inputs(options):
    model, shape = recurrent(**options), ProbeShape(2, 3, 5, 2, 4)
    windows = windows_for(shape)
    decay = measure(model, windows, shape)
    model.eval()
    np.testing.assert_allclose(
        decay.norms["inputs", "joint"], naive_norms(of_recurrent, model, windows, shape), rtol=1e-9
    )
    curve = decay.curve("inputs")
    assert (curve.reference_lag, curve.R[0], curve.pairs) == (0, 1, 4)
    assert list(decay.curves)[-1] == ("inputs", "joint")
    assert decay.curve() is decay.curve("all")  # which stays the one to quote


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid", "identity"])
@pytest.mark.parametrize("embedding_size", [0, 3])
def test_norms_of_a_window_model_s_inputs(embedding_size, activation):
    model = window_model(4, embedding_size=embedding_size, activation=activation, dropout=0.5)
    shape = ProbeShape(2, 3, 7, 2, 4)
    windows = windows_for(shape)
    decay = measure(model, windows, shape)
    expected = naive_norms(of_window, model, windows, shape)
    np.testing.assert_allclose(decay.norms["inputs", "joint"], expected, rtol=1e-9)
    assert set(decay.norms) == {("inputs", "joint")}
    assert not decay.norms["inputs", "joint"][4:].any()  # exactly
    assert decay.norms["inputs", "joint"][:4].any(axis=1).all()


@pytest.mark.parametrize(("window", "warm_up"), [(1, 0), (3, 0), (9, 0), (9, 2), (9, 20)])
def test_a_window_longer_than_what_was_read(window, warm_up):
    """What is read before the measured steps, padding too, is there but has no lag."""
    model, shape = window_model(window), ProbeShape(2, warm_up, 4, 3, 2)
    windows = windows_for(shape)
    expected = naive_norms(of_window, model, windows, shape)
    np.testing.assert_allclose(measure(model, windows, shape).norms["inputs", "joint"], expected, rtol=1e-9)


def test_every_number_of_a_window_model_s_gradient():
    model = window_model(3, embedding_size=2)
    tokens, targets, ends = torch.randint(V, (2, 7)), torch.randint(V, (2, 2)), torch.tensor([1, 5])
    found = model.input_gradients(tokens, model.initial_state(2), targets, ends)
    assert found.shape == (7, 4, 2)
    for b, e in np.ndindex(2, 2):
        end = int(ends[e])
        loss, leaves = of_window(model, torch.cat((tokens[b, : end + 1], targets[b, e : e + 1])))
        for t, gradient in enumerate(torch.autograd.grad(loss, leaves, allow_unused=True)):
            expected = torch.zeros(1, 2, dtype=torch.float64) if gradient is None else gradient
            torch.testing.assert_close(found[t, 2 * b + e], expected[0], rtol=1e-10, atol=1e-14)
        assert not found[end + 1 :, 2 * b + e].any()


def test_inputs_of_a_scalar_network():
    """A scalar linear network, W_hh = 1/2, W_hx = (2, 0), W_qh = (1, 0): ‖∂J/∂x_{i−k}‖ = 2 ‖∂J/∂h_{i−k}‖."""
    model = RecurrentModel(2, cell="vanilla", hidden_size=1, activation="identity").double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.layers[0].weight_hh.data.fill_(0.5)
    model.layers[0].weight_ih.data[0, 0] = 2
    model.head.weight.data[0] = 1
    shape = ProbeShape(1, 0, 3, 1, 2)
    decay = measure(model, torch.ones(1, 5, dtype=torch.int64), shape)  # inputs that move nothing
    np.testing.assert_allclose(decay.curve("all").G, [1 / 2, 1 / 4, 1 / 8, 1 / 16], rtol=1e-12)
    np.testing.assert_allclose(decay.curve("inputs").G, [1, 1 / 2, 1 / 4, 1 / 8], rtol=1e-12)
    assert decay.scalars()["decay/inputs/half_life"] == pytest.approx(1)


def test_a_network_that_reads_the_state_before_has_its_inputs_reference_where_it_reads_them():
    """The concatenated network's logits read x_i itself: lag 0 for the inputs, though the state's is 1."""
    decay = measure(recurrent(cell="concatenated"), windows_for(ProbeShape(2, 1, 4, 2, 2)), ProbeShape(2, 1, 4, 2, 2))
    assert (decay.curve().reference_lag, decay.curve("inputs").reference_lag) == (1, 0)


@pytest.mark.parametrize("make", [recurrent, window_model])
def test_measuring_changes_no_weight_no_gradient_and_no_random_state(make):
    model = make(dropout=0.5).float().train()
    model.compute_dtype = torch.bfloat16
    shape = ProbeShape(2, 4, 6, 2, 4)
    windows = windows_for(shape)
    model.head.weight.grad = torch.full_like(model.head.weight, 3.0)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    torch.manual_seed(7)
    np.random.seed(7)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = measure(model, windows, shape)
    first.scalars(), first.summary()
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])
    assert model.training
    assert model.compute_dtype == torch.bfloat16
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    assert (model.head.weight.grad == 3).all()
    assert [parameter.grad is None for parameter in model.parameters()].count(False) == 1
    assert all(np.array_equal(first.norms[key], norms) for key, norms in measure(model, windows, shape).norms.items())


@pytest.mark.parametrize("make", [recurrent, window_model])
def test_inputs_are_measured_in_fp32_whatever_the_training_precision(make):
    model, shape = make(hidden_size=16, embedding_size=8), ProbeShape(2, 8, 8, 2, 4)
    windows = windows_for(shape)
    exact = measure(model, windows, shape).norms["inputs", "joint"]
    model = model.float()
    model.compute_dtype = torch.bfloat16
    np.testing.assert_allclose(measure(model, windows, shape).norms["inputs", "joint"], exact, rtol=1e-4, atol=1e-7)


# What is said of a window model


def test_a_window_model_is_neither_warned_about_nor_judged():
    shape = ProbeShape(3, 2, 8, 2, 100, look_back=(4, 4))
    decay = measure(window_model(4), windows_for(shape), shape)
    assert decay.quoted == "inputs"
    assert decay.curve() is decay.curve("inputs", "joint")
    assert cut_recurrence_warning(decay) is None
    text = verdict(decay, Truncation(4))
    assert "carries no state" in text
    assert "beyond its window has no gradient" in text
    assert f"is {decay.curve().half_life} steps" in text
    assert not {"cut", "lost", "%"} & set(text.split())
    scalars = decay.scalars()
    assert {name.rpartition("/")[0] for name in scalars} == {"decay/inputs"}
    assert {"decay/inputs/half_life", "decay/inputs/half_life_low", "decay/inputs/horizon"} <= set(scalars)
    assert not {"decay/inputs/lost_share", "decay/inputs/at_truncation"} & set(scalars)
    (record,) = json.loads(json.dumps(decay.records(3), allow_nan=False))
    assert (record["layer"], record["component"], len(record["R"])) == ("inputs", "joint", 9)
    assert record["zero_share"] == [0, 0, 0, 0, 1, 1, 1, 1, 1]


def test_a_window_of_one_character_is_no_cut_recurrence():
    shape = ProbeShape(2, 0, 4, 1, 2)
    decay = measure(window_model(1), windows_for(shape), shape)
    assert decay.curve().R.tolist() == [1, 0, 0, 0, 0]
    assert cut_recurrence_warning(decay) is None


def test_a_window_model_that_ignores_its_inputs_has_nothing_to_say():
    model, shape = window_model(2), ProbeShape(2, 0, 4, 1, 2)
    nn.init.zeros_(model.weight)
    decay = measure(model, windows_for(shape), shape)
    assert decay.curve().pairs == 0
    assert verdict(decay, Truncation(4)).startswith("No gradient reaches what it reads")
    assert cut_recurrence_warning(decay) is None
    assert decay.interval("half_life") is None


def test_the_longest_lag_of_a_window_model_is_twice_its_window():
    assert probe_shape(100_000, 0, truncation_length=64, look_back=(16, 16))[0].max_lag == 32
    assert probe_shape(100_000, 0, truncation_length=64, look_back=(1, 1))[0].max_lag == 2
    shape, note = probe_shape(100_000, 0, truncation_length=64, look_back=(400, 400))
    assert shape.max_lag == 512
    assert "512 instead of 800" in note
