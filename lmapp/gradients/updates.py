"""Gradient norms and update-to-weight ratios of a network's parts, its parameters grouped by names that people know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lmapp.gradients.clipping import global_norm


def group_name(parameter: str) -> str:
    """The group of a parameter, from its full name in the network, by rules that hold for any network.

    A number is joined to what it counts: `layers.0.weight_hh` is in `layer0/weight_hh`. The biases of what is counted
    are one group, `layer0/bias`, wherever in it they are. A part that is not counted is one group with all it holds:
    `embedding`, `head`. What belongs to the network itself has its own name, all biases that of `bias`.
    """
    *modules, last = parameter.split(".")
    parts: list[str] = []
    counted = 0  # parts up to the first that has a number
    for module in modules:
        if module.isdigit() and parts:
            parts[-1] = parts[-1].removesuffix("s") + module
            counted = counted or len(parts)
        else:
            parts.append(module)
    if modules and not counted:
        return parts[0]
    if last.startswith("bias"):
        return "/".join([*parts[:counted], "bias"])
    return "/".join([*parts, last])


def grouped(named: Iterable[tuple[str, Tensor]]) -> dict[str, list[Tensor]]:
    """Tensors by the groups of their names, both in the order given.

    Of `named_parameters()` a tied matrix is there once, by its first name: `embedding`.
    """
    groups: dict[str, list[Tensor]] = {}
    for name, tensor in named:
        groups.setdefault(group_name(name), []).append(tensor)
    return groups


def group_norms(groups: Mapping[str, Sequence[Tensor]]) -> dict[str, float]:
    """‖·‖₂ of each group taken as one vector; the squares of all add up to that of the global norm."""
    return {name: float(global_norm(tensors)) for name, tensors in groups.items()}


@torch.no_grad()
def update_ratios(before: Mapping[str, Sequence[Tensor]], after: Mapping[str, Sequence[Tensor]]) -> dict[str, float]:
    """‖Δw‖₂/‖w‖₂ of one optimiser step, by group: how far a step moves the weights, measured by their own length.

    Whatever moved them is in it: learning rate, clipping, momentum, weight decay. About 1e-3 is usually taken for
    healthy, far more for too high a learning rate, far less for one too low (Karpathy, Stanford CS231n notes, "Neural
    Networks Part 3"): a rule of thumb.

    Args:
        before: the weights w before the step.
        after: the same groups of the same tensors after it.

    Returns:
        The ratios; none for a group whose weights were all 0, as biases are at first.
    """
    ratios = {}
    for name, weights in before.items():
        if length := float(global_norm(weights)):
            ratios[name] = float(global_norm(torch._foreach_sub(list(after[name]), list(weights)))) / length
    return ratios
