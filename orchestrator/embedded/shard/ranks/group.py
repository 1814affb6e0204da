"""Sums and votes over the ranks of a shard: gloo over the loopback interface, and nothing global.

Every call is made by all ranks in the same order.  One that a rank does not join in time, or at all,
raises GroupBroken, and the group is of no more use.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from orchestrator.errors import ShardError

_gloo: Any = dist.ProcessGroupGloo  # torch has no types for it

CALL_DEADLINE_S = 20.0
"""How long ranks wait for the slowest in one call: they differ by a layer's work, or by an import."""


class GroupBroken(ShardError):
    """Another rank did not take part."""


class Group:
    """This process as `rank` of `ranks`; returns once all have come to the file `meeting`."""

    def __init__(
        self,
        meeting: str,
        rank: int,
        ranks: int,
        *,
        join_deadline_s: float,
        call_deadline_s: float = CALL_DEADLINE_S,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        options = _gloo._Options()
        options._devices = [_gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=join_deadline_s)
        self._lowest = dist.AllreduceOptions()
        self._lowest.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        store = FileStore(meeting, -1)
        store.set_timeout(timedelta(seconds=join_deadline_s))
        try:
            self._group = _gloo(store, rank, ranks, options)
        except RuntimeError as error:
            raise GroupBroken(f"Rank {rank} did not meet the others within {join_deadline_s:g} s.") from error
        self._group._set_default_timeout(timedelta(seconds=call_deadline_s))
        self._lost = f"Another rank of this shard ended, or did not take part for {call_deadline_s:g} s."

    def add(self, part: Tensor) -> None:
        """Replaces `part` by its sum over all ranks; the same bits on each of them."""
        try:
            self._group.allreduce([part]).wait()
        except RuntimeError as error:
            raise GroupBroken(self._lost) from error

    def agree(self, number: int) -> int:
        """`number` where every rank gave it, else 0."""
        ends = torch.tensor([number, -number])
        try:
            self._group.allreduce([ends], self._lowest).wait()
        except RuntimeError as error:
            raise GroupBroken(self._lost) from error
        lowest, highest = int(ends[0]), -int(ends[1])
        return number if lowest == highest else 0

    def close(self) -> None:
        """The others' calls fail from now on; the destructor is what closes gloo's connections."""
        del self._group
