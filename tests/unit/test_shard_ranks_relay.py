"""Shards that split the model differently relay each other's records; every answer is that of one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.unit.rank_stand_ins.threads import Client, serving, spec, until
from tgi_patches.bridge import Record
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.bridge.files import arena_path
from tgi_patches.contract import BridgeMiss, GetTag, MissReason, PutTag, Role, new_handle

PROMPTS = ("the ship left the harbour before the sun rose and", "one two three four five", "def add(first")
NEW_TOKENS = 10
RANK_RING_BYTES = 12 << 20
"""Half of what the stand-in gives a prefill shard."""
DAMAGED_BYTES = 64 << 10


@pytest.fixture(scope="module")
def six_heads(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A random Llama that splits over 2, 3 and 6 ranks; its answers depend on every layer."""
    folder = tmp_path_factory.mktemp("six") / "heads"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=256,
        initializer_range=0.4,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def answers(shard: Client, **more: Any) -> list[list[int]]:
    return [(await shard.ask(prompt, NEW_TOKENS, **more))[0] for prompt in PROMPTS]


async def test_every_pair_of_splits_relays_and_answers_as_one_process(
    six_heads: Path, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        prefills, decodes = [
            [await stack.enter_async_context(serving(spec(six_heads, tmp_path, role, n))) for n in (1, 2, 3)]
            for role in (Role.PREFILL, Role.DECODE)
        ]
        wanted = await answers(decodes[0])
        assert len({token for answer in wanted for token in answer}) > 5, "a dull model would prove nothing"
        assert await answers(decodes[1]) == await answers(decodes[2]) == wanted
        for prefill, decode in product(prefills, decodes):
            tags = [await prefill.put(prompt) for prompt in PROMPTS]
            got = [
                await decode.ask(prompt, NEW_TOKENS, tag) for prompt, tag in zip(PROMPTS, tags, strict=True)
            ]
            assert got == [(answer, "hit") for answer in wanted], f"{prefill.shard} to {decode.shard}"
        for shard in prefills:
            assert (await shard.status()).exports == {"ok": 9}
        for shard in decodes:
            assert (await shard.status()).imports == {"hit": 9}


@pytest.fixture
async def two_and_two(tiny_model: Path, tmp_path: Path) -> AsyncIterator[tuple[Client, Client]]:
    async with (
        serving(spec(tiny_model, tmp_path, Role.PREFILL, 2)) as prefill,
        serving(spec(tiny_model, tmp_path, Role.DECODE, 2)) as decode,
    ):
        yield prefill, decode


async def test_status_tells_of_all_ranks_together(
    two_and_two: tuple[Client, Client], tiny_model: Path, tmp_path: Path
) -> None:
    split = await two_and_two[0].status()
    async with serving(spec(tiny_model, tmp_path / "one", Role.PREFILL, 1)) as alone:
        whole = await alone.status()
    assert split.bytes_per_token == whole.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert (split.ring_bytes, split.record_limit_bytes) == (whole.ring_bytes, whole.record_limit_bytes)
    assert split.fingerprint.difference(whole.fingerprint) is None
    assert (split.fingerprint.tensor_parallel, whole.fingerprint.tensor_parallel) == (2, 1)
    assert split.kv_tokens == whole.kv_tokens


async def test_a_damaged_or_missing_part_of_one_rank_is_a_miss_of_all(
    two_and_two: tuple[Client, Client], tmp_path: Path
) -> None:
    prefill, decode = two_and_two
    wanted, _ = await decode.ask(PROMPTS[0], NEW_TOKENS)
    damaged, missing = [await prefill.put(PROMPTS[0]) for _ in range(2)]
    theirs = arena_path(tmp_path, "test", prefill.shard, 1)
    _damage(theirs)
    assert await decode.ask(PROMPTS[0], NEW_TOKENS, damaged) == (wanted, MissReason.RANKS)
    theirs.unlink()
    theirs.touch()
    assert await decode.ask(PROMPTS[0], NEW_TOKENS, missing) == (wanted, MissReason.RANKS)
    assert (await decode.status()).imports == {"ranks": 2}
    own = arena_path(tmp_path, "test", prefill.shard, 0)
    _damage(own)
    answer, why = await decode.ask(PROMPTS[0], NEW_TOKENS, missing)
    assert (answer, why) == (wanted, MissReason.CHECKSUM)


def _damage(arena: Path) -> None:
    """Change the first bytes of the ring, which is the end of the file."""
    with arena.open("r+b") as file:
        start = arena.stat().st_size - RANK_RING_BYTES
        file.seek(start)
        old = file.read(DAMAGED_BYTES)
        file.seek(start)
        file.write(bytes(byte ^ 0xFF for byte in old))


async def test_a_record_is_there_only_once_every_rank_has_published(
    two_and_two: tuple[Client, Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, _ = two_and_two
    status = await prefill.status()
    reader = ArenaBridge(tmp_path, "test", "reader", 0, 1, status.fingerprint, 0, 60.0)
    gate = threading.Event()
    export = ArenaBridge.export

    def gated(self: Any, *args: Any, **more: Any) -> Record:
        if self._rank == 1:
            assert gate.wait(10)
        return export(self, *args, **more)

    monkeypatch.setattr(ArenaBridge, "export", gated)
    handle = new_handle()
    async with asyncio.TaskGroup() as group:
        putting = group.create_task(prefill.ask(PROMPTS[0], 1, PutTag(handle)))
        await until(partial(_published, reader, prefill.shard, status.epoch, handle))
        early = await prefill.wait(handle, timeout_s=0.05)
        assert (early.found, early.reason) == (False, MissReason.MISSING)
        gate.set()
        assert (await prefill.wait(handle)).found
        await putting
    reader.close()


async def _published(reader: ArenaBridge, shard: str, epoch: int, handle: str) -> bool:
    try:
        return reader.lookup(shard, epoch, handle, 0).ranks == 2
    except BridgeMiss:
        return False


async def test_a_record_that_one_rank_could_not_publish_is_a_counted_failure(
    two_and_two: tuple[Client, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = two_and_two
    wanted, _ = await decode.ask(PROMPTS[0], NEW_TOKENS)
    export = ArenaBridge.export

    def failing(self: Any, *args: Any, **more: Any) -> Record:
        if self._rank == 1:
            raise BridgeMiss(MissReason.LAYOUT)
        return export(self, *args, **more)

    monkeypatch.setattr(ArenaBridge, "export", failing)
    handle = new_handle()
    await prefill.ask(PROMPTS[0], 1, PutTag(handle))
    reply = await prefill.wait(handle)
    assert (reply.found, reply.reason) == (False, MissReason.LAYOUT)
    status = await prefill.status()
    assert status.exports == {"layout": 1}
    tag = GetTag(handle, prefill.shard, status.epoch, wanted[0])
    assert await decode.ask(PROMPTS[0], NEW_TOKENS, tag) == (wanted, MissReason.RANKS)


async def test_split_prompts_and_requests_at_once_answer_as_one_process(
    tiny_model: Path, tmp_path: Path
) -> None:
    changes = {"chunked_prefill": True, "max_batch_prefill_tokens": 7}
    asked = [{"seed": 11, "do_sample": True, "temperature": 0.9}, {}, {"repetition_penalty": 1.3}]

    async def answered(ranks: int) -> list[Any]:
        order = spec(tiny_model, tmp_path / str(ranks), Role.PREFILL, ranks, **changes)
        async with serving(order) as shard:
            tag = await shard.put(PROMPTS[0])
            got = await shard.ask(PROMPTS[0], NEW_TOKENS, tag)
            asking = [
                shard.ask(prompt, NEW_TOKENS, **more) for prompt, more in zip(PROMPTS, asked, strict=True)
            ]
            return [got, *await asyncio.gather(*asking)]

    one, two = await answered(1), await answered(2)
    assert one[0][1] == "hit"
    assert one == two


async def test_a_reader_that_leaves_is_dropped_on_every_rank(
    two_and_two: tuple[Client, Client],
) -> None:
    _, decode = two_and_two
    wanted, _ = await decode.ask(PROMPTS[1], NEW_TOKENS)
    leaving = asyncio.create_task(decode.ask(PROMPTS[0], 150))
    staying = asyncio.create_task(decode.ask(PROMPTS[2], 60))
    await until(partial(_running, decode, 2))
    leaving.cancel()
    assert len((await staying)[0]) <= 60
    await until(partial(_running, decode, 0))
    assert await decode.ask(PROMPTS[1], NEW_TOKENS) == (wanted, None)


async def _running(shard: Client, count: int) -> bool:
    return (await shard.status()).running == count
