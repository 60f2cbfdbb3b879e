"""The processes that train together: who is who, and what they tell each other.

They are started from outside, by torchrun or SLURM's srun, and found by Lightning's cluster environments. Each reads
the same batches and takes its share of the rows; the gradients are added up, so that all take the same step. The first
process alone writes and prints. Where there is but one, nothing here does anything.

Shapes: B rows, P processes.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, overload

import numpy as np
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from torch import Tensor
from torch import distributed as dist

from lmapp.errors import LmappError, UsageError

PATIENCE = timedelta(hours=6)
"""How long a process waits for the others, as while the first one encodes a large text."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together.

    What tensors are summed or gathered, and in which order, has to be the same in all of them.

    Attributes:
        rank: its number, from 0.
        world: P, how many there are.
        local_rank: its number among those of its machine.
        local_world: how many there are on its machine.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    def seed(self, seed: int, step: int) -> int:
        """For what a process draws for itself from a step on: masks of its own rows."""
        return int(np.random.SeedSequence((seed, self.rank, step)).generate_state(1)[0])

    @overload
    def rows(self, tensor: Tensor) -> Tensor: ...

    @overload
    def rows(self, tensor: None) -> None: ...

    def rows(self, tensor: Tensor | None) -> Tensor | None:
        """This process's share, (B/P, …), of the rows of (B, …): the first process has the first ones."""
        if self.world == 1 or tensor is None:
            return tensor
        share = tensor.shape[0] // self.world
        return tensor[self.rank * share : (self.rank + 1) * share]

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """All rows, (B, …), from each process's share of them, (B/P, …): the reverse of `rows`."""
        if self.world == 1:
            return tensor
        shares = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(shares, tensor.contiguous())
        return torch.cat(shares)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Make each tensor, in place, the sum of all processes'; in one piece, so that it is always added up alike."""
        if self.world == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view_as(tensor))

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of all processes' numbers, in float64."""
        if self.world == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def of_first(self, value: Any) -> Any:
        """The first process's value."""
        return self.gather(value if self.first else None)[0]

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """What each process does for itself, without a word to the others: an error of any one is raised in all."""
        if self.world == 1:
            yield
            return
        error: LmappError | None = None
        try:
            yield
        except LmappError as own:
            error = own
        for found in self.gather(error):
            if found is not None:
                raise found


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the processes started with this one, if there are any. Those but the first end without a word.

    Raises:
        LmappError: another process is gone.
    """
    environment = _environment()
    if environment is None:
        yield Ranks()
        return
    ranks = _join(environment)
    try:
        yield ranks
    except (LmappError, KeyboardInterrupt) as error:
        if ranks.first:
            raise
        raise SystemExit(error.exit_code if isinstance(error, LmappError) else 130) from None
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        if ranks.first:
            raise LmappError(
                "Another process of this run has ended, and without it the rest cannot go on.\n"
                "What was saved last is whole: go on with lmapp train --resume, started as before."
            ) from error
        raise SystemExit(1) from None


def _environment() -> ClusterEnvironment | None:
    """Who has started several processes; None if there is one."""
    environment: ClusterEnvironment | None = None
    if TorchElasticEnvironment.detect():
        environment = TorchElasticEnvironment()
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # set by srun alone, not in a batch script
        try:
            environment = SLURMEnvironment(auto_requeue=False)
        except RuntimeError:  # Lightning cannot say where a machine's tasks begin
            raise UsageError("Start the tasks with srun --ntasks-per-node, not with --ntasks alone.") from None
    return environment if environment is not None and environment.world_size() > 1 else None


def _join(environment: ClusterEnvironment) -> Ranks:
    rank, world = environment.global_rank(), environment.world_size()
    if not dist.is_initialized():
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=PATIENCE)
        atexit.register(dist.destroy_process_group)
    hosts = Ranks(rank, world).gather(socket.gethostname())
    return Ranks(rank, world, hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank]))
