"""What a training step will need of memory and what there is, asked before the first one is taken; and keeping it.

Shapes: B rows, T steps, V symbols.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmapp.gradients.decay import Truncation
from lmapp.models import InfillModel, Network, RecurrentModel, WindowModel
from lmapp.training import truncation as truncated

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class Need(NamedTuple):
    """Bytes that training takes.

    Attributes:
        weights: weights, their gradients and two moments, in fp32.
        step: what a step makes of its characters beside that.
    """

    weights: int
    step: int

    @property
    def total(self) -> int:
        """Both."""
        return self.weights + self.step


def needed(model: Network, truncation: Truncation, rows: int, steps: int, carry: bool) -> Need:
    """What training on windows of B rows of T steps takes at its peak.

    A character costs what the forward pass keeps for it, measured on two short windows; what the backward pass of one
    layer makes, while the rest is still there; and three times the V fp32 numbers of its logits: their
    log-probabilities, and the gradients of both. Against the peaks of real steps that is right within a factor of two.
    """
    short, long = 2, 6
    few = min(rows, 4)
    kept = (_kept(model, truncation, few, long) - _kept(model, truncation, few, short)) / (few * (long - short))
    character = kept + _backward(model) + 3 * 4 * model.vocabulary_size
    characters = rows * truncated.work(truncation, steps, carry)
    return Need(weights(model), round(character * characters))


def weights(model: torch.nn.Module) -> int:
    """Bytes of fp32 weights, their gradients and two moments."""
    return 16 * sum(p.numel() for p in model.parameters())


def _backward(model: Network) -> int:
    """Bytes a character for one layer's backward pass.

    The gradients of its outputs and of its gates, and a copy of each for the products that they are factors of.
    """
    if isinstance(model, WindowModel):
        numbers = 2 * model.head.in_features
    else:
        layers: Any = model.layers if isinstance(model, RecurrentModel) else model.forwards
        numbers = max(layer.output_size + layer.gate_size for layer in layers)
    return 2 * numbers * model.compute_dtype.itemsize


def _kept(model: Network, truncation: Truncation, rows: int, steps: int) -> int:
    """Bytes kept for the backward pass over B rows of T steps, with the kernels that training runs."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    device = next(model.parameters()).device
    tokens = torch.zeros(rows, steps, dtype=torch.int64, device=device)
    random = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(random), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # The graph is held until its tensors are counted: a freed one's address may be another's.
        if isinstance(model, InfillModel):
            graph: object = model(tokens)
        elif truncation.masks:  # which mask it is does not matter, only that there is one
            graph = model(tokens, model.initial_state(rows), credit=torch.ones(rows, steps, device=device))
        else:
            graph = model(tokens, model.initial_state(rows))
        total = sum(sizes.values())
        del graph
    return total


def available(device: torch.device) -> int | None:
    """Bytes that can still be had: the GPU's, or the system's within this process's limits; None if it does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [size for size in (_system(), *_limits()) if size is not None]
    return min(found, default=None)


def _system() -> int | None:
    """What can be had without swapping, by /proc/meminfo; elsewhere all there is."""
    try:
        for line in (PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except (OSError, ValueError):
        pass
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits() -> Iterator[int]:
    """The memory limits of the control groups this process is in, version 1 and 2, as far as they can be read."""
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, name = CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A limit holds for all groups below it. In a container the path may be one that only the host sees.
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(top):
                try:
                    yield int((directory / name).read_text())
                except (OSError, ValueError):  # not there, or "max"
                    continue


@contextmanager
def kept_between_steps() -> Iterator[None]:
    """While training, let the C library keep what a step frees, for the next one to take.

    By default glibc gives large pieces back to the system each time, and the system clears every page anew when it is
    touched: an LSTM 1×512 then trains at 0.7 times the speed. Where the C library is another one, nothing happens.
    """
    trim_threshold, top_pad, mmap_threshold, mmap_max = -1, -2, -3, -4  # of malloc.h
    try:
        mallopt, trim = (getattr(ctypes.CDLL(None), name) for name in ("mallopt", "malloc_trim"))
    except (AttributeError, OSError, TypeError):
        yield
        return
    for option, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 2**26)):
        mallopt(option, value)
    try:
        yield
    finally:
        # Having been set, these no longer adapt themselves; the first two are what they would adapt to.
        for option, value in ((mmap_threshold, 2**25), (trim_threshold, 2**26), (top_pad, 2**17), (mmap_max, 2**16)):
            mallopt(option, value)
        trim(0)
