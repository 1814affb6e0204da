"""Paged KV blocks as the runs of bytes that a bridge copies.

For pools of the layout `[blocks, block, heads, dim]` (K and V alike): slot `s` is row `s` of the pool
seen as `[slots, heads, dim]`, so consecutive slots are one stretch of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """(first slot, length) of every stretch of consecutive slots, in the given order."""
    if not slots:
        return []
    first, count = slots[0], len(slots)
    if slots[-1] == first + count - 1 and list(slots) == list(range(first, first + count)):
        return [(first, count)]
    merged: list[tuple[int, int]] = []
    start = following = first
    for slot in slots:
        if slot != following:
            merged.append((start, following - start))
            start = slot
        following = slot + 1
    merged.append((start, following - start))
    return merged


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
