"""Bounds on the decay: that they hold, that they are tight where they can be, and that they are not given elsewhere."""

import json
import math
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from lmapp.cells import CELLS
from lmapp.cells.vanilla import ACTIVATIONS, Vanilla
from lmapp.gradients import bounds
from lmapp.gradients.bounds import GAMMA, Bounds, conditions, measure_bounds, why_not
from lmapp.gradients.decay import ProbeShape, measure
from lmapp.models import RecurrentModel

V = 6
SHAPE = ProbeShape(3, 4, 12, 3, 6)


class Own(Vanilla):
    """From outside; what its step does is not known."""


@pytest.fixture(autouse=True)
def _somewhere(monkeypatch):
    module = types.ModuleType("somewhere")
    module.Own = Own
    monkeypatch.setitem(sys.modules, "somewhere", module)


def model_of(cell="vanilla", hidden_size=5, scale=0.8, seed=0, **options):
    torch.manual_seed(seed)
    model = RecurrentModel(V, cell=cell, hidden_size=hidden_size, **options).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=scale)
    return model


def with_weight(weight, activation="identity"):
    model = model_of(hidden_size=len(weight), activation=activation)
    with torch.no_grad():
        model.layers[0].weight_hh.copy_(torch.as_tensor(weight, dtype=torch.float64))
    return model


def bounds_of(model, shape=SHAPE, **options):
    windows = torch.randint(V, (shape.windows, shape.length), generator=torch.Generator().manual_seed(1))
    return measure_bounds(model, windows, shape, measure(model, windows, shape), **options)


def test_gamma_is_the_largest_slope():
    a = torch.linspace(-8, 8, 16_001, dtype=torch.float64, requires_grad=True)
    assert set(GAMMA) == set(ACTIVATIONS)
    for name, activation in ACTIVATIONS.items():
        h = activation.function(a)
        (slope,) = torch.autograd.grad(h.sum(), a)
        assert slope.max().item() == pytest.approx(GAMMA[name], abs=1e-12)
        torch.testing.assert_close(bounds._SLOPES[name](h), slope, atol=1e-14, rtol=1e-12)


def holds(found, rounding=1e-9):
    """And are two bounds, no copies of the curve."""
    assert isinstance(found, Bounds)
    assert found.R[0] == found.product[0] == found.uniform[0] == 1
    assert (found.product * (1 + rounding) >= found.R).all()
    assert (found.product <= found.uniform * (1 + rounding)).all()
    return found


@pytest.mark.parametrize("lanczos", [False, True])
@pytest.mark.parametrize("scale", [0.2, 0.8, 2.0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_both_bounds_hold_at_every_lag(activation, scale, lanczos, monkeypatch):
    hidden_size = bounds.MOST_EXACT + 32 if lanczos else 5
    model = model_of(activation=activation, hidden_size=hidden_size, scale=scale * math.sqrt(5 / hidden_size))
    found = holds(bounds_of(model))
    if lanczos:
        monkeypatch.setattr(bounds, "MOST_EXACT", hidden_size)
        exact = bounds_of(model).product
        assert (found.product >= exact * (1 - 1e-12)).all()
        assert (found.product <= exact * 1.0011**found.lags).all()
    assert found.activation == activation
    assert found.R[1] < 0.99 * found.product[1]
    if activation == "identity":
        np.testing.assert_allclose(found.product, found.uniform, rtol=1e-12)
    elif activation != "relu" or scale > 0.2:
        assert found.product[1] < 0.999 * found.uniform[1]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_both_bounds_hold_after_some_training(activation, real_text):
    letters = sorted(set(real_text[:6_000]))
    ids = torch.tensor([letters.index(c) for c in real_text[:6_000]])
    torch.manual_seed(0)
    model = RecurrentModel(len(letters), cell="vanilla", hidden_size=24, activation=activation)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    rows = ids[: 20 * 16 * 17].view(20, 16, 17)
    for batch in rows:
        logits, _ = model(batch[:, :-1], model.initial_state(16))
        nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
    shape = ProbeShape(4, 20, 30, 4, 15)
    windows = ids[: 4 * shape.length].view(4, -1)
    found = holds(measure_bounds(model, windows, shape, measure(model, windows, shape)), 1e-5)
    assert found.R[30] < found.product[30]


def test_the_product_is_that_of_each_pairs_own_steps():
    model = model_of()
    windows = torch.randint(V, (3, SHAPE.length), generator=torch.Generator().manual_seed(1))
    found = measure_bounds(model, windows, SHAPE, measure(model, windows, SHAPE))
    weight = model.layers[0].weight_hh.detach().numpy()
    logs = np.zeros((13, 9))
    for window in range(3):
        with torch.no_grad():
            states, norms = model.initial_state(1), []
            for t in range(SHAPE.length - 1):
                _, states = model.step(windows[window : window + 1, t], states)
                norms.append(np.linalg.norm((1 - states[0].h[0].numpy() ** 2)[:, None] * weight, 2))
        for end in range(3):
            i = SHAPE.warm_up + SHAPE.max_lag + end
            for lag in range(13):
                logs[lag, 3 * window + end] = np.log(norms[i - lag + 1 : i + 1]).sum()
    np.testing.assert_allclose(found.product, np.exp(logs.mean(1)), rtol=1e-10)
    assert found.sigma_max == pytest.approx(np.linalg.norm(weight, 2), rel=1e-12)
    np.testing.assert_allclose(found.uniform, found.sigma_max ** np.arange(13.0), rtol=1e-12)


@pytest.mark.parametrize("alpha", [0.6, 1.0, 1.2])
def test_tight_for_an_orthogonal_matrix_and_the_identity(alpha):
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    for weight in (alpha * np.eye(4), alpha * rotation):
        found = holds(bounds_of(with_weight(weight)))
        np.testing.assert_allclose(found.R, alpha ** np.arange(13.0), rtol=1e-10)
        np.testing.assert_allclose(found.product, found.R, rtol=1e-10)
        np.testing.assert_allclose(found.uniform, found.R, rtol=1e-10)


def test_tight_for_one_unit_of_any_activation():
    found = holds(bounds_of(model_of(hidden_size=1, seed=1)))
    np.testing.assert_allclose(found.R, found.product, rtol=1e-10)
    assert found.product[5] < found.uniform[5]


def test_both_bounds_hold_over_the_pairs_whose_ratio_is_not_zero():
    """With ReLU some pairs' gradients die early, and R averages over the others."""
    dying = 0
    for seed in range(8):
        model = model_of(hidden_size=2, activation="relu", scale=1.0, seed=seed)
        windows = torch.randint(V, (3, SHAPE.length), generator=torch.Generator().manual_seed(1))
        decay = measure(model, windows, SHAPE)
        found = measure_bounds(model, windows, SHAPE, decay)
        if isinstance(found, str):
            assert decay.curve(0).pairs == 0
            continue
        holds(found)
        zeros = decay.curve(0).zero_share
        dying += int(((zeros > 0) & (zeros < 1)).any())
        assert (found.product[zeros == 1] == 0).all()
    assert dying


def test_norms_by_lanczos_are_near_and_not_below(monkeypatch):
    torch.manual_seed(0)
    weight, slopes = torch.randn(150, 150, dtype=torch.float64) / 12, torch.rand(7, 150, dtype=torch.float64)
    exact = np.linalg.norm(slopes.numpy()[:, :, None] * weight.numpy(), 2, axis=(1, 2))
    start = torch.randn(150, dtype=torch.float64)
    found = bounds._lanczos(weight, slopes, start, 100.0)
    assert (exact <= found).all()
    assert (found <= exact * 1.0011).all()
    monkeypatch.setattr(bounds, "_MOST_VECTORS", 2)  # what does not settle is the uniform one
    assert (bounds._lanczos(weight, slopes, start, 100.0) == 100).all()


@pytest.mark.parametrize("seed", range(4))
def test_norms_by_lanczos_are_not_below_where_singular_values_lie_close(seed):
    """W is orthogonal, so a norm is the largest slope, and the others lie right beneath."""
    torch.manual_seed(seed)
    weight = torch.linalg.qr(torch.randn(256, 256, dtype=torch.float64)).Q
    slopes = 1 - torch.randn(64, 256, dtype=torch.float64).tanh() ** 2
    found = bounds._lanczos(weight, slopes, torch.randn(256, dtype=torch.float64), 1.5)
    exact = slopes.amax(1).numpy()
    settled = found < 1.5
    assert settled.mean() > 0.5
    assert (exact <= found).all()
    assert (found[settled] <= exact[settled] * 1.0011).all()


@pytest.mark.parametrize("below", ["lstm", "gru", "vanilla", "somewhere:Own"])
def test_the_top_layer_of_a_plain_stack(below):
    model = model_of(cell=[below, "vanilla"], hidden_size=4, scale=0.6)
    found = holds(bounds_of(model))
    assert found.layer == 1
    assert why_not(model) is None
    assert "layers above" in bounds_of(model, layer=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"cell": cell}, "vanilla layer") for cell in CELLS if cell not in ("vanilla", "concatenated")),
        ({"cell": "concatenated"}, "lag 0"),
        ({"cell": ["vanilla", "gru"]}, "vanilla layer, and layer 1 is GRU"),
        ({"cell": "somewhere:Own"}, "layer 0 is Own"),
        ({"cell": "vanilla", "num_layers": 2, "connections": "dense"}, "dense"),
        ({"cell": "vanilla", "num_layers": 2, "connections": "residual"}, "residual"),
        ({"cell": "vanilla", "zoneout": 0.2}, "zoneout"),
    ],
)
def test_elsewhere_the_reason(options, said):
    model = model_of(**options)
    assert said in bounds_of(model)
    assert conditions(model) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(value):
    model = model_of()
    with torch.no_grad():
        model.layers[0].weight_hh[0, 0] = value
    assert "not finite" in bounds_of(model)
    assert conditions(model) == []


def test_no_gradient_at_lag_0():
    model = model_of()
    nn.init.zeros_(model.head.weight)
    assert "no finite gradient" in bounds_of(model)


def test_no_recurrence():
    for activation in ("identity", "tanh"):
        found = holds(bounds_of(with_weight(np.zeros((3, 3)), activation)))
        assert found.R.tolist() == found.product.tolist() == found.uniform.tolist() == [1] + [0] * 12


def test_a_bound_beyond_float64_is_infinite():
    shape = ProbeShape(1, 0, 300, 1, 6)
    found = bounds_of(with_weight(100 * np.eye(2), "tanh"), shape)
    assert found.uniform[-1] == math.inf
    record = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert record["uniform"][-1] == "inf"
    assert len(record["uniform"]) == len(record["product"]) == 301
    assert {name: record[name] for name in ("layer", "activation", "gamma", "sigma_max")} == {
        "layer": 0,
        "activation": "tanh",
        "gamma": 1,
        "sigma_max": 100,
    }


def test_measuring_changes_nothing():
    model = model_of(dropout=0.5).float().train()
    model.compute_dtype = torch.bfloat16
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    random_state = torch.get_rng_state()
    found = holds(bounds_of(model), 1e-5)
    assert torch.equal(random_state, torch.get_rng_state())
    assert model.training
    assert model.compute_dtype == torch.bfloat16
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    np.testing.assert_allclose(bounds_of(model.double()).product, found.product, rtol=1e-4)


# What the weights say by themselves


def test_conditions_of_tanh_are_about_the_norm_alone():
    text = " ".join(conditions(with_weight(np.diag([0.9, 0.1]), "tanh")))
    assert "The gradient must vanish: the largest singular value of W_hh is 0.9, and being below 1/γ = 1 " in text
    assert "cannot explode" in text
    for weight in (np.diag([1.5, 0.1]), [[3.0, -3.0], [3.0, -3.0]], [[0.5, 4.0], [0.0, 0.5]]):  # ρ = 1.5, 0, 0.5
        text = " ".join(conditions(with_weight(weight, "tanh")))
        assert "can explode, but need not" in text
        assert "must vanish" not in text
        assert "radius" not in text and "eigenvalue" not in text
    assert "is 6," in " ".join(conditions(with_weight([[3.0, -3.0], [3.0, -3.0]], "tanh")))
    text = " ".join(conditions(with_weight(np.eye(3), "relu")))
    assert "cannot explode" in text and "must vanish" not in text


def test_conditions_of_the_sigmoid_have_its_own_limit():
    text = " ".join(conditions(with_weight(np.diag([3.6, 0.1]), "sigmoid")))
    assert "must vanish: the largest singular value of W_hh is 3.6, and being below 1/γ = 4" in text
    assert "by 0.9 at most" in text
    assert "can explode" in " ".join(conditions(with_weight(np.diag([4.1, 0.1]), "sigmoid")))


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (
            [[0.5, 4.0], [0.0, 0.5]],
            "it is 0.5, the gradient goes as 0.5^k with the lag k, up to powers of k, so it van",
        ),
        (
            [[1.25, 0.0], [0.0, 0.5]],
            "it is 1.25, the gradient goes as 1.25^k with the lag k, up to powers of k, so it e",
        ),
        ([[0.0, 1.0], [-1.0, 0.0]], "so it neither vanishes nor explodes exponentially."),
    ],
)
def test_in_a_linear_network_the_radius_decides(weight, said):
    assert said in conditions(with_weight(weight))[-1]


def test_conditions_of_a_stack_name_the_layer():
    model = model_of(cell=["gru", "vanilla"], scale=0.1)
    assert conditions(model)[0].startswith("The gradient through layer 1's recurrence must vanish: ")
