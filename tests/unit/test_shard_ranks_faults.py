"""A rank that does what the others do not ends its shard, and tells why; nobody waits in vain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from orchestrator.embedded.shard.ranks import followers
from orchestrator.embedded.shard.ranks import model as ranked
from orchestrator.embedded.shard.ranks.assemble import opened
from orchestrator.embedded.shard.ranks.messages import Command, Decode, Prefill
from orchestrator.embedded.shard.ranks.part import Part
from orchestrator.embedded.shard.seam import Batch, Request, Sampling, Stopping
from orchestrator.embedded.shard.server import ShardServer
from orchestrator.errors import ConfigError, GenerationFailed, ShardError
from tests.unit.rank_stand_ins.threads import LONG_S, Thread, in_thread, spec
from tgi_patches.contract import Role

IDS = tuple(range(40, 60))


def request(new_tokens: int, slots: tuple[int, ...] = ()) -> Request:
    return Request(0, "", IDS, Sampling(), Stopping(new_tokens, ignore_eos_token=True), slots)


class Shard:
    """A shard of two ranks without HTTP around it."""

    def __init__(self, server: ShardServer, follower: Thread) -> None:
        self.loop = server.service.loop
        self.follower = follower
        self.running = asyncio.create_task(server.run())

    async def answer(self, asked: Request) -> list[int]:
        """Token ids."""
        async with asyncio.timeout(LONG_S):
            return [generation.token.id async for generation in self.loop.generate(asked)]

    async def ended(self) -> str:
        """Why, in a sentence."""
        async with asyncio.timeout(LONG_S):
            with pytest.raises(ShardError) as caught:
                await self.running
        return str(caught.value)


@pytest.fixture
async def shard(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shard]:
    monkeypatch.setattr(followers, "STOP_GRACE_S", 0.05)
    monkeypatch.setattr(followers, "KILLED_S", 0.0)  # a thread that waits in a sum cannot be killed
    started: list[Thread] = []

    async def launch(end: Any) -> Thread:
        started.append(await in_thread(end))
        return started[0]

    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(opened(spec(tiny_model, tmp_path, Role.MIXED, 2), launch))
        made = Shard(server, started[0])
        yield made
        made.running.cancel()
        await asyncio.gather(made.running, return_exceptions=True)


async def test_a_follower_that_ends_while_nothing_runs_ends_the_shard(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranked, "FAILED_SETTLE_S", 0.05)
    shard.follower.kill()
    assert await shard.ended() == "Rank 1 of this shard ended (exit code 0)."


async def test_a_follower_that_ends_in_the_middle_of_an_answer_fails_it_and_the_shard(shard: Shard) -> None:
    steps = shard.loop.generate(request(400))
    await anext(steps)
    shard.follower.kill()
    async with asyncio.timeout(LONG_S):
        with pytest.raises(GenerationFailed, match="Rank 1 of this shard ended"):
            async for _ in steps:
                pass
    assert await shard.ended() == "Rank 1 of this shard ended (exit code 0)."


def failing(monkeypatch: pytest.MonkeyPatch, ranks: set[int], kind: type[Command] = Prefill) -> None:
    """These ranks raise where they should carry out a command of the kind."""
    run = Part.run

    async def raising(self: Part, command: Command) -> Any:
        if self.group.rank in ranks and isinstance(command, kind):
            raise ValueError("the prompt was: secret")
        return await run(self, command)

    monkeypatch.setattr(Part, "run", raising)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", [Prefill, Decode])
async def test_a_rank_that_fails_alone_ends_the_shard_without_a_word_of_the_prompt(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, rank: int, kind: type[Command]
) -> None:
    monkeypatch.setattr(ranked, "FAILED_SETTLE_S", 0.1)
    failing(monkeypatch, {rank}, kind)
    with pytest.raises(GenerationFailed) as caught:
        await shard.answer(request(5))
    assert await shard.ended() == f"Rank {rank} of this shard failed where others did not: ValueError."
    assert "secret" not in str(caught.value)


async def test_what_fails_alike_on_all_ranks_fails_its_batch_and_nothing_else(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = await shard.answer(request(5))
    with monkeypatch.context() as patch:
        failing(patch, {0, 1})
        with pytest.raises(GenerationFailed, match="ValueError"):
            await shard.answer(request(5))
    assert await shard.answer(request(5)) == wanted
    assert not shard.running.done()


async def test_a_batch_that_nobody_wants_is_left_out_on_every_rank(shard: Shard) -> None:
    wanted = await shard.answer(request(5))
    model: Any = shard.loop._model
    assert await model.prefill(Batch(99, (request(5),), lambda: False)) == ([], None)
    asked = iter([True, False, False])
    slots = tuple(range(len(IDS)))
    batch = Batch(98, (request(1, slots=slots),), lambda: next(asked))
    generations, _ = await model.prefill(batch)
    assert [generation.token.id for generation in generations] == wanted[:1]
    assert await shard.answer(request(5)) == wanted


async def test_a_model_that_cannot_be_split_is_refused_before_it_serves(
    tiny_model: Path, tmp_path: Path
) -> None:
    for ranks, dtype, sentence in ((3, "float32", "2 KV heads"), (2, "int8", "int8 weights are not split")):
        order = spec(tiny_model, tmp_path, Role.MIXED, ranks, dtype=dtype)
        with pytest.raises(ConfigError, match=sentence):
            async with opened(order, in_thread):
                pass
