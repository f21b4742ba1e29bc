"""Several processes, one training: what torchrun starts, each on its share of every batch.

The batch of a step is the same whatever the number of processes; process r takes every world-th of
its sequences, and a process that is left without one runs a block that weighs nothing. Losses are
divided by the sum of weights over all processes, so gradients add up to those of one process.

Gradients are flattened and summed in one call after the backward pass, rather than by
DistributedDataParallel: the loss is one autograd node that brings the gradients of the heads all at
once (`losses.py`), so there is little to overlap, and a hundred megabytes a step are nothing beside
the logits. With `train.shard` FSDP2 does it instead: weights, gradients and Adam's state are
sharded, and gathered for a step as one group, because the drafter's parts are called one by one and
not through one `forward` each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dspark.errors import ConfigError

T = TypeVar("T")
TIMEOUT = timedelta(hours=24)
"""Others wait while one process computes the features of all text."""


@dataclass(frozen=True)
class Group:
    """The processes of a run; one alone does nothing of what is below."""

    rank: int = 0
    world: int = 1

    @staticmethod
    def join(device: torch.device) -> Group:
        """Join the group that torchrun describes in the environment, if it does."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return Group()
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=TIMEOUT)
        return Group(dist.get_rank(), dist.get_world_size())

    @staticmethod
    def local_device(device: torch.device) -> torch.device:
        """This process's own GPU among those of its machine."""
        if device.type != "cuda" or device.index is not None:
            return device
        index = int(os.environ.get("LOCAL_RANK", "0"))
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"process {index} of this machine has no GPU: it has {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    @property
    def first(self) -> bool:
        """This process writes files and talks."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        return items[self.rank :: self.world]

    def sum(self, x: Tensor) -> Tensor:
        """In place over all processes."""
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def mean_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its mean over processes."""
        if self.world == 1:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([g.reshape(-1) for g in grads])
        self.sum(flat).div_(self.world)
        parts = torch.split(flat, [g.numel() for g in grads])
        for p, g in zip(parameters, parts, strict=True):
            p.grad = g.view_as(p)


def shard(module: nn.Module, group: Group, device: torch.device) -> None:
    """Shard the parameters of `module` over all processes (FSDP2)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (group.world,))
    # Also behind a validation: else what it gathered would be used after the next update.
    fully_shard(module, mesh=mesh, reshard_after_forward=True)


def whole(x: Tensor) -> Tensor:
    """A tensor in one piece, sharded or not; every process has to ask."""
    from torch.distributed.tensor import DTensor

    return x.full_tensor() if isinstance(x, DTensor) else x


def copy_whole(into: Tensor, x: Tensor) -> None:
    """Copy a tensor in one piece into one that may be sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(into, DTensor):
        x = distribute_tensor(x.to(into.device), into.device_mesh, into.placements)
    into.copy_(x)
