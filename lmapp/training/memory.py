"""What training will need of memory and what there is, asked before the first step is taken; and keeping it.

Shapes: B rows, T steps, V symbols; of a measurement of gradient decay N windows, m end points each, K the largest lag.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmapp.config import Config, TrainConfig
from lmapp.data.streaming import Batches
from lmapp.errors import UsageError
from lmapp.gradients.decay import ProbeShape, measure
from lmapp.gradients.truncation import Truncation
from lmapp.models import InfillModel, Network, RecurrentModel, WindowModel, make_model
from lmapp.training.optimizers import moments
from lmapp.training.truncation import kernels, work
from lmapp.units import count, size

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class Need(NamedTuple):
    """Bytes that training takes.

    Attributes:
        weights: weights, their gradients and what the optimiser keeps of them, in fp32.
        step: what a step makes of its characters beside that.
        probe: what a measurement of gradient decay makes, which is done before the first step and between others.
        copies: what comparing the weights before and after a logged step makes.
    """

    weights: int
    step: int
    probe: int = 0
    copies: int = 0

    @property
    def total(self) -> int:
        """The most at a time."""
        return self.weights + max(self.step, self.probe, self.copies)


def needed(
    model: Network,
    train: TrainConfig,
    truncation: Truncation,
    rows: int,
    steps: int,
    longest: int,
    probe: ProbeShape | None = None,
    *,
    resets: bool = False,
) -> Need:
    """What training on windows of B rows of T steps takes at its peak.

    A character costs what the forward pass keeps for it, measured on two short windows; what the backward pass of one
    layer makes, while the rest is still there; and three times the V fp32 numbers of its logits: their
    log-probabilities, and the gradients of both. Against the peaks of real steps that is right within a factor of two,
    as is what is measured of the probe.

    Args:
        model: what is trained.
        train: how.
        truncation: where the gradient is cut.
        rows: B.
        steps: T.
        longest: the steps of the longest row.
        probe: how gradient decay is measured, if it is.
        resets: whether states are reset where records begin.
    """
    few, short = min(rows, 4), 2
    by_table = kernels(model, truncation, rows, steps, longest, resets=resets)[0] == "table+scan"
    if by_table and not isinstance(model, WindowModel) and model.embedding is not None:
        # An embedding's first layer has a table for more characters than symbols only.
        few = min(rows, 32)
        short = model.vocabulary_size // few + 1
    longer, shorter = (_kept(model, truncation, few, length, resets) for length in (short + 4, short))
    kept = (longer - shorter) / (few * 4)
    character = kept + _backward(model, train) + 3 * 4 * model.vocabulary_size
    step = round(character * rows * work(truncation, steps, longest))
    # A logged step, when all that is freed again, copies the weights to compare them with the updated ones.
    copies = 8 * sum(p.numel() for p in model.parameters())
    return Need(weights(model, train), step, 0 if probe is None else probed(model, probe), copies)


def weights(model: torch.nn.Module, train: TrainConfig) -> int:
    """Bytes of fp32 weights, their gradients and what the optimiser keeps."""
    return 4 * (2 + moments(train)) * sum(p.numel() for p in model.parameters())


def _backward(model: Network, train: TrainConfig) -> int:
    """Bytes a character for one layer's backward pass.

    The gradients of its outputs and of its gates, and a copy of each for the products that they are factors of; what
    Ω makes of them is as much as one of both.
    """
    if isinstance(model, WindowModel):
        numbers = 2 * model.head.in_features
    else:
        layers: Any = model.layers if isinstance(model, RecurrentModel) else model.forwards
        numbers = max(layer.output_size + layer.gate_size for layer in layers)
    return (3 if train.omega else 2) * numbers * model.compute_dtype.itemsize


def _kept(model: Network, truncation: Truncation, rows: int, steps: int, resets: bool) -> int:
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
        elif truncation.masks or resets:  # which mask it is does not matter, only that there is one
            ones = torch.ones(rows, steps, device=device)
            keep, credit = ones if resets else None, ones if truncation.masks else None
            graph = model(tokens, model.initial_state(rows), keep=keep, credit=credit)
        else:
            graph = model(tokens, model.initial_state(rows))
        total = sum(sizes.values())
        del graph
    return total


def probed(model: Network, shape: ProbeShape) -> int:
    """Bytes that measuring gradient decay makes, extrapolated from two short measurements.

    They have so many pairs of a step and an end point that what grows with these is more than the copies of a recurrent
    matrix that products make.
    """
    if isinstance(model, WindowModel):
        few, lag = shape.windows, 2  # the end points' windows are there at once, whatever K is
    else:
        assert isinstance(model, RecurrentModel)
        layers: Any = model.layers
        few = min(shape.windows, 8)
        lag = 2 + 3 * max(layer.hidden_size for layer in layers) // (2 * few * shape.end_points)
    pairs, peaks = [], []
    for short in (replace(shape, windows=few, warm_up=0, max_lag=share * lag) for share in (1, 2)):
        with _Peak(model) as peak:
            measure(model, torch.zeros(few, short.length, dtype=torch.int64), short)
        pairs.append(_pairs(short))
        peaks.append(peak.most)
    pair = (peaks[1] - peaks[0]) / (pairs[1] - pairs[0])
    return round(peaks[0] + pair * (_pairs(shape) - pairs[0]))


def _pairs(shape: ProbeShape) -> int:
    """Of steps that a measurement goes back over and end points: N·m·(K+m)."""
    return shape.windows * shape.end_points * (shape.max_lag + shape.end_points)


class _Peak(TorchDispatchMode):
    """Counts the bytes of all tensors made while it is entered, as long as each is there; `most` is the peak."""

    def __init__(self, model: Network) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = {p.untyped_storage()._cdata for p in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._known:
                    self._known.add(key)
                    self.now += size
                    weakref.finalize(storage, self._gone, key, size)
        self.most = max(self.most, self.now)
        return made

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def check_weights(config: Config, vocabulary_size: int, device: torch.device, processes: int = 1) -> None:
    """Refuse a network that cannot fit, before it is made.

    Args:
        config: the run's configuration.
        vocabulary_size: V.
        device: where it is to be.
        processes: how many on this machine have such a network each.

    Raises:
        UsageError: it cannot.
    """
    with torch.device("meta"):
        model = make_model(vocabulary_size, config.model)
    need, there = weights(model, config.train), _for_each(device, processes)
    if there is not None and need > there:
        parameters = sum(p.numel() for p in model.parameters())
        other = "--model.window" if config.model.kind == "window" else "--model.num-layers"
        raise UsageError(
            f"This needs at least {size(need)} of memory ({parameters:,} parameters); {size(there)} are available.\n"
            f"Try a smaller --model.hidden-size or {other}."
        )


def check(
    need: Need,
    config: Config,
    truncation: Truncation,
    batches: Batches,
    probe: ProbeShape | None,
    device: torch.device,
    processes: int = 1,
) -> None:
    """Refuse what cannot fit before the system starts to kill processes for it.

    Args:
        need: of a process.
        config: the run's configuration.
        truncation: where the gradient is cut.
        batches: of all processes.
        probe: how gradient decay is measured, if it is.
        device: where training is to be.
        processes: how many on this machine need as much.

    Raises:
        UsageError: a step, or a measurement of gradient decay, cannot.
    """
    there = _for_each(device, processes)
    if there is None or need.total <= there:
        return
    if probe is not None and need.weights + max(need.step, need.copies) <= there:
        raise UsageError(
            f"This needs about {size(need.total)} of memory, {size(need.probe)} of it to measure gradient decay up to "
            f"lag {probe.max_lag:,}\non {count(probe.windows, 'window')}; {size(there)} are available.\n"
            "Try a smaller --gradients.max-lag or --gradients.windows, or --gradients.every-steps 0."
        )
    window = "--model.window, " if config.model.kind == "window" else ""
    smaller = f"--model.hidden-size, {window}--data.batch-size or --data.sequence-length"
    match truncation.mode:
        case "full":
            ways = "It grows with the text: use less of it, a smaller --model.hidden-size, or another --train.bptt."
        case "sliding":
            ways = f"Try a larger --train.stride, or a smaller --train.truncation-length, {smaller}."
        case _:
            ways = f"Try a smaller {smaller}."
    raise UsageError(
        f"This needs about {size(need.weights + need.step)} of memory, {size(need.step)} of it for a step of "
        f"--train.bptt {truncation.mode} on\n{count(batches.batch_size, 'row')} of "
        f"{count(batches.sequence_length, 'character')}; {size(there)} are available.\n{ways}"
    )


def available(device: torch.device) -> int | None:
    """Bytes that can still be had: the GPU's, or the system's within this process's limits; None if it does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [size for size in (_system(), *_limits()) if size is not None]
    return min(found, default=None)


def _for_each(device: torch.device, processes: int) -> int | None:
    """Bytes that each process of this machine can have: a GPU is its own, the system's memory is divided."""
    there = available(device)
    return there if there is None or device.type == "cuda" else there // processes


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
    """What the control groups this process is in leave it of their limits, version 1 and 2, as far as can be read."""
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, limit, usage, prefix = CGROUPS, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top, limit, usage = CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            prefix = "total_"  # of all groups below, which usage counts too
        else:
            continue
        # A limit holds for all groups below it. In a container the path may be one that only the host sees.
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(top):
                try:
                    most = int((directory / limit).read_text())
                except (OSError, ValueError):  # not there, or "max"
                    continue
                yield max(0, most - _used(directory, usage, prefix))


def _used(group: Path, usage: str, prefix: str) -> int:
    """Bytes in use by a control group but for its copies of files, which make room; 0 if it does not say."""
    used = files = 0
    try:
        used = int((group / usage).read_text())
        lines = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
        files = sum(int(value) for name, value in lines if name in (f"{prefix}active_file", f"{prefix}inactive_file"))
    except (OSError, ValueError):
        pass
    return max(0, used - files)


@contextmanager
def kept_between_steps() -> Iterator[None]:
    """While training, let the C library keep what a step frees, for the next one to take.

    By default glibc gives large pieces back to the system each time, and the system clears every page anew when it is
    touched: an LSTM 1×512 then trains at 0.7 times the speed. Where the C library is another one, nothing happens.
    """
    trim_threshold, top_pad, mmap_threshold, mmap_max = -1, -2, -3, -4  # of malloc.h
    library = _glibc()
    if library is None:
        yield
        return
    mallopt, trim = library.mallopt, library.malloc_trim
    for option, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 2**26)):
        mallopt(option, value)
    try:
        yield
    finally:
        # Having been set, these no longer adapt themselves; the first two are what they would adapt to.
        for option, value in ((mmap_threshold, 2**25), (trim_threshold, 2**26), (top_pad, 2**17), (mmap_max, 2**16)):
            mallopt(option, value)
        trim(0)


def _glibc() -> ctypes.CDLL | None:
    """The C library of this process, if it is one whose malloc can be told what to keep."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
