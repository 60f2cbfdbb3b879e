import json
import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from lmapp.gradients.decay import (
    Curve,
    Decay,
    ProbeShape,
    cut_recurrence_warning,
    lost_share,
    measure,
    probe_shape,
    probe_windows,
    verdict,
)
from lmapp.gradients.truncation import UNLIMITED, Truncation
from lmapp.models import Gradients, LayerGradients, RecurrentModel

# Where to measure


def test_long_validation_text_gives_what_was_asked_for_and_nothing_to_say():
    shape, reason = probe_shape(100_000, 900_000, truncation_length=64)
    assert shape == ProbeShape(8, 64, 128, 4, 64, "validation")
    assert shape.length == 64 + 128 + 4 + 1
    assert reason == ""


def test_largest_lag_can_be_given():
    shape, reason = probe_shape(100_000, 0, truncation_length=64, max_lag=20, windows=3, warm_up=5, end_points=2)
    assert shape == ProbeShape(3, 5, 20, 2, 64)
    assert reason == ""


@pytest.mark.parametrize("validation", [0, 1, 196, 8 * 197 - 1])
def test_too_little_validation_text_moves_to_the_end_of_the_training_text(validation):
    shape, reason = probe_shape(validation, 10_000, truncation_length=64)
    assert shape == ProbeShape(8, 64, 128, 4, 64, "train")
    assert "end of the training text" in reason


def test_validation_text_that_holds_all_windows_exactly_is_enough():
    shape, reason = probe_shape(8 * 197, 10_000, truncation_length=64)
    assert shape.source == "validation"
    assert reason == ""


def test_short_text_takes_from_the_warm_up_first_then_from_the_lags():
    shape, reason = probe_shape(10, 150, truncation_length=64)
    assert (shape.warm_up, shape.max_lag, shape.source) == (150 - 128 - 4 - 1, 128, "train")
    assert "warm-up is 17 steps instead of 64" in reason
    assert "largest lag" not in reason
    shape, reason = probe_shape(10, 50, truncation_length=64)
    assert (shape.warm_up, shape.max_lag) == (0, 45)
    assert "warm-up is 0 steps instead of 64" in reason
    assert "largest lag is 45 instead of 128" in reason


def test_overlap_and_fewer_windows_are_said():
    shape, reason = probe_shape(0, 400, truncation_length=64)
    assert shape.windows == 8
    assert "overlap" in reason
    shape, reason = probe_shape(0, 197, truncation_length=64)
    assert shape.windows == 1
    assert "only 1 of 8 windows" in reason
    assert "overlap" not in reason


def test_below_two_lags_decay_is_off_and_says_so():
    shape, reason = probe_shape(0, 7, truncation_length=64)
    assert (shape.warm_up, shape.max_lag) == (0, 2)
    for train in (6, 1, 0):
        shape, reason = probe_shape(0, train, truncation_length=64)
        assert shape is None
        assert "decay is off" in reason
        assert f"{train} characters" in reason
    shape, reason = probe_shape(10_000, 10_000, truncation_length=64, max_lag=1)
    assert shape is None
    assert "largest lag is 1" in reason


@pytest.mark.parametrize("length", [8 * 197, 8 * 197 + 3, 50_000])
@pytest.mark.parametrize("source", ["validation", "train"])
def test_windows_are_pieces_of_the_text_that_do_not_overlap(length, source):
    shape = ProbeShape(8, 64, 128, 4, 64, source)
    ids = np.arange(length, dtype=np.uint16)
    windows = probe_windows(ids, shape, seed=5)
    assert windows.dtype == np.int64
    assert windows.shape == (8, 197)
    assert (np.diff(windows, axis=1) == 1).all()
    assert (np.diff(windows[:, 0]) >= 197).all()
    if source == "train":
        assert windows.min() >= length - 8 * 197


def test_windows_of_a_short_text_are_spread_evenly_and_distinct():
    shape, _ = probe_shape(0, 230, truncation_length=64)
    windows = probe_windows(np.arange(230), shape, seed=0)
    assert windows[0, 0] == 0
    assert windows[-1, -1] == 229
    assert len(set(windows[:, 0])) == shape.windows == 8


@pytest.mark.parametrize("train", range(7, 215))
def test_every_short_text_gives_windows_that_fit(train):
    shape, _ = probe_shape(0, train, truncation_length=64)
    windows = probe_windows(np.arange(train), shape, seed=1)
    assert windows.shape == (shape.windows, shape.length)
    assert windows.max() < train
    assert len({tuple(window) for window in windows.tolist()}) == shape.windows


def test_windows_depend_on_the_seed_alone():
    shape = ProbeShape(8, 64, 128, 4, 64)
    ids = np.random.default_rng(0).integers(0, 50, 100_000)
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    first = probe_windows(ids, shape, seed=5)
    assert np.array_equal(first, probe_windows(ids, shape, seed=5))
    assert not np.array_equal(first, probe_windows(ids, shape, seed=6))
    assert np.array_equal(before, np.random.get_state()[1])


# The measurement


def model_of(cell, hidden_size=3, num_layers=1, vocabulary_size=5, seed=0, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = RecurrentModel(
            vocabulary_size, cell=cell, hidden_size=hidden_size, num_layers=num_layers, init="torch", **options
        ).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    return model


def windows_for(shape, vocabulary_size=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary_size, (shape.windows, shape.length), generator=generator)


def linear_model(weight, readout):
    """h_t = W h_{t−1}, without inputs or biases; logits are `readout` h."""
    weight, readout = torch.tensor(weight, dtype=torch.float64), torch.tensor(readout, dtype=torch.float64)
    model = RecurrentModel(
        len(readout), cell="vanilla", hidden_size=len(weight), num_layers=1, activation="identity"
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.layers[0].weight_hh.copy_(weight)
        model.head.weight.copy_(readout)
    return model


@pytest.mark.parametrize("alpha", [0.5, 0.9, 1.0, 1.1])
def test_scaled_identity_decays_as_a_power(alpha):
    model = linear_model((alpha * np.eye(3)).tolist(), [[1.0, 0.5, 0.0], [0.0, 2.0, 1.0]])
    shape = ProbeShape(2, 3, 12, 4, 6)
    curve = measure(model, windows_for(shape, 2), shape).curve()
    assert np.abs(curve.R - alpha ** np.arange(13.0)).max() < 1e-12 * max(1, alpha**12)
    assert curve.rate == pytest.approx(alpha, rel=1e-12)
    assert curve.reference_lag == 0


def test_linear_network_whose_gradient_grows_before_it_falls():
    # ∂J/∂h_i ∝ (1, 0); W^k is [[.5^k, 4k·.5^(k−1)], [0, .5^k]], so the norm rises above 1 first.
    model = linear_model([[0.5, 4.0], [0.0, 0.5]], [[1.0, 0.0], [0.0, 0.0]])
    shape = ProbeShape(2, 0, 7, 2, 4)
    decay = measure(model, windows_for(shape, 2), shape)
    curve = decay.curve()
    expected = [1, 4.031129, 4.007805, 3.002603, 2.000976, 1.250391, 0.750163, 0.437570]
    assert np.abs(curve.R - expected).max() < 5e-7
    assert curve.half_life.value == pytest.approx(6.752581, abs=5e-7)
    assert not curve.half_life.censored


def test_lstm_without_weights_has_its_memory_counted_once():
    model = model_of("lstm", hidden_size=1, vocabulary_size=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.head.weight.copy_(torch.tensor([[1.0], [0.0]]))
    shape = ProbeShape(1, 0, 3, 1, 2)
    decay = measure(model, torch.zeros(1, 5, dtype=torch.int64), shape)
    joint, h, c = (decay.curve("all", component) for component in ("joint", "h", "c"))
    assert joint.G[0] == pytest.approx(0.5, abs=1e-12)  # 0.559017 if c's way through h_t counted twice
    np.testing.assert_allclose(joint.R, [1, 1 / 4, 1 / 8, 1 / 16], atol=1e-12, rtol=0)
    assert h.R.tolist() == [1, 0, 0, 0]
    assert h.zero_share.tolist() == [0, 1, 1, 1]
    np.testing.assert_allclose(c.R, [0, 1 / 4, 1 / 8, 1 / 16], atol=1e-12, rtol=0)
    assert cut_recurrence_warning(decay) is None


class _State(NamedTuple):
    h: torch.Tensor


class _ReadsPrevious(nn.Module):
    """h_t = h_{t−1}/2 and logits (h_{t−1}, 0): the output is read from the state before."""

    hidden_size, output_size, gate_size = 1, 2, 1
    output_component = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, 1), 0.5, dtype=torch.float64))

    def step(self, gates, state):
        output = torch.cat([state.h, torch.zeros_like(state.h)], 1)
        return output, _State(gates * 0 + state.h @ self.weight)


class _HeadlessModel(nn.Module):
    """One such cell whose outputs are the logits, with the interface `measure` uses, by plain autograd."""

    def __init__(self, cell):
        super().__init__()
        self.layers = nn.ModuleList([cell])
        self.compute_dtype = torch.float32

    def initial_state(self, batch_size):
        return (_State(torch.zeros(batch_size, 1, dtype=torch.float64)),)

    def forward(self, tokens, states):
        raise AssertionError("no warm-up was asked for")

    def state_gradients(self, tokens, states, targets, end_points):
        (cell,), (state,) = self.layers, states
        entering = []
        outputs = []
        state = _State(state.h.clone().requires_grad_())
        for _ in range(tokens.shape[1]):
            entering.append(state)
            output, state = cell.step(torch.zeros(len(tokens), 1, dtype=torch.float64), state)
            outputs.append(output)
        loss = nn.functional.cross_entropy(outputs[int(end_points[0])], targets[:, 0], reduction="sum")
        found = torch.autograd.grad(loss, [s.h for s in entering] + outputs, allow_unused=True)
        leaves = [s.h for s in entering] + outputs
        found = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
        count = len(entering)
        states_found = torch.stack([*found[:count], torch.zeros_like(found[0])])
        outputs = torch.stack(found[count:])
        return Gradients((LayerGradients(_State(states_found), outputs, outputs),), torch.zeros_like(outputs))


def test_the_concatenated_cell_has_its_reference_at_lag_one():
    """The same figures from the cell itself, alone and as the top of a stack."""
    model = RecurrentModel(2, cell="concatenated", hidden_size=1, num_layers=1).double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.layers[0].weight_hh.data = torch.tensor([[0.5], [1.0], [0.0]], dtype=torch.float64)
    shape = ProbeShape(windows=1, warm_up=0, max_lag=3, end_points=1, truncation_length=2)
    curve = measure(model, torch.zeros(1, 5, dtype=torch.int64), shape).curve()
    assert curve.reference_lag == 1
    assert curve.G.tolist() == pytest.approx([0, 0.5, 0.25, 0.125], abs=1e-12)
    assert curve.R.tolist() == pytest.approx([0, 1, 0.5, 0.25], abs=1e-12)
    stack = model_of(["gru", "concatenated"], num_layers=None)
    decay = measure(stack, windows_for(ProbeShape(2, 3, 4, 2, 4)), ProbeShape(2, 3, 4, 2, 4))
    assert decay.curve(0).reference_lag == 0  # the layer below reaches the logits at once, but through this one
    assert decay.curve(1).reference_lag == decay.curve().reference_lag == 1


def test_a_cell_that_reads_the_state_before_has_its_reference_at_lag_one():
    shape = ProbeShape(1, 0, 3, 1, 2)
    decay = measure(_HeadlessModel(_ReadsPrevious()), torch.zeros(1, 5, dtype=torch.int64), shape)
    curve = decay.curve()
    # The published values 0, 1/2, 1/4, 1/8 are for ∂J/∂o = (−1/2, 1/2) at h = 0, seen through the readout (1, 0).
    np.testing.assert_allclose(curve.G, [0, 0.5, 0.25, 0.125], atol=1e-12, rtol=0)
    assert curve.reference_lag == 1
    np.testing.assert_allclose(curve.R, [0, 1, 0.5, 0.25], atol=1e-12, rtol=0)
    assert curve.zero_share.tolist() == [1, 0, 0, 0]
    assert curve.rate == pytest.approx(0.5)
    assert cut_recurrence_warning(decay) is None


def test_a_cell_that_reads_the_state_before_is_recognised_where_widths_agree():
    class Wide(_ReadsPrevious):
        hidden_size, output_size = 1, 1

        def step(self, gates, state):
            return state.h, _State(gates * 0 + state.h @ self.weight)

    class Model(_HeadlessModel):
        def initial_state(self, batch_size):
            return (_State(torch.ones(batch_size, 1, dtype=torch.float64)),)

        def state_gradients(self, tokens, states, targets, end_points):
            steps = tokens.shape[1]
            entering = torch.zeros(steps + 1, 1, 1, dtype=torch.float64)
            entering[:steps, 0, 0] = 0.5 ** torch.arange(steps - 1, -1, -1)
            outputs = torch.zeros(steps, 1, 1, dtype=torch.float64)
            outputs[-1] = 1
            return Gradients((LayerGradients(_State(entering), outputs, outputs),), torch.zeros_like(outputs))

    decay = measure(Model(Wide()), torch.zeros(1, 5, dtype=torch.int64), ProbeShape(1, 0, 3, 1, 2))
    assert decay.curve().G.tolist() == [0, 1, 0.5, 0.25]
    assert decay.curve(0).G.tolist() == [0, 1, 0.5, 0.25]


def naive_norms(model, windows, shape, layer):
    """∂J/∂S by central differences: the loss recomputed from a perturbed state, one number at a time.

    Returns (K+1, P) by component. `layer` None perturbs every layer's state at once; then nothing at the same time is
    recomputed but the readout. Otherwise the layers above take the perturbed state at the same time.
    """
    epsilon = 1e-5
    layers, hidden = list(model.layers), model.layers[0].hidden_size
    first, steps = shape.warm_up, shape.max_lag + shape.end_points
    result = {}

    def embed(token):
        if model.embedding is not None:
            return model.embedding(token)
        return nn.functional.one_hot(token, model.head.out_features).double()

    def advance(x, states, start=0):
        after = list(states[:start])
        for cell, state in zip(layers[start:], states[start:], strict=True):
            x, state = cell.step(cell.project(x), state)
            after.append(state)
        return x, after

    with torch.no_grad():
        for window in range(shape.windows):
            tokens = windows[window : window + 1]
            states = list(model.initial_state(1))
            history = []
            for t in range(first + steps):
                before = states
                _, states = advance(embed(tokens[:, t]), states)
                history.append((before, states))
            for end in range(shape.end_points):
                final = first + shape.max_lag + end
                for lag in range(shape.max_lag + 1):
                    t = final - lag
                    before, after = history[t]

                    def loss(
                        number, component, index, delta, tokens=tokens, t=t, final=final, before=before, after=after
                    ):
                        states = list(after)
                        changed = states[number]._asdict()
                        changed[component] = changed[component].clone()
                        changed[component][0, index] += delta
                        states[number] = type(states[number])(**changed)
                        x = states[-1].h
                        if layer is not None and number + 1 < len(layers):
                            x, states = advance(
                                states[number].h, states[: number + 1] + before[number + 1 :], number + 1
                            )
                        for later in range(t + 1, final + 1):
                            x, states = advance(embed(tokens[:, later]), states)
                        return nn.functional.cross_entropy(model.head(x), tokens[:, final + 1]).item()

                    for component in model.layers[0].state_type._fields:
                        squares = 0.0
                        for number in range(len(layers)) if layer is None else [layer]:
                            for index in range(hidden):
                                up = loss(number, component, index, epsilon)
                                down = loss(number, component, index, -epsilon)
                                squares += ((up - down) / (2 * epsilon)) ** 2
                        array = result.setdefault(
                            component, np.zeros((shape.max_lag + 1, shape.windows * shape.end_points))
                        )
                        array[lag, window * shape.end_points + end] = math.sqrt(squares)
    result["joint"] = np.sqrt(sum(array**2 for array in result.values()))
    return result


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("cell", ["vanilla", "lstm", "gru"])
def test_norms_equal_finite_differences_of_the_loss_under_a_perturbed_state(cell, num_layers):
    model = model_of(cell, num_layers=num_layers, embedding_size=2 if cell == "gru" else 0)
    shape = ProbeShape(2, 3, 3, 2, 4)
    windows = windows_for(shape)
    decay = measure(model, windows, shape)
    for layer in ["all", *range(num_layers)]:
        expected = naive_norms(model, windows, shape, None if layer == "all" else layer)
        assert set(expected) == {component for where, component in decay.norms if where == layer}
        for component, norms in expected.items():
            np.testing.assert_allclose(decay.norms[layer, component], norms, atol=2e-9, rtol=1e-6)


def test_all_layers_together_are_not_the_layers_added_up():
    decay = measure(model_of("gru", num_layers=2), windows_for(ProbeShape(2, 3, 4, 2, 4)), ProbeShape(2, 3, 4, 2, 4))
    added = np.hypot(decay.norms[0, "joint"], decay.norms[1, "joint"])
    assert (decay.norms["all", "joint"] < added).all()


@pytest.mark.parametrize("cell", ["vanilla", "lstm", "gru"])
def test_measuring_changes_nothing(cell):
    model = model_of(cell, num_layers=2, dropout=0.5).float()
    model.compute_dtype = torch.bfloat16
    model.train()
    model.layers[1].eval()  # a frozen part keeps its own flag
    shape = ProbeShape(2, 4, 4, 2, 4)
    windows = windows_for(shape)
    model.head.weight.grad = torch.full_like(model.head.weight, 3.0)
    flags = [module.training for module in model.modules()]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    torch.manual_seed(7)
    random_state = torch.get_rng_state()
    first = measure(model, windows, shape)
    assert torch.equal(random_state, torch.get_rng_state())
    assert [module.training for module in model.modules()] == flags
    assert model.compute_dtype == torch.bfloat16
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    assert (model.head.weight.grad == 3).all()
    assert [parameter.grad is None for parameter in model.parameters()].count(False) == 1
    again = measure(model, windows, shape)
    assert all(np.array_equal(first.norms[key], again.norms[key]) for key in first.norms)


def test_settings_come_back_even_if_measuring_fails():
    model = model_of("gru").float().train()
    model.compute_dtype = torch.bfloat16
    shape = ProbeShape(1, 2, 4, 2, 4)
    with pytest.raises((RuntimeError, IndexError)):
        measure(model, windows_for(shape) + 1000, shape)
    assert model.training
    assert model.compute_dtype == torch.bfloat16


def test_fp32_is_measured_in_fp32_whatever_the_training_precision():
    model = model_of("lstm", hidden_size=8, num_layers=2)
    shape = ProbeShape(2, 8, 8, 2, 4)
    windows = windows_for(shape)
    exact = measure(model, windows, shape)
    model = model.float()
    model.compute_dtype = torch.bfloat16
    near = measure(model, windows, shape)
    for key, norms in exact.norms.items():
        np.testing.assert_allclose(near.norms[key], norms, rtol=1e-4, atol=1e-7)


def test_warm_up_changes_the_state_it_starts_from():
    model = model_of("gru")
    shape, cold = ProbeShape(1, 20, 4, 1, 4), ProbeShape(1, 0, 4, 1, 4)
    windows = windows_for(shape)
    warm = measure(model, windows, shape).curve().G
    # The warm-up only provides the state: starting the measurement at the state by hand gives the same.
    states = model.initial_state(1)
    _, states = model(windows[:, :20], states)
    model.initial_state = lambda batch_size: states
    np.testing.assert_allclose(measure(model, windows[:, 20:], cold).curve().G, warm, rtol=1e-12)


def test_small_gradients_are_no_zeros():
    model = linear_model((0.01 * np.eye(2)).tolist(), [[1.0, 0.0], [0.0, 1.0]]).float()
    shape = ProbeShape(1, 0, 16, 1, 8)
    curve = measure(model, windows_for(shape, 2), shape).curve()
    assert curve.zero_share.max() == 0  # 1e-32: its square is 0 in fp32
    assert curve.rate == pytest.approx(0.01, rel=1e-4)


def test_a_network_that_forgets_everything_is_warned_about():
    model = linear_model([[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]])
    shape = ProbeShape(1, 2, 6, 2, 3)
    decay = measure(model, windows_for(shape, 2), shape)
    warning = cut_recurrence_warning(decay)
    assert "recurrence is cut" in warning
    assert "lag from 1 to 6" in warning
    assert decay.curve().R.tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert decay.curve().half_life == (1, False)
    assert decay.curve().horizon == (1, False)
    assert decay.curve().rate is None
    assert decay.scalars()["decay/lost_share"] == 0
    assert "decay/rate" not in decay.scalars()


def test_no_gradient_at_all_gives_no_figures_but_no_failure():
    model = linear_model([[0.5]], [[0.0], [0.0]])
    shape = ProbeShape(1, 0, 4, 2, 2)
    decay = measure(model, windows_for(shape, 2), shape)
    assert decay.curve().pairs == 0
    assert decay.curve().left_out == 2
    assert cut_recurrence_warning(decay) is None
    assert "nothing to say" in verdict(decay, Truncation(2))
    assert "decay/lost_share" not in decay.scalars()
    json.dumps([decay.records(0), decay.scalars()], allow_nan=False)


# Curves and figures


def decay_of(norms, shape=None, **components):
    """A Decay with one layer, from a joint (K+1, P) array."""
    norms = np.asarray(norms, dtype=np.float64)
    norms = norms[:, None] if norms.ndim == 1 else norms
    shape = shape or ProbeShape(norms.shape[1], 0, len(norms) - 1, 1, (len(norms) - 1) // 2)
    parts = {"joint": norms, **(components or {"h": norms})}
    return Decay({(where, name): np.asarray(part) for where in ("all", 0) for name, part in parts.items()}, shape)


def power(rate, max_lag):
    return rate ** np.arange(max_lag + 1.0)


@pytest.mark.parametrize(("length", "share"), [(44, 0.20), (200, 0.045)])
def test_share_that_truncation_cuts_of_a_geometric_curve(length, share):
    R = power(0.9, 2000)
    assert lost_share(R, length) == pytest.approx(share, abs=0.003)
    assert lost_share(R, length) == pytest.approx(9 * (1 - 0.9**length) / length, rel=1e-12)


def test_lost_share_is_the_mean_over_the_offsets_in_a_block():
    R = np.random.default_rng(0).random(30)
    by_hand = np.mean([R[j:].sum() / R.sum() for j in range(1, 11)])
    assert lost_share(R, 10) == pytest.approx(by_hand, rel=1e-14)


def test_lost_share_sums_to_the_measured_end_only():
    R = power(0.9, 20)
    by_hand = sum(R[j:].sum() for j in range(1, 21)) / R.sum() / 40
    assert lost_share(R, 40) == pytest.approx(by_hand, rel=1e-14)
    assert lost_share(np.zeros(5), 2) is None


def test_figures_of_a_geometric_curve():
    curve = decay_of(3.0 * power(0.9, 100)).curve()
    assert curve.half_life.value == pytest.approx(math.log(0.5) / math.log(0.9))
    assert curve.horizon.value == pytest.approx(math.log(0.01) / math.log(0.9))
    assert curve.rate == pytest.approx(0.9)
    assert curve.lag_99 == (43, False)  # 1 − 0.9^44 = 0.9903
    assert not curve.half_life.censored
    assert curve.at(50) == pytest.approx(0.9**50)
    assert curve.at(101) is None
    assert curve.G[0] == 3


def test_figures_are_censored_where_the_window_ends_first():
    curve = decay_of(power(0.99, 40)).curve()
    assert curve.half_life == (40, True)
    assert curve.horizon == (40, True)
    assert curve.lag_99 == (40, True)
    assert str(curve.half_life) == "> 40"
    curve = decay_of(power(0.95, 40)).curve()
    assert not curve.half_life.censored
    assert curve.horizon == (40, True)


def test_a_plateau_is_censored_and_a_crossing_at_a_lag_is_exact():
    assert decay_of([1, 0.6, 0.6, 0.6, 0.6]).curve().half_life == (4, True)
    assert decay_of([1, 0.5, 0.25, 0.2]).curve().half_life == (1, False)
    assert decay_of([1, 0.8, 0.2, 0.9]).curve().half_life.value == pytest.approx(1 + math.log(1.6) / math.log(4))


def test_components_are_relative_to_the_joint_norm_and_cross_after_their_rise():
    h, c = np.array([2.0, 0.6, 0.0, 0.0]), np.array([0.0, 1.6, 0.8, 0.1])
    decay = decay_of(np.hypot(h, c), h=h[:, None], c=c[:, None])
    np.testing.assert_allclose(decay.curve("all", "c").R, [0, 0.8, 0.4, 0.05], rtol=1e-12)
    assert decay.curve("all", "c").half_life.value == pytest.approx(1 + math.log(0.8 / 0.5) / math.log(2))
    np.testing.assert_allclose(decay.curve("all", "h").R, [1, 0.3, 0, 0], rtol=1e-12)
    assert decay.curve("all", "h").horizon == (2, False)
    small = decay_of(np.hypot(h, c / 10), h=h[:, None], c=c[:, None] / 10).curve("all", "c")
    assert small.half_life is None, "it is never above the level it would fall to"


def test_a_small_component_that_has_not_fallen_is_censored_too():
    c = 0.005 * power(0.99, 10)
    curve = decay_of(np.ones(11), h=np.ones((11, 1)), c=c[:, None]).curve("all", "c")
    assert curve.lag_99 == (10, True)


def test_average_is_geometric_over_the_ratios_that_are_not_zero():
    norms = np.array([[1.0, 4.0, 2.0], [0.5, 0.5, 0.0], [0.25, 0.0, 0.0]])
    curve = decay_of(norms).curve()
    np.testing.assert_allclose(curve.R, [1, math.sqrt(0.5 * 0.125), 0.25], rtol=1e-12)
    assert curve.zero_share == pytest.approx([0, 1 / 3, 2 / 3])
    np.testing.assert_allclose(curve.G, norms.mean(axis=1), rtol=1e-12)
    assert (curve.pairs, curve.left_out) == (3, 0)


def test_pairs_without_a_reference_or_not_finite_are_left_out_and_counted():
    norms = np.array([[1.0, 0.0, 2.0, math.inf], [0.5, 0.7, math.nan, 1.0], [0.25, 0.1, 0.1, 1.0]])
    decay = decay_of(norms)
    curve = decay.curve()
    np.testing.assert_allclose(curve.R, [1, 0.5, 0.25], rtol=1e-12)
    assert (curve.pairs, curve.left_out) == (1, 3)
    np.testing.assert_allclose(curve.G, [0.5, 0.6, 0.175], rtol=1e-12)
    json.dumps(decay.records(3), allow_nan=False)


def test_ratios_smaller_than_float64_holds_do_not_become_zero():
    curve = decay_of(np.array([[1e300, 1e300], [1e-20, 1e290]])).curve()
    assert curve.R[1] == pytest.approx(1e-165, rel=1e-9)


# What is written


def test_scalars_carry_the_logged_names():
    shape = ProbeShape(2, 4, 12, 2, 6)
    decay = measure(model_of("lstm", num_layers=2), windows_for(shape), shape)
    scalars = decay.scalars()
    top = {name for name in scalars if name.count("/") == 1}
    figures = ("half_life", "horizon", "lag_99")
    assert top == {
        *(f"decay/{name}{end}" for name in figures for end in ("", "_censored")),
        "decay/rate",
        "decay/at_truncation",
        "decay/lost_share",
        "decay/half_life_low",
        "decay/half_life_high",
    }
    for name in figures:
        assert {f"decay/inputs/{name}", f"decay/inputs/{name}_censored"} <= set(scalars)
    for layer in (0, 1):
        for component in ("joint", "h", "c"):
            # c may be below half of the joint norm everywhere.
            there = decay.figure("half_life", layer, component) is not None
            assert there or component == "c"
            assert (f"decay/layer{layer}/{component}/half_life" in scalars) is there
            assert (f"decay/layer{layer}/{component}/half_life_censored" in scalars) is there
    curve = decay.curve()
    assert scalars["decay/at_truncation"] == curve.R[6]
    assert scalars["decay/lost_share"] == lost_share(curve.R, 6)
    assert scalars["decay/layer1/c/rate"] == decay.curve(1, "c").rate
    assert all(type(value) is float for value in scalars.values())


def test_a_truncation_length_beyond_the_window_has_no_value():
    decay = decay_of(power(0.5, 4), ProbeShape(1, 0, 4, 1, 10))
    assert "decay/at_truncation" not in decay.scalars()


def test_records_are_lines_of_plain_json():
    shape = ProbeShape(2, 2, 5, 2, 3)
    decay = measure(model_of("lstm", num_layers=2), windows_for(shape), shape)
    records = json.loads(json.dumps(decay.records(200), allow_nan=False))
    assert [(record["layer"], record["component"]) for record in records] == [
        *((layer, component) for layer in ("all", 0, 1) for component in ("joint", "h", "c")),
        ("inputs", "joint"),
    ]
    for record in records:
        assert record["step"] == 200
        assert record["lags"] == list(range(6))
        assert [len(record[name]) for name in ("G", "R", "zero_share")] == [6, 6, 6]
        assert record["reference_lag"] == 0
        assert (record["pairs"], record["left_out"]) == (4, 0)
    assert records[0]["R"] == decay.curve().R.tolist()


def test_verdict_names_the_losses_the_half_life_and_its_limits():
    text = verdict(decay_of(power(0.9, 400), ProbeShape(1, 0, 400, 1, 44)), Truncation(44))
    assert "cut every 44 steps" in text
    assert "20.3 %" in text
    assert f"every 22 steps it would be {100 * 9 * (1 - 0.9**22) / 22:.1f} %" in text
    assert f"every 88 steps {100 * 9 * (1 - 0.9**88) / 88:.1f} %" in text
    assert "half-life is 6.58 steps" in text
    assert "up to 400" in text
    assert "share of norms" in text
    assert "half-life is > 8 steps" in verdict(decay_of(power(0.99, 8)), Truncation(4))
    assert "every 1 steps" in verdict(decay_of(power(0.9, 8)), Truncation(1))


def tail(ratio, lag):
    """Share of Σ R from `lag` on, where R = ratio^k without end."""
    return ratio**lag


@pytest.mark.parametrize(
    ("truncation", "look_back", "lost"),
    [
        (Truncation(44, "block", 64), (1, 44), sum(tail(0.9, j) for j in range(1, 45)) / 44),
        (Truncation(20, "sliding", 64), (20, 20), tail(0.9, 20)),
        (Truncation(20, "sliding", 64, 5), (20, 24), sum(tail(0.9, j) for j in range(20, 25)) / 5),
        (Truncation(8, "randomised", 30, 1, 0.875), (1, 30), sum(tail(0.9, j) for j in range(1, 31)) / 30),
        (Truncation(300, "full", 300), None, 0),
    ],
)
def test_what_each_truncation_cuts(truncation, look_back, lost):
    if look_back is not None:
        assert truncation.look_back == look_back
    shape = ProbeShape(1, 0, 400, 1, truncation.length, look_back=truncation.look_back)
    decay = decay_of(power(0.9, 400), shape)
    assert decay.scalars()["decay/lost_share"] == pytest.approx(lost, abs=1e-12)
    fewest, most = truncation.look_back
    assert lost_share(decay.curve().R, most, fewest) == pytest.approx(lost, abs=1e-12)
    if truncation.mode != "full":
        assert f"{100 * lost:.1f} %" in verdict(decay, truncation)


def test_verdicts_on_other_truncations_than_block():
    decay = decay_of(power(0.9, 400))
    text = verdict(decay, Truncation(20, "sliding", 64, 5))
    assert text.startswith("With losses that look back 20 to 24 steps, on average ")
    for length in (10, 40):
        lost = sum(tail(0.9, j) for j in range(length, length + 5)) / 5
        assert f"with {length} steps " in text
        assert f"{100 * lost:.1f} %" in text
    assert "With losses that look back 20 steps, " in verdict(decay, Truncation(20, "sliding", 64))
    text = verdict(decay, Truncation(8, "randomised", 30, 1, 0.875))
    assert "nothing is cut on average: gradients look back 6.17 steps in the mean" in text
    assert "unbiased" in text
    assert "Where a window of 30 steps begins they end" in text
    assert "look back 15.5 steps" in verdict(decay, Truncation(8, "randomised", 30, 1, 1.0))
    text = verdict(decay, Truncation(300, "full", 300))
    assert text.startswith("Nothing is cut: every loss looks back to the beginning of its row.")
    assert "%" not in text
    for mode in ("sliding", "randomised", "full"):
        assert "half-life is 6.58 steps" in verdict(decay, Truncation(20, mode, 64))


def test_the_longest_lag_unless_given():
    """Twice what a loss looks back at most; beyond 512 that is not measured unless it is asked for."""

    def lag(truncation, **given):
        shape, note = probe_shape(
            100_000, 0, truncation_length=truncation.length, look_back=truncation.look_back, **given
        )
        capped = shape.max_lag == 512
        assert ("the largest lag is 512 instead of" in note and "unless a longer one is asked for" in note) == capped
        return shape.max_lag

    assert lag(Truncation(255, "block", 400)) == 510
    assert lag(Truncation(300, "block", 300)) == 512
    assert lag(Truncation(300, "sliding", 64)) == 512
    assert lag(Truncation(30, "sliding", 64, 5)) == 68
    assert lag(Truncation(5, "randomised", 64, 1, 0.8)) == 128
    assert lag(Truncation(30_000, "full", 30_000)) == 512
    assert lag(Truncation(100, "full", 100)) == 200
    assert lag(Truncation(300, "block", 300), max_lag=700) == 700
    assert Truncation(100, "full", 100).look_back == (UNLIMITED, UNLIMITED)


@pytest.mark.parametrize(("window", "keep"), [(1, 0.5), (3, 0.5), (30, 0.875), (64, 1 - 1 / 64), (40, 1.0)])
def test_how_far_a_randomised_loss_looks_back_in_the_mean(window, keep):
    """Over every offset in a window and every place of the first cut before it, weighted with its probability."""
    found = 0.0
    for offset in range(1, window + 1):
        reach = sum(step * keep ** (step - 1) * (1 - keep) for step in range(1, offset))
        found += (reach + offset * keep ** (offset - 1)) / window
    assert Truncation(8, "randomised", window, 1, keep).mean_look_back == pytest.approx(found, rel=1e-12)


def test_curve_can_be_made_from_recorded_numbers():
    record = decay_of(power(0.8, 10)).records(0)[0]
    arrays = {name: np.array(record[name]) for name in ("lags", "G", "R", "zero_share")}
    curve = Curve(**arrays, **{name: record[name] for name in ("reference_lag", "pairs", "left_out")})
    assert curve.half_life == decay_of(power(0.8, 10)).curve().half_life


def test_what_is_cut_of_a_task_is_what_lies_between_its_record_s_beginning_and_its_answer():
    norms = np.array([0.9**k * np.ones(8) for k in range(13)])
    shape = ProbeShape(8, 0, 12, 1, 14, look_back=(13, 13), record=True)
    whole = Decay({("all", "joint"): norms}, shape)
    said = verdict(whole, Truncation(14, "block", 14))
    assert said.startswith("Nothing is cut between a record's beginning and its answer.")
    assert "6.58" in said
    assert whole.scalars()["decay/lost_share"] == 0
    cut = Decay({("all", "joint"): norms}, replace(shape, look_back=(6, 6)))
    share = sum(0.9**k for k in range(6, 13)) / sum(0.9**k for k in range(13))
    assert f"on average {100 * share:.1f} % is cut off" in verdict(cut, Truncation(14, "block", 14))


def test_gradients_that_overflow_are_no_decay():
    norms = np.full((13, 8), np.inf)
    found = Decay({("all", "joint"): norms, (0, "joint"): norms}, ProbeShape(8, 0, 12, 1, 14))
    assert found.scalars() == {}
    assert found.summary() == []
    assert found.figure("half_life") is None
    assert "overflow within 12 steps" in verdict(found, Truncation(14, "block", 14))
