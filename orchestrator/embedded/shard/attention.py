"""Attention over a paged KV pool, registered with transformers under the name `paged_cpu`.

A step packs the rows of all requests into one sequence: tensors are [1, heads, rows, head_dim].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface

NAME = "paged_cpu"


@dataclass(slots=True)
class KVPool:
    """Per layer K and V as `[blocks, block_size, kv_heads, head_dim]`, TGI's flashdecoding layout."""

    layers: list[tuple[Tensor, Tensor]]
    block_size: int

    @classmethod
    def create(
        cls, *, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVPool:
        shape = (blocks, block_size, kv_heads, head_dim)
        pool = [(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)) for _ in range(layers)]
        for k, v in pool:  # touch every page now: memory that is promised must be there
            k.zero_()
            v.zero_()
        return cls(pool, block_size)

    def flat(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer as `[slots, kv_heads, head_dim]`."""
        k, v = self.layers[layer]
        return k.view(-1, *k.shape[2:]), v.view(-1, *v.shape[2:])


@dataclass(slots=True)
class Span:
    """One request's rows in a step: `queries` new tokens at the end of a context of `context` tokens."""

    queries: int
    context: int
    slots: Tensor
    """Slots of the whole context, int64 [context]."""
    start: int
    """First slot if the context is one run of consecutive slots, else -1."""


@dataclass(slots=True)
class Step:
    """What the attention function needs beside q, k and v; lives for one forward."""

    pool: KVPool
    spans: Sequence[Span]
    write_slots: Tensor
    """Where each packed row's K and V go, int64 [rows]."""
    write_start: int
    """First of `write_slots` if they are one run, else -1."""
    layers_seen: int = 0


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    paged_step: Step | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """q [1, heads, rows, dim], k and v [1, kv_heads, rows, dim] -> [1, rows, heads, dim]."""
    if paged_step is None:
        raise RuntimeError("this model does not hand its keyword arguments to attention")
    step = paged_step
    step.layers_seen += 1
    pool_k, pool_v = step.pool.flat(module.layer_idx)  # type: ignore[arg-type]
    _write(pool_k, key[0].transpose(0, 1), step)
    _write(pool_v, value[0].transpose(0, 1), step)
    out = torch.empty_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)
    row = 0
    for span in step.spans:
        rows = slice(row, row + span.queries)
        k = pool_k[span.start : span.start + span.context] if span.start >= 0 else pool_k[span.slots]
        v = pool_v[span.start : span.start + span.context] if span.start >= 0 else pool_v[span.slots]
        out[rows] = _attend(query[0, :, rows], k, v, scaling)
        row += span.queries
    return out[None], None


def _write(pool: Tensor, rows: Tensor, step: Step) -> None:
    if step.write_start >= 0:
        pool[step.write_start : step.write_start + rows.shape[0]] = rows
    else:
        pool.index_copy_(0, step.write_slots, rows)


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
    """q [heads, n, dim], k and v [context, kv_heads, dim] -> [n, heads, dim]; causal, aligned at the end.

    Query heads that share a KV head form a batch of their own, so K and V are never repeated.
    """
    heads, n, dim = q.shape
    context, kv_heads = k.shape[:2]
    group = heads // kv_heads
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    if n == 1:
        out = sdpa(q.reshape(1, kv_heads, group, dim), k[None], v[None], scale=scaling)
        return out.reshape(1, heads, dim)
    k = k[:, None].expand(kv_heads, group, context, dim)
    v = v[:, None].expand(kv_heads, group, context, dim)
    q = q.reshape(kv_heads, group, n, dim)
    if n == context:
        out = sdpa(q, k, v, is_causal=True, scale=scaling)
    else:
        mask = torch.ones(n, context, dtype=torch.bool).tril(context - n)
        out = sdpa(q, k, v, attn_mask=mask, scale=scaling)
    return out.reshape(heads, n, dim).transpose(0, 1)


def register() -> None:
    """Make the function known to transformers; calling it again changes nothing."""
    AttentionInterface.register(NAME, paged_attention)


def consecutive_start(slots: Sequence[int]) -> int:
    """First slot if `slots` ascend by one, else -1."""
    if slots and all(b - a == 1 for a, b in pairwise(slots)):
        return slots[0]
    return -1
