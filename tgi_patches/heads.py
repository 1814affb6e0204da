"""Which KV heads of which rank a rank reads, when two shards split the same model differently.  Pure.

Rank r of n holds heads [r * H / n, (r + 1) * H / n) of H; a model with a single KV head is copied to
every rank, as TGI and Megatron do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Heads that one record holds for one reader: `count` of them from `theirs` on go to `ours` on."""

    rank: int
    """Of the record's writer."""
    heads: int
    """KV heads in a row of the record."""
    theirs: int
    ours: int
    count: int
    whole: bool
    """The record's rows are the reader's rows: all heads, in place."""


def held(kv_heads: int, ranks: int, rank: int) -> tuple[int, int]:
    """(first, after the last) of the heads on `rank`.  Raises ValueError where they do not divide."""
    if kv_heads == 1:
        return 0, 1
    if kv_heads % ranks:
        raise ValueError(f"{kv_heads} KV heads cannot be split over {ranks} ranks.")
    each = kv_heads // ranks
    return rank * each, (rank + 1) * each


def shares(kv_heads: int, writers: int, rank: int, ranks: int) -> tuple[Share, ...]:
    """What rank `rank` of `ranks` reads of a shard of `writers` ranks, in the order of its own heads."""
    start, end = held(kv_heads, ranks, rank)
    if kv_heads == 1:
        return (Share(rank % writers, heads=1, theirs=0, ours=0, count=1, whole=True),)
    found = []
    for writer in range(writers):
        first, after = held(kv_heads, writers, writer)
        low, high = max(start, first), min(end, after)
        if low < high:
            whole = (low, high) == (first, after) == (start, end)
            found.append(Share(writer, after - first, low - first, low - start, high - low, whole))
    return tuple(found)
