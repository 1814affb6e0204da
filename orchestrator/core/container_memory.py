"""What the limit of a container's memory has to hold: own memory, and the pages of the arenas it writes.

The kernel charges a page of a tmpfs to whoever touches it first, and that is the shard that fills it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.core.order import ShardOrder
from orchestrator.errors import ConfigError

RUNTIME_BYTES = 1536 * 2**20
"""Python with torch, its threads and buffers of a step."""
LOADING = 3
"""While it loads, a shard holds the file's pages, the tensors and what they are converted from."""
TMPFS_SLACK_BYTES = 16 * 2**20
"""For folders, ids and reports beside the arenas, in whole pages."""
POOL_PROMPTS = 4
"""An embedded shard's KV pool holds so many requests of the longest length."""


def embedded_bytes(weights_bytes: int, kv_bytes_per_token: int, max_total_tokens: int) -> int:
    """Of an embedded shard, beside its arena."""
    return RUNTIME_BYTES + LOADING * weights_bytes + POOL_PROMPTS * max_total_tokens * kv_bytes_per_token


def limit_bytes(own_bytes: int, order: ShardOrder) -> int:
    """Of the container; 0, no limit, where its own memory has none."""
    return own_bytes and own_bytes + arena_bytes([order])


def arena_bytes(orders: Iterable[ShardOrder]) -> int:
    return sum(one.arena_bytes + one.pinned_bytes + one.pulled_bytes for one in orders)


def tmpfs_bytes(planned: int, host_bytes: int) -> int:
    """Of the arenas' volume, which keeps its size while shards run: pages cost only where they are touched.

    Room for all arenas twice while shards are rolled, and for more shards later.
    """
    return max(2 * planned + TMPFS_SLACK_BYTES, host_bytes // 2)


def check_memory(orders: Sequence[ShardOrder], host_bytes: int) -> None:
    """ConfigError where the limits, or the arenas of shards without one, are more than the host has."""
    arenas = arena_bytes(orders)
    wanted = max(arenas, sum(one.memory_bytes for one in orders))
    if wanted > host_bytes:
        what = "The containers' memory limits are" if wanted > arenas else "The KV arenas need"
        raise ConfigError(
            f"{what} {_gib(wanted)} GiB together and the host has {_gib(host_bytes)} GiB: lower "
            "shards.*.memory_bytes, limits.max_total_tokens, arena.bytes or the number of shards."
        )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"
