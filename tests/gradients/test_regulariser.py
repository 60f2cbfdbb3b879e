"""Pascanu's Ω: the two products against a loop over time and automatic differentiation, in float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from lmapp.cells.vanilla import ACTIVATIONS, Vanilla
from lmapp.gradients.regulariser import add_gradients, omega, watching
from lmapp.models import RecurrentModel

SYMBOLS, ROWS, STEPS = 7, 3, 6


def make(dtype=torch.float64, **options):
    """A stack of vanilla cells with no parameter at 0."""
    torch.manual_seed(3)
    options = {"hidden_size": 5, "num_layers": 2, **options}
    model = RecurrentModel(SYMBOLS, cell="vanilla", **options).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.to(dtype)


def window(steps=STEPS):
    generator = torch.Generator().manual_seed(4)
    return (torch.randint(SYMBOLS, (ROWS, steps), generator=generator) for _ in range(2))


def entering(model):
    generator = torch.Generator().manual_seed(5)
    states = model.initial_state(ROWS)
    return tuple(type(s)(*(torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in s)) for s in states)


def loss_of(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def taken(model, tokens, targets, scale=1.0, **masks):
    """What `watching` takes, by layer from the bottom up, and J's own gradient of each recurrent matrix."""
    model.zero_grad()
    with watching(model) as found:
        logits, _ = model(tokens, entering(model), **masks)
    (scale * loss_of(logits, targets)).backward()
    assert [layer for layer, _ in found] == list(model.layers)[::-1]
    return [entry for _, entry in reversed(found)]


def ratios(model, tokens, targets, keep=None, credit=None):
    """‖W_hhᵀ(φ′(a_t)∘g_t)‖/‖g_t‖ of the rows and steps that count, and for each layer a W_hh to differentiate it by.

    Written down step by step, g_t being what automatic differentiation has for h_t.
    """
    reads_all = model.connections == "dense"
    h = [state.h for state in entering(model)]
    embedded = functional.one_hot(tokens, SYMBOLS).double() if model.embedding is None else model.embedding(tokens)
    masks = [1.0] * len(h)
    if model.training and model.dropout:
        masks = [functional.dropout(torch.ones_like(state), model.dropout) for state in h]
    slopes, states, logits = [[] for _ in h], [[] for _ in h], []
    for t in range(tokens.shape[1]):
        x, seen = embedded[:, t], []
        for number, layer in enumerate(model.layers):
            before = h[number]
            if keep is not None:
                before = before * keep[:, t, None]
            if credit is not None:
                before = before.detach() + credit[:, t, None] * (before - before.detach())
            a = layer.project(torch.cat((embedded[:, t], *seen), 1) if reads_all else x) + before @ layer.weight_hh.T
            value = h[number] = ACTIVATIONS[layer.activation].function(a)
            slopes[number].append(torch.autograd.grad(value.sum(), a, retain_graph=True)[0])
            states[number].append(value)
            y = value * masks[number]
            seen.append(y)
            adds = model.connections == "residual" and x.shape == y.shape and (number or model.embedding is not None)
            x = x + y if adds else y
        logits.append(model.head(torch.cat(seen, 1) if reads_all else x))
    loss = loss_of(torch.stack(logits, 1), targets)
    found = []
    for number, layer in enumerate(model.layers):
        gradients = torch.stack(torch.autograd.grad(loss, states[number], retain_graph=True))
        weight = layer.weight_hh.detach().clone().requires_grad_()
        handed_on = (torch.stack(slopes[number]) * gradients).detach() @ weight  # of rows: the transposed matrix
        counted = gradients.square().sum(-1) >= 1e-20
        found.append((weight, handed_on[counted].norm(dim=-1) / gradients[counted].norm(dim=-1)))
    return found


def assert_agrees(entries, twins):
    for entry, (weight, ratio) in zip(entries, twins, strict=True):
        total = (ratio - 1).square().sum()
        (gradient,) = torch.autograd.grad(total, weight)
        assert entry.counted == ratio.numel() > 0
        torch.testing.assert_close(entry.total, total.detach(), rtol=1e-10, atol=0)
        torch.testing.assert_close(entry.gradient, gradient, rtol=1e-10, atol=1e-12)
        assert gradient.norm() > 1e-3


# The equation ---------------------------------------------------------------------------------------------------------


def test_half_the_identity_is_a_quarter_a_step_and_its_gradient_minus_the_direction_s_square():
    generator = torch.Generator().manual_seed(1)
    for steps in (1, 4):
        upstream = torch.randn(steps, 2, 3, generator=generator, dtype=torch.float64)
        gradients = upstream.clone()
        for t in reversed(range(steps - 1)):
            gradients[t] += gradients[t + 1] / 2
        found = omega(torch.eye(3, dtype=torch.float64) / 2, gradients, upstream)
        assert found.counted == 2 * steps
        assert found.total.item() == pytest.approx(2 * steps / 4, abs=1e-14)
        directions = functional.normalize(gradients, dim=-1).flatten(0, 1)
        torch.testing.assert_close(found.gradient, -directions.T @ directions, rtol=0, atol=1e-14)


def test_an_orthogonal_matrix_and_no_slope_have_none():
    matrix = nn.init.orthogonal_(torch.empty(4, 4, dtype=torch.float64))
    deltas = torch.randn(1, 5, 4, dtype=torch.float64)
    found = omega(matrix, deltas, deltas)
    assert found.total.item() == pytest.approx(0, abs=1e-28)
    assert found.gradient.abs().max() < 1e-14


def test_what_hands_nothing_on_counts_and_has_no_direction():
    upstream = torch.ones(1, 2, 3, dtype=torch.float64)
    for weight, deltas in ((torch.zeros(3, 3), upstream), (torch.eye(3), torch.zeros_like(upstream))):
        found = omega(weight.double(), deltas, upstream)
        assert (found.total, found.counted) == (2, 2)
        assert not found.gradient.any()


def test_a_step_that_hardly_anything_reaches_does_not_count():
    def of(*lengths):
        vectors = torch.zeros(1, len(lengths), 2, dtype=torch.float64)
        vectors[0, :, 0] = torch.tensor(lengths, dtype=torch.float64)
        return omega(torch.eye(2, dtype=torch.float64) / 2, vectors, vectors)

    assert of(1.01e-10, 0.99e-10, 0.0, 3.0).counted == 2
    assert of(1.01e-10, 0.99e-10, 0.0, 3.0).total.item() == pytest.approx(0.5)
    torch.testing.assert_close(of(0.99e-10, 0.0, 3.0).gradient, of(3.0).gradient)
    assert of(0.0).counted == of(0.0).total == 0
    assert not of(0.0).gradient.any()


@pytest.mark.parametrize(
    "options",
    [
        *({"activation": name} for name in ACTIVATIONS),
        {"num_layers": 1},
        {"num_layers": 3, "embedding_size": 4, "bias": False},
        {"num_layers": 3, "embedding_size": 5, "connections": "residual"},
        {"num_layers": 3, "connections": "dense"},
        {"dropout": 0.5},
    ],
    ids=str,
)
def test_every_layer_of_a_network_agrees_with_the_loop(options):
    model, (tokens, targets) = make(**options), window()
    torch.manual_seed(8)
    entries = taken(model, tokens, targets)
    torch.manual_seed(8)  # the same masks
    assert_agrees(entries, ratios(model, tokens, targets))


def test_an_embedding_s_gates_from_a_table_and_without():
    model = make(embedding_size=4)
    for steps in (2, STEPS):
        assert ("table+scan" in model.kernels(ROWS, steps)) == (steps == STEPS)
        tokens, targets = window(steps)
        assert_agrees(taken(model, tokens, targets), ratios(model, tokens, targets))


@pytest.mark.parametrize("names", [["credit"], ["keep"], ["keep", "credit"]])
def test_a_cut_gradient_and_reset_states_agree_with_the_loop(names):
    model, (tokens, targets) = make(), window()
    values = {"credit": [1, 0, 1, 1, 0, 1], "keep": [1, 1, 1, 0, 1, 1]}
    masks = {name: torch.tensor(values[name]).double().expand(ROWS, STEPS).clone() for name in names}
    for mask in masks.values():
        mask[1] = mask[1].flip(0)
    assert_agrees(taken(model, tokens, targets, **masks), ratios(model, tokens, targets, **masks))


def test_rows_without_losses_do_not_count():
    model, (tokens, targets) = make(), window()
    targets[1] = -100
    targets[2, 3:] = -100
    entries = taken(model, tokens, targets)
    assert [entry.counted.item() for entry in entries] == [STEPS + 3] * 2
    assert_agrees(entries, ratios(model, tokens, targets))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_torch_s_kernel_gives_the_same(monkeypatch, activation):
    model, (tokens, targets) = make(activation=activation), window()
    expected = taken(model, tokens, targets)
    monkeypatch.setattr(Vanilla, "kernel", lambda *_: "torch")
    assert model.kernels(ROWS, STEPS) == ["torch", "torch"]
    torch.testing.assert_close(taken(model, tokens, targets), expected, rtol=1e-10, atol=1e-12)


# Numbers that are not float64 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e25, 1e-5])
def test_the_loss_s_scale_does_not_matter(scale):
    model, (tokens, targets) = make(torch.float32), window()
    for found, expected in zip(taken(model, tokens, targets, scale), taken(model, tokens, targets), strict=True):
        torch.testing.assert_close(found.total, expected.total, rtol=1e-4, atol=0)
        torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-3, atol=1e-4)
    assert all(entry.counted == 0 for entry in taken(model, tokens, targets, 1e-12))


def test_bf16_is_close():
    model, (tokens, targets) = make(torch.float32, hidden_size=48), window(20)
    for layer in model.layers:
        layer.weight_hh.data *= 0.2
    exact = taken(model, tokens, targets)
    model.compute_dtype = torch.bfloat16
    for found, expected in zip(taken(model, tokens, targets), exact, strict=True):
        assert found.gradient.dtype == torch.float32
        torch.testing.assert_close(found.total, expected.total, rtol=0.02, atol=0)
        assert (found.gradient - expected.gradient).norm() < 0.03 * expected.gradient.norm()


def test_what_is_not_finite_stays_so():
    weight = torch.eye(2)
    deltas = torch.tensor([[[float("nan"), 1.0], [1.0, 1.0]]])
    assert not omega(weight, deltas, deltas).gradient.isfinite().all()


# On top of the gradient of J ------------------------------------------------------------------------------------------


def test_the_gradient_is_added_to_the_recurrent_matrices_alone():
    model, (tokens, targets) = make(), window()
    entries = taken(model, tokens, targets)
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    value = add_gradients(list(zip(model.layers, entries, strict=True)), 0.7)
    means = [entry.total / entry.counted for entry in entries]
    assert value == pytest.approx(float(sum(means)), rel=1e-14)
    for name, parameter in model.named_parameters():
        expected = before[name]
        if name.endswith("weight_hh"):
            entry = entries[int(name.split(".")[1])]
            expected = expected + 0.7 * entry.gradient / entry.counted
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-14, msg=name)


def test_watching_changes_nothing_and_ends():
    model, (tokens, targets) = make(torch.float32, dropout=0.3), window()
    torch.manual_seed(2)
    taken(model, tokens, targets)
    watched = [parameter.grad.clone() for parameter in model.parameters()]
    torch.manual_seed(2)
    model.zero_grad()
    loss_of(model(tokens, entering(model))[0], targets).backward()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), watched, strict=True))
    assert not any({"scan", "torch_forward"} & vars(layer).keys() for layer in model.layers)
    with watching(model) as found, torch.no_grad():
        model(tokens, entering(model))
    assert found == []


def test_rows_in_two_processes_come_to_the_gradient_of_all_of_them():
    model, (tokens, targets) = make(), window()
    targets[0, 2:] = -100  # one process has fewer that count
    count = (targets >= 0).sum()

    def share(rows):
        model.zero_grad()
        with watching(model) as found:
            logits, _ = model(tokens[rows], tuple(type(s)(s.h[rows]) for s in entering(model)))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets[rows].flatten(), reduction="sum") / count
        loss.backward()
        return found

    def gradients():
        return [parameter.grad.clone() for parameter in model.parameters()]

    whole = add_gradients(share(slice(None)), 0.5)
    expected = gradients()
    parts = [share(rows) for rows in (slice(0, 1), slice(1, None))]
    own = [[float(x) for _, entry in part for x in (entry.total, entry.counted)] for part in parts]
    sums = [a + b for a, b in zip(*own, strict=True)]
    added = []
    for rows, numbers in zip((slice(0, 1), slice(1, None)), own, strict=True):
        found = share(rows)

        def sum_up(values, numbers=numbers):
            assert values == pytest.approx(numbers)
            return sums

        assert add_gradients(found, 0.5, sum_up) == pytest.approx(whole, rel=1e-12)
        added.append(gradients())
    for one, other, both in zip(*added, expected, strict=True):
        torch.testing.assert_close(one + other, both, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("activation", "scale"), [("tanh", 0.5), ("identity", 0.6), ("identity", 1.5), ("sigmoid", 1.0)]
)
def test_its_descent_brings_the_ratio_to_one(activation, scale):
    model, (tokens, targets) = make(activation=activation, hidden_size=16), window(20)
    for layer in model.layers:
        nn.init.orthogonal_(layer.weight_hh.data).mul_(scale)

    def step():
        with watching(model) as found:
            logits, _ = model(tokens, model.initial_state(ROWS))
        loss_of(logits, targets).backward()
        model.zero_grad()
        for layer in model.layers:
            layer.weight_hh.grad = torch.zeros_like(layer.weight_hh)
        value = add_gradients(found, 1.0)
        for layer in model.layers:
            layer.weight_hh.data -= 0.5 * layer.weight_hh.grad
        return value

    def distance():
        return [(ratio.log().mean().abs().item()) for _, ratio in ratios(model, tokens, targets)]

    before, first = distance(), step()
    for _ in range(200):
        last = step()
    assert last < first / 4
    assert all(new < old / 2 for new, old in zip(distance(), before, strict=True))
