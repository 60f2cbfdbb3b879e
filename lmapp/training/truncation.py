"""Truncated back-propagation through time: a window's logits, with the gradient cut where the mode says.

Only the gradients depend on the mode, not the values, as long as the weights stay. Where they change between windows,
"sliding" reads the tokens it has kept again with the new ones, all other modes go on from a state that the old ones
made.

Where a record begins, the states may be reset: no loss then looks back beyond it, whatever the mode.

Shapes: B rows, T steps of a window, V symbols, n kept tokens a row, m groups; τ, s, π as in `Truncation`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lmapp.config import TrainConfig
from lmapp.errors import UsageError
from lmapp.gradients.truncation import UNLIMITED, Truncation
from lmapp.models import LanguageNetwork, Network, RecurrentModel, detach
from lmapp.models.recurrent import States


class Carried(NamedTuple):
    """What a window hands to the row's next one, cut from the graph.

    Attributes:
        states: one State a layer, entering the first of `tokens`; without any, the next window.
        tokens: (B, n) ids read since, n < τ, which only "sliding" keeps. Where n < τ − 1 the row begins with them.
        keep: (B, n), of these tokens what `read` takes of its inputs; None where nothing is reset or kept.
    """

    states: States
    tokens: Tensor
    keep: Tensor | None = None


class Group(NamedTuple):
    """Losses `first` to `end` − 1, which look back to step `start`; counted from the first kept token."""

    start: int
    first: int
    end: int


def resolve(train: TrainConfig, sequence_length: int, longest: int = UNLIMITED) -> Truncation:
    """What the options come to for windows of T steps; under "full" T is a row's whole length.

    The text may be too short for what was asked for: nothing then reaches beyond a window, or under "sliding" a row.

    Args:
        train: the options.
        sequence_length: T.
        longest: the steps of the longest row.
    """
    length = sequence_length if train.truncation_length is None else train.truncation_length
    length = min(length, longest if train.bptt == "sliding" else sequence_length)
    probability = 1.0
    if train.bptt == "randomised":
        # A window of one step, all that such a text allows, has nothing to cut inside.
        probability = train.keep_probability or 1 - 1 / length or 1.0
    return Truncation(length, train.bptt, sequence_length, min(train.stride, sequence_length), probability)


def cold(model: LanguageNetwork, rows: int) -> Carried:
    """At the beginning of B rows."""
    device = next(model.parameters()).device
    return Carried(model.initial_state(rows), torch.empty(rows, 0, dtype=torch.int64, device=device))


def check_resets(model: Network) -> None:
    """Resetting multiplies states by 0, so it needs layers that begin there.

    Raises:
        UsageError: a layer, of a cell from outside, begins elsewhere.
    """
    assert isinstance(model, RecurrentModel)
    for layer, state in zip(model.layers, model.initial_state(1), strict=True):
        if any(component.any() for component in state):
            raise UsageError(
                "--data.reset-state makes zeros of the state where a record begins; that is not where "
                f"{type(layer).__name__} begins.\n"
                "Leave it out, or use a cell whose initial_state is zeros."
            )


def read(
    model: LanguageNetwork, inputs: Tensor, carried: Carried, truncation: Truncation, keep: Tensor | None = None
) -> tuple[Tensor, Carried]:
    """Read a window.

    Args:
        model: in training or evaluation mode.
        inputs: (B, T) ids.
        carried: from `cold` or the window before.
        truncation: where the gradient is cut. However it is, it never leaves the window, "sliding" apart.
        keep: (B, T), 0 where an input begins a record, else 1; given for all windows or none. The states that enter a
            0 become zeros, the initial state, and no gradient passes.

    Returns:
        logits (B, T, V), and what the next window is to begin with.
    """
    if truncation.mode == "sliding":
        return _slide(model, inputs, carried, truncation, keep)
    mask = credit(truncation, *inputs.shape)
    if mask is None and keep is None:  # without masks torch.nn's kernels may run
        logits, states = model(inputs, carried.states)
    else:
        wide = carried.states[0][0]
        logits, states = model(inputs, carried.states, keep, None if mask is None else mask.to(wide))
    return logits, carried._replace(states=detach(states))


def credit(truncation: Truncation, rows: int, steps: int) -> Tensor | None:
    """What the gradients of the states entering each step are multiplied by: (B, T), in float64; None for all by 1.

    "block": 0 every τ steps. "randomised" (Tallec & Ollivier 2017, arXiv:1705.08209): 1/π with probability π, else 0,
    each drawn for itself from torch's global generator.
    """
    if truncation.mode == "block" and truncation.length < steps:
        return (torch.arange(steps) % truncation.length != 0).double().expand(rows, steps)
    if truncation.mode == "randomised" and truncation.keep_probability < 1:
        kept = torch.rand(rows, steps) < truncation.keep_probability
        return kept.double() / truncation.keep_probability
    return None


def groups(truncation: Truncation, kept: int, steps: int) -> list[Group]:
    """The losses of a window of T steps under "sliding", by the step that they look back to.

    s losses each, that look back τ to τ + s − 1 steps; all that would look back beyond the beginning of the row, which
    then is the first kept token, are one group. The last may be smaller.
    """
    ends: dict[int, int] = {}
    for first in range(kept, kept + steps, truncation.stride):
        ends[max(0, first - truncation.length + 1)] = min(first + truncation.stride, kept + steps)
    firsts = [kept, *ends.values()]
    return [Group(start, first, end) for (start, end), first in zip(ends.items(), firsts, strict=False)]


def work(truncation: Truncation, steps: int, longest: int) -> int:
    """Steps a row reads for the window that needs most, those read without a gradient apart.

    That is T, but more under "sliding": so many tokens as may be, or as the row holds, are kept before the window.

    Args:
        truncation: where the gradient is cut.
        steps: T.
        longest: the steps of the longest row.
    """
    if truncation.mode != "sliding":
        return steps
    # The more tokens are kept before a window, the more it needs: the last whole one does, or the narrow one after it.
    lasts = (longest // steps - 1) * steps, longest // steps * steps
    found = []
    for begin in lasts:
        parts = groups(truncation, min(truncation.length - 1, begin), min(steps, longest - begin))
        found.append(len(parts) * max((part.end - part.start for part in parts), default=0))
    return max(found)


def kernels(
    model: Network, truncation: Truncation, rows: int, steps: int, longest: int, *, resets: bool = False
) -> list[str]:
    """What each layer runs on in a whole window, under "sliding" with others before it; as a model's own `kernels`.

    Args:
        model: what is trained.
        truncation: where the gradient is cut.
        rows: B.
        steps: T.
        longest: the steps of the longest row.
        resets: whether `read` is given `keep`.
    """
    if truncation.masks or resets:
        assert isinstance(model, RecurrentModel)
        return model.kernels(rows, work(truncation, steps, longest), masks=True)
    return model.kernels(rows, work(truncation, steps, longest))


def _slide(
    model: LanguageNetwork, inputs: Tensor, carried: Carried, truncation: Truncation, keep: Tensor | None
) -> tuple[Tensor, Carried]:
    """Every group reads from its own start, side by side as rows of one batch.

    A shorter group reads on beyond its end; what it puts out there is dropped. Dropout, weight drop and zoneout draw
    anew for each group, and for the steps to its start.
    """
    text = torch.cat((carried.tokens, inputs), 1)
    if keep is not None and carried.keep is not None:
        keep = torch.cat((carried.keep, keep), 1)
    total = text.shape[1]
    parts = groups(truncation, carried.tokens.shape[1], inputs.shape[1])
    onward = max(0, total - truncation.length + 1)
    # The states that enter each group's first step, and the next window's kept tokens, with the weights as they are.
    entering: list[States] = []
    states, position = carried.states, 0
    with torch.no_grad():
        for start in [*(part.start for part in parts), onward]:
            if start > position:
                before = None if keep is None else keep[:, position:start]
                _, states = model(text[:, position:start], states, before)
                position = start
            entering.append(states)
    *starts, last = entering
    begin, first, end = torch.tensor(parts).unsqueeze(-1).unbind(1)  # (m, 1) each
    steps = begin + torch.arange(max(part.end - part.start for part in parts))
    places = steps.clamp(max=total - 1).to(text.device)
    tokens = text[:, places]  # (B, m, steps)
    side_by_side = tuple(
        type(layer[0])(*(torch.stack(component, 1).flatten(0, 1) for component in zip(*layer, strict=True)))
        for layer in zip(*starts, strict=True)
    )
    logits, _ = model(tokens.flatten(0, 1), side_by_side, None if keep is None else keep[:, places].flatten(0, 1))
    scored = (first <= steps) & (steps < end)
    logits = logits.unflatten(0, tokens.shape[:2])[:, scored.to(text.device)]
    return logits, Carried(last, text[:, onward:].clone(), None if keep is None else keep[:, onward:].clone())
