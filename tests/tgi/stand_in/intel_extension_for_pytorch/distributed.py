"""IPEX's collectives for CPU tensors, by gloo instead of oneCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_gather", "all_gather_into_tensor", "all_reduce", "init_process_group"]


def init_process_group(
    backend: str, world_size: int, rank: int, timeout: timedelta, pg_options: Any = None
) -> None:
    """Of the address and port in MASTER_ADDR and MASTER_PORT; `backend` names oneCCL and is ignored."""
    dist.init_process_group("gloo", world_size=world_size, rank=rank, timeout=timeout)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """The sum over all ranks, in place."""
    dist.all_reduce(tensor, group=group)


def all_gather(
    gathered: list[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Every rank's tensor in the list `gathered`, in the order of ranks."""
    dist.all_gather(gathered, tensor, group=group)


def all_gather_into_tensor(
    gathered: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Every rank's tensor one after the other in the memory of `gathered`."""
    parts = list(gathered.view(dist.get_world_size(group), *tensor.shape).unbind(0))
    dist.all_gather(parts, tensor, group=group)
