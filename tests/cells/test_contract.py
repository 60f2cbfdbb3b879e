"""What every cell in `lmapp.cells` owes the protocol, whoever wrote it and whether or not its name is in the table.

The reference is the loop over `step` under automatic differentiation, in float64.
"""

import importlib
import inspect
import itertools
import pkgutil

import pytest
import torch
from torch import nn

import lmapp.cells
from lmapp.cells import CELLS, products
from lmapp.cells.protocol import Cell, GatedCell, map_state
from lmapp.cells.vanilla import ACTIVATIONS
from lmapp.errors import UsageError

OUTPUTS = 4
BASES = {"LinearCell"}
"""Classes with a step that are no cells by themselves."""


def every_cell():
    """Each class in the package that has a step of its own, or inherits one and is defined in a file for itself."""
    found = []
    for module in pkgutil.iter_modules(lmapp.cells.__path__):
        content = importlib.import_module(f"lmapp.cells.{module.name}")
        found += [
            kind
            for _, kind in inspect.getmembers(content, inspect.isclass)
            if issubclass(kind, Cell) and kind.step is not Cell.step and kind.__module__ == content.__name__
        ]
    return sorted({kind for kind in found if kind.__name__ not in BASES}, key=lambda kind: kind.__name__)


def variants(kind):
    """The values of the options that a cell takes."""
    activations = list(ACTIVATIONS) if "activation" in kind.options else [None]
    biases = [True, False] if "bias" in kind.options else [None]
    for activation, bias in itertools.product(activations, biases):
        yield {name: value for name, value in (("activation", activation), ("bias", bias)) if value is not None}


CASES = [
    pytest.param(kind, options, id=f"{kind.__name__}-{options}") for kind in every_cell() for options in variants(kind)
]
KINDS = every_cell()
MASKS = ["", "keep", "credit", "zoneout", "keep credit", "keep credit zoneout"]


def make(kind, width=5, size=7, dtype=torch.float64, **options):
    torch.manual_seed(1)
    if kind.reads_out:
        options["output_size"] = OUTPUTS
    cell = kind(width, size, **options)
    for name, parameter in cell.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return cell.to(dtype)


def random_state(cell, batch, dtype=torch.float64):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return cell.state_type(*(torch.randn(batch, cell.hidden_size, dtype=wide) for _ in cell.state_type._fields))


def random_masks(cell, steps, batch, names, dtype=torch.float64):
    masks = {}
    if "keep" in names:
        masks["keep"] = torch.randint(2, (steps, batch))
    if "credit" in names:
        masks["credit"] = 2 * torch.rand(steps, batch)
    if "zoneout" in names:
        shape = (steps, batch, cell.hidden_size)
        masks["zoneout"] = cell.state_type(*(torch.rand(shape, dtype=dtype) for _ in cell.state_type._fields))
    return masks


def differentiate(cell, function, inputs, state, **masks):
    """Outputs, last state and the gradients of a random linear function of both, by everything they depend on."""
    inputs = inputs.detach().clone().requires_grad_()
    state = map_state(lambda s: s.detach().clone().requires_grad_(), state)
    cell.zero_grad()
    outputs, last = function(inputs, state, **masks)
    generator = torch.Generator().manual_seed(7)
    loss = sum((x.double() * torch.randn(x.shape, generator=generator).double()).sum() for x in (outputs, *last))
    loss.backward()
    found = {"outputs": outputs, "inputs": inputs.grad}
    for name, before, after in zip(state._fields, state, last, strict=True):
        found |= {f"last {name}": after, f"first {name}": before.grad}
    found |= {name: parameter.grad for name, parameter in cell.named_parameters()}
    return {name: torch.zeros(1) if value is None else value.detach() for name, value in found.items()}


def reference(cell):
    return lambda x, state, **masks: Cell.scan(cell, cell.project(x), state, **masks)


def assert_same(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        error = (value.double() - expected[name].double()).norm() / expected[name].double().norm().clamp_min(1e-6)
        assert error < tolerance, (name, float(error))


def test_every_cell_has_a_name():
    named = {path.partition(":")[2] for path in CELLS.values()}
    assert {kind.__name__ for kind in KINDS} == named
    assert len(KINDS) >= 8


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_forward_is_the_loop_over_step(kind, options, masks):
    cell = make(kind, **options)
    x, state = torch.randn(6, 3, 5, dtype=torch.float64), random_state(cell, 3)
    given = random_masks(cell, 6, 3, masks)
    found = differentiate(cell, cell, x, state, **given)
    assert_same(found, differentiate(cell, reference(cell), x, state, **given), 1e-9)


@pytest.mark.parametrize("masks", ["", "keep credit zoneout"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_shape(kind, masks):
    generator = torch.Generator().manual_seed(5)
    shapes = [(1, 1, 1, 1), (1, 4, 2, 3), (5, 1, 1, 2), (2, 1, 3, 1)]
    shapes += [tuple(int(torch.randint(1, 11, (), generator=generator)) for _ in range(4)) for _ in range(6)]
    for steps, batch, width, size in shapes:
        cell = make(kind, width, size)
        x, state = torch.randn(steps, batch, width, dtype=torch.float64), random_state(cell, batch)
        given = random_masks(cell, steps, batch, masks)
        found = differentiate(cell, cell, x, state, **given)
        assert_same(found, differentiate(cell, reference(cell), x, state, **given), 1e-9)
        assert found["outputs"].shape == (steps, batch, cell.output_size)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_windows_join(kind, masks):
    cell = make(kind)
    gates, state = torch.randn(9, 3, cell.gate_size, dtype=torch.float64), random_state(cell, 3)
    given = random_masks(cell, 9, 3, masks)

    def in_two(gates, state, **given):
        def part(span):
            return {n: map_state(lambda m: m[span], m) if n == "zoneout" else m[span] for n, m in given.items()}

        first, between = cell.scan(gates[:4], state, **part(slice(4)))
        second, last = cell.scan(gates[4:], between, **part(slice(4, None)))
        return torch.cat((first, second)), last

    whole = differentiate(cell, cell.scan, gates, state, **given)
    assert_same(differentiate(cell, in_two, gates, state, **given), whole, 1e-9)


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("masks", ["", "zoneout"])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_state_gradients_are_those_of_step(kind, options, masks, repeats):
    cell = make(kind, **options)
    gates, state = torch.randn(5, 2, cell.gate_size, dtype=torch.float64), random_state(cell, 2)
    upstream = torch.randn(5, 2 * repeats, cell.output_size, dtype=torch.float64)
    given = random_masks(cell, 5, 2, masks)
    found = cell.state_gradients(gates, state, upstream, **given)
    expected = Cell.state_gradients(cell, gates, state, upstream, **given)
    assert found[0]._fields == cell.state_type._fields
    for ours, theirs in zip((*found[0], found[1]), (*expected[0], expected[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert not any(component[-1].any() for component in found[0])
    assert all(parameter.grad is None for parameter in cell.parameters())


@pytest.mark.parametrize("masks", ["", "zoneout"])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_state_gradients_are_finite_differences(kind, options, masks):
    """The state entering one step is moved along a random direction, and all after it is computed anew."""
    cell = make(kind, **options)
    steps, at, small = 5, 2, 1e-6
    gates, state = torch.randn(steps, 2, cell.gate_size, dtype=torch.float64), random_state(cell, 2)
    upstream = torch.randn(steps, 2, cell.output_size, dtype=torch.float64)
    given = random_masks(cell, steps, 2, masks)
    entering, _ = cell.state_gradients(gates, state, upstream, **given)

    def part(span):
        return {name: map_state(lambda m: m[span], mask) for name, mask in given.items()}

    with torch.no_grad():
        _, between = cell.scan(gates[:at], state, **part(slice(at)))
        for name in state._fields:
            direction = torch.randn_like(getattr(between, name))

            def loss(shift, name=name, direction=direction):
                moved = between._replace(**{name: getattr(between, name) + shift * direction})
                outputs, _ = cell.scan(gates[at:], moved, **part(slice(at, None)))
                return float((outputs * upstream[at:]).sum())

            slope = (loss(small) - loss(-small)) / (2 * small)
            expected = float((getattr(entering, name)[at] * direction).sum())
            assert slope == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("masks", ["", "keep credit zoneout"])
@pytest.mark.parametrize("kind", KINDS)
def test_lower_precisions_agree_with_float64(kind, masks, dtype, tolerance, onednn, monkeypatch):
    cell = make(kind, size=32, dtype=torch.float32)
    if not onednn:
        monkeypatch.setattr(products, "_onednn", lambda _: False)
    gates, state = torch.randn(12, 4, cell.gate_size).to(dtype), random_state(cell, 4, dtype)
    given = random_masks(cell, 12, 4, masks, torch.float32)
    found = differentiate(cell, cell.scan, gates, state, **given)
    assert found["outputs"].dtype == found["inputs"].dtype == dtype
    wide = [found[f"{which} {name}"].dtype for which in ("last", "first") for name in state._fields]
    assert {*wide, *(found[name].dtype for name, _ in cell.named_parameters())} == {torch.float32}
    if "zoneout" in given:
        given["zoneout"] = map_state(torch.Tensor.double, given["zoneout"])
    cell.double()
    expected = differentiate(cell, cell.scan, gates.double(), map_state(torch.Tensor.double, state), **given)
    assert_same(found, expected, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_step_and_scan_give_the_same_dtypes(kind, dtype):
    cell = make(kind, dtype=torch.float32)
    gates, state = torch.randn(2, 3, cell.gate_size).to(dtype), random_state(cell, 3, dtype)
    output, after = cell.step(gates[0], state)
    outputs, last = cell.scan(gates, state)
    assert output.dtype == outputs.dtype == dtype
    assert {s.dtype for s in (*after, *last)} == {torch.float32}
    zoned, _ = cell.zone(output, state, after, map_state(torch.zeros_like, state))
    assert zoned.dtype == dtype
    torch.testing.assert_close(zoned, output)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_carried_in_fp32(kind):
    """Two windows in bf16 are one window, to the last bit: nothing is rounded between them but where it always is.

    The minimal cells add up in another order in a window of another length.
    """
    cell = make(kind, size=16, dtype=torch.float32)
    gates, state = torch.randn(8, 2, cell.gate_size).bfloat16(), random_state(cell, 2, torch.bfloat16)
    whole, last = cell.scan(gates, state)
    first, between = cell.scan(gates[:5], state)
    second, end = cell.scan(gates[5:], between)
    exact = isinstance(cell, GatedCell)
    outputs, states = (0, 0) if exact else (1e-2, 1e-6)
    torch.testing.assert_close(whole, torch.cat((first, second)), rtol=outputs, atol=outputs)
    for one, other in zip(last, end, strict=True):
        torch.testing.assert_close(one, other, rtol=states, atol=states)
    if kind.remembers:  # what a gate keeps is more than bf16 can hold, and the next window feels it
        rounded = map_state(lambda s: s.bfloat16().float(), between)
        assert not torch.equal(between[-1], rounded[-1])
        _, otherwise = cell.scan(gates[5:], rounded)
        assert not torch.allclose(end[-1], otherwise[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_scan_leaves_its_arguments_alone(kind):
    cell = make(kind)
    gates, state = torch.randn(4, 2, cell.gate_size, dtype=torch.float64), random_state(cell, 2)
    masks = random_masks(cell, 4, 2, "keep credit zoneout")
    arguments = [gates, *state, masks["keep"], masks["credit"], *masks["zoneout"]]
    copies = [x.clone() for x in arguments]
    outputs, _ = cell.scan(gates.requires_grad_(), state, **masks)
    upstream = torch.randn_like(outputs)
    copies.append(upstream.clone())
    outputs.backward(upstream)
    assert all(map(torch.equal, [*arguments, upstream], copies))


@pytest.mark.parametrize("kind", KINDS)
def test_credit_cuts_the_gradient_as_detaching_does(kind):
    cell = make(kind)
    gates, state = torch.randn(6, 2, cell.gate_size, dtype=torch.float64), random_state(cell, 2)
    credit = torch.ones(6, 2)
    credit[4] = 0
    found = differentiate(cell, cell.scan, gates, state, credit=credit)

    def in_two(gates, state):
        first, between = cell.scan(gates[:4], state)
        second, last = cell.scan(gates[4:], map_state(torch.Tensor.detach, between))
        return torch.cat((first, second)), last

    assert_same(found, differentiate(cell, in_two, gates, state), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_keep_zero_starts_anew(kind):
    cell = make(kind)
    gates, state = torch.randn(6, 2, cell.gate_size, dtype=torch.float64), random_state(cell, 2)
    keep = torch.ones(6, 2)
    keep[4, 1] = 0
    outputs, _ = cell.scan(gates, state, keep)
    alone, _ = cell.scan(gates[4:, 1:], cell.initial_state(1))
    torch.testing.assert_close(outputs[4:, 1:], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_zoneout_by_one_keeps_the_state_and_by_zero_changes_nothing(kind):
    cell = make(kind)
    gates, state = torch.randn(6, 2, cell.gate_size, dtype=torch.float64), random_state(cell, 2)
    zeros = cell.state_type(*(torch.zeros(6, 2, cell.hidden_size, dtype=torch.float64) for _ in state))
    outputs, last = cell.scan(gates, state, zoneout=zeros)
    expected, expected_last = cell.scan(gates, state)
    torch.testing.assert_close((outputs, last), (expected, expected_last), rtol=1e-12, atol=1e-12)
    outputs, last = cell.scan(gates, state, zoneout=map_state(torch.ones_like, zeros))
    torch.testing.assert_close(last, state, rtol=1e-12, atol=1e-12)
    if not cell.reads_out:
        torch.testing.assert_close(outputs, state.h.expand_as(outputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_table_projects_every_one_hot_input(kind, options):
    cell = make(kind, **options)
    torch.testing.assert_close(cell.table(), Cell.table(cell), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_input_gradients(kind, repeats):
    cell = make(kind)
    x, gates = torch.randn(3, 2, 5).double(), torch.randn(3, 2 * repeats, cell.gate_size).double()
    torch.testing.assert_close(cell.input_gradients(x, gates), Cell.input_gradients(cell, x, gates))


@pytest.mark.parametrize("init", ["orthogonal", "identity", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_initialisation_is_reproducible_and_leaves_nothing_out(kind, init):
    cell, again = make(kind, size=16), make(kind, size=16)
    for one in (cell, again):
        for parameter in one.parameters():
            nn.init.constant_(parameter, 7)
        torch.manual_seed(3)
        one.reset_parameters(init)
    for one, other in zip(cell.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        assert not one.eq(7).any()
    if init == "torch" or cell.recurrent_weight is None:
        return
    recurrent, eye = getattr(cell, cell.recurrent_weight).detach(), torch.eye(16, dtype=torch.float64)
    for block in recurrent[: cell.recurrent_rows].split(16):
        assert torch.equal(block, eye) == (init == "identity")
        torch.testing.assert_close(block @ block.T, eye, rtol=0, atol=1e-6)
    if cell.reads_out:  # its readout is drawn as nn.Linear's
        bound = (5 + 16) ** -0.5
        readout = torch.cat((cell.weight_ih[-OUTPUTS:], recurrent[-OUTPUTS:]), 1)
        assert readout.abs().max() <= bound
        assert readout.std().item() == pytest.approx(bound / 3**0.5, rel=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_puts_out_what_it_says(kind):
    assert kind.output_component == Cell.output_component.func(make(kind)) == (None if kind.reads_out else "h")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.remembers])
def test_the_memory_bias_sets_what_is_kept(kind):
    """At gates without input and state, the derivative of the state by the state is what the gates keep."""

    def kept(cell):
        state = map_state(lambda s: s.requires_grad_(), cell.initial_state(1))
        memory = state[-1]
        gates = cell.project(torch.zeros(1, cell.input_size, dtype=torch.float64))
        if cell.recurrent_weight:
            nn.init.zeros_(getattr(cell, cell.recurrent_weight))
        _, new = cell.step(gates, state)
        return torch.autograd.grad(new[-1].sum(), memory)[0].squeeze(0)

    cell = make(kind, size=64)
    cell.reset_parameters()
    cell.set_memory_bias(3.0, None)
    much = kept(cell)
    cell.reset_parameters()
    cell.set_memory_bias(-3.0, None)
    assert (much > 0.6).all()
    assert (kept(cell) < 0.2).all()
    cell.reset_parameters()
    cell.set_memory_bias(None, 1000.0)
    # A gate σ(log u) with u uniform in 1..999 keeps u/(1+u): memories of u steps.
    steps = 1 / (1 - kept(cell))
    assert steps.min() >= 2
    assert steps.max() <= 1001
    assert 250 < steps.mean() < 750


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.remembers])
def test_a_cell_without_memory_gates_says_so(kind):
    for bias, longest in ((1.0, None), (None, 10.0)):
        with pytest.raises(UsageError, match=r"gate that keeps the state.*has none"):
            make(kind).set_memory_bias(bias, longest)
