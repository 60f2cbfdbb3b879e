"""The bidirectional model: what a place is predicted from, and which characters are masked."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lmapp import cells
from lmapp.config import build
from lmapp.errors import UsageError
from lmapp.models import InfillModel, make_model
from lmapp.models.infill import choose_masked

V = 11


def make(cell="gru", **options):
    torch.manual_seed(0)
    return InfillModel(V, **({"cell": cell, "hidden_size": 8} | options))


def naive(model, tokens):
    """Logits (B, T, V): each direction step by step, in plain operations, in the order of the text."""
    x = F.one_hot(tokens, V + 1).double() if model.embedding is None else model.embedding(tokens)
    for ahead, back in zip(model.forwards, model.backwards, strict=True):
        outputs = []
        for layer, order in ((ahead, range(tokens.shape[1])), (back, range(tokens.shape[1] - 1, -1, -1))):
            state, found = layer.initial_state(len(tokens)), {}
            for t in order:
                found[t], state = layer.step(layer.project(x[:, t]), state)
            outputs.append(torch.stack([found[t] for t in range(tokens.shape[1])], 1))
        x = torch.cat(outputs, -1)
    return model.head(x)


@pytest.mark.parametrize("embedding_size", [0, 5])
@pytest.mark.parametrize("stack", ["vanilla", "gru", "lstm", ["lstm", "gru"], ["gru", "vanilla", "gru"]])
def test_it_is_two_recurrences_a_layer(stack, embedding_size):
    model = make(stack, embedding_size=embedding_size).double()
    tokens, targets = torch.randint(V, (2, 3, 9)).unbind()
    tokens[1, 4] = model.mask_symbol
    logits, expected = model(tokens), naive(model, tokens)
    assert logits.shape == (3, 9, V)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)

    def gradients(logits):
        model.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    wanted = gradients(expected)
    for name, gradient in gradients(logits).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cell", [name for name in cells.CELLS if not cells.find(name).reads_out])
def test_every_cell_will_do(cell):
    model = make(cell, num_layers=2).double()
    tokens = torch.randint(V, (2, 5))
    torch.testing.assert_close(model(tokens), naive(model, tokens), rtol=1e-12, atol=1e-12)


def test_every_place_is_predicted_from_both_sides_and_from_itself():
    model = make(num_layers=2).double()
    tokens = torch.randint(V, (1, 7))
    logits = model(tokens)
    for t in range(7):
        other = tokens.clone()
        other[0, t] = (other[0, t] + 1) % V
        assert (model(other) != logits).any(-1).all()


def test_text_read_backwards_by_the_cells_exchanged_is_the_same():
    model = make(num_layers=1).double()
    turned = copy.deepcopy(model)
    turned.forwards, turned.backwards = turned.backwards, turned.forwards
    with torch.no_grad():
        turned.head.weight.copy_(model.head.weight.roll(8, 1))
    tokens = torch.randint(V, (3, 6))
    torch.testing.assert_close(turned(tokens.flip(1)).flip(1), model(tokens), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_gradients_on_real_text_keep_their_direction(cell, dtype, real_text):
    symbols, ids = np.unique(np.array(list(real_text[:4096])), return_inverse=True)
    ids, count = torch.as_tensor(ids.reshape(32, 128)), len(symbols)
    torch.manual_seed(0)
    model = InfillModel(count, cell=cell, hidden_size=48, num_layers=2)
    masked = choose_masked(ids, torch.ones(count, dtype=torch.bool), 0.15)
    twin = copy.deepcopy(model).double()
    model.compute_dtype = dtype

    def gradients(network):
        logits = network(ids.masked_fill(masked, network.mask_symbol))
        F.cross_entropy(logits[masked], ids[masked]).backward()
        return {name: parameter.grad.double() for name, parameter in network.named_parameters()}

    found = gradients(model)
    for name, expected in gradients(twin).items():
        cosine = F.cosine_similarity(found[name].flatten(), expected.flatten(), dim=0)
        assert cosine >= (0.999 if dtype == torch.bfloat16 else 1 - 1e-6), (name, float(cosine))


def test_kernels_and_dtypes():
    assert make("gru", num_layers=2).kernels(4, 8) == ["table+scan", "scan"]
    assert make("gru", embedding_size=5).kernels(1, 8) == ["scan"]
    assert make("lstm").kernels(4, 8) == ["torch"]
    model = make("lstm", hidden_size=5)
    model.compute_dtype = torch.bfloat16
    logits = model(torch.randint(V, (2, 6)))
    assert logits.dtype == torch.float32
    logits.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_dropout_is_one_mask_over_time():
    model = make("vanilla", hidden_size=64, dropout=0.5, activation="identity", init="identity").double()
    for layer in (*model.forwards, *model.backwards):
        torch.nn.init.zeros_(layer.weight_hh)
        torch.nn.init.ones_(layer.weight_ih)
    torch.nn.init.ones_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    tokens = torch.randint(V, (5, 6))
    logits = model(tokens)
    assert torch.equal(logits, logits[:, :1].expand_as(logits))
    assert not torch.equal(logits[0], logits[1])
    assert model.eval()(tokens).unique().tolist() == [128.0]


def test_options_reach_the_cells_of_both_directions():
    model = make(["vanilla", "gru"], activation="relu", bias=False, init="identity")
    assert [layer.activation for layer in (model.forwards[0], model.backwards[0])] == ["relu", "relu"]
    assert all(layer.bias_ih is None for layer in (*model.forwards, *model.backwards))
    assert model.head.bias is None
    assert torch.equal(model.backwards[0].weight_hh, torch.eye(8))
    model = make("lstm", num_layers=2, forget_bias=2.5)
    assert all(layer.bias_ih[8:16].eq(2.5).all() for layer in (*model.forwards, *model.backwards))
    # inputs of variance 1: one-hot ones are drawn from a wider range
    assert make("gru").backwards[0].weight_ih.abs().max().item() == pytest.approx(3**0.5, rel=0.05)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(UsageError, match="activation is an option of the vanilla cell"):
        make("gru", activation="relu")
    with pytest.raises(UsageError, match="the outputs of Concatenated are the logits, and an infill model has two"):
        make("concatenated")
    with pytest.raises(UsageError, match="forget-bias"):
        make("vanilla", forget_bias=1.0)
    for option in ("tie_embeddings", "zoneout", "weight_drop"):
        with pytest.raises(UsageError, match=r"is an option of kind recurrent; --model\.kind is infill"):
            build({"model": {"kind": "infill", option: True if option == "tie_embeddings" else 0.1}})
    with pytest.raises(UsageError, match="the text on both sides"):
        build({"model": {"kind": "infill", "bidirectional": False}})


def test_the_configuration_s_network():
    config = build({"model": {"kind": "infill", "cell": ["gru", "lstm"], "hidden_size": 7, "bidirectional": True}})
    model = make_model(V, config.model)
    assert isinstance(model, InfillModel)
    assert [type(layer).__name__ for layer in model.backwards] == ["GRU", "LSTM"]
    assert model.head.in_features == 14


# Masks ----------------------------------------------------------------------------------------------------------------

ONES = torch.ones(V, dtype=torch.bool)


@pytest.mark.parametrize("fraction", [0.01, 0.15, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (8, 100)])
def test_the_share_is_exact_and_at_least_one_character(fraction, shape):
    tokens = torch.randint(V, shape)
    masked = choose_masked(tokens, ONES, fraction)
    assert masked.shape == shape
    assert int(masked.sum()) == max(1, round(fraction * tokens.numel()))


def test_every_character_is_as_likely_to_be_masked():
    tokens = torch.randint(V, (4, 10))
    generator = torch.Generator().manual_seed(0)
    counts = sum(choose_masked(tokens, ONES, 0.25, generator).double() for _ in range(2000)) / 2000
    assert counts.min() > 0.2
    assert counts.max() < 0.3


def test_a_mask_is_a_matter_of_its_generator():
    tokens = torch.randint(V, (4, 50))
    first, again, other = (choose_masked(tokens, ONES, 0.2, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    state = torch.get_rng_state()
    choose_masked(tokens, ONES, 0.2, torch.Generator().manual_seed(3))
    assert torch.equal(torch.get_rng_state(), state)
    drawn = choose_masked(tokens, ONES, 0.2)
    torch.set_rng_state(state)
    assert torch.equal(choose_masked(tokens, ONES, 0.2), drawn)


def test_symbols_that_continue_a_character_go_with_it():
    starts = torch.tensor([True, False, True])  # 1 continues what is before it
    tokens = torch.tensor([[1, 0, 1, 1, 0, 2, 1, 0], [0, 0, 1, 2, 2, 2, 0, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
    whole = [[(1, 2, 3), 4, (5, 6), 7], [0, (1, 2), 3, 4, 5, (6, 7)]]
    generator, seen = torch.Generator().manual_seed(0), set()
    for _ in range(200):
        masked = choose_masked(tokens, starts, 0.3, generator)
        assert not masked[2].any()  # nothing begins there
        assert not masked[0, 0]
        count = 0
        for row, characters in enumerate(whole):
            for character in characters:
                places = [character] if isinstance(character, int) else list(character)
                values = masked[row, places]
                assert values.all() or not values.any()
                count += int(values[0])
                seen |= {(row, character)} if values[0] else set()
        assert count == 3  # of ten characters
    assert len(seen) == 10


def test_where_no_character_begins_nothing_is_masked():
    assert not choose_masked(torch.ones(2, 3, dtype=torch.int64), torch.tensor([True, False]), 1.0).any()
