"""Limits of containers: own memory and the arena that is charged to it."""

from __future__ import annotations

import pytest

from orchestrator.core.container_memory import check_memory, embedded_bytes, limit_bytes
from orchestrator.core.order import ShardOrder
from orchestrator.errors import ConfigError
from tgi_patches.contract import Role

GIB = 2**30


def order(memory_gib: float = 0, arena_gib: float = 0) -> ShardOrder:
    return ShardOrder(
        "d",
        "prefill-0",
        Role.PREFILL,
        "m",
        "m",
        memory_bytes=int(memory_gib * GIB),
        arena_bytes=int(arena_gib * GIB),
    )


def test_the_limit_is_own_memory_and_every_arena_of_the_shard() -> None:
    made = ShardOrder("d", "s", Role.PREFILL, "m", "m", arena_bytes=100, pinned_bytes=20, pulled_bytes=3)
    assert limit_bytes(1000, made) == 1123
    assert limit_bytes(0, made) == 0, "no limit for the own part is no limit at all"


def test_an_embedded_shard_gets_its_weights_three_times_and_four_longest_prompts() -> None:
    # 270 MB of weights, 45 KiB of KV per token (30 layers, 3 KV heads of 64, float32), 4096 tokens.
    assert embedded_bytes(270_000_000, 46_080, 4096) == 1_610_612_736 + 810_000_000 + 754_974_720


def test_limits_that_the_host_cannot_hold_are_refused() -> None:
    check_memory([order(8), order(8)], 16 * GIB)
    with pytest.raises(ConfigError, match=r"limits are 16.0 GiB together and the host has 15.0 GiB"):
        check_memory([order(8), order(8)], 15 * GIB)


def test_arenas_count_where_shards_have_no_limit() -> None:
    check_memory([order(arena_gib=4)], 4 * GIB)
    with pytest.raises(ConfigError, match=r"arenas need 5.0 GiB together and the host has 4.0 GiB"):
        check_memory([order(arena_gib=4), order(arena_gib=1)], 4 * GIB)
