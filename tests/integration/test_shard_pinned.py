"""Pinned records of real embedded shards, of one process and of two ranks: they outlive the ring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.rank_stand_ins.threads import Client, serving, spec
from tgi_patches.contract import GetTag, PutTag, Role, new_handle

PROMPT = "the ship left the harbour before the sun rose and"
NEW_TOKENS = 8
RING_BYTES = 64 << 10
"""Of each rank."""
PINNED_BYTES = 8 << 10
"""Of all ranks: one record of PROMPT, not two."""
LAP = 30
"""So many records of PROMPT are more than a whole ring, also where a rank has half of each."""
SAMPLED = {"do_sample": True, "temperature": 1.5}


@asynccontextmanager
async def pair(
    model: Path, arenas: Path, ranks: int, *, pinned_bytes: int = PINNED_BYTES, ttl_s: float = 60.0
) -> AsyncIterator[tuple[Client, Client]]:
    order = spec(
        model,
        arenas,
        Role.PREFILL,
        ranks,
        arena_bytes=RING_BYTES * ranks,
        pinned_bytes=pinned_bytes,
        record_ttl_s=ttl_s,
    )
    async with serving(order) as prefill, serving(spec(model, arenas, Role.DECODE, 1)) as decode:
        yield prefill, decode


async def put(prefill: Client, *, pinned: bool = False) -> GetTag:
    """How a reader gets the record, who has sent no token yet."""
    handle = new_handle()
    await prefill.ask(PROMPT, 1, PutTag(handle, pinned=pinned))
    return GetTag(handle, prefill.shard, (await prefill.status()).epoch)


async def lap(prefill: Client) -> None:
    for _ in range(LAP):
        await put(prefill)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_pinned_record_is_a_hit_after_more_than_a_whole_ring_and_another_one_a_miss(
    tiny_model: Path, tmp_path: Path, ranks: int
) -> None:
    async with pair(tiny_model, tmp_path, ranks) as (prefill, decode):
        wanted, _ = await decode.ask(PROMPT, NEW_TOKENS)
        pinned, plain = await put(prefill, pinned=True), await put(prefill)
        await lap(prefill)
        assert await decode.ask(PROMPT, NEW_TOKENS, plain) == (wanted, "overwritten")
        for _ in range(3):
            assert await decode.ask(PROMPT, NEW_TOKENS, pinned) == (wanted, "hit")
        status = await prefill.status()
        assert status.exports == {"pinned": 1, "ok": LAP + 1}
        assert (status.pinned_bytes, (await decode.status()).pinned_bytes) == (PINNED_BYTES, 0)
        told = await prefill.wait(pinned.handle, timeout_s=0)
        assert (told.found, told.kv_bytes) == (True, told.prompt_tokens * status.bytes_per_token)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_readers_of_a_pinned_record_sample_as_if_they_were_alone(
    tiny_model: Path, tmp_path: Path, ranks: int
) -> None:
    async with pair(tiny_model, tmp_path, ranks) as (prefill, decode):
        pinned = await put(prefill, pinned=True)
        answers = set()
        for seed in (1, 2, 3):
            alone, _ = await decode.ask(PROMPT, NEW_TOKENS, seed=seed, **SAMPLED)
            assert await decode.ask(PROMPT, NEW_TOKENS, pinned, seed=seed, **SAMPLED) == (alone, "hit")
            answers.add(tuple(alone))
        assert len(answers) == 3


async def test_a_named_first_token_that_is_not_the_records_is_the_one_that_counts(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with pair(tiny_model, tmp_path, 1) as (prefill, decode):
        tag = await put(prefill)
        wanted, _ = await decode.ask(PROMPT, NEW_TOKENS)
        other = (wanted[0] + 1) % 200
        answer, result = await decode.ask(PROMPT, NEW_TOKENS, replace(tag, first_token_id=other))
        assert (answer[0], result) == (other, "hit")


async def test_a_pinned_record_is_a_miss_once_its_time_is_over_and_leaves_its_place(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Two such records do not fit at a time."""
    ttl_s = 0.05
    async with pair(tiny_model, tmp_path, 1, ttl_s=ttl_s) as (prefill, decode):
        wanted, _ = await decode.ask(PROMPT, NEW_TOKENS)
        tags = []
        for _ in range(3):
            tags.append(await put(prefill, pinned=True))
            await asyncio.sleep(ttl_s)
        assert (await prefill.status()).exports == {"pinned": 3}
        results = [await decode.ask(PROMPT, NEW_TOKENS, tag) for tag in tags]
        assert results == [(wanted, "missing")] * 3


@pytest.mark.parametrize("ranks", [1, 2])
async def test_what_finds_no_room_to_be_pinned_is_in_the_ring(
    tiny_model: Path, tmp_path: Path, ranks: int
) -> None:
    async with pair(tiny_model, tmp_path, ranks) as (prefill, decode):
        wanted, _ = await decode.ask(PROMPT, NEW_TOKENS)
        tags = [await put(prefill, pinned=True) for _ in range(3)]
        exports = (await prefill.status()).exports
        assert exports == {"pinned": 1, "ok": 2}
        for tag in tags:
            assert await decode.ask(PROMPT, NEW_TOKENS, tag) == (wanted, "hit")
    async with pair(tiny_model, tmp_path / "none", ranks, pinned_bytes=0) as (prefill, decode):
        tag = await put(prefill, pinned=True)
        status = await prefill.status()
        assert (status.exports, status.pinned_bytes) == ({"ok": 1}, 0)
        assert await decode.ask(PROMPT, NEW_TOKENS, tag) == (wanted, "hit")
