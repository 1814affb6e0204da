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
    merged: list[tuple[int, int]] = []
    for slot in slots:
        if merged and slot == merged[-1][0] + merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] + 1)
        else:
            merged.append((slot, 1))
    return merged


def planes(
    kv_cache: Sequence[tuple[Tensor, Tensor]], slot_runs: Sequence[tuple[int, int]]
) -> list[list[memoryview]]:
    """Writable byte views of the given slots: one entry per [layer][k|v], its runs in order.

    `kv_cache` holds one (K, V) pair per layer, each `[blocks, block, heads, dim]`, contiguous, on the
    CPU, of any dtype.  Nothing is copied: the views stay valid as long as the tensors.
    """
    return [_plane(pool, slot_runs) for pair in kv_cache for pool in pair]


def _plane(pool: Tensor, slot_runs: Sequence[tuple[int, int]]) -> list[memoryview]:
    if pool.dim() != 4 or not pool.is_contiguous() or pool.device.type != "cpu":
        raise ValueError(
            "A KV pool must be a contiguous CPU tensor [blocks, block, heads, dim], "
            f"not {tuple(pool.shape)} with strides {pool.stride()} on {pool.device}."
        )
    slots = pool.shape[0] * pool.shape[1]
    data = pool.detach().view(torch.uint8).reshape(-1).numpy().data
    row = len(data) // slots
    for start, length in slot_runs:
        if start < 0 or start + length > slots:
            raise IndexError(f"Slots {start} to {start + length - 1} are outside a pool of {slots}.")
    return [data[start * row : (start + length) * row] for start, length in slot_runs]
