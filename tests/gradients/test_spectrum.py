"""Spectral figures: against dense decompositions, in closed form, and where they degenerate."""

import json
import math
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from lmapp.cells import CELLS
from lmapp.cells.protocol import Cell, HiddenState
from lmapp.gradients import spectrum
from lmapp.gradients.decay import ProbeShape, probe_windows
from lmapp.gradients.jacobians import network_jacobian, unflatten
from lmapp.gradients.spectrum import largest_modulus, leading_singular, measure_spectrum, start_block, why_not
from lmapp.models import RecurrentModel

V = 6


class Matrices:
    """Dense matrices (R, n, n) as an operator on R·copies rows."""

    def __init__(self, matrices, copies=1):
        self.matrices = torch.as_tensor(matrices, dtype=torch.float64).repeat_interleave(copies, 0)

    def jvp(self, v):
        return torch.einsum("rij,rj->ri", self.matrices, v)

    def vjp(self, u):
        return torch.einsum("rij,ri->rj", self.matrices, u)


class Plain(Cell):
    """h_t = tanh(gates + h W + (h W)²): a cell from outside."""

    state_type = HiddenState

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.gate_size = hidden_size
        self.inputs = nn.Linear(input_size, hidden_size)
        self.weight = nn.Parameter(torch.empty(hidden_size, hidden_size).normal_())

    def project(self, x):
        return self.inputs(x)

    def step(self, gates, state):
        h = state.h @ self.weight
        h = (gates + h + h**2).tanh()
        return h, HiddenState(h)


class _Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient * (1 - ctx.saved_tensors[0] ** 2)


class Sealed(Plain):
    """The same with a backward pass of its own."""

    def step(self, gates, state):
        h = state.h @ self.weight
        h = _Tanh.apply(gates + h + h**2)
        return h, HiddenState(h)


class Forgetting(Plain):
    """Its Jacobian is 0."""

    def step(self, gates, state):
        return gates.tanh(), HiddenState(gates.tanh())


@pytest.fixture(autouse=True)
def _somewhere(monkeypatch):
    module = types.ModuleType("somewhere")
    module.__dict__.update({name: value for name, value in globals().items() if isinstance(value, type)})
    monkeypatch.setitem(sys.modules, "somewhere", module)


def model_of(cell, hidden_size=4, num_layers=None, scale=0.7, **options):
    torch.manual_seed(0)
    model = RecurrentModel(V, cell=cell, hidden_size=hidden_size, num_layers=num_layers, **options).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=scale)
    return model


def linear(weight, activation="identity"):
    """h_t = φ(W h_{t−1}): no inputs, no biases."""
    torch.manual_seed(1)
    weight = torch.as_tensor(weight, dtype=torch.float64)
    model = RecurrentModel(V, cell="vanilla", hidden_size=len(weight), activation=activation).double()
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.zero_()
        model.layers[0].weight_hh.copy_(weight)
        nn.init.normal_(model.head.weight)
    return model


SHAPE = ProbeShape(3, 5, 12, 2, 6)


def windows_of(shape=SHAPE, seed=1):
    return torch.randint(V, (shape.windows, shape.length), generator=torch.Generator().manual_seed(seed))


def natural_jacobians(model, shape=SHAPE, windows=None):
    """(N, K + m, n, n): every Jacobian along the windows after the warm-up, by the naive loop."""
    windows = windows_of(shape) if windows is None else windows
    states, found = model.initial_state(shape.windows), []
    for t in range(shape.length - 1):
        jacobian = network_jacobian(model, windows[:, t], states)
        if t >= shape.warm_up:
            found.append(jacobian.dense())
        states = unflatten(jacobian.after, states)
    return torch.stack(found, 1).numpy()


def random_matrices(rows, size, seed=0):
    return torch.randn(rows, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def block(rows, size, seed=0):
    return start_block(rows, size, torch.zeros(1, dtype=torch.float64), torch.Generator().manual_seed(seed))


NETWORKS = {
    **{cell: {"cell": cell} for cell in CELLS},
    **{name: {"cell": "vanilla", "activation": name} for name in ("relu", "sigmoid", "identity")},
    "from outside": {"cell": "somewhere:Plain", "num_layers": 2},
    "mixed": {"cell": ["lstm", "gru", "vanilla"]},
    "residual": {"cell": ["gru", "lstm"], "connections": "residual", "embedding_size": 4},
    "dense": {"cell": ["vanilla", "mingru"], "connections": "dense"},
    "zoneout": {"cell": ["lstm", "gru"], "zoneout": 0.3},
}


# The iterations


@pytest.mark.parametrize("size", [1, 2, 3, 7, 30])
def test_singular_value_and_vector_of_dense_matrices(size):
    matrices = random_matrices(5, size)
    start = block(5, size)
    found = leading_singular([Matrices(matrices, start.shape[2])], start, 1e-9, 5000)
    _, values, right = torch.linalg.svd(matrices)
    assert found.settled.all()
    np.testing.assert_allclose(np.exp(found.logs), values[:, 0], rtol=1e-12)
    cosine = (found.right * right[:, 0]).sum(1).abs()
    np.testing.assert_allclose(cosine, 1, rtol=1e-9)
    if size > 1:
        np.testing.assert_allclose(found.second, values[:, 1] / values[:, 0], rtol=1e-6)


def test_singular_value_of_a_product_is_that_of_the_product_in_its_order():
    factors = [random_matrices(3, 6, seed) for seed in range(4)]
    product = factors[3] @ factors[2] @ factors[1] @ factors[0]
    found = leading_singular([Matrices(factor, 4) for factor in factors], block(3, 6), 1e-10, 5000)
    _, values, right = torch.linalg.svd(product)
    np.testing.assert_allclose(np.exp(found.logs), values[:, 0], rtol=1e-12)
    np.testing.assert_allclose((found.right * right[:, 0]).sum(1).abs(), 1, rtol=1e-12)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_a_product_beyond_float64_has_its_logarithm(scale):
    matrix = scale * torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))[None]
    found = leading_singular([Matrices(matrix, 3)] * 5, block(1, 3))
    assert found.logs[0] == pytest.approx(5 * math.log(3 * scale), rel=1e-12)
    assert found.right[0].abs().tolist() == pytest.approx([1, 0, 0], abs=1e-2)


def test_what_does_not_settle_says_so():
    matrix = torch.diag(torch.linspace(1, 0.99, 40, dtype=torch.float64))[None]
    hasty = leading_singular([Matrices(matrix, 4)], block(1, 40), 1e-6, 3)
    assert not hasty.settled[0]
    assert 0.99 < np.exp(hasty.logs[0]) < 1
    patient = leading_singular([Matrices(matrix, 4)], block(1, 40), 1e-6, 5000)
    assert patient.settled[0]
    assert np.exp(patient.logs[0]) == pytest.approx(1, rel=1e-6)


def test_a_vector_settles_only_where_its_singular_value_leads():
    equal, apart = torch.eye(3, dtype=torch.float64), torch.diag(torch.tensor([1, 0.9, 0.1], dtype=torch.float64))
    matrices = torch.stack((equal, apart))
    found = leading_singular([Matrices(matrices, 3)], block(2, 3), 1e-3, 50, directions=True)
    assert found.settled.tolist() == [False, True]
    assert leading_singular([Matrices(matrices, 3)], block(2, 3)).settled.all()


def test_rows_that_are_zero_or_not_finite_leave_the_others_alone():
    matrices = random_matrices(4, 5)
    matrices[1] = 0
    matrices[2, 0, 0] = math.nan
    matrices[3, 0, 0] = math.inf
    found = leading_singular([Matrices(matrices, 4)], block(4, 5), 1e-9, 1000)
    assert found.logs[0] == pytest.approx(math.log(torch.linalg.matrix_norm(matrices[0], 2)), rel=1e-12)
    assert found.logs[1] == -math.inf
    assert np.isnan(found.logs[2:]).all()
    assert found.settled.tolist() == [True, True, False, False]
    start = torch.ones(4, 5, dtype=torch.float64)
    radius, settled = largest_modulus(Matrices(matrices), start)
    assert radius[0] == pytest.approx(np.abs(np.linalg.eigvals(matrices[0])).max(), rel=1e-9)
    assert radius[1] == 0
    assert np.isnan(radius[2:]).all()
    assert settled.tolist() == [True, True, False, False]


@pytest.mark.parametrize("size", [1, 2, 3, 15, 16, 17, 40])
def test_modulus_of_small_matrices_is_exact(size):
    matrices = random_matrices(4, size)
    radius, settled = largest_modulus(Matrices(matrices), torch.ones(4, size, dtype=torch.float64), 1e-9)
    np.testing.assert_allclose(radius, np.abs(np.linalg.eigvals(matrices)).max(1), rtol=1e-8)
    assert settled.all()


def test_modulus_of_a_rotation_which_a_power_iteration_never_finds():
    """A complex pair leads; everything else is smaller."""
    torch.manual_seed(0)
    angle = 1.0
    matrix = torch.diag(torch.linspace(0.9, -0.9, 400, dtype=torch.float64))
    matrix[:2, :2] = 1.1 * torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    basis = torch.linalg.qr(torch.randn(400, 400, dtype=torch.float64)).Q
    matrix = (basis @ matrix @ basis.T)[None]
    counted = Matrices(matrix)
    radius, settled = largest_modulus(counted, torch.randn(1, 400, dtype=torch.float64), 1e-6)
    assert radius[0] == pytest.approx(1.1, rel=1e-6)
    assert settled.all()


def test_modulus_of_a_large_random_matrix():
    matrix = random_matrices(1, 300) / math.sqrt(300)
    radius, _ = largest_modulus(Matrices(matrix), torch.ones(1, 300, dtype=torch.float64))
    assert radius[0] == pytest.approx(np.abs(np.linalg.eigvals(matrix)).max(), rel=5e-3)
    small, settled = largest_modulus(Matrices(matrix), torch.ones(1, 300, dtype=torch.float64), 1e-12, 20)
    assert not settled[0]
    assert 0 < small[0] < 2


# The measurement


@pytest.mark.parametrize("name", NETWORKS)
def test_against_dense_decompositions_at_every_point(name, monkeypatch):
    """All points there are, so that it does not matter which were drawn."""
    model = model_of(**NETWORKS[name])
    monkeypatch.setattr(spectrum.leading_singular, "__defaults__", (1e-10, 5000))
    every = natural_jacobians(model)
    found = measure_spectrum(model, windows_of(), SHAPE, points=10**6)
    by_time = every.transpose(1, 0, 2, 3).reshape(-1, *every.shape[2:])
    assert found.size == every.shape[-1]
    assert found.norms_settled.all()
    np.testing.assert_allclose(found.norms, np.linalg.norm(by_time, 2, axis=(1, 2)), rtol=1e-8)
    np.testing.assert_allclose(found.radii, np.abs(np.linalg.eigvals(by_time)).max(1), rtol=1e-9, atol=1e-12)
    assert found.radius_method == "eigenvalues"
    assert found.norm == pytest.approx(math.exp(np.log(found.norms[found.norms > 0]).mean()))
    monkeypatch.setattr(spectrum, "MOST_EIGENVALUES", 0)
    krylov = measure_spectrum(model, windows_of(), SHAPE, points=10**6)
    assert krylov.radius_method == "arnoldi"
    assert krylov.radii_settled.all()
    np.testing.assert_allclose(krylov.radii, found.radii, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("warm_up", [0, 3, 40])
def test_lyapunov_exponent_by_the_naive_product(name, warm_up):
    """The product of all matrices from the settling steps on, applied to the vector that was drawn."""
    shape, model = ProbeShape(2, warm_up, 10, 2, 6), model_of(**NETWORKS[name])
    found = measure_spectrum(model, windows_of(shape), shape, points=1, seed=5)
    settling = min(warm_up, 32)
    assert (found.steps, found.settling_steps) == (12, settling)
    every = natural_jacobians(model, ProbeShape(2, warm_up - settling, 10 + settling, 2, 6), windows_of(shape))
    generator = torch.Generator().manual_seed(5)
    torch.randperm(2 * 12, generator=generator)
    drawn = torch.randn(2, found.size, generator=generator, dtype=torch.float64).numpy()
    for window in range(2):
        settled = np.linalg.multi_dot([np.eye(found.size), *every[window, :settling][::-1], drawn[window]])
        grown = np.linalg.multi_dot([np.eye(found.size), *every[window, settling:][::-1], settled])
        expected = math.log(np.linalg.norm(grown) / np.linalg.norm(settled)) / 12 if grown.any() else -math.inf
        assert found.exponents[window] == pytest.approx(expected, rel=1e-9)
    if np.isfinite(found.exponents).all():
        assert found.lyapunov == pytest.approx(found.exponents.mean())
        assert found.lyapunov_spread == pytest.approx(found.exponents.std())


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.3])
def test_scaled_identity(alpha):
    found = measure_spectrum(linear(alpha * np.eye(3)), windows_of(), SHAPE, overlap=True)
    assert found.norm == pytest.approx(alpha, rel=1e-12)
    assert found.radius == pytest.approx(alpha, rel=1e-12)
    assert found.lyapunov == pytest.approx(math.log(alpha), abs=1e-12)
    assert found.lyapunov_spread == pytest.approx(0, abs=1e-12)
    # Every direction is as good as any other: there is none to turn to.
    assert "neither simple nor" in found.overlap.note
    assert found.overlap.pairs.tolist() == [0] * len(found.overlap.lags)
    assert np.isnan(found.overlap.values).all()


def test_norm_and_radius_are_two_things():
    found = measure_spectrum(linear([[0.5, 4.0], [0.0, 0.5]]), windows_of(), SHAPE)
    assert found.norm == pytest.approx(4.061553, abs=5e-7)
    assert found.radius == pytest.approx(0.5, abs=1e-7)
    # A double eigenvalue: ‖J^k v‖ goes as k·0.5^k.
    assert math.log(0.5) < found.lyapunov < math.log(0.5) + math.log(18 / 4) / 14


def test_a_gradient_that_grows_where_all_eigenvalues_are_zero():
    """W² = 0, and yet with tanh the product of Jacobians explodes: what is often said of eigenvalues is wrong."""
    model = linear([[3.0, -3.0], [3.0, -3.0]], "tanh")
    with torch.no_grad():
        model.layers[0].bias_ih.copy_(torch.tensor([-1.5, -3.0]))
    assert (model.layers[0].weight_hh @ model.layers[0].weight_hh == 0).all()
    shape = ProbeShape(1, 0, 18, 2, 6)
    product, norms, vectors = np.eye(2), {}, None
    every = natural_jacobians(model, shape)[0]
    for step, matrix in enumerate(every, 1):
        product = matrix @ product
        norms[step] = np.linalg.norm(product, 2)
    assert norms[5] == pytest.approx(1.76326, rel=5e-6)
    assert norms[10] == pytest.approx(100.951, rel=5e-6)
    assert norms[20] == pytest.approx(84897.3, rel=5e-6)
    tokens, states = windows_of(shape)[:, 0], model.initial_state(1)
    operators = []
    for _ in range(20):  # the same without any matrix
        operators.append(network_jacobian(model, tokens.expand(2), unflatten(_twice(states), states)))
        states = unflatten(operators[-1].after[:1], states)
        if len(operators) in (5, 10, 20):
            vectors = leading_singular(operators, block(1, 2), 1e-9)
            assert np.exp(vectors.logs[0]) == pytest.approx(norms[len(operators)], rel=1e-9)
    found = measure_spectrum(model, windows_of(shape), shape)
    assert found.lyapunov > 0.4
    assert found.settling_steps == 0


def _twice(states):
    return torch.cat([x for state in states for x in state], 1).repeat(2, 1)


def rotation(angle, scale):
    return scale * np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


@pytest.mark.parametrize("krylov", [False, True])
def test_complex_pairs(krylov, monkeypatch):
    if krylov:
        monkeypatch.setattr(spectrum, "MOST_EIGENVALUES", 0)
    weight = np.zeros((5, 5))
    weight[:2, :2], weight[2:4, 2:4], weight[4, 4] = rotation(1.0, 0.9), rotation(2.0, 0.6), -0.3
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(5, 5)))[0]
    found = measure_spectrum(linear(basis @ weight @ basis.T), windows_of(), SHAPE)
    assert found.radius == pytest.approx(0.9, rel=1e-9)
    assert found.norm == pytest.approx(0.9, rel=1e-3)


@pytest.mark.parametrize("pair", [False, True])
def test_exponent_of_a_linear_network_is_the_logarithm_of_its_radius(pair):
    weight = np.diag([0.5, 0.4, 0.3, 0.2]) + np.triu(np.random.default_rng(0).normal(size=(4, 4)), 2)
    if pair:
        weight[:2, :2] = rotation(0.7, 0.95)
    else:
        weight[0, 0] = 0.95
    shape = ProbeShape(2, 40, 60, 4, 6)
    found = measure_spectrum(linear(weight), windows_of(shape), shape)
    assert found.settling_steps == 32
    assert found.radius == pytest.approx(0.95, rel=1e-9)
    assert found.lyapunov == pytest.approx(math.log(0.95), abs=1e-7 if not pair else 0.02)
    assert found.norm > 1.1
    # Without a warm-up the vector's turning is part of it.
    shape = ProbeShape(2, 0, 60, 4, 6)
    cold = measure_spectrum(linear(weight), windows_of(shape), shape)
    assert cold.settling_steps == 0
    assert 1e-4 < abs(cold.lyapunov - math.log(0.95)) < 0.1


def test_zoneout_is_part_of_the_jacobian():
    weight = np.diag([0.5, -0.9])
    model = linear(weight)
    model.zoneout = 0.25
    found = measure_spectrum(model, windows_of(), SHAPE)
    assert found.radius == pytest.approx(0.25 + 0.75 * 0.5, rel=1e-9)


# The gradient's direction


def actual_directions(model, windows, shape):
    """∂J^(i)/∂S_{i−k} of each window's last prediction by automatic differentiation, unit vectors (N, n) by lag."""
    last = shape.length - 2
    states, history = model.initial_state(len(windows)), []
    for t in range(last + 1):
        leaves = tuple(type(s)(*(x.detach().requires_grad_() for x in s)) for s in states)
        history.append(leaves)
        _, states = model.step(windows[:, t], leaves)
    found = {}
    for lag in range(1, shape.max_lag + 1):
        states = leaves = history[last - lag + 1]
        for t in range(last - lag + 1, last + 1):
            logits, states = model.step(windows[:, t], states)
        loss = nn.functional.cross_entropy(logits, windows[:, last + 1], reduction="sum")
        gradients = torch.autograd.grad(loss, [x for s in leaves for x in s], materialize_grads=True)
        gradient = torch.cat(gradients, 1)
        found[lag] = (gradient / gradient.norm(dim=1, keepdim=True)).numpy()
    return found


@pytest.mark.parametrize("name", ["vanilla", "lstm", "gru", "from outside", "mixed", "residual", "dense", "zoneout"])
def test_overlap_with_the_leading_singular_vector_of_the_product(name, monkeypatch):
    shape = ProbeShape(3, 5, 9, 2, 6)
    monkeypatch.setattr(spectrum, "ANGLE", 1e-7)
    monkeypatch.setattr(spectrum, "MOST_ITERATIONS_A_LAG", 3000)
    monkeypatch.setattr(spectrum, "DISTINCT", 1e-9)
    model, windows = model_of(**NETWORKS[name]), windows_of(shape)
    found = measure_spectrum(model, windows, shape, overlap=True).overlap
    assert found.reference == "singular vector"
    assert found.note == ""
    assert found.lags.tolist() == [1, 2, 4, 8]
    assert found.pairs.tolist() == [3] * 4
    every, directions = natural_jacobians(model, shape, windows), actual_directions(model, windows, shape)
    for lag, value in zip(found.lags, found.values, strict=True):
        cosines = []
        for window in range(3):
            product = np.eye(every.shape[-1])
            for matrix in every[window, -lag:]:
                product = matrix @ product
            cosines.append(abs(np.linalg.svd(product)[2][0] @ directions[lag][window]))
        assert value == pytest.approx(np.mean(cosines), abs=1e-5)


def test_overlap_of_a_linear_network_tends_to_one_with_a_real_leading_eigenvalue():
    rng = np.random.default_rng(0)
    basis = rng.normal(size=(5, 5))
    weight = basis @ np.diag([-0.9, 0.6, 0.5, 0.3, 0.1]) @ np.linalg.inv(basis)
    shape = ProbeShape(3, 2, 64, 2, 6)
    windows = windows_of(shape)
    found = measure_spectrum(linear(weight), windows, shape, overlap=True).overlap
    assert found.reference == "eigenvector"
    assert found.lags.tolist() == [1, 2, 4, 8, 16, 32, 64]
    assert found.values[-1] == pytest.approx(1, abs=1e-12)
    assert found.values[0] < 0.95
    assert found.pairs.tolist() == [3] * 7
    values, vectors = np.linalg.eig(weight.T)
    leading = vectors[:, np.argmax(np.abs(values))]
    directions = actual_directions(linear(weight), windows, shape)
    for lag, value in zip(found.lags, found.values, strict=True):
        assert value == pytest.approx(np.abs(directions[lag] @ leading).mean(), abs=1e-10)
    # W's own leading eigenvector is another: the transposed one is right.
    values, vectors = np.linalg.eig(weight)
    assert abs(leading @ vectors[:, np.argmax(np.abs(values))]) < 0.9


def test_overlap_of_a_linear_network_tends_to_the_plane_of_a_complex_pair():
    basis = np.random.default_rng(1).normal(size=(4, 4))
    middle = np.diag([0.0, 0.0, 0.5, -0.4])
    middle[:2, :2] = rotation(1.0, 0.9)
    weight = basis @ middle @ np.linalg.inv(basis)
    shape = ProbeShape(3, 2, 64, 2, 6)
    found = measure_spectrum(linear(weight), windows_of(shape), shape, overlap=True).overlap
    assert found.reference == "eigenplane"
    assert found.values[-1] == pytest.approx(1, abs=1e-12)
    assert found.values[0] < 0.999
    plane = np.linalg.qr(np.linalg.inv(basis).T[:, :2])[0]
    directions = actual_directions(linear(weight), windows_of(shape), shape)
    for lag, value in zip(found.lags, found.values, strict=True):
        assert value == pytest.approx(np.linalg.norm(directions[lag] @ plane, axis=1).mean(), abs=1e-9)


def test_overlap_of_the_concatenated_network_which_is_linear():
    shape = ProbeShape(3, 2, 32, 2, 6)
    model = model_of("concatenated", hidden_size=3)
    with torch.no_grad():
        model.layers[0].weight_hh[:3] = torch.diag(torch.tensor([0.9, 0.2, 0.1])) + 0.1
    found = measure_spectrum(model, windows_of(shape), shape, overlap=True).overlap
    assert found.reference == "eigenvector"
    assert found.values[-1] == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("weight", [[[0.5, 4.0], [0.0, 0.5]], [[0.5, 0.0], [0.0, -0.5]]])
def test_a_leading_eigenvalue_that_is_not_alone_is_said(weight):
    found = measure_spectrum(linear(weight), windows_of(), SHAPE, overlap=True).overlap
    assert found.reference == "singular vector"
    assert "neither simple nor" in found.note


def test_a_gradient_that_vanishes_keeps_its_direction():
    """In fp32 1e-2^32 is 0; the direction is that of the float64 network all the same."""
    weight = 0.01 * np.array([[1.0, 0.5], [0.2, 0.3]])
    shape = ProbeShape(2, 2, 64, 1, 6)
    exact = measure_spectrum(linear(weight), windows_of(shape), shape, overlap=True).overlap
    single = measure_spectrum(linear(weight).float(), windows_of(shape), shape, overlap=True).overlap
    assert single.pairs.tolist() == [2] * 7
    np.testing.assert_allclose(single.values, exact.values, rtol=1e-5)


# What is given, and where it degenerates


def test_the_same_seed_gives_the_same_figures():
    model = model_of(["lstm", "gru"])
    first, again, other = (
        measure_spectrum(model, windows_of(), SHAPE, points=4, seed=seed, overlap=True, dense=True)
        for seed in (3, 3, 4)
    )
    assert json.dumps(first.as_dict()) == json.dumps(again.as_dict())
    assert len(first.norms) == 4
    assert not np.array_equal(first.norms, other.norms)
    assert first.norm == pytest.approx(other.norm, rel=0.5)


def test_pictures_are_of_the_point_of_the_middle_norm():
    model = model_of("gru")
    found = measure_spectrum(model, windows_of(), SHAPE, points=7, dense=True)
    assert found.singular_values[0] == pytest.approx(np.median(found.norms), rel=1e-3)
    assert len(found.eigenvalues) == len(found.singular_values) == found.size == 4
    assert np.abs(found.eigenvalues).prod() == pytest.approx(found.singular_values.prod())  # |det J| both
    assert np.abs(found.eigenvalues).max() == pytest.approx(found.radii[np.argsort(found.norms)[3]])
    assert measure_spectrum(model, windows_of(), SHAPE).eigenvalues is None


def test_measuring_changes_nothing():
    model = model_of(["lstm", "gru"], dropout=0.5).float().train()
    model.compute_dtype = torch.bfloat16
    model.layers[1].eval()
    model.head.weight.grad = torch.full_like(model.head.weight, 3.0)
    flags = [module.training for module in model.modules()]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    random_state = torch.get_rng_state()
    found = measure_spectrum(model, windows_of(), SHAPE, overlap=True, dense=True)
    assert torch.equal(random_state, torch.get_rng_state())
    assert [module.training for module in model.modules()] == flags
    assert model.compute_dtype == torch.bfloat16
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    assert (model.head.weight.grad == 3).all()
    assert [parameter.grad is None for parameter in model.parameters()].count(False) == 1
    exact = measure_spectrum(model.double(), windows_of(), SHAPE, overlap=True)
    for name in ("norm", "radius", "lyapunov"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=1e-3)


@pytest.mark.parametrize("krylov", [False, True])
def test_a_cell_that_reads_no_state(krylov, monkeypatch):
    if krylov:
        monkeypatch.setattr(spectrum, "MOST_EIGENVALUES", 0)
    found = measure_spectrum(model_of("somewhere:Forgetting"), windows_of(), SHAPE, overlap=True, dense=True)
    assert (found.norm, found.radius, found.lyapunov) == (0, 0, -math.inf)
    assert math.isnan(found.lyapunov_spread)
    assert found.norms_settled.all()
    assert found.scalars() == {"spectrum/norm": 0, "spectrum/radius": 0}
    assert (found.eigenvalues == 0).all()
    assert found.overlap.pairs.tolist() == [0] * len(found.overlap.lags)
    record = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert record["lyapunov"] == "-inf"
    assert record["norm_zero_share"] == record["lyapunov_zero_share"] == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("krylov", [False, True])
def test_weights_that_are_not_finite(value, krylov, monkeypatch):
    if krylov:
        monkeypatch.setattr(spectrum, "MOST_EIGENVALUES", 0)
    model = model_of("vanilla", activation="identity")
    with torch.no_grad():
        model.layers[0].weight_hh[0, 0] = value
    found = measure_spectrum(model, windows_of(), SHAPE, overlap=True, dense=True)
    assert np.isnan([found.norm, found.radius, found.lyapunov, found.lyapunov_spread]).all()
    assert found.scalars() == {}
    assert found.eigenvalues is None
    assert np.isnan(found.overlap.values).all()
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize("cell", CELLS)
def test_one_unit(cell):
    model = model_of(cell, hidden_size=1)
    shape = ProbeShape(1, 0, 2, 1, 2)
    found = measure_spectrum(model, windows_of(shape), shape, overlap=True, dense=True)
    every = natural_jacobians(model, shape)[0]
    np.testing.assert_allclose(found.norms, np.linalg.norm(every, 2, axis=(1, 2)), rtol=1e-3)
    assert len(found.norms) == found.steps == 3
    assert set(found.scalars()) == {"spectrum/norm", "spectrum/radius", "spectrum/lyapunov"}
    if found.size == 1:
        logs = np.log(np.abs(every[:, 0, 0]))
        assert found.lyapunov == pytest.approx(logs.mean(), rel=1e-9)
        np.testing.assert_allclose(found.overlap.values, 1, rtol=1e-12)


def test_a_sealed_step_is_treated_by_its_matrices():
    open_, sealed = model_of(["somewhere:Plain", "gru"]), model_of(["somewhere:Sealed", "gru"])
    sealed.load_state_dict(open_.state_dict())
    expected, found = (
        measure_spectrum(model, windows_of(), SHAPE, dense=True, overlap=True) for model in (open_, sealed)
    )
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-10)
    np.testing.assert_allclose(found.radii, expected.radii, rtol=1e-10)
    np.testing.assert_allclose(found.exponents, expected.exponents, rtol=1e-10)
    np.testing.assert_allclose(found.overlap.values, expected.overlap.values, rtol=1e-8)


def test_a_large_sealed_step_is_refused(monkeypatch):
    monkeypatch.setattr(spectrum, "MOST_SEALED", 7)
    small, large = (model_of(["somewhere:Sealed", "gru"], hidden_size=size) for size in (3, 4))
    assert why_not(small) is None
    assert why_not(model_of(["somewhere:Plain", "gru"])) is None
    assert why_not(model_of("lstm", embedding_size=3)) is None
    assert "of 8 entries of the state it is too large (at most 7)" in why_not(large)
    measure_spectrum(small, windows_of(), SHAPE, points=1)
    with pytest.raises(ValueError, match=r"cannot be measured: a torch\.autograd\.Function"):
        measure_spectrum(large, windows_of(), SHAPE, points=1)


def test_of_a_large_state_less_is_followed(monkeypatch):
    shape, model = ProbeShape(3, 5, 20, 2, 6), model_of("lstm")
    windows = windows_of(shape)
    whole = measure_spectrum(model, windows, shape, overlap=True)
    assert (len(whole.norms), whole.overlap.note, whole.overlap.pairs[0]) == (16, "", 3)
    monkeypatch.setattr(spectrum, "LARGE", 7)
    monkeypatch.setattr(spectrum, "FEW_LAGS", 9)
    monkeypatch.setattr(spectrum, "FEW_ITERATIONS", 60)
    found = measure_spectrum(model, windows, shape, overlap=True)
    assert (len(found.norms), len(found.exponents)) == (4, 3)
    assert found.overlap.note == "of 8 entries of the state only 2 windows and 9 lags were followed"
    assert found.overlap.lags.tolist() == [1, 2, 4, 8]
    assert found.overlap.pairs.max() == 2
    # The same two windows by themselves.
    monkeypatch.setattr(spectrum, "LARGE", 2048)
    two = ProbeShape(2, 5, 20, 2, 6)
    expected = measure_spectrum(model, windows[:2], two, overlap=True).overlap
    used = (found.overlap.pairs == 2) & (expected.pairs[:4] == 2)
    assert used.any()
    np.testing.assert_allclose(found.overlap.values[used], expected.values[:4][used], atol=0.05)


def test_points_where_a_figure_is_zero_are_counted_and_left_out_of_the_mean():
    found = spectrum.Spectrum(
        2, np.array([0.0, 2.0, 8.0]), np.ones(3, bool), np.array([0.0, 0.0, 0.5]), np.ones(3, bool), "eigenvalues",
        np.array([-math.inf, -0.2, -0.4]), 14, 5,
    )  # fmt: skip
    assert found.norm == pytest.approx(4)
    assert found.radius == pytest.approx(0.5)
    assert found.lyapunov == pytest.approx(-0.3)
    assert found.lyapunov_spread == pytest.approx(0.1)
    record = found.as_dict()
    assert record["norm_zero_share"] == pytest.approx(1 / 3)
    assert record["radius_zero_share"] == pytest.approx(2 / 3)
    assert record["lyapunov_zero_share"] == pytest.approx(1 / 3)


def test_on_real_text(real_text):
    letters = sorted(set(real_text[:20_000]))
    ids = np.array([letters.index(c) for c in real_text[:20_000]])
    shape = ProbeShape(4, 40, 20, 4, 10)
    torch.manual_seed(0)
    model = RecurrentModel(len(letters), cell="lstm", hidden_size=32)
    found = measure_spectrum(model, torch.from_numpy(probe_windows(ids, shape, 0)), shape, overlap=True)
    assert found.size == 64
    assert found.radius < found.norm < 5
    assert found.lyapunov < math.log(found.norm)
    assert found.overlap.values[-1] > found.overlap.values[0]
