"""Attention over a paged KV pool, registered with transformers under the name `paged_cpu`.

A step packs the rows of all requests into one sequence: tensors are [1, heads, rows, head_dim].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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

    @property
    def blocks(self) -> int:
        return self.layers[0][0].shape[0]

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

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

    def first_seen(self, window: int | None) -> int:
        """The oldest position that any of the new tokens attends to."""
        return 0 if window is None else max(0, self.context - self.queries - window + 1)

    def read(self, pool: Tensor, first: int) -> Tensor:
        """Rows of positions from `first` on, `[context - first, kv_heads, dim]`; a view where it can be."""
        if self.start >= 0:
            return pool[self.start + first : self.start + self.context]
        return pool[self.slots[first:]]


@dataclass(frozen=True, slots=True)
class Rule:
    """How a layer attends: scale of the scores, how far back it sees, how scores are squeezed."""

    scaling: float | None
    window: int | None
    softcap: float | None


class Abandoned(Exception):
    """Nobody wants the result of the running step."""


@dataclass(slots=True)
class Step:
    """What the attention function needs beside q, k and v; lives for one forward."""

    pool: KVPool
    spans: Sequence[Span]
    write_slots: Tensor
    """Where each packed row's K and V go, int64 [rows]."""
    write_start: int
    """First of `write_slots` if they are one run, else -1."""
    wanted: Callable[[], bool]
    """False when the step need not be finished; asked once a layer."""
    layers_seen: int = 0


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged_step: Step | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """q [1, heads, rows, dim], k and v [1, kv_heads, rows, dim] -> [1, rows, heads, dim]."""
    if paged_step is None:
        raise RuntimeError("this model does not hand its keyword arguments to attention")
    if unused.get("s_aux") is not None:
        raise RuntimeError("attention sinks are not supported")
    step = paged_step
    step.layers_seen += 1
    if not step.wanted():
        raise Abandoned
    pool_k, pool_v = step.pool.flat(module.layer_idx)  # type: ignore[arg-type]
    _write(pool_k, key[0].transpose(0, 1), step)
    _write(pool_v, value[0].transpose(0, 1), step)
    rule = Rule(scaling, sliding_window, softcap)
    out = torch.empty_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)
    row = 0
    for span in step.spans:
        rows = slice(row, row + span.queries)
        out[rows] = _attend(query[0, :, rows], pool_k, pool_v, span, rule)
        row += span.queries
    return out[None], None


def _write(pool: Tensor, rows: Tensor, step: Step) -> None:
    if step.write_start >= 0:
        pool[step.write_start : step.write_start + rows.shape[0]] = rows
    else:
        pool.index_copy_(0, step.write_slots, rows)


def _attend(q: Tensor, pool_k: Tensor, pool_v: Tensor, span: Span, rule: Rule) -> Tensor:
    """q [heads, n, dim], pools [slots, kv_heads, dim] -> [n, heads, dim]; causal, aligned at the end.

    Query heads that share a KV head form a batch of their own, so K and V are never repeated.
    """
    heads, n, dim = q.shape
    first = span.first_seen(rule.window)
    k, v = (span.read(pool, first).transpose(0, 1) for pool in (pool_k, pool_v))
    kv_heads, context = k.shape[:2]
    group = heads // kv_heads
    q = q.reshape(kv_heads, group, n, dim)
    if rule.softcap is not None:
        return _softcapped(q, k, v, rule).reshape(heads, n, dim).transpose(0, 1)
    if n == 1:
        out = sdpa(q.view(1, kv_heads, group, dim), k[None], v[None], scale=rule.scaling)
        return out.reshape(1, heads, dim)
    shape = (kv_heads, group, context, dim)
    k, v = k[:, None].expand(shape), v[:, None].expand(shape)
    if n == context and (rule.window is None or n <= rule.window):
        out = sdpa(q, k, v, is_causal=True, scale=rule.scaling)
    else:
        out = sdpa(q, k, v, attn_mask=_visible(n, context, rule.window), scale=rule.scaling)
    return out.reshape(heads, n, dim).transpose(0, 1)


def _visible(n: int, context: int, window: int | None) -> Tensor:
    """bool [n, context]: query i stands at position context - n + i and sees back `window` positions."""
    mask = torch.ones(n, context, dtype=torch.bool).tril(context - n)
    return mask if window is None else mask.triu(context - n - window + 1)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    """Attention with scores squeezed by tanh, as in Gemma 2.

    q [kv_heads, group, n, dim], k and v [kv_heads, context, dim] -> the shape of q.
    """
    assert rule.softcap is not None
    n, dim = q.shape[2:]
    scores = torch.matmul(q, k[:, None].transpose(-1, -2)).float() * (rule.scaling or dim**-0.5)
    scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.masked_fill(~_visible(n, k.shape[1], rule.window), -math.inf)
    return torch.matmul(scores.softmax(-1).to(q.dtype), v[:, None])


def register() -> None:
    """Make the function known to transformers; calling it again changes nothing."""
    AttentionInterface.register(NAME, paged_attention)


def consecutive_start(slots: Sequence[int]) -> int:
    """First slot if `slots` ascend by one, else -1."""
    if slots and all(b - a == 1 for a, b in pairwise(slots)):
        return slots[0]
    return -1
