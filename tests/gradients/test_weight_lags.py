"""∂J/∂W_hh by lag: the factors of each cell's own backward pass, copies of the weight, and sums known beforehand."""

import importlib
import inspect
import itertools
import pkgutil
import sys
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lmapp.cells
from lmapp.cells import CELLS
from lmapp.cells.gru import GRU
from lmapp.cells.protocol import Cell, GatedCell, HiddenState
from lmapp.cells.vanilla import ACTIVATIONS
from lmapp.gradients import weight_lags
from lmapp.gradients.decay import ProbeShape, warmed_up
from lmapp.gradients.weight_lags import WeightLags, has_factors, measure_weight_lags
from lmapp.models import RecurrentModel, detach

V = 6
SHAPE = ProbeShape(windows=2, warm_up=3, max_lag=5, end_points=3, truncation_length=4)


class Doubling(Cell):
    """From outside: a step only; its output is not its state, and its weight stands transposed."""

    state_type = HiddenState
    recurrent_weight = "weight"

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.gate_size = hidden_size
        self.output_size = 2 * hidden_size
        self.inputs = nn.Linear(input_size, hidden_size)
        self.weight = nn.Parameter(torch.empty(hidden_size, hidden_size).normal_())

    def project(self, x):
        return self.inputs(x).sin()

    def step(self, gates, state):
        h = (gates + state.h @ self.weight).tanh()
        return torch.cat((h, state.h * gates), 1), HiddenState(h)


class Nameless(Doubling):
    """It names no recurrent weight."""

    recurrent_weight = None


class Older(GRU):
    """From outside: it gives its weight's gradient, but not what that is made of."""

    recurrent_factors = GatedCell.recurrent_factors

    def parameter_gradients(self, trace, deltas):
        raise AssertionError


def every_recurrent_weight():
    """The name and the options of each cell in the package that has one, alone in a stack of two or on top."""
    found = []
    for module in pkgutil.iter_modules(lmapp.cells.__path__):
        content = importlib.import_module(f"lmapp.cells.{module.name}")
        found += [
            kind
            for _, kind in inspect.getmembers(content, inspect.isclass)
            if issubclass(kind, Cell) and kind.__module__ == content.__name__ and kind.step is not Cell.step
        ]
    for kind in found:
        if kind.recurrent_weight is None:
            continue
        name = next(key for key, path in CELLS.items() if path == f"{kind.__module__}:{kind.__name__}")
        activations = list(ACTIVATIONS) if "activation" in kind.options else ["tanh"]
        for activation, bias in itertools.product(activations, (True, False)):
            cell = ["vanilla", name] if kind.reads_out else name
            options = {"cell": cell, "num_layers": 2, "activation": activation, "bias": bias}
            yield pytest.param(options, id=f"{name} {activation} {bias}")


NETWORKS = [
    *every_recurrent_weight(),
    pytest.param({"cell": "concatenated", "dropout": 0.0}, id="concatenated alone"),
    pytest.param({"cell": "lstm", "connections": "residual", "num_layers": 3}, id="residual"),
    pytest.param({"cell": ["gru_before", "lstm", "vanilla"], "connections": "dense"}, id="dense"),
    pytest.param({"cell": ["gru", "mingru", "concatenated"], "connections": "dense"}, id="dense, reads out"),
    pytest.param({"cell": ["lstm_linear", "minlstm", "gru"]}, id="mixed"),
    pytest.param({"cell": "gru", "embedding_size": 0, "num_layers": 2, "connections": "dense"}, id="one-hot"),
    pytest.param({"cell": ["lstm", "gru", "gru_before", "vanilla"], "zoneout": 0.3}, id="zoneout"),
    pytest.param({"cell": ["lstm", "concatenated"], "zoneout": 0.3}, id="zoneout, reads out"),
    pytest.param({"cell": ["lstm", "somewhere:Doubling", "gru", "somewhere:Nameless"]}, id="outside"),
    pytest.param({"cell": ["somewhere:Older", "gru"]}, id="outside, older"),
]


@pytest.fixture(autouse=True)
def _somewhere(monkeypatch):
    module = types.ModuleType("somewhere")
    module.Doubling, module.Nameless, module.Older = Doubling, Nameless, Older
    monkeypatch.setitem(sys.modules, "somewhere", module)


def model_of(**options):
    torch.manual_seed(0)
    model = RecurrentModel(V, **{"hidden_size": 4, "embedding_size": 4, "dropout": 0.5, **options}).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def text(shape=SHAPE, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(V, (shape.windows, shape.length), generator=generator)


def with_weight(model):
    return [number for number, layer in enumerate(model.layers) if layer.recurrent_weight]


def whole_gradients(model, windows, shape=SHAPE):
    """∂(ΣJ)/∂W_hh of every layer that has one, each J's history cut K steps before its end point, by differentiation
    of the loop over `model.step`."""
    model.eval()
    numbers = with_weight(model)
    weights = [getattr(model.layers[n], model.layers[n].recurrent_weight) for n in numbers]
    total = [torch.zeros_like(weight) for weight in weights]
    for end in range(shape.warm_up + shape.max_lag, shape.length - 1):
        states = model.initial_state(len(windows))
        for t in range(end + 1):
            states = detach(states) if t <= end - shape.max_lag else states
            logits, states = model.step(windows[:, t], states)
        loss = F.cross_entropy(logits, windows[:, end + 1], reduction="sum")
        total = [a + b for a, b in zip(total, torch.autograd.grad(loss, weights), strict=True)]
    rows = [model.layers[n].recurrent_rows for n in numbers]
    return {n: gradient[:r] for n, r, gradient in zip(numbers, rows, total, strict=True)}


def contributions(model, windows, shape=SHAPE):
    """D_k of every layer, (K+1, R, H): of each end point by itself, with a copy of the weight for every step."""
    model.eval()
    found = {}
    for number in with_weight(model):
        layer = model.layers[number]
        name = layer.recurrent_weight
        weight = getattr(layer, name)
        parts = weight.new_zeros(shape.max_lag + 1, *weight.shape)
        for end in range(shape.warm_up + shape.max_lag, shape.length - 1):
            states, copies = model.initial_state(len(windows)), []
            for t in range(end + 1):
                if t == end - shape.max_lag:
                    states = detach(states)
                if t >= end - shape.max_lag:
                    copies.append(weight.detach().clone().requires_grad_())
                    layer._parameters[name] = copies[-1]
                logits, states = model.step(windows[:, t], states)
            layer._parameters[name] = weight
            loss = F.cross_entropy(logits, windows[:, end + 1], reduction="sum")
            parts += torch.stack(torch.autograd.grad(loss, copies, materialize_grads=True)).flip(0)
        found[number] = parts[:, : layer.recurrent_rows].detach()
    return found


def step_by_step(model, windows, number):
    model.eval()
    states = warmed_up(model, windows, SHAPE)
    tokens, targets = windows[:, SHAPE.warm_up : -1], windows[:, -SHAPE.end_points :]
    used = torch.ones_like(targets, dtype=torch.bool)
    return weight_lags.by_steps(model, model.layers[number], tokens, states, targets, used)


@pytest.mark.parametrize("options", NETWORKS)
def test_the_lags_sum_to_the_gradient(options):
    model = model_of(**options)
    whole, parts = whole_gradients(model, text()), contributions(model, text())
    assert whole.keys() == parts.keys()
    for number, gradient in whole.items():
        assert parts[number].shape == (SHAPE.max_lag + 1, *gradient.shape)
        torch.testing.assert_close(parts[number].sum(0), gradient, rtol=1e-10, atol=1e-12)
        squares, products = step_by_step(model, text(), number)
        torch.testing.assert_close(squares, parts[number].square().sum((1, 2)), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(products, (parts[number] * gradient).sum((1, 2)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", NETWORKS)
def test_from_factors_and_from_copies(options):
    model = model_of(**options)
    found, slowly = (measure_weight_lags(model, text(), SHAPE, step_by_step=slow) for slow in (False, True))
    parts, whole = contributions(model, text()), whole_gradients(model, text())
    assert [layer.layer for layer in found] == [layer.layer for layer in slowly] == with_weight(model)
    for ours, theirs in zip(found, slowly, strict=True):
        norms = parts[ours.layer].flatten(1).norm(dim=1)
        along = (parts[ours.layer] * whole[ours.layer]).sum((1, 2)) / whole[ours.layer].square().sum()
        for result in (ours, theirs):
            np.testing.assert_allclose(result.size, (norms / norms.sum()).numpy(), rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(result.share, along.numpy(), rtol=1e-9, atol=1e-10)
            assert result.lags.tolist() == list(range(SHAPE.max_lag + 1))
            assert (result.pairs, result.left_out) == (6, 0)
            assert result.cell == type(model.layers[result.layer]).__name__
            assert result.weight == model.layers[result.layer].recurrent_weight
            assert result.size.sum() == pytest.approx(1, abs=1e-12)
            assert result.share.sum() == pytest.approx(1, abs=1e-12)
            np.testing.assert_allclose(result.cumulative_size[-1], 1)
        reads_out = model.layers[ours.layer].reads_out
        assert (ours.size[0] == 0) == reads_out
        assert (ours.size[1:] > 0).all()


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_of_the_package_that_can_says_its_factors(name):
    kind = lmapp.cells.find(name)
    options = {"output_size": V} if kind.reads_out else {}
    assert has_factors(kind(2, 3, **options)) == (kind.recurrent_weight is not None)


def test_the_fast_way_is_taken(monkeypatch):
    model = model_of(cell=["gru", "somewhere:Doubling"])
    asked = []
    slow = weight_lags.by_steps
    monkeypatch.setattr(weight_lags, "by_steps", lambda model, layer, *a: asked.append(layer) or slow(model, layer, *a))
    measure_weight_lags(model, text(), SHAPE)
    assert asked == [model.layers[1]]


def test_step_by_step_one_gradient_of_the_weight_is_held_at_a_time(monkeypatch):
    """Not one for each lag."""
    model = model_of(cell="somewhere:Doubling")
    size = model.layers[0].weight.shape
    register, alive, most = torch.Tensor.register_hook, [], []

    def watching(view, hook):
        def watched(gradient):
            alive.append(weakref.ref(gradient))
            most.append(sum(reference() is not None for reference in alive))
            return hook(gradient)

        assert view.shape == size
        return register(view, watched)

    monkeypatch.setattr(torch.Tensor, "register_hook", watching)
    measure_weight_lags(model, text(), SHAPE)
    assert len(most) == 2 * (SHAPE.max_lag + 1)
    assert max(most) <= 2


def test_the_lags_are_taken_some_at_a_time(monkeypatch):
    model = model_of(cell="gru_before")
    (whole,) = measure_weight_lags(model, text(), SHAPE)
    monkeypatch.setattr(weight_lags, "ELEMENTS", 100)
    (pieces,) = measure_weight_lags(model, text(), SHAPE)
    np.testing.assert_allclose(pieces.size, whole.size, rtol=1e-12)
    np.testing.assert_allclose(pieces.share, whole.share, rtol=1e-12)


def test_cells_without_a_recurrent_weight_are_absent():
    assert measure_weight_lags(model_of(cell=["mingru", "minlstm"]), text(), SHAPE) == []
    (only,) = measure_weight_lags(model_of(cell=["mingru", "lstm", "somewhere:Nameless"]), text(), SHAPE)
    assert (only.layer, only.cell) == (1, "LSTM")


@pytest.mark.parametrize("step_by_step", [False, True])
def test_pairs_that_are_not_finite_are_left_out(step_by_step):
    model = model_of(cell="lstm", num_layers=2)
    windows = text()
    windows[windows == 5] = 4
    expected = measure_weight_lags(model, windows[:1], SHAPE, step_by_step=step_by_step)
    model.embedding.weight.data[5] = torch.nan
    windows[1, -4] = 5  # read by all end points of the second window
    found = measure_weight_lags(model, windows, SHAPE, step_by_step=step_by_step)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.pairs, ours.left_out) == (3, 3)
        np.testing.assert_allclose(ours.size, theirs.size, rtol=1e-12)
        np.testing.assert_allclose(ours.share, theirs.share, rtol=1e-12)
    windows[0, -4] = 5
    for ours in measure_weight_lags(model, windows, SHAPE, step_by_step=step_by_step):
        assert (ours.pairs, ours.left_out, ours.lag_holding(0.5)) == (0, 6, None)
        assert not ours.size.any() and not ours.share.any()


@pytest.mark.parametrize("step_by_step", [False, True])
def test_nothing_else_changes(step_by_step):
    model = model_of(cell=["gru", "lstm"]).float()
    model.train()
    model.compute_dtype = torch.bfloat16
    parameters, random = dict(model.named_parameters()), torch.get_rng_state()
    values = {name: parameter.clone() for name, parameter in parameters.items()}
    for found in measure_weight_lags(model, text(), SHAPE, step_by_step=step_by_step):
        assert found.size.dtype == found.share.dtype == np.float64
        assert found.share.sum() == pytest.approx(1, abs=1e-12)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training and model.compute_dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name] and torch.equal(parameter, values[name]) and parameter.grad is None


def test_small_gradients_in_fp32_are_no_zeros():
    """Their squares are too small for fp32."""
    model = model_of(cell="vanilla", num_layers=1)
    model.layers[0].weight_hh.data *= 1e-5
    (double,) = measure_weight_lags(model, text(), SHAPE)
    (single,) = measure_weight_lags(model.float(), text(), SHAPE)
    assert 0 < double.size[-1] < 1e-20
    np.testing.assert_allclose(single.size, double.size, rtol=1e-3)


# By hand


def scalar(weight, bias):
    """A scalar linear network with W_qh = [1; 0], whose input is `bias` at every step."""
    model = RecurrentModel(2, cell="vanilla", hidden_size=1, activation="identity").double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.layers[0].weight_hh.data.fill_(weight)
    model.layers[0].bias_ih.data.fill_(bias)
    model.head.weight.data[0] = 1
    return model


THREE = ProbeShape(windows=1, warm_up=0, max_lag=2, end_points=1, truncation_length=2)


@pytest.mark.parametrize("step_by_step", [False, True])
def test_scalar_network(step_by_step):
    def lags(weight, bias):
        windows = torch.zeros(1, 4, dtype=torch.int64)
        return measure_weight_lags(scalar(weight, bias), windows, THREE, step_by_step=step_by_step)[0]

    # h is 0, 1, 3/2 where a step reads it, and a step back halves the gradient: 3/2, 1/2·1, 1/4·0.
    found = lags(0.5, 1.0)
    assert found.size == pytest.approx([3 / 4, 1 / 4, 0], abs=1e-12)
    assert found.share == pytest.approx([3 / 4, 1 / 4, 0], abs=1e-12)
    # h is 0, 1, 3/4: 3/4, −1/4·1, 0 make 1/2.
    found = lags(-0.25, 1.0)
    assert found.size == pytest.approx([3 / 4, 1 / 4, 0], abs=1e-12)
    assert found.share == pytest.approx([3 / 2, -1 / 2, 0], abs=1e-12)
    # h is 0, 1, 1/2: 1/2, −1/2·1, 0 make nothing at all.
    found = lags(-0.5, 1.0)
    assert found.size == pytest.approx([1 / 2, 1 / 2, 0], abs=1e-12)
    assert found.share.tolist() == [0, 0, 0]
    # Without input there is nothing to multiply the weight with, though ∂J/∂h_t is −7/24, −1/4, −1/6 and so on.
    found = lags(0.5, 0.0)
    assert (found.pairs, found.size.tolist(), found.share.tolist()) == (1, [0, 0, 0], [0, 0, 0])
    assert found.lag_holding(0.5) is None


@pytest.mark.parametrize("step_by_step", [False, True])
def test_linear_network_with_a_hump(step_by_step):
    """At a state that stays the same ‖D_k‖ goes as ‖∂J/∂h_{i−k}‖, and (Wᵀ)^k (1, 0) = (2^{−k}, 8k 2^{−k})."""
    shape = ProbeShape(windows=1, warm_up=200, max_lag=7, end_points=1, truncation_length=4)
    model = RecurrentModel(2, cell="vanilla", hidden_size=2, activation="identity").double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.layers[0].weight_hh.data = torch.tensor([[0.5, 4], [0, 0.5]], dtype=torch.float64)
    model.layers[0].bias_ih.data[0] = 0.5
    model.head.weight.data[0, 0] = 1
    windows = torch.zeros(1, shape.length, dtype=torch.int64)
    (found,) = measure_weight_lags(model, windows, shape, step_by_step=step_by_step)
    R = [1, 4.031129, 4.007805, 3.002603, 2.000976, 1.250391, 0.750163, 0.437570]
    assert found.size / found.size[0] == pytest.approx(R, abs=5e-7)
    k = np.arange(8)
    pulled = np.stack((0.5**k, 8 * k * 0.5**k), 1)
    whole = pulled.sum(0)
    assert found.share == pytest.approx(pulled @ whole / (whole @ whole), abs=1e-12)
    assert found.lag_holding(0.5).value == 2
    assert str(found.lag_holding(0.99)) == "> 7"


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid"])
def test_forward_in_time(activation):
    """The same gradient from s_t = b_t + C_t s_{t−1}, s_t = ∂h_t/∂W, which goes along with the states."""
    size = 3
    model = model_of(cell="vanilla", num_layers=1, hidden_size=size, activation=activation)
    model.layers[0].bias_ih.data += 0.5
    cell, windows = model.layers[0], text()
    weight = cell.weight_hh.detach()
    slope = {"tanh": lambda h: 1 - h**2, "relu": lambda h: (h > 0).double(), "sigmoid": lambda h: h * (1 - h)}[
        activation
    ]
    whole = torch.zeros(size, size, dtype=torch.float64)
    by_lag = torch.zeros(SHAPE.max_lag + 1, size, size, dtype=torch.float64)
    for window in windows:
        for end in range(SHAPE.warm_up + SHAPE.max_lag, SHAPE.length - 1):
            h = torch.zeros(size, dtype=torch.float64)
            s = torch.zeros(size, size, size, dtype=torch.float64)  # ∂h/∂W
            parts = []  # of s, by the step that W was used at
            for t in range(end + 1):
                before = h
                gates = cell.project(model.embedding(window[t])).detach()
                h = ACTIVATIONS[activation].function(gates + weight @ before)
                jacobian = slope(h).unsqueeze(1) * weight
                immediate = torch.einsum("u,ur,c->urc", slope(h), torch.eye(size, dtype=torch.float64), before)
                if t >= end - SHAPE.max_lag:
                    s = immediate + torch.einsum("uv,vrc->urc", jacobian, s)
                    parts = [*(torch.einsum("uv,vrc->urc", jacobian, part) for part in parts), immediate]
            leaf = h.clone().requires_grad_()
            loss = F.cross_entropy(model.head(leaf), window[end + 1])
            (error,) = torch.autograd.grad(loss, leaf)
            whole += torch.einsum("u,urc->rc", error, s)
            by_lag += torch.stack([torch.einsum("u,urc->rc", error, part) for part in reversed(parts)])
    torch.testing.assert_close(by_lag.sum(0), whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(whole_gradients(model, windows)[0], whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(contributions(model, windows)[0], by_lag, rtol=1e-10, atol=1e-12)
    (found,) = measure_weight_lags(model, windows, SHAPE)
    norms = by_lag.flatten(1).norm(dim=1)
    np.testing.assert_allclose(found.size, norms / norms.sum(), rtol=1e-10)
    np.testing.assert_allclose(found.share, (by_lag * whole).sum((1, 2)) / whole.square().sum(), rtol=1e-9, atol=1e-12)


def test_the_state_at_which_the_history_is_cut_is_a_natural_one():
    """Another first character of the warm-up makes another result."""
    model, windows = model_of(cell="lstm", num_layers=2), text()
    first = measure_weight_lags(model, windows, SHAPE)[0]
    windows[:, 0] = (windows[:, 0] + 1) % V
    assert not np.allclose(measure_weight_lags(model, windows, SHAPE)[0].size, first.size, rtol=1e-6)


def curve(size):
    size = np.array(size, dtype=float)
    return WeightLags(0, "Vanilla", "weight_hh", np.arange(len(size)), size / size.sum(), size / size.sum(), 1, 0)


def test_the_lag_that_holds_a_part():
    found = curve(0.5 ** np.arange(20))
    assert [found.lag_holding(part).value for part in (0.5, 0.9, 0.99)] == [0, 3, 6]
    assert not any(found.lag_holding(part).censored for part in (0.5, 0.9, 0.99))
    found = curve(0.9 ** np.arange(20))
    assert found.lag_holding(0.5) == (5, False)
    assert found.lag_holding(0.9) == (19, True)
    assert curve([0, 1, 0, 0]).lag_holding(0.99) == (1, False)


def test_on_real_text(real_text):
    """An LSTM whose memory is short learns from near, one whose memory is long from further back."""
    letters = sorted(set(real_text[:3000]))
    shape = ProbeShape(windows=4, warm_up=16, max_lag=40, end_points=4, truncation_length=20)
    ids = torch.tensor([letters.index(c) for c in real_text[: 4 * shape.length]]).view(4, -1)
    held = []
    for bias in (-1.0, 4.0):
        torch.manual_seed(0)
        model = RecurrentModel(len(letters), cell="lstm", hidden_size=16, forget_bias=bias)
        (found,) = measure_weight_lags(model, ids, shape)
        held.append(found.lag_holding(0.9).value)
    assert held[0] < 8 < held[1]
