"""A pool whose slots are rows already: `[blocks, block, heads, dim]` on the CPU, copied without a stop.

Slot `s` is row `s` of the pool seen as `[slots, heads, dim]`, so consecutive slots are one stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tgi_patches.bridge import Planes
from tgi_patches.kv.slots import runs


class PoolBytes:
    """The bytes of a paged pool, viewed once: a view of every tensor costs more than a small copy.

    `kv_cache` holds one (K, V) pair per layer, each `[blocks, block, heads, dim]`, contiguous, on the
    CPU, of any dtype.  Nothing is copied, and the tensors live as long as this.
    """

    def __init__(self, kv_cache: Sequence[tuple[Tensor, Tensor]]) -> None:
        pools = [pool for pair in kv_cache for pool in pair]
        self._views = [_bytes_of(pool) for pool in pools]
        self._slots = [pool.shape[0] * pool.shape[1] for pool in pools]

    def planes(self, slot_runs: Sequence[tuple[int, int]]) -> list[list[memoryview]]:
        """Writable views of the given slots: one entry per [layer][k|v], its runs in order."""
        for start, length in slot_runs:
            if start < 0 or start + length > min(self._slots):
                limit = min(self._slots)
                raise IndexError(f"Slots {start} to {start + length - 1} are outside a pool of {limit}.")
        cuts: dict[int, list[slice]] = {}
        planes = []
        for view, slots in zip(self._views, self._slots, strict=True):
            row = len(view) // slots
            if row not in cuts:
                cuts[row] = [slice(start * row, (start + length) * row) for start, length in slot_runs]
            planes.append([view[cut] for cut in cuts[row]])
        return planes

    def outbox(self, slots: Sequence[int]) -> Planes:
        """What to export of the given slots."""
        return self.planes(runs(slots))

    def inbox(self, slots: Sequence[int]) -> InPlaceInbox:
        """The slots themselves: a read that fails leaves garbage there, which a prefill overwrites."""
        last_slot = [run for (run,) in self.planes([(slots[-1], 1)])]
        return InPlaceInbox(self.planes(runs(slots)), last_slot)


@dataclass(slots=True)
class InPlaceInbox:
    """An Inbox that is the pool."""

    planes: Planes
    last_slot: list[memoryview]
    last_kv: list[bytes] = field(default_factory=list)

    def commit(self) -> None:
        self.last_kv = [bytes(run) for run in self.last_slot]

    def repair(self) -> None:
        for slot, exported in zip(self.last_slot, self.last_kv, strict=True):
            slot[:] = exported


def planes(
    kv_cache: Sequence[tuple[Tensor, Tensor]], slot_runs: Sequence[tuple[int, int]]
) -> list[list[memoryview]]:
    """`PoolBytes(kv_cache).planes(slot_runs)`, for a single use."""
    return PoolBytes(kv_cache).planes(slot_runs)


def _bytes_of(pool: Tensor) -> memoryview:
    if pool.dim() != 4 or not pool.is_contiguous() or pool.device.type != "cpu":
        raise ValueError(
            "A KV pool must be a contiguous CPU tensor [blocks, block, heads, dim], "
            f"not {tuple(pool.shape)} with strides {pool.stride()} on {pool.device}."
        )
    data: memoryview = pool.detach().view(torch.uint8).reshape(-1).numpy().data
    return data
