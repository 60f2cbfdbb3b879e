"""Cells from outside lmapp: what they owe, how they are found and tried, and that they are treated as their own."""

import sys
import types
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmapp.cells import find, searching_here
from lmapp.cells.gru import GRU
from lmapp.cells.outside import make
from lmapp.cells.protocol import Cell, GatedCell, HiddenState
from lmapp.errors import UsageError
from lmapp.gradients.decay import ProbeShape, measure
from lmapp.models import RecurrentModel


class Leaky(Cell):
    """All that is owed and nothing more."""

    state_type = HiddenState

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.gate_size = hidden_size
        self.weight = nn.Parameter(torch.empty(hidden_size, input_size).normal_())
        self.rate = nn.Parameter(torch.empty(hidden_size).uniform_(0.5, 1))

    def project(self, x):
        return F.linear(x, self.weight.to(x.dtype))

    def step(self, gates, state):
        (s,) = state
        s = self.rate * s + gates.tanh()
        return s.to(gates.dtype), self.state_type(s)


class Memory(NamedTuple):
    """A state that has no h."""

    s: Tensor


class Remembering(Leaky):
    state_type = Memory


class Doubled(Leaky):
    """Its output is no part of its state, but as wide."""

    def step(self, gates, state):
        output, state = super().step(gates, state)
        return 2 * output, state


class Looking(Leaky):
    """It looks at values, which are nowhere on the meta device."""

    def step(self, gates, state):
        return super().step(gates if float(gates.sum()) > 1e9 else 2 * gates, state)


@pytest.fixture(autouse=True)
def _somewhere(monkeypatch):
    """The cells above, in the module `somewhere`."""
    module = types.ModuleType("somewhere")
    module.__dict__.update({name: value for name, value in globals().items() if isinstance(value, type)})
    module.nothing = 3
    monkeypatch.setitem(sys.modules, "somewhere", module)


def model_of(cell, **options):
    torch.manual_seed(0)
    return RecurrentModel(7, cell=f"somewhere:{cell}", **({"hidden_size": 5} | options)).double()


# Finding --------------------------------------------------------------------------------------------------------------


class OnlyStep(Cell):
    step = Leaky.step


class OnlyProject(Cell):
    project = Leaky.project


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("somewhere:OnlyStep", "is no cell by itself: it lacks project."),
        ("somewhere:OnlyProject", "is no cell by itself: it lacks step."),
        ("somewhere:Cell", "it lacks project and step."),
        ("somewhere:GatedCell", "it lacks step."),
        ("somewhere:Memory", "does not extend lmapp.cells.protocol.Cell."),
        ("somewhere:nothing", "there is no class 'nothing' in the module somewhere."),
        ("somewhere:Nobody", "there is no class 'Nobody' in the module somewhere."),
        ("lmapp.cells.linear_recurrence:LinearCell", "is no cell by itself: others are made from it."),
        ("syntax:Own", r"cannot be imported (SyntaxError: invalid syntax (syntax.py, line 1))."),
        ("raises:Own", r"cannot be imported (KeyError: 'x')."),
        ("nowhere:Own", "cannot be imported (No module named 'nowhere')."),
        (":Own", "cannot be imported (ValueError: Empty module name)."),
    ],
)
def test_what_is_no_cell_is_refused_in_one_line(name, said, tmp_path, monkeypatch):
    (tmp_path / "syntax.py").write_text("def (\n")
    (tmp_path / "raises.py").write_text("{}['x']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError) as caught:
        find(name)
    assert str(caught.value).startswith("--model.cell: ")
    assert str(caught.value).endswith(said)
    assert "\n" not in str(caught.value)


def test_a_cell_under_any_of_its_names_is_found():
    assert find("somewhere:Leaky") is Leaky
    assert find("somewhere:GRU") is find("gru") is GRU
    assert GatedCell.__module__ == "lmapp.cells.protocol"


def test_the_current_directory_is_searched_for_a_while_and_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owncell.py").write_text("from lmapp.cells.gru import GRU\nclass Own(GRU): pass\n")
    (tmp_path / "fractions.py").write_text("raise SystemExit\n")
    before = list(sys.path)
    with pytest.raises(UsageError, match="No module named 'owncell'"):
        find("owncell:Own")
    with searching_here():
        monkeypatch.delitem(sys.modules, "fractions", raising=False)
        assert issubclass(find("owncell:Own"), GRU)
        import fractions

        assert fractions.Fraction(1, 2)
    monkeypatch.delitem(sys.modules, "owncell")
    assert sys.path == before
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.path)
    with searching_here():
        assert sys.path == before
    assert sys.path == before


# What they owe --------------------------------------------------------------------------------------------------------


class Dividing(Leaky):
    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        1 / 0  # noqa: B018


class Naming(Leaky):
    def __init__(self, width):
        super().__init__(width, width)


class Resetting(Leaky):
    def reset_parameters(self):
        nn.init.ones_(self.rate)


class Gateless(Leaky):
    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        del self.gate_size


class Stateless(Leaky):
    state_type = None


class Unweighted(Leaky):
    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.weight, self.rate = None, None


class WideGates(Leaky):
    def project(self, x):
        return torch.cat((super().project(x), super().project(x)), 1)


class NarrowInput(Leaky):
    def project(self, x):
        return x @ self.weight


class WideOutput(Leaky):
    def step(self, gates, state):
        output, state = super().step(gates, state)
        return torch.cat((output, output), 1), state


class WideState(Leaky):
    def step(self, gates, state):
        output, state = super().step(gates, state)
        return output, HiddenState(torch.cat((state.h, state.h), 1))


class WideStart(Leaky):
    def initial_state(self, batch_size):
        return HiddenState(torch.zeros(batch_size, 1))


class BareState(Leaky):
    def step(self, gates, state):
        output, _ = super().step(gates, state)
        return output, output


class Halved(Leaky):
    def step(self, gates, state):
        output, state = super().step(gates, state)
        return output.half(), state


class HalvedState(Leaky):
    def step(self, gates, state):
        output, state = super().step(gates, state)
        return output, HiddenState(state.h.half())


class Failing(Leaky):
    def step(self, gates, state):
        raise LookupError("no such luck.\nat all")


class Alone(Leaky):
    def step(self, gates, state):
        return super().step(gates, state)[0]


class Reading(Leaky):
    reads_out = True

    def __init__(self, input_size, hidden_size, output_size):
        super().__init__(input_size, hidden_size)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("Dividing", ": its constructor fails (ZeroDivisionError: division by zero)."),
        (
            "Naming",
            ": its constructor fails (TypeError: Naming.__init__() takes 2 positional arguments but 3 were given).",
        ),
        ("Resetting", ": reset_parameters(init, fan_in) fails (TypeError: "),
        ("Gateless", " breaks the protocol of cells: it has no gate_size."),
        ("Stateless", " breaks the protocol of cells: its state_type is no NamedTuple of tensors."),
        ("Unweighted", " breaks the protocol of cells: it has no parameters."),
        ("WideGates", " breaks the protocol of cells: what project gives is of shape (2, 10), not (2, 5)."),
        ("WideOutput", " breaks the protocol of cells: the output of step is of shape (2, 10), not (2, 5)."),
        ("WideState", " breaks the protocol of cells: h in the state from step is of shape (2, 10), not (2, 5)."),
        ("WideStart", "h in the state from initial_state is of shape (2, 1), not (2, 5)."),
        ("BareState", " breaks the protocol of cells: the state from step is a Tensor, not a HiddenState."),
        ("Alone", " breaks the protocol of cells: step gives a Tensor, not an output and a state."),
        ("Halved", " breaks the protocol of cells: the output of step is in torch.float16, not in torch.float32."),
        ("HalvedState", "h in the state from step is in torch.float16, not in torch.float32."),
        ("Reading", " breaks the protocol of cells: it reads out, so its output_size is to be 7, not 5."),
    ],
)
def test_a_cell_that_breaks_the_protocol_is_refused_in_one_line(cell, said, device):
    with pytest.raises(UsageError) as caught, torch.device(device):
        model_of(cell)
    assert str(caught.value).startswith(f"--model.cell: {__name__}:{cell}")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("NarrowInput", "project fails (RuntimeError: "),
        ("Failing", "step fails (LookupError: no such luck)."),
    ],
)
def test_a_step_that_fails_is_refused_where_it_has_values(cell, said):
    with pytest.raises(UsageError) as caught:
        model_of(cell, hidden_size=3)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cell_that_looks_at_values_is_made_on_the_meta_device_too():
    with torch.device("meta"):
        assert RecurrentModel(7, cell="somewhere:Looking", hidden_size=5).layers[0].weight.is_meta
    model_of("Looking")


def test_only_cells_from_outside_are_tried(monkeypatch):
    monkeypatch.setattr(GRU, "step", None)
    torch.manual_seed(3)
    cell = make(GRU, 4, 6, bias=False)
    torch.manual_seed(3)
    assert all(map(torch.equal, cell.parameters(), GRU(4, 6, bias=False).parameters()))


def test_without_reset_parameters_the_constructors_draw_stays():
    torch.manual_seed(0)
    drawn = Leaky(7, 5)
    torch.manual_seed(0)
    model = RecurrentModel(7, cell="somewhere:Leaky", hidden_size=5)
    assert torch.equal(model.layers[0].weight, drawn.weight)
    assert torch.equal(model.layers[0].rate, drawn.rate)


# What they put out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [(Leaky, "h"), (Remembering, "s"), (Doubled, None), (Looking, "h")])
def test_what_a_cell_puts_out_is_found_by_one_step(kind, name):
    assert kind(3, 1).output_component == kind(3, 5).double().output_component == name


def test_a_cell_may_say_what_it_puts_out():
    class Saying(Leaky):
        output_component = None

    assert Saying(3, 5).output_component is None


@pytest.mark.parametrize("training", [True, False])
def test_zoneout_leaves_an_output_alone_that_is_not_the_state(training):
    """With a share of 1e-12 nothing is kept, so all is as without; training draws a mask of zeros."""
    tokens = torch.randint(7, (3, 9))
    found = []
    for zoneout in (0.0, 1e-12):
        model = model_of("Doubled", zoneout=zoneout).train(training)
        logits, states = model(tokens, model.initial_state(3))
        stepped, _ = model.step(tokens[:, 0], states)
        found.append((logits, stepped))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("training", [True, False])
def test_a_state_without_h_is_like_any_other(training):
    tokens, found = torch.randint(7, (3, 9)), []
    shape = ProbeShape(3, 2, 4, 2, 4)
    for cell in ("Leaky", "Remembering"):
        model = model_of(cell, zoneout=0.3, num_layers=2).train(training)
        torch.manual_seed(1)
        logits, states = model(tokens, model.initial_state(3))
        found.append((logits, states[0][0], measure(model, tokens, shape).norms))
    (logits, state, norms), (others, other, without) = found
    assert torch.equal(logits, others)
    assert torch.equal(state, other)
    assert norms.keys() == {(layer, {"s": "h"}.get(name, name)) for layer, name in without}
    for (layer, name), values in without.items():
        assert (norms[layer, {"s": "h"}.get(name, name)] == values).all()
    assert (norms["all", "h"][0] > 0).all()  # at lag 0 there is what the readout reads
