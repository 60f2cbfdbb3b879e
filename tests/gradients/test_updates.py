"""Norms and update-to-weight ratios by group, against steps made by hand; and the names of the groups."""

import math

import pytest
import torch
from torch import nn

from lmapp.cells.protocol import Cell, HiddenState
from lmapp.config import build
from lmapp.gradients.clipping import global_norm
from lmapp.gradients.updates import group_name, group_norms, grouped, update_ratios
from lmapp.models import InfillModel, RecurrentModel, WindowModel
from lmapp.training.optimizers import make_optimizer


def with_gradients(model, scale=1.0):
    generator = torch.Generator().manual_seed(3)
    for parameter in model.double().parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def copies(model):
    return grouped((name, p.detach().clone()) for name, p in model.named_parameters())


def length(*tensors):
    return math.sqrt(math.fsum(float(x) ** 2 for tensor in tensors for x in tensor.flatten()))


# Names


@pytest.mark.parametrize(
    ("parameter", "group"),
    [
        ("layers.0.weight_hh", "layer0/weight_hh"),
        ("layers.11.bias_ih", "layer11/bias"),
        ("layers.11.bias_hh", "layer11/bias"),
        ("forwards.1.weight_ih", "forward1/weight_ih"),
        ("embedding.weight", "embedding"),
        ("head.weight", "head"),
        ("head.bias", "head"),
        ("weight", "weight"),
        ("bias", "bias"),
        ("layers.0.rate", "layer0/rate"),
        ("layers.2.inner.weight", "layer2/inner/weight"),
        ("layers.2.inner.bias", "layer2/bias"),
        ("layers.2.experts.1.weight", "layer2/expert1/weight"),
        ("layers.2.experts.1.bias", "layer2/bias"),
        ("readout.deep.er.weight", "readout"),
    ],
)
def test_the_group_of_a_parameter(parameter, group):
    assert group_name(parameter) == group


def layer_groups(*layers):
    return [f"{layer}/{part}" for layer in layers for part in ("weight_ih", "weight_hh", "bias")]


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (lambda: RecurrentModel(7, cell="lstm", hidden_size=5), [*layer_groups("layer0"), "head"]),
        (
            lambda: RecurrentModel(7, cell=["gru", "vanilla"], hidden_size=5, embedding_size=3),
            ["embedding", *layer_groups("layer0", "layer1"), "head"],
        ),
        (
            lambda: RecurrentModel(7, cell="gru", hidden_size=5, bias=False),
            ["layer0/weight_ih", "layer0/weight_hh", "head"],
        ),
        (lambda: RecurrentModel(7, cell="concatenated", hidden_size=5), layer_groups("layer0")),
        (lambda: RecurrentModel(7, cell="mingru", hidden_size=5), ["layer0/weight_ih", "layer0/bias", "head"]),
        (lambda: WindowModel(7, window=3, hidden_size=5, embedding_size=2), ["weight", "bias", "embedding", "head"]),
        (
            lambda: InfillModel(7, cell="gru", hidden_size=5, num_layers=2),
            [*layer_groups("forward0", "forward1", "backward0", "backward1"), "head"],
        ),
    ],
)
def test_the_groups_of_a_network(model, groups):
    network = model()
    found = grouped(network.named_parameters())
    assert list(found) == groups
    assert sum(len(tensors) for tensors in found.values()) == len(list(network.parameters()))


class Odd(Cell):
    """A cell from outside: parts of its own, one of them with a bias."""

    state_type = HiddenState

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.gate_size = hidden_size
        self.reading = nn.Linear(input_size, hidden_size)
        self.rate = nn.Parameter(torch.full((hidden_size,), 0.5))

    def project(self, x):
        return self.reading(x)

    def step(self, gates, state):
        s = self.rate * state.h + gates.tanh()
        return s, HiddenState(s)


def test_a_cell_from_outside_has_groups_by_its_own_names():
    model = RecurrentModel(7, cell="gru", hidden_size=5)
    model.layers[0] = Odd(7, 5)
    assert list(grouped(model.named_parameters())) == ["layer0/rate", "layer0/reading/weight", "layer0/bias", "head"]


def test_a_tied_matrix_is_there_once_as_the_embedding():
    model = RecurrentModel(7, cell="gru", hidden_size=5, embedding_size=5, tie_embeddings=True)
    found = grouped(model.named_parameters())
    assert [tuple(t.shape) for t in found["embedding"]] == [(7, 5)]
    assert [tuple(t.shape) for t in found["head"]] == [(7,)]
    with_gradients(model)
    assert found["embedding"][0] is model.head.weight
    norms = group_norms(grouped((name, p.grad) for name, p in model.named_parameters()))
    assert norms["embedding"] == pytest.approx(length(model.head.weight.grad), rel=1e-12)


# Norms


@pytest.mark.parametrize("scale", [1.0, 1e20])
def test_squares_of_the_groups_add_up_to_that_of_the_global_norm(scale):
    model = with_gradients(RecurrentModel(7, cell=["lstm", "gru"], hidden_size=5, embedding_size=3), scale).float()
    gradients = [p.grad for p in model.parameters()]
    norms = group_norms(grouped((name, p.grad) for name, p in model.named_parameters()))
    whole = float(global_norm(gradients))
    assert math.sqrt(math.fsum(norm**2 for norm in norms.values())) == pytest.approx(whole, rel=1e-6)
    biases = [model.layers[1].bias_ih.grad, model.layers[1].bias_hh.grad]
    assert norms["layer1/bias"] == pytest.approx(length(*biases), rel=1e-6)
    assert all(0 < norm < whole for norm in norms.values())


# Updates


def test_of_plain_gradient_descent_the_ratio_is_the_rate_times_that_of_gradient_and_weight():
    model = with_gradients(RecurrentModel(7, cell=["lstm", "gru"], hidden_size=5, embedding_size=3))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    before = copies(model)
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    ratios = update_ratios(before, copies(model))
    gradients = grouped((name, p.grad) for name, p in model.named_parameters())
    assert list(ratios) == list(before)
    for name, ratio in ratios.items():
        assert ratio == pytest.approx(0.01 * length(*gradients[name]) / length(*before[name]), rel=1e-10), name


def test_weight_decay_is_part_of_the_update():
    """AdamW by hand, its first step: w − η λ w − η g/(|g| + ε); biases are not decayed."""
    config = build({"train": {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.3}}).train
    model = with_gradients(RecurrentModel(7, cell="gru", hidden_size=5))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    before = copies(model)
    make_optimizer(model, config).step()
    ratios = update_ratios(before, copies(model))
    for name, weights in before.items():
        gradients = [p.grad for n, p in model.named_parameters() if group_name(n) == name]
        moved = [
            0.01 * (0.3 * (w.dim() > 1) * w + g / (g.abs() + 1e-8)) for w, g in zip(weights, gradients, strict=True)
        ]
        assert ratios[name] == pytest.approx(length(*moved) / length(*weights), rel=1e-6), name


def test_weights_that_were_zero_have_no_ratio_and_those_that_stayed_have_zero():
    before = {"zero": [torch.zeros(3), torch.zeros(2)], "still": [torch.ones(2)], "empty": [torch.empty(0)]}
    after = {"zero": [torch.ones(3), torch.zeros(2)], "still": [torch.ones(2)], "empty": [torch.empty(0)]}
    assert update_ratios(before, after) == {"still": 0.0}


def test_nothing_that_is_given_changes():
    model = with_gradients(RecurrentModel(7, cell="gru", hidden_size=5))
    gradients = [p.grad.clone() for p in model.parameters()]
    before, after = copies(model), copies(model)
    for tensors in after.values():
        for tensor in tensors:
            tensor.mul_(1.01)
    kept = {name: [t.clone() for t in tensors] for name, tensors in before.items()}
    group_norms(grouped((name, p.grad) for name, p in model.named_parameters()))
    assert update_ratios(before, after)["head"] == pytest.approx(0.01)
    assert all(torch.equal(a, b) for name in kept for a, b in zip(kept[name], before[name], strict=True))
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))
