"""minGRU and minLSTM: their equations, and the scan of a linear recurrence against the loop over `step`."""

import math
from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from lmapp.cells import find, linear_recurrence
from lmapp.cells.linear_recurrence import LinearCell
from lmapp.cells.mingru import MinGRU
from lmapp.cells.minlstm import MinLSTM
from lmapp.cells.protocol import Cell, HiddenState
from lmapp.errors import UsageError

KINDS = [MinGRU, MinLSTM]
NAMES = ("keep", "credit", "zoneout")
MASKS = [chosen for count in range(4) for chosen in combinations(NAMES, count)]


def make(kind: type[LinearCell], size: int = 5, dtype: torch.dtype = torch.float64) -> LinearCell:
    torch.manual_seed(1)
    cell = kind(4, size)
    torch.nn.init.normal_(cell.bias_ih)
    return cell.to(dtype)


def make_masks(names: tuple[str, ...], steps: int, batch: int, size: int) -> dict:
    masks = {
        "keep": torch.randint(2, (steps, batch)),
        "credit": 2 * torch.rand(steps, batch),
        "zoneout": HiddenState(torch.bernoulli(torch.full((steps, batch, size), 0.3, dtype=torch.float64))),
    }
    return {name: mask for name, mask in masks.items() if name in names}


def differentiate(cell: LinearCell, scan, x: Tensor, state: HiddenState, masks: dict) -> dict[str, Tensor]:
    """Outputs, last state and the gradients of a random linear function of both, parameters included."""
    gates = cell.project(x).detach().requires_grad_()
    state = HiddenState(state.h.clone().requires_grad_())
    generator = torch.Generator().manual_seed(7)
    found = {}
    for name, leaf in (("gates", gates), ("parameters", cell.project(x))):
        outputs, last = scan(leaf, state, **masks)
        loss = sum((y.double() * torch.randn(y.shape, generator=generator).double()).sum() for y in (outputs, last.h))
        leaves = (gates, state.h) if name == "gates" else tuple(cell.parameters())
        found |= {f"{name} {i}": g for i, g in enumerate(torch.autograd.grad(loss, leaves))}
        found |= {f"outputs of {name}": outputs.detach(), f"last of {name}": last.h.detach()}
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        error = (value.double() - expected[name].double()).norm() / expected[name].double().norm().clamp_min(1e-6)
        assert error < tolerance, (name, float(error))


def random_inputs(cell: LinearCell, steps: int, batch: int) -> tuple[Tensor, HiddenState]:
    dtype = cell.weight_ih.dtype
    x = 2 * torch.randn(steps, batch, cell.input_size, dtype=dtype)
    return x, HiddenState(torch.randn(batch, cell.hidden_size, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", MASKS, ids=lambda names: "+".join(names) or "none")
@pytest.mark.parametrize(("steps", "batch"), list(product((1, 2, 7, 64, 97), (1, 3))))
def test_scan_is_the_loop_over_step(kind, names, steps, batch):
    cell = make(kind)
    x, state = random_inputs(cell, steps, batch)
    masks = make_masks(names, steps, batch, cell.hidden_size)
    found = differentiate(cell, cell.scan, x, state, masks)
    expected = differentiate(cell, lambda *a, **m: Cell.scan(cell, *a, **m), x, state, masks)
    assert_same(found, expected, 1e-12)


@pytest.mark.parametrize("chunks", [1, 2, 5, 16, 31])
@pytest.mark.parametrize("backwards", [False, True])
def test_chunks_join(chunks, backwards, monkeypatch):
    monkeypatch.setattr(linear_recurrence, "chunk_count", lambda *_: chunks)
    torch.manual_seed(0)
    a, b = torch.rand(31, 2, 3, dtype=torch.float64), torch.randn(31, 2, 3, dtype=torch.float64)
    first = h = torch.randn(2, 3, dtype=torch.float64)
    expected = torch.empty_like(b)
    for t in reversed(range(31)) if backwards else range(31):
        h = expected[t] = a[t] * h + b[t]
    out = torch.full_like(b, math.nan)
    linear_recurrence.solve(a, b, first, out, backwards)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)


def test_the_rule_for_chunks():
    assert linear_recurrence.chunk_count(64, 1024, "cpu") == 8
    assert linear_recurrence.chunk_count(97, 1024, "cpu") == 9
    assert linear_recurrence.chunk_count(64, 32 * 512, "cpu") == 1
    assert linear_recurrence.chunk_count(64, 32 * 512, "cuda") == 8
    assert linear_recurrence.chunk_count(3, 1, "cuda") == 1


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_chunks_has_the_same_gradients(kind, chunks, monkeypatch):
    cell = make(kind)
    x, state = random_inputs(cell, 18, 2)
    masks = make_masks(NAMES, 18, 2, cell.hidden_size)
    expected = differentiate(cell, lambda *a, **m: Cell.scan(cell, *a, **m), x, state, masks)
    monkeypatch.setattr(linear_recurrence, "chunk_count", lambda steps, *_: min(chunks, steps))
    assert_same(differentiate(cell, cell.scan, x, state, masks), expected, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_join(kind):
    cell = make(kind)
    x, state = random_inputs(cell, 40, 3)

    def in_two(gates, state):
        first, between = cell.scan(gates[:23], state)
        second, last = cell.scan(gates[23:], between)
        return torch.cat((first, second)), last

    expected = differentiate(cell, cell.scan, x, state, {})
    assert_same(differentiate(cell, in_two, x, state, {}), expected, 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("kind", KINDS)
def test_lower_precisions_agree_with_float64(kind, dtype, tolerance):
    cell = make(kind, 32, torch.float32)
    gates = torch.randn(64, 4, cell.gate_size).to(dtype)
    upstream = torch.randn(64, 4, 32).to(dtype)
    found = []
    for wide in (torch.float32, torch.float64):
        leaf = (gates if wide == torch.float32 else gates.double()).requires_grad_()
        first = torch.linspace(-1, 1, 4 * 32, dtype=wide).view(4, 32).requires_grad_()
        outputs, last = cell.scan(leaf, HiddenState(first))
        gradients = torch.autograd.grad(outputs, (leaf, first), upstream.to(outputs.dtype))
        found.append({str(i): y for i, y in enumerate((outputs, last.h, *gradients))})
    assert [y.dtype for y in found[0].values()] == [dtype, torch.float32, dtype, torch.float32]
    assert_same(found[0], found[1], tolerance)
    # The state itself is not rounded on its way.
    torch.testing.assert_close(found[0]["1"].double(), found[1]["1"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_step_and_scan_agree_in_lower_precisions(kind, dtype):
    cell = make(kind, dtype=torch.float32)
    gates = torch.randn(2, 3, cell.gate_size).to(dtype)
    output, after = cell.step(gates[0], cell.initial_state(3))
    _, after = cell.step(gates[1], after)
    outputs, last = cell.scan(gates, cell.initial_state(3))
    torch.testing.assert_close(output, outputs[0])
    torch.testing.assert_close(after.h, last.h, rtol=1e-5, atol=1e-6)
    assert output.dtype == outputs.dtype == dtype
    assert after.h.dtype == last.h.dtype == torch.float32


@pytest.mark.parametrize("zoned", [False, True])
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("steps", [1, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_state_gradients_are_the_default_ones(kind, steps, repeats, zoned):
    cell = make(kind)
    x, state = random_inputs(cell, steps, 2)
    gates = cell.project(x).detach()
    zoneout = HiddenState(torch.rand(steps, 2, 5, dtype=torch.float64)) if zoned else None
    upstream = torch.randn(steps, 2 * repeats, 5, dtype=torch.float64)
    entering, gate_gradients = cell.state_gradients(gates, state, upstream, zoneout)
    expected, expected_gates = Cell.state_gradients(cell, gates, state, upstream, zoneout)
    torch.testing.assert_close(entering.h, expected.h, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gate_gradients, expected_gates, rtol=1e-12, atol=1e-12)
    assert not entering.h[-1].any()
    torch.testing.assert_close(
        cell.input_gradients(x, gate_gradients), Cell.input_gradients(cell, x, gate_gradients), rtol=1e-12, atol=1e-12
    )
    assert all(parameter.grad is None for parameter in cell.parameters())


def test_mingru_step_by_hand():
    gates = torch.tensor([[0.4, 0.7]], dtype=torch.float64)
    output, after = MinGRU(1, 1).step(gates, HiddenState(torch.tensor([[0.5]], dtype=torch.float64)))
    z = 1 / (1 + math.exp(-0.4))
    assert output.item() == after.h.item() == pytest.approx((1 - z) * 0.5 + z * 0.7, abs=1e-15)


def test_minlstm_step_by_hand():
    gates = torch.tensor([[0.4, -0.3, 0.7]], dtype=torch.float64)
    output, after = MinLSTM(1, 1).step(gates, HiddenState(torch.tensor([[0.5]], dtype=torch.float64)))
    f, i = 1 / (1 + math.exp(-0.4)), 1 / (1 + math.exp(0.3))
    assert output.item() == after.h.item() == pytest.approx((f * 0.5 + i * 0.7) / (f + i), abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_gates_of_mingru(dtype):
    gates = torch.tensor([[200.0, 0.7], [-200.0, 0.7]], dtype=dtype).unsqueeze(1).requires_grad_()
    outputs, _ = MinGRU(1, 1).scan(gates, HiddenState(torch.tensor([[0.5]], dtype=dtype)))
    torch.testing.assert_close(outputs.flatten(), torch.tensor([0.7, 0.7], dtype=dtype))
    outputs.sum().backward()
    torch.testing.assert_close(gates.grad[:, 0], torch.tensor([[0.0, 2.0], [0.0, 0.0]], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("f", "i", "kept"), [(200, 200, 0.5), (-200, -200, 0.5), (200, -200, 1), (-200, 200, 0), (-200, -201, 0.7310585786)]
)
def test_extreme_gates_of_minlstm(f, i, kept, dtype):
    gates = torch.tensor([[[f, i, 0.7]]], dtype=dtype, requires_grad=True)
    outputs, _ = MinLSTM(1, 1).scan(gates, HiddenState(torch.tensor([[0.5]], dtype=dtype)))
    assert outputs.item() == pytest.approx(kept * 0.5 + (1 - kept) * 0.7, rel=1e-6)
    outputs.sum().backward()
    # f/(f+i) follows f's pre-activation at the rate kept(1 − kept)(1 − σ(f)), and i's likewise.
    rates = [-0.2 * kept * (1 - kept) * (f < 0), 0.2 * kept * (1 - kept) * (i < 0), 1 - kept]
    assert gates.grad.flatten().tolist() == pytest.approx(rates, rel=1e-5)


@pytest.mark.parametrize(("kind", "gates"), [(MinGRU, (20.0, 0.7)), (MinLSTM, (-20.0, 5.0, 0.7))])
def test_a_tiny_share_kept_is_not_rounded_to_zero(kind, gates):
    """What is left of a gradient that decays fast is right in fp32 too."""
    h = torch.ones(1, 1, requires_grad=True)
    outputs, _ = kind(1, 1).scan(torch.tensor([[gates]]), HiddenState(h))
    outputs.sum().backward()
    small = 1 / (1 + math.exp(20))
    expected = small if kind is MinGRU else small / (small + 1 / (1 + math.exp(-5)))
    assert h.grad.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_share_kept_after_chrono_initialisation(kind, dtype):
    cell = kind(4, 2000).to(dtype)
    torch.manual_seed(3)
    cell.set_memory_bias(None, 50)
    zero = torch.zeros(1, 4, dtype=dtype)
    kept = cell.coefficients(cell.project(zero))[0].detach().double()
    times = kept / (1 - kept)  # U, uniform from 1 to 49
    assert times.min() >= 0.999
    assert times.max() <= 49.01
    assert times.mean() == pytest.approx(25, abs=1)
    assert times.std() == pytest.approx(48 / math.sqrt(12), abs=0.6)
    assert not cell.bias_ih[-2000:].any()


@pytest.mark.parametrize(("kind", "kept"), [(MinGRU, 0.880797078), (MinLSTM, 0.880797078 / (0.880797078 + 0.5))])
def test_the_share_kept_after_a_forget_bias(kind, kept):
    cell = kind(4, 6).double()
    cell.set_memory_bias(2.0, None)
    a, b = cell.coefficients(cell.project(torch.zeros(1, 4, dtype=torch.float64)))
    torch.testing.assert_close(a, torch.full_like(a, kept))
    assert not b.any()
    assert cell.bias_ih.count_nonzero() == 6


@pytest.mark.parametrize("kind", KINDS)
def test_without_biases(kind):
    cell = kind(4, 6, bias=False).double()
    assert list(dict(cell.named_parameters())) == ["weight_ih"]
    x, state = random_inputs(cell, 5, 2)
    outputs, _ = cell(x, state)
    torch.testing.assert_close(outputs, Cell.scan(cell, x @ cell.weight_ih.T, state)[0])
    torch.testing.assert_close(cell.table(), cell.weight_ih.T)
    with pytest.raises(UsageError, match="forget-bias"):
        cell.set_memory_bias(1.0, None)
    with pytest.raises(UsageError, match="chrono"):
        cell.set_memory_bias(None, 50)


@pytest.mark.parametrize("kind", KINDS)
def test_an_early_input_changes_a_late_output(kind):
    cell = make(kind)
    x, state = random_inputs(cell, 64, 2)
    changed = x.clone()
    changed[3, 0] += 1
    before, after = (cell(y, state)[0].detach() for y in (x, changed))
    differs = (before != after).any(-1)
    assert torch.equal(before[:3], after[:3])
    assert torch.equal(before[:, 1], after[:, 1])
    assert differs[3:12, 0].all()
    cell.set_memory_bias(None, 2000)
    before, after = (cell(y, state)[0].detach() for y in (x, changed))
    assert (before[-1, 0] - after[-1, 0]).abs().min() > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_scan_leaves_its_arguments_alone(kind):
    cell = make(kind)
    x, state = random_inputs(cell, 9, 2)
    gates = cell.project(x).detach()
    masks = make_masks(NAMES, 9, 2, cell.hidden_size)
    copies = [y.clone() for y in (gates, state.h, masks["zoneout"].h)]
    outputs, _ = cell.scan(gates.requires_grad_(), state, **masks)
    upstream = torch.randn_like(outputs)
    copies.append(upstream.clone())
    outputs.backward(upstream)
    assert all(map(torch.equal, (gates, state.h, masks["zoneout"].h, upstream), copies))


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_derivative_is_refused(kind):
    cell = make(kind)
    x, state = random_inputs(cell, 3, 2)
    gates = cell.project(x).detach().requires_grad_()
    outputs, _ = cell.scan(gates, state)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), gates, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_projects_every_one_hot_input(kind):
    cell = make(kind)
    torch.testing.assert_close(cell.table(), Cell.table(cell), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_initialisations(kind):
    torch.manual_seed(0)
    cell = kind(12, 64)
    for init, fan_in, bound in (("torch", None, 1 / 8), ("orthogonal", None, 1 / 2), ("identity", 1, math.sqrt(3))):
        cell.reset_parameters(init, fan_in)
        weight = cell.weight_ih.detach()
        assert weight.abs().max() <= bound
        assert weight.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert bool(cell.bias_ih.any()) == (init == "torch")
        assert cell.bias_ih.abs().max() <= bound
    with pytest.raises(ValueError, match="orthogonal"):
        cell.reset_parameters("xavier")


@pytest.mark.parametrize(("name", "kind"), [("mingru", MinGRU), ("minlstm", MinLSTM)])
def test_they_are_found_by_name(name, kind):
    assert find(name) is kind
    assert kind.recurrent_weight is None
