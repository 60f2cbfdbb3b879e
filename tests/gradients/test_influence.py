"""The influence of each character on a prediction, against automatic differentiation through `step`."""

import pytest
import torch
from torch.nn import functional as F

from lmapp.config import ModelConfig
from lmapp.gradients.influence import by_character, influence
from lmapp.models import make_model

KINDS = {
    "gru": {"cell": "gru", "embedding_size": 5},
    "one-hot lstm": {"cell": "lstm"},
    "residual": {"cell": "vanilla", "num_layers": 3, "connections": "residual", "embedding_size": 6},
    "dense": {"cell": ["lstm", "gru"], "connections": "dense", "embedding_size": 4},
    "window": {"kind": "window", "window": 4, "embedding_size": 3},
    "one-hot window": {"kind": "window", "window": 4},
}


def make(options):
    torch.manual_seed(1)
    options = {"hidden_size": 6, **options}
    cell = options.pop("cell", None)
    given = {**options, **({"cell": [cell] if isinstance(cell, str) else cell} if cell else {})}
    return make_model(9, ModelConfig(**given)).double()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("symbols", [1, 3])
def test_it_is_the_gradient_of_the_loss_on_each_symbol(name, symbols):
    """Against finite differences of the loss in every entry of the vector that a symbol is read as."""
    model, ids = make(KINDS[name]), torch.randint(9, (12,), generator=torch.Generator().manual_seed(2))
    first = len(ids) - symbols
    found = influence(model, ids, first)
    expected = torch.tensor([numeric(model, ids, first, n) for n in range(first)], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    if "window" in name:
        assert (found[: first - 4] == 0).all()
        assert (found[first - 4 :] > 0).all()
    else:
        assert (found > 0).all()


def numeric(model, ids, first, place, step=1e-6):
    """The norm of central differences of J in every entry of the vector read at `place`."""
    window = hasattr(model, "window")
    width = model.embedding.embedding_dim if model.embedding is not None else 9 + window
    gradient = [
        (loss(model, ids, first, place, entry, step) - loss(model, ids, first, place, entry, -step)) / (2 * step)
        for entry in range(width)
    ]
    return torch.stack(gradient).norm()


def loss(model, ids, first, place, entry, change):
    """J with one entry of the vector read at one place changed."""
    with torch.no_grad():
        table = torch.eye(9 + hasattr(model, "window"), dtype=torch.float64)
        if model.embedding is not None:
            table = model.embedding.weight
        vectors = table[ids[:-1]].clone()
        vectors[place, entry] += change
        logits = window_logits(model, vectors, table) if hasattr(model, "window") else stack_logits(model, vectors)
        return F.cross_entropy(logits[first - 1 :], ids[first:], reduction="sum")


def stack_logits(model, vectors):
    states, rows = model.initial_state(1), []
    for vector in vectors:
        below, outputs, new = vector[None], [], []
        reads = [below]
        for layer, state in zip(model.layers, states, strict=True):
            read = torch.cat(reads, -1) if model.connections == "dense" else below
            output, state = layer.step(layer.project(read), state)
            adds = model.connections == "residual" and output.shape == below.shape
            below = below + output if adds else output
            reads.append(output)
            outputs.append(output)
            new.append(state)
        states = tuple(new)
        rows.append(model.head(torch.cat(outputs, -1) if model.connections == "dense" else below)[0])
    return torch.stack(rows)


def window_logits(model, vectors, table):
    padding = table[-1:].expand(model.window - 1, -1)
    places = torch.cat((padding, vectors)).unfold(0, model.window, 1).transpose(1, 2)
    weight = model.weight if model.embedding is not None else model.weight.t()
    hidden = torch.tanh(F.linear(places.flatten(1), weight, model.bias))
    return model.head(hidden)


def test_it_leaves_everything_as_it_was():
    model = make(KINDS["gru"]).train()
    before = [p.clone() for p in model.parameters()]
    influence(model, torch.arange(8), 7)
    assert model.training
    assert all(p.grad is None and torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_symbols_of_one_character_are_one():
    norms = torch.tensor([3.0, 4.0, 1.0, 2.0, 2.0], dtype=torch.float64)
    starts = torch.tensor([True, False, True, True, False])
    torch.testing.assert_close(by_character(norms, starts), torch.tensor([5.0, 1.0, 8**0.5], dtype=torch.float64))
    assert by_character(norms[:1], torch.tensor([False])).tolist() == [3]
