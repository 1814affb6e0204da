"""The part of TGI's KV cache that the loop gives out, and its bookkeeping."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.embedded.shard.blocks import BlockAllocator, PrefixAllocator, RowAllocator
from orchestrator.embedded.shard.seam import ModelInfo
from orchestrator.embedded.tgi.assemble import allocator, kv_tokens
from orchestrator.errors import ConfigError
from tgi_patches.contract import Role, ShardSpec

SPEC = ShardSpec(
    "d", "s", Role.MIXED, "/m", "m", max_input_tokens=900, max_total_tokens=1000, max_batch_prefill_tokens=900
)
CUDA = ModelInfo("", "bfloat16", 0, 0, kv_tokens=6400, max_position=0, block_size=64, device="cuda")
PADDED = replace(CUDA, kv_tokens=0, padded=True)


# --- how much ---


def test_on_a_gpu_all_is_used_but_the_block_that_tgi_writes_to() -> None:
    assert kv_tokens(SPEC, CUDA) == 6400 - 64


def test_on_a_cpu_four_of_the_longest_requests_unless_told_otherwise() -> None:
    cpu = replace(CUDA, device="cpu")
    assert kv_tokens(SPEC, cpu) == 4000
    assert kv_tokens(SPEC, replace(cpu, lookahead_tokens=3)) == 4012
    assert kv_tokens(replace(SPEC, kv_pool_tokens=5000), cpu) == 5000
    assert kv_tokens(replace(SPEC, kv_pool_tokens=9000), cpu) == 6336


def test_a_padded_model_gets_what_tgi_s_router_assumes() -> None:
    assert kv_tokens(SPEC, PADDED) == 16_000
    assert kv_tokens(replace(SPEC, max_batch_prefill_tokens=20_000), PADDED) == 20_000
    assert kv_tokens(replace(SPEC, kv_pool_tokens=2000), PADDED) == 2000


@pytest.mark.parametrize(
    ("spec", "info"),
    [
        (SPEC, replace(CUDA, kv_tokens=1024)),  # 960 without the reserved block
        (SPEC, replace(CUDA, kv_tokens=1088, lookahead_tokens=25)),
        (replace(SPEC, kv_pool_tokens=999), PADDED),
    ],
)
def test_a_cache_too_small_for_the_longest_request_is_refused(spec: ShardSpec, info: ModelInfo) -> None:
    with pytest.raises(ConfigError, match="and the longest request needs"):
        kv_tokens(spec, info)


# --- who owns what ---


def test_the_allocator_follows_the_server() -> None:
    assert type(allocator(CUDA, 640)) is BlockAllocator
    assert type(allocator(replace(CUDA, prefix_caching=True), 640)) is PrefixAllocator
    assert type(allocator(PADDED, 640)) is RowAllocator


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_block_0_is_never_given_out_and_all_others_are(prefix_caching: bool) -> None:
    blocks = allocator(replace(CUDA, prefix_caching=prefix_caching), 130)  # three blocks of 64
    taken = [blocks.allocate(64) for _ in range(3)]
    assert sorted(one.blocks[0] for one in taken if one is not None) == [1, 2, 3]
    assert blocks.allocate(1) is None
    assert blocks.used_tokens == 192
    assert blocks.slots((3, 1), 66)[62:] == (3 * 64 + 62, 3 * 64 + 63, 64, 65)
    for one in taken:
        assert one is not None
        blocks.free(one.blocks)
    assert blocks.used_tokens == 0


def test_rows_count_at_the_longest_one_s_length() -> None:
    rows = RowAllocator(100)
    short = rows.allocate(10)
    long = rows.allocate(40)
    assert short is not None
    assert long is not None
    assert rows.used_tokens == 2 * 40
    assert rows.allocate(1) is None  # a third row would make it 120
    rows.free(long.blocks)
    assert rows.used_tokens == 10
    assert rows.allocate(50) is not None
    assert rows.used_tokens == 100
    assert rows.slots(short.blocks, 10) == ()


def test_a_row_longer_than_the_budget_never_runs() -> None:
    rows = RowAllocator(100)
    assert rows.allocate(101) is None
    assert rows.allocate(100) is not None
