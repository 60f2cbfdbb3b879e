"""Truncated back-propagation through time: every mode against what it stands for, and through whole runs."""

import itertools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import lmapp
import lmapp.cells
import lmapp.run
from lmapp import checkpoint, laboratory
from lmapp.cells.gru import GRU
from lmapp.cells.protocol import HiddenState
from lmapp.config import build
from lmapp.data import datamodule
from lmapp.data.batches import RowBatches
from lmapp.errors import LmappError, UsageError
from lmapp.gradients.truncation import Truncation
from lmapp.models import RecurrentModel, make_model
from lmapp.training import module as training_module
from lmapp.training import truncation
from lmapp.training.module import LanguageModule
from lmapp.training.saving import EndOfStep
from lmapp.training.truncation import Carried, cold, groups, read, resolve, work

CELLS = ["vanilla", "gru", "lstm"]
Gradients = dict[str, Tensor]


def model_of(cell: str, layers: int, symbols: int) -> RecurrentModel:
    """In float64, with no parameter at 0."""
    torch.manual_seed(3)
    model = RecurrentModel(symbols, cell=cell, hidden_size=4, num_layers=layers, embedding_size=3).double()
    for parameter in model.parameters():
        parameter.data = 0.7 * torch.randn(parameter.shape, dtype=torch.float64)
    return model


def distinct(rows: int, widths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Windows of so many steps in which no id comes twice: the gradient of an embedding's row is that of one step."""
    ids = torch.arange(rows * sum(widths)).view(rows, -1)
    return [(piece, (piece * 7 + 1) % ids.numel()) for piece in ids.split(widths, 1)]


def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def gradients(model: RecurrentModel, loss: Tensor) -> Gradients:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def assert_close(found: Gradients, expected: Gradients, where: Any = "") -> None:
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-10, msg=lambda m: f"{where} {name}: {m}")  # noqa: B023


# What the options come to ---------------------------------------------------------------------------------------------


def options(**train: Any) -> Any:
    return build({"data": {"sequence_length": 8}, "train": train}).train


def test_options_resolved() -> None:
    assert resolve(options(), 8) == Truncation(8, "block", 8)
    assert resolve(options(truncation_length=3), 8) == Truncation(3, "block", 8)
    assert resolve(options(truncation_length=8), 5) == Truncation(5, "block", 5)  # the text was too short
    assert resolve(options(bptt="full"), 900) == Truncation(900, "full", 900)
    assert resolve(options(bptt="sliding", truncation_length=20, stride=4), 8) == Truncation(20, "sliding", 8, 4)
    assert resolve(options(bptt="randomised"), 8) == Truncation(8, "randomised", 8, 1, 1 - 1 / 8)
    assert resolve(options(bptt="randomised", truncation_length=5), 8) == Truncation(5, "randomised", 8, 1, 0.8)
    assert resolve(options(bptt="randomised", keep_probability=0.3), 8).keep_probability == 0.3
    assert resolve(options(bptt="randomised"), 1).keep_probability == 1


def test_options_resolved_for_a_text_that_is_too_short_for_them() -> None:
    assert resolve(options(truncation_length=8), 5, 5) == Truncation(5, "block", 5)
    assert resolve(options(bptt="randomised", truncation_length=8), 5, 5) == Truncation(5, "randomised", 5, 1, 0.8)
    sliding = options(bptt="sliding", truncation_length=20, stride=6)
    assert resolve(sliding, 8, 20) == Truncation(20, "sliding", 8, 6)
    assert resolve(sliding, 8, 19) == Truncation(19, "sliding", 8, 6)
    assert resolve(sliding, 5, 5) == Truncation(5, "sliding", 5, 5)


@pytest.mark.parametrize(
    ("data", "train", "words"),
    [
        ({}, {"bptt": "randomised", "truncation_length": 1}, "--train.truncation-length 1"),
        ({"sequence_length": 1}, {"bptt": "randomised"}, "--data.sequence-length 1"),
        ({}, {"bptt": "block", "truncation_length": 65}, "--data.sequence-length 64"),
        ({}, {"bptt": "full", "truncation_length": 8}, "leave out --train.truncation-length"),
        ({}, {"bptt": "full", "stride": 2}, "--train.stride is an option of --train.bptt sliding"),
        ({}, {"bptt": "sliding", "keep_probability": 0.5}, "--train.keep-probability is an option of"),
        ({}, {"bptt": "sliding", "stride": 65}, "--train.stride 65 is longer than the window, --data.sequence-length"),
        ({}, {"bptt": "randomised", "truncation_length": 65}, "64: randomised truncation cuts"),
        (
            {},
            {"bptt": "randomised", "truncation_length": 8, "keep_probability": 0.5},
            "--train.truncation-length and --train.keep-probability exclude each other",
        ),
        ({}, {"bptt": "sliding", "carry_state": False}, "block and randomised: sliding looks back\ninto the windows"),
        ({}, {"bptt": "full", "carry_state": False}, "full reads a row's\nwhole text in one window"),
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(data: dict[str, Any], train: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        build({"data": data, "train": train})
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_keep_probability_makes_a_window_of_one_step_good() -> None:
    train = {"bptt": "randomised", "keep_probability": 0.5}
    assert build({"data": {"sequence_length": 1}, "train": train}).train.keep_probability == 0.5


def test_what_nothing_carries_cannot_be_told_not_to() -> None:
    with pytest.raises(UsageError, match=r"--train\.carry-state is an option of kinds recurrent and window"):
        build({"model": {"kind": "infill"}, "train": {"carry_state": False}})
    for kind in ("recurrent", "window"):
        assert not build({"model": {"kind": kind}, "train": {"carry_state": False}}).train.carry_state


# The smallest example -------------------------------------------------------------------------------------------------


class Scalar:
    """W_hh = 1/2, x = h_0 = 0, W_qh = [1; 0], V = 2, y = 0, T = 3, linear; ∂J/∂h_t is read off at the gates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = RecurrentModel(
            2, cell="vanilla", activation="identity", hidden_size=1, embedding_size=1, bias=False
        ).double()
        for parameter in self.model.parameters():
            parameter.data.zero_()
        layer = self.model.layers[0]
        layer.weight_hh.data.fill_(0.5)
        assert self.model.head is not None
        self.model.head.weight.data[0] = 1
        self.gates: list[Tensor] = []
        scan = layer.scan

        def watched(gates: Tensor, *rest: Any) -> Any:
            gates.retain_grad()
            self.gates.append(gates)
            return scan(gates, *rest)

        monkeypatch.setattr(layer, "scan", watched)

    def gradient(self, cut: Truncation, rows: int = 1) -> Tensor:
        """∂J/∂h_t, (rows, 3), of the mean loss of each row."""
        self.gates.clear()
        tokens = torch.zeros(rows, 3, dtype=torch.int64)
        logits, _ = read(self.model, tokens, cold(self.model, rows), cut)
        losses_of(logits, tokens).mean(1).sum().backward()
        (gates,) = self.gates
        assert gates.grad is not None
        return gates.grad[..., 0].t()


def draw(monkeypatch: pytest.MonkeyPatch, patterns: Tensor) -> None:
    """Let the next random masks be `patterns` (rows, T): 1 where the gradient is kept."""
    monkeypatch.setattr(torch, "rand", lambda *shape: 1 - patterns.double().view(shape))


def all_patterns(steps: int) -> Tensor:
    """Every pattern over steps 1..T−1, (2^(T−1), T); at step 0 there is nothing to keep."""
    return torch.tensor([(0, *rest) for rest in itertools.product((0, 1), repeat=steps - 1)])


def test_the_smallest_example_block(monkeypatch: pytest.MonkeyPatch) -> None:
    scalar = Scalar(monkeypatch)
    for cut, expected in (
        (Truncation(3, "block", 3), (-7 / 24, -1 / 4, -1 / 6)),
        (Truncation(3, "full", 3), (-7 / 24, -1 / 4, -1 / 6)),
        (Truncation(2, "block", 3), (-1 / 4, -1 / 6, -1 / 6)),
        (Truncation(1, "block", 3), (-1 / 6, -1 / 6, -1 / 6)),
    ):
        assert scalar.gradient(cut)[0].tolist() == pytest.approx(expected, abs=1e-15)


def test_the_smallest_example_randomised(monkeypatch: pytest.MonkeyPatch) -> None:
    scalar = Scalar(monkeypatch)
    draw(monkeypatch, all_patterns(3))
    first = scalar.gradient(Truncation(3, "randomised", 3, keep_probability=0.5), 4)[:, 0]
    assert first.tolist() == pytest.approx([-1 / 6, -1 / 6, -2 / 6, -3 / 6], abs=1e-15)
    assert first.mean().item() == pytest.approx(-7 / 24, abs=1e-15)


# Block, full ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("length", [1, 4, 10])
def test_block_is_pieces_of_the_window_with_the_state_detached(cell: str, layers: int, length: int) -> None:
    (inputs, targets), *_ = distinct(2, [11])
    model = model_of(cell, layers, 22)
    logits, after = read(model, inputs, cold(model, 2), Truncation(length, "block", 11))
    pieces, carried = [], cold(model, 2)
    for piece in inputs.split(length, 1):
        part, carried = read(model, piece, carried, Truncation(piece.shape[1], "block", piece.shape[1]))
        pieces.append(part)
    whole = torch.cat(pieces, 1)
    torch.testing.assert_close(logits, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after.states, carried.states, rtol=1e-12, atol=1e-12)
    expected = gradients(model, losses_of(whole, targets).sum())
    assert_close(gradients(model, losses_of(logits, targets).sum()), expected)
    uncut, _ = read(model, inputs, cold(model, 2), Truncation(11, "block", 11))
    other = gradients(model, losses_of(uncut, targets).sum())["layers.0.weight_hh"]
    assert not torch.allclose(other, expected["layers.0.weight_hh"])


def test_a_block_as_long_as_the_window_needs_no_mask() -> None:
    assert truncation.credit(Truncation(8, "block", 8), 2, 8) is None
    assert truncation.credit(Truncation(8, "block", 8), 2, 5) is None
    assert truncation.credit(Truncation(9, "full", 9), 2, 9) is None
    assert truncation.credit(Truncation(8, "randomised", 8, keep_probability=1.0), 2, 8) is None
    mask = truncation.credit(Truncation(3, "block", 8), 2, 8)
    assert mask is not None
    assert mask.tolist() == 2 * [[0, 1, 1, 0, 1, 1, 0, 1]]


def test_what_is_carried_is_cut_from_the_graph() -> None:
    model = model_of("lstm", 2, 20)
    for cut in (Truncation(5, "block", 5), Truncation(3, "sliding", 5), Truncation(5, "randomised", 5, 1, 0.5)):
        carried = cold(model, 2)
        for inputs, _ in distinct(2, [5, 5]):
            _, carried = read(model, inputs, carried, cut)
            assert not any(component.requires_grad for state in carried.states for component in state)


# Randomised -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("steps", [2, 10])
def test_over_all_patterns_the_randomised_gradient_is_the_full_one(
    monkeypatch: pytest.MonkeyPatch, cell: str, layers: int, steps: int
) -> None:
    patterns, keep = all_patterns(steps), 0.3
    (row, aim), *_ = distinct(1, [steps])
    model = model_of(cell, layers, steps)
    _, before = read(model, row.flip(1), cold(model, 1), Truncation(steps, "block", steps))
    logits, _ = read(model, row, before, Truncation(steps, "full", steps))
    expected = gradients(model, losses_of(logits, aim).sum())
    # One pattern a row, its loss weighted with its probability.
    count = len(patterns)
    draw(monkeypatch, patterns)
    many = Carried(tuple(type(s)(*(c.expand(count, -1) for c in s)) for s in before.states), before.tokens)
    logits, _ = read(model, row.expand(count, -1), many, Truncation(4, "randomised", steps, 1, keep))
    kept = patterns.sum(1).double()
    probability = keep**kept * (1 - keep) ** (steps - 1 - kept)
    assert probability.sum().item() == pytest.approx(1)
    losses = losses_of(logits, aim.expand(count, -1))
    assert_close(gradients(model, (probability * losses.sum(1)).sum()), expected)
    alone = gradients(model, losses[0].sum())["layers.0.weight_hh"]
    assert not torch.allclose(alone, expected["layers.0.weight_hh"])


def test_masks_are_drawn_for_each_row_and_step_from_the_global_generator() -> None:
    cut = Truncation(5, "randomised", 400, 1, 0.8)
    torch.manual_seed(5)
    mask = truncation.credit(cut, 50, 400)
    assert mask is not None
    again = truncation.credit(cut, 50, 400)
    torch.manual_seed(5)
    assert torch.equal(mask, truncation.credit(cut, 50, 400))  # type: ignore[arg-type]
    assert not torch.equal(mask, again)  # type: ignore[arg-type]
    assert set(mask.unique().tolist()) == {0, 1 / 0.8}
    kept = (mask > 0).double()
    assert kept.mean().item() == pytest.approx(0.8, abs=0.01)
    together = kept.sub(kept.mean())
    assert (together[1:] * together[:-1]).mean().abs() < 0.01
    assert (together[:, 1:] * together[:, :-1]).mean().abs() < 0.01


# Sliding --------------------------------------------------------------------------------------------------------------

# Widths of three windows, τ, s: shorter and longer than a window, dividing it and not, a narrow last window.
SHAPES = [
    ([5, 5, 5], 3, 1),
    ([5, 5, 3], 4, 2),
    ([4, 4, 2], 7, 1),
    ([4, 4, 1], 9, 3),
    ([4, 4, 2], 3, 6),
    ([6, 6, 6], 1, 4),
    ([3, 3, 2], 20, 2),
    ([1, 1, 1], 2, 1),
]


def starts(widths: list[int], length: int, stride: int) -> Iterator[tuple[int, int]]:
    """Of every loss of a row: its step and the step that it looks back to."""
    begin = 0
    for width in widths:
        for step in range(begin, begin + width):
            first = begin + (step - begin) // stride * stride
            yield step, max(0, first - length + 1)
        begin += width


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("widths", "length", "stride"), SHAPES)
def test_every_sliding_loss_is_one_that_starts_anew_so_many_steps_before_it(
    cell: str, layers: int, widths: list[int], length: int, stride: int
) -> None:
    rows, total = 2, sum(widths)
    windows = distinct(rows, widths)
    inputs, targets = (torch.cat(parts, 1) for parts in zip(*windows, strict=True))
    model = model_of(cell, layers, inputs.numel())
    carried, losses = cold(model, rows), []
    for piece, aim in windows:
        logits, carried = read(model, piece, carried, Truncation(length, "sliding", widths[0], stride))
        assert logits.shape[:2] == piece.shape
        losses.append(losses_of(logits, aim))
    found = torch.cat(losses, 1)
    looked_back = []
    for step, start in starts(widths, length, stride):
        states = model.initial_state(rows)
        if start:
            with torch.no_grad():
                _, states = model(inputs[:, :start], states)
        logits, _ = model(inputs[:, start : step + 1], states)
        expected = losses_of(logits[:, -1:], targets[:, step : step + 1])
        torch.testing.assert_close(found[:, step : step + 1], expected, rtol=1e-10, atol=1e-10)
        # With weights, so that the rows do not stand in for one another.
        weights = torch.tensor([[1.0], [-0.4]], dtype=torch.float64)
        mine = gradients(model, (weights * found[:, step : step + 1]).sum())
        assert_close(mine, gradients(model, (weights * expected).sum()), step)
        looked_back.append(step - start + 1)
    assert max(looked_back) == min(total, length + min(stride, max(widths)) - 1)


def test_a_sliding_loss_reaches_so_many_steps_and_not_one_more() -> None:
    length, widths = 4, [5, 5, 5]
    model = model_of("gru", 2, 15)
    carried = cold(model, 1)
    step = 0
    for inputs, targets in distinct(1, widths):
        logits, carried = read(model, inputs, carried, Truncation(length, "sliding", 5))
        for loss in losses_of(logits, targets)[0]:
            by_step = gradients(model, loss)["embedding.weight"].abs().sum(1)
            reached = [index for index in range(15) if by_step[index] > 0]
            assert reached == list(range(max(0, step - length + 1), step + 1))
            step += 1


def test_what_sliding_keeps() -> None:
    model = model_of("lstm", 2, 60)
    inputs = torch.cat([piece for piece, _ in distinct(3, [6, 6, 6, 2])], 1)
    carried, done = cold(model, 3), 0
    for piece in inputs.split(6, 1):
        _, carried = read(model, piece, carried, Truncation(9, "sliding", 6, 4))
        done += piece.shape[1]
        kept = min(8, done)
        assert torch.equal(carried.tokens, inputs[:, done - kept : done])
        # On its own, so that a checkpoint holds no more.
        assert carried.tokens.untyped_storage().nbytes() == 8 * carried.tokens.numel()
        states = model.initial_state(3)
        if done > kept:
            _, states = model(inputs[:, : done - kept], states)
        torch.testing.assert_close(carried.states, states, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("widths", "length", "stride"), SHAPES)
def test_groups_hold_every_loss_once(widths: list[int], length: int, stride: int) -> None:
    cut = Truncation(length, "sliding", widths[0], stride)
    kept = 0
    for width in widths:
        parts = groups(cut, kept, width)
        assert [step for part in parts for step in range(part.first, part.end)] == list(range(kept, kept + width))
        assert len({part.start for part in parts}) == len(parts)
        kept = min(length - 1, kept + width)


def test_the_work_of_sliding() -> None:
    assert work(Truncation(8, "block", 64), 64, 1000) == 64
    assert work(Truncation(8, "sliding", 64), 64, 1000) == 64 * 8
    assert work(Truncation(8, "sliding", 64, 8), 64, 1000) == 8 * 15
    assert work(Truncation(100, "sliding", 64, 10), 64, 1000) == 7 * 109
    assert work(Truncation(100, "sliding", 64, 10), 64, 64) == 64
    assert work(Truncation(3, "sliding", 4), 4, 4) == 2 * 3
    assert work(Truncation(95, "sliding", 64), 64, 95) == 95  # as one group


@pytest.mark.parametrize("longest", [8, 9, 15, 16, 17, 40, 43])
@pytest.mark.parametrize(("length", "stride"), [(1, 1), (3, 2), (7, 8), (8, 1), (12, 5), (30, 3), (43, 1)])
def test_no_window_of_a_row_needs_more_work(longest: int, length: int, stride: int) -> None:
    cut = Truncation(min(length, longest), "sliding", 8, stride)
    found = []
    for begin in range(0, longest, 8):
        parts = groups(cut, min(cut.length - 1, begin), min(8, longest - begin))
        found.append(len(parts) * max(part.end - part.start for part in parts))
    assert work(cut, 8, longest) == max(found)


# All modes ------------------------------------------------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "block": {},
    "blocks": {"truncation_length": 5},
    "full": {"bptt": "full"},
    "sliding": {"bptt": "sliding", "truncation_length": 7},
    "strides": {"bptt": "sliding", "truncation_length": 20, "stride": 6},
    "randomised": {"bptt": "randomised", "truncation_length": 4},
    "randomised, given": {"bptt": "randomised", "keep_probability": 0.6},
}


@pytest.mark.parametrize("cell", [*CELLS, "mingru"])
def test_the_values_do_not_depend_on_the_mode(cell: str) -> None:
    model = model_of(cell, 2, 42)
    windows = distinct(2, [8, 8, 5])
    whole, last = model(torch.cat([piece for piece, _ in windows], 1), model.initial_state(2))
    for name, train in MODES.items():
        cut = resolve(options(**train), 8)
        carried, parts = cold(model, 2), []
        for piece, _ in windows:
            logits, carried = read(model, piece, carried, cut)
            parts.append(logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12, msg=lambda m: f"{name}: {m}")  # noqa: B023
        if cut.mode != "sliding":
            torch.testing.assert_close(carried.states, last, rtol=1e-12, atol=1e-12)


def test_sliding_reads_what_it_kept_with_the_weights_as_they_are() -> None:
    """Where they changed between two windows; every other mode goes on from the state that the old ones made."""
    (first, _), (second, _) = distinct(2, [8, 8])
    found = {}
    for name, train in MODES.items():
        model = model_of("gru", 2, 32)
        cut = resolve(options(**train), 8)
        _, carried = read(model, first, cold(model, 2), cut)
        for parameter in model.parameters():
            parameter.data *= 0.9
        found[name], _ = read(model, second, carried, cut)
    again, _ = model(torch.cat((first, second), 1), model.initial_state(2))
    torch.testing.assert_close(found.pop("strides"), again[:, 8:])  # its τ is longer than both windows
    assert not torch.allclose(found.pop("sliding"), found["block"])
    for logits in found.values():
        torch.testing.assert_close(logits, found["block"])
        assert not torch.allclose(logits, again[:, 8:])


def test_dropout_is_drawn_in_every_mode() -> None:
    torch.manual_seed(1)
    model = RecurrentModel(42, cell="gru", hidden_size=8, num_layers=2, dropout=0.5, weight_drop=0.3, zoneout=0.2)
    (inputs, _), *_ = distinct(2, [8])
    for train in MODES.values():
        carried = cold(model, 2)
        model.train()
        drawn = [read(model, inputs, carried, resolve(options(**train), 8))[0] for _ in range(2)]
        assert not torch.equal(*drawn)
        model.eval()
        still = [read(model, inputs, carried, resolve(options(**train), 8))[0] for _ in range(2)]
        assert torch.equal(*still)


# Records that begin from the initial state ----------------------------------------------------------------------------

STACKS: dict[str, dict[str, Any]] = {
    "mixed": {"cell": ["lstm", "gru", "vanilla"]},
    "linear": {"cell": ["mingru", "minlstm"], "embedding_size": 3},
    "dense": {"cell": ["gru", "lstm_linear"], "embedding_size": 3, "connections": "dense"},
    "on top": {"cell": ["gru_before", "concatenated"], "embedding_size": 3},
}
RECORDS = [[0, 3, 4, 11, 16], [2, 8, 9, 10, 20]]
"""Of each row of 21 steps: within windows of 8, several in one, at the borders of windows and over whole ones."""


def stack_of(name: str, symbols: int) -> RecurrentModel:
    torch.manual_seed(3)
    model = RecurrentModel(symbols, hidden_size=4, **STACKS[name]).double()
    for parameter in model.parameters():
        parameter.data = 0.7 * torch.randn(parameter.shape, dtype=torch.float64)
    return model


def keep_of(records: list[list[int]], steps: int) -> Tensor:
    keep = torch.ones(len(records), steps)
    for row, begins in enumerate(records):
        keep[row, begins] = 0
    return keep


def in_windows(
    model: RecurrentModel, windows: list[tuple[Tensor, Tensor]], keep: Tensor, cut: Truncation
) -> tuple[Tensor, Carried]:
    """All losses (B, T) of rows read window by window, and what is carried at their end."""
    carried, losses, done = cold(model, len(keep)), [], 0
    for inputs, targets in windows:
        piece = keep[:, done : done + inputs.shape[1]]
        logits, carried = read(model, inputs, carried, cut, piece)
        losses.append(losses_of(logits, targets))
        done += inputs.shape[1]
    return torch.cat(losses, 1), carried


def looks_back(cut: Truncation, widths: list[int]) -> list[int]:
    """The step that each loss of a row looks back to, if there are no records."""
    if cut.mode == "sliding":
        return [start for _, start in starts(widths, cut.length, cut.stride)]
    begins = [sum(widths[:index]) for index in range(len(widths))]
    length = cut.length if cut.mode == "block" else cut.window
    return [
        begin + step // length * length for begin, width in zip(begins, widths, strict=True) for step in range(width)
    ]


def alone(model: RecurrentModel, windows: list[tuple[Tensor, Tensor]], backs: list[int]) -> Tensor:
    """The same losses, record by record and loss by loss, each with a pass of its own; the model is given no mask."""
    inputs, targets = (torch.cat(parts, 1) for parts in zip(*windows, strict=True))
    losses = torch.zeros(targets.shape, dtype=torch.float64)
    for row, step in itertools.product(range(len(inputs)), range(inputs.shape[1])):
        record = max([begin for begin in RECORDS[row] if begin <= step], default=0)
        start = max(record, backs[step])
        states = model.initial_state(1)
        if start > record:
            with torch.no_grad():
                _, states = model(inputs[row : row + 1, record:start], states)
        logits, _ = model(inputs[row : row + 1, start : step + 1], states)
        losses[row, step] = losses_of(logits[:, -1:], targets[row : row + 1, step : step + 1]).squeeze()
    return losses


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("mode", [mode for mode in MODES if "randomised" not in mode])
def test_every_record_is_trained_on_as_if_it_were_alone(stack: str, mode: str) -> None:
    widths = [21] if mode == "full" else [8, 8, 5]
    windows = distinct(2, widths)
    model = stack_of(stack, 42)
    cut = resolve(options(**MODES[mode]), widths[0], 21)
    found, _ = in_windows(model, windows, keep_of(RECORDS, 21), cut)
    expected = alone(model, windows, looks_back(cut, widths))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    # With weights, so that no loss stands in for another.
    weights = torch.randn(found.shape, dtype=torch.float64)
    mine = gradients(model, (weights * found).sum())
    assert_close(mine, gradients(model, (weights * expected).sum()), mode)
    without, _ = in_windows(model, windows, torch.ones(2, 21), cut)
    assert not torch.allclose(without, found)


def test_one_window_a_record_is_training_on_each_record() -> None:
    widths = [5, 5, 5]
    model = stack_of("mixed", 30)
    windows = distinct(2, widths)
    found, _ = in_windows(model, windows, keep_of([[0, 5, 10]] * 2, 15), Truncation(5, "block", 5))
    expected = [losses_of(model(inputs, model.initial_state(2))[0], targets) for inputs, targets in windows]
    torch.testing.assert_close(found, torch.cat(expected, 1), rtol=1e-12, atol=1e-12)
    assert_close(gradients(model, found.mean()), gradients(model, torch.cat(expected, 1).mean()))


@pytest.mark.parametrize("stack", STACKS)
def test_over_all_patterns_the_randomised_gradient_of_records_is_the_full_one(
    monkeypatch: pytest.MonkeyPatch, stack: str
) -> None:
    steps, share = 7, 0.3
    patterns = all_patterns(steps)
    (row, aim), *_ = distinct(1, [steps])
    model = stack_of(stack, steps)
    kept = keep_of([[0, 3, 4]], steps)
    logits, _ = read(model, row, cold(model, 1), Truncation(steps, "full", steps), kept)
    expected = gradients(model, losses_of(logits, aim).sum())
    count = len(patterns)
    draw(monkeypatch, patterns)
    cut = Truncation(4, "randomised", steps, 1, share)
    logits, _ = read(model, row.expand(count, -1), cold(model, count), cut, kept.expand(count, -1))
    passed = patterns.sum(1).double()
    probability = share**passed * (1 - share) ** (steps - 1 - passed)
    losses = losses_of(logits, aim.expand(count, -1))
    assert_close(gradients(model, (probability * losses.sum(1)).sum()), expected)


def test_what_sliding_keeps_of_records() -> None:
    model = stack_of("mixed", 42)
    inputs = torch.cat([piece for piece, _ in distinct(2, [8, 8, 5])], 1)
    keep = keep_of(RECORDS, 21)
    carried, done = cold(model, 2), 0
    for piece in inputs.split(8, 1):
        reset = keep[:, done : done + piece.shape[1]]
        _, carried = read(model, piece, carried, Truncation(10, "sliding", 8, 4), reset)
        done += piece.shape[1]
        kept = min(9, done)
        assert carried.keep is not None
        assert torch.equal(carried.keep, keep[:, done - kept : done])
        assert carried.keep.untyped_storage().nbytes() == 4 * carried.keep.numel()
        before = done - kept
        for row, begins in enumerate(RECORDS):
            states = model.initial_state(1)
            record = max([begin for begin in begins if begin < before], default=0)
            if before > record:
                _, states = model(inputs[row : row + 1, record:before], states)
            mine = tuple(type(state)(*(c[row : row + 1] for c in state)) for state in carried.states)
            torch.testing.assert_close(mine, states, rtol=1e-12, atol=1e-12)


def test_the_kernels_of_records_are_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = RecurrentModel(20, cell="lstm", hidden_size=32, num_layers=2)
    runs: list[bool] = []
    for layer in model.layers:
        original = layer.torch_forward
        monkeypatch.setattr(layer, "torch_forward", lambda *args, f=original: (runs.append(True), f(*args))[1])
    inputs = torch.randint(20, (4, 8))
    for mode, train in MODES.items():
        cut = resolve(options(**train), 8, 40)
        for keep in (None, torch.ones(4, 8)):
            runs.clear()
            read(model, inputs, cold(model, 4), cut, keep)
            said = truncation.kernels(model, cut, 4, 8, 40, resets=keep is not None)
            assert said == (["torch", "torch"] if runs else ["table+scan", "scan"]), (mode, keep)
            assert not runs or keep is None


@pytest.mark.parametrize("cell", lmapp.cells.CELLS)
def test_every_cell_begins_with_zeros(cell: str) -> None:
    truncation.check_resets(RecurrentModel(7, cell=cell, hidden_size=5))


class Elsewhere(GRU):
    """Begins with ones."""

    def initial_state(self, batch_size: int) -> HiddenState:
        return HiddenState(torch.ones_like(super().initial_state(batch_size).h))


def test_a_cell_that_begins_elsewhere_is_not_reset() -> None:
    model = RecurrentModel(7, cell="gru", hidden_size=5, num_layers=2)
    model.layers[1] = Elsewhere(5, 5)
    with pytest.raises(UsageError) as caught:
        truncation.check_resets(model)
    assert "--data.reset-state" in str(caught.value)
    assert "Elsewhere" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


# Whole runs -----------------------------------------------------------------------------------------------------------

ROWS, WIDTH = 4, 8


def settings(directory: Path, text: str, **sections: Any) -> dict[str, Any]:
    (directory / "text.txt").write_text(text, encoding="utf-8")
    return {
        "data": {
            "path": [str(directory / "text.txt")],
            "batch_size": ROWS,
            "sequence_length": WIDTH,
            "val_fraction": 0,
            "cache_dir": str(directory / "cache"),
            **sections.get("data", {}),
        },
        "model": {"hidden_size": 16, **sections.get("model", {})},
        "train": {"max_steps": 60, "learning_rate": 0.02, "warmup_steps": 5, "precision": "fp32", "device": "cpu"}
        | sections.get("train", {}),
        "gradients": {"every_steps": 0, **sections.get("gradients", {})},
        "logging": {"wandb": "disabled", "every_steps": 1},
        "runs_dir": str(directory / "runs"),
    }


def lines(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def text(real_text: str) -> str:
    """430 characters: in four rows an epoch has fourteen windows of 8, the last of 4 steps with shorter rows."""
    return "".join(c for c in real_text if c.isascii())[:430]


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains(tmp_path: Path, text: str, mode: str, cell: str) -> None:
    run = lmapp.train(settings(tmp_path, text, train=MODES[mode], model={"cell": cell, "num_layers": 2}), quiet=True)
    losses = [line["train/loss"] for line in lines(run)]
    assert len(losses) == 60
    assert losses[-1] < losses[0] - 0.5
    assert run.metrics["bptt"] == MODES[mode].get("bptt", "block")
    saved = checkpoint.read(run.path / "checkpoints" / "last.ckpt")["lmapp"]
    assert saved["plan"]["bptt"] == run.metrics["bptt"]
    rows = math.ceil(429 / ROWS)
    assert saved["plan"]["sequence_length"] == (rows if mode == "full" else WIDTH)
    expected = {"full": rows, **{name: train.get("truncation_length", WIDTH) for name, train in MODES.items()}}
    assert saved["plan"]["truncation_length"] == (rows if mode == "full" else expected[mode])
    assert saved["tokens"].shape[1] == {"sliding": 6, "strides": 19}.get(mode, 0)


def test_the_kernel_that_is_stored_is_the_one_that_runs(tmp_path: Path, text: str) -> None:
    kernels = {}
    for mode in MODES:
        train = MODES[mode] | {"max_steps": 1}
        model = {"cell": "lstm", "hidden_size": 32, "num_layers": 2}
        run = lmapp.train(settings(tmp_path, text, train=train, model=model), quiet=True)
        kernels[mode] = run.metrics["kernels"]
    for mode in ("blocks", "randomised", "randomised, given"):
        assert kernels.pop(mode) == ["table+scan", "scan"]
    assert set(map(tuple, kernels.values())) == {("torch", "torch")}


def test_losses_of_runs_whose_weights_stay_do_not_depend_on_the_mode(tmp_path: Path, text: str) -> None:
    """Three passes, narrow last windows among them, with and without carried state."""
    found: dict[bool, list[list[float]]] = {}
    for carry in (True, False):
        for mode in MODES:
            if mode != "full" and (carry or MODES[mode].get("bptt") != "sliding"):
                train = {**MODES[mode], "learning_rate": 1e-30, "carry_state": carry, "max_steps": 42}
                run = lmapp.train(settings(tmp_path, text, train=train), quiet=True)
                found.setdefault(carry, []).append([line["train/loss"] for line in lines(run)])
    for carry, runs in found.items():
        for losses in runs:
            assert losses == pytest.approx(runs[0], abs=1e-6), carry
    apart = [abs(a - b) for a, b in zip(found[True][0], found[False][0], strict=True)]
    assert apart[0] == apart[14] == 0
    assert min(apart[1:14]) > 1e-5


BEGINS = [0, 5, 30, 31, 47, 108, 109, 160, 200, 201, 290, 330, 400, 429]
"""Symbols of the text at which records begin: in the middle of windows and rows, at their borders, two in a row."""


def with_rows(monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    """Let training read rows that are made so."""
    monkeypatch.setattr(datamodule, "RowBatches", lambda ids, **asked: RowBatches(ids, **{**asked, **how}))


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_losses_of_runs_are_those_of_records(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, mode: str, carry: bool
) -> None:
    """With weights that stay, every window's loss is that of its symbols, each after those of its own record."""
    if not carry and (mode == "full" or MODES[mode].get("bptt") == "sliding"):
        return
    with_rows(monkeypatch, starts=np.array(BEGINS))
    train = {**MODES[mode], "learning_rate": 1e-30, "carry_state": carry, "max_steps": 28}
    config = settings(tmp_path, text, train=train)
    found = [line["train/loss"] for line in lines(lmapp.train(config, quiet=True))]
    torch.manual_seed(build(config).seed)
    model = make_model(len(set(text)), build(config).model)
    assert isinstance(model, RecurrentModel)
    ids = torch.tensor([sorted(set(text)).index(c) for c in text])
    share, longer = divmod(len(text) - 1, ROWS)
    width = share + 1 if mode == "full" else WIDTH
    losses: list[list[float]] = [[] for _ in range(0, share + 1, width)]
    first = 0
    for row in range(ROWS):
        states = model.initial_state(1)
        for step in range(share + (row < longer)):
            if first + step in BEGINS or (not carry and step % width == 0):
                states = model.initial_state(1)
            with torch.no_grad():
                logits, states = model(ids[None, None, first + step].view(1, 1), states)
            losses[step // width].append(functional.cross_entropy(logits[0], ids[first + step + 1, None]).item())
        first += share + (row < longer)
    means = [sum(window) / len(window) for window in losses]
    assert found == pytest.approx((means * 28)[:28], abs=1e-5)


@pytest.mark.parametrize(("mode", "shift"), [("blocks", True), ("strides", False)])
def test_records_and_shifted_epochs_resumed(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, mode: str, shift: bool
) -> None:
    """Bit for bit, within epochs of fourteen steps and at their ends."""
    with_rows(monkeypatch, starts=np.array(BEGINS), shift=shift)
    sections: dict[str, Any] = {
        "train": {**MODES[mode], "max_steps": 40, "checkpoint_minutes": 1e-9},
        "model": {"cell": ["lstm", "mingru"], "dropout": 0.2},
    }
    copies, save = tmp_path / "copies", EndOfStep._save

    def save_and_keep(end: EndOfStep, trainer: Any, module: Any) -> None:
        save(end, trainer, module)
        if not module.progress.finished and not (copies / str(module.progress.step)).exists():
            shutil.copytree(path, copies / str(module.progress.step))

    monkeypatch.setattr(EndOfStep, "_save", save_and_keep)
    config = {**settings(tmp_path, text, **sections), "name": "run"}
    path = Path(config["runs_dir"]) / "run"
    lmapp.train(config, quiet=True)
    whole = checkpoint.read(path / "checkpoints" / "last.ckpt")
    assert whole["lmapp"]["progress"]["epoch"] == 2
    assert (whole["lmapp"]["keep"] is not None) == (MODES[mode].get("bptt") == "sliding")
    for cut in (2, 14, 15, 28, 39):
        shutil.rmtree(path)
        shutil.copytree(copies / str(cut), path)
        lmapp.train(resume="run", runs_dir=config["runs_dir"], quiet=True)
        again = checkpoint.read(path / "checkpoints" / "last.ckpt")
        for name, weights in whole["state_dict"].items():
            assert torch.equal(weights, again["state_dict"][name]), (cut, name)
        for key in ("tokens", "keep"):
            mine, theirs = whole["lmapp"][key], again["lmapp"][key]
            assert (mine is None and theirs is None) or torch.equal(mine, theirs), (cut, key)
        assert again["lmapp"]["progress"]["characters"] == whole["lmapp"]["progress"]["characters"]


def test_epochs_of_a_run_are_cut_elsewhere(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_rows(monkeypatch, shift=True)
    run = lmapp.train(settings(tmp_path, text, train={"max_steps": None, "max_epochs": 4}), quiet=True)
    done = [0] + [line["characters"] for line in lines(run)]
    read_so_far = [b - a for a, b in itertools.pairwise(done)]
    steps = len(read_so_far) // 4
    assert len(read_so_far) == 4 * steps
    firsts = [read_so_far[epoch * steps] // ROWS for epoch in range(4)]
    assert len(set(firsts)) == 4
    assert [done[epoch * steps] for epoch in range(5)] == [0, 429, 858, 1287, 1716]


def test_without_carried_state_nothing_is_kept(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    train = {**MODES["blocks"], "carry_state": False, "max_steps": 20}
    lmapp.train(settings(tmp_path, text, train=train), quiet=True)
    assert all(carried.tokens.shape == (ROWS, 0) and not carried.states[0].h.any() for carried in seen)


def test_full_has_no_more_rows_than_there_are_characters_to_predict(tmp_path: Path, text: str) -> None:
    options = settings(tmp_path, text[:3], data={"shrink": False}, train={"bptt": "full", "max_steps": 2})
    with pytest.raises(LmappError, match=r"Set --data\.batch-size 2, or allow"):
        lmapp.train(options, quiet=True)
    options["data"]["shrink"] = True
    run = lmapp.train(options, quiet=True)
    assert (run.metrics["batch_size"], run.metrics["sequence_length"], run.metrics["characters"]) == (2, 1, 4)


def test_full_is_one_pass_over_every_row(tmp_path: Path, text: str) -> None:
    options = settings(tmp_path, text, train={"bptt": "full", "max_steps": 3, "clip_norm": None})
    run = lmapp.train(options, quiet=True)
    config = build(options)
    torch.manual_seed(config.seed)
    model = make_model(len(set(text)), config.model)
    assert isinstance(model, RecurrentModel)
    ids = torch.tensor([sorted(set(text)).index(c) for c in text])
    loss = torch.zeros(())
    share, longer = divmod(len(text) - 1, ROWS)
    start = 0
    for row in range(ROWS):
        size = share + (row < longer)
        piece = ids[start : start + size + 1]
        logits, _ = model(piece[None, :-1], model.initial_state(1))
        loss = loss + functional.cross_entropy(logits[0], piece[1:], reduction="sum")
        start += size
    loss = loss / (len(text) - 1)
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    first = lines(run)[0]
    assert first["train/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert first["gradient/norm"] == pytest.approx(norm, rel=1e-5)
    assert [line["characters"] for line in lines(run)] == [429, 858, 1287]
    assert run.metrics["epochs"] == 3


def watch(monkeypatch: pytest.MonkeyPatch, poison: int | None = None) -> list[Carried]:
    """What each step in turn starts from; the loss of step `poison` (counted from 1) is not a number."""
    seen: list[Carried] = []
    step = LanguageModule.training_step

    def watched(model: Any, inputs: Tensor, carried: Carried, *cut: Any) -> Any:
        seen.append(carried)
        return read(model, inputs, carried, *cut)

    def training_step(module: LanguageModule, batch: Any, batch_idx: int) -> Tensor:
        loss = step(module, batch, batch_idx)
        return loss * math.nan if module.progress.step + 1 == poison else loss

    monkeypatch.setattr(training_module, "read", watched)
    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    return seen


def test_sliding_starts_cold_at_an_epoch_and_after_a_gradient_that_is_not_finite(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch, poison=5)
    lmapp.train(settings(tmp_path, text, train={**MODES["strides"], "max_steps": 30}), quiet=True)
    kept = [0, 8, 16, 19, 19, 0, 8, 16, *6 * [19], 0, 8, 16, *11 * [19], 0, 8]
    assert [carried.tokens.shape[1] for carried in seen] == kept
    for carried in seen:
        assert carried.states[0].h.any() == (carried.tokens.shape[1] == 19)


def test_what_was_carried_is_brought_to_the_device(tmp_path: Path) -> None:
    config = build({"model": {"hidden_size": 4}})
    model = make_model(5, config.model)
    assert isinstance(model, RecurrentModel)
    module = LanguageModule(model, config, Truncation(9, "sliding", 6), 3, {})
    for keep in (None, torch.ones(2, 8)):
        module._carried = Carried(model.initial_state(2), torch.zeros(2, 8, dtype=torch.int64), keep)
        module.to("meta")
        module.on_train_start()
        assert module._carried.tokens.device.type == module._carried.states[0].h.device.type == "meta"
        assert (module._carried.keep is None) == (keep is None)
        assert keep is None or module._carried.keep.device.type == "meta"
        module.to_empty(device="cpu")


# What is said ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("block", []),
        ("blocks", ["gradient", "cut every 5 steps"]),
        (
            "full",
            ["cut nowhere", "4 rows × 108 characters, 1 step a pass", "--data.sequence-length is not read", "memory"],
        ),
        ("sliding", ["every loss looks back 7 steps", "about 7 times the work"]),
        ("strides", ["every loss looks back 20 to 25 steps", "about 6.25 times the work"]),
        ("randomised", ["passes a step with probability 0.75", "looks back 2.65 steps in the mean"]),
    ],
)
def test_the_description_says_where_the_gradient_is_cut(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], mode: str, words: list[str]
) -> None:
    lmapp.train(settings(tmp_path, text, train={**MODES[mode], "max_steps": 1}))
    output = capsys.readouterr().out
    assert all(word in output for word in words), output
    names = [line.partition(" ")[0] for line in output.splitlines()]
    assert ("gradient" in names) == (mode != "block")
    assert ("memory" in names) == (mode == "full")


def test_a_text_that_shrinks_the_window_shrinks_the_block(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = lmapp.train(settings(tmp_path, text[:6], train={"truncation_length": 7, "max_steps": 2}))
    assert (run.metrics["sequence_length"], run.metrics["truncation_length"]) == (5, 5)
    assert "--train.truncation-length 7 is longer than the windows that the text allows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("train", "length", "words"),
    [
        (
            {"bptt": "sliding", "truncation_length": 1_000_000},
            108,
            [
                "--train.truncation-length 1,000,000 is longer than the rows, of at most 108 characters: every loss",
                "every loss looks back 108 steps, for about 13.5 times the work",
            ],
        ),
        ({"bptt": "sliding", "truncation_length": 108}, 108, []),
    ],
)
def test_sliding_looks_back_no_further_than_its_row(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], train: dict[str, Any], length: int, words: list[str]
) -> None:
    run = lmapp.train(settings(tmp_path, text, train={**train, "max_steps": 14}))
    output = capsys.readouterr().out
    assert all(word in output for word in words), output
    assert ("is longer than" in output) == bool(words)
    saved = checkpoint.read(run.path / "checkpoints" / "last.ckpt")["lmapp"]
    assert saved["plan"]["truncation_length"] == length
    assert saved["tokens"].shape[1] == length - 1
    (measured,) = laboratory.measure_checkpoints([str(run.path)], max_lag=20, windows=1)
    assert f"With losses that look back {length} steps" in measured.verdict


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (
            {"bptt": "sliding", "truncation_length": 4, "stride": 7},
            "--train.stride 7 is longer than the windows that the text allows: 5 losses look back together",
        ),
        (
            {"bptt": "randomised", "truncation_length": 7},
            "--train.truncation-length 7 is longer than the windows that the text allows: it is taken for 5.",
        ),
    ],
)
def test_a_text_that_shrinks_the_window_shrinks_what_cannot_be_longer(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], train: dict[str, Any], words: str
) -> None:
    lmapp.train(settings(tmp_path, text[:6], train={**train, "max_steps": 2}))
    output = capsys.readouterr().out
    assert words in output
    assert ("passes a step with probability 0.8," in output) == (train["bptt"] == "randomised")


def test_the_longest_lag_is_that_of_what_losses_look_back_on_unless_it_is_given(
    tmp_path: Path, real_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(c for c in real_text if c.isascii())[:9000]
    data = {"sequence_length": 300, "batch_size": 2, "val_fraction": 0.5}
    for lag, train, gradients in (
        (512, {}, {}),
        (520, {}, {"max_lag": 520}),
        (20, {"truncation_length": 10}, {}),
        (512, {"bptt": "randomised", "truncation_length": 10}, {}),
        (512, {"bptt": "full"}, {}),
        (14, {"bptt": "sliding", "truncation_length": 5, "stride": 3}, {}),
    ):
        sections = {"train": {**train, "max_steps": 1}, "gradients": {"every_steps": 1, "windows": 1, **gradients}}
        run = lmapp.train(settings(tmp_path, text, data=data, **sections))
        output = " ".join(capsys.readouterr().out.split())
        with open(run.path / "decay.jsonl", encoding="utf-8") as file:
            assert json.loads(file.readline())["lags"][-1] == lag
        twice = "4,500" if train.get("bptt") == "full" else "600"
        words = f"the largest lag is 512 instead of {twice}, unless a longer one is asked for."
        assert (words in output) == (lag == 512), output
        if "max_lag" not in gradients:
            (measured,) = laboratory.measure_checkpoints([str(run.path)], windows=1)
            assert measured.decay.shape.max_lag == lag
            assert (words[:-1] in measured.note) == (lag == 512)


def test_verdicts_of_runs(tmp_path: Path, real_text: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(c for c in real_text if c.isascii())[:5000]
    words = {
        "sliding": "With losses that look back 7 steps",
        "strides": "With losses that look back 20 to 25 steps",
        "full": "Nothing is cut",
        "randomised": "look back 2.65 steps in the mean",
        "blocks": "With the gradient cut every 5 steps",
    }
    for mode, sentence in words.items():
        sections = {
            "train": {**MODES[mode], "max_steps": 2},
            "data": {"val_fraction": 0.3},
            "gradients": {"every_steps": 5, "windows": 2},
        }
        run = lmapp.train(settings(tmp_path, text, **sections))
        assert sentence in " ".join(capsys.readouterr().out.split())
        (measured,) = laboratory.measure_checkpoints([str(run.path)], windows=2)
        assert sentence in measured.verdict
        assert measured.as_dict()["bptt"] == run.metrics["bptt"]
        most = {"sliding": 7, "strides": 25, "full": 256, "randomised": WIDTH, "blocks": 5}
        assert measured.decay.shape.max_lag == 2 * most[mode]
        lost = lines(run)[-1]["decay/lost_share"]
        curve = measured.decay.curve().R
        share = curve / curve.sum()
        if mode == "full":
            assert lost == 0
        if mode == "sliding":
            assert lost == pytest.approx(share[7:].sum(), rel=1e-4)
        if mode == "strides":
            assert lost == pytest.approx(sum(share[j:].sum() for j in range(20, 26)) / 6, rel=1e-4)
