"""Every reason for which a record is not used: the answer stays right and the counter names it."""

from __future__ import annotations

import mmap
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.embedded.shard.seam import Generation, Request, Stopping
from orchestrator.embedded.tgi.model import ModelLimits
from tests.tgi.pair import Member, Models, Prompt, Trio, arena_folder, member, told
from tests.tgi.prompts import prompt_of, tokenizer_of
from tests.tgi.servers import ServerPlan, Servers
from tgi_patches.bridge.layout import Word
from tgi_patches.contract import new_handle

ARENA_BYTES = 1 << 20
LIMITS = ModelLimits(max_input_tokens=200, max_total_tokens=256, max_batch_prefill_tokens=256)
STOPPING = Stopping(8, ignore_eos_token=True)
TEXT = "the river and the stone under an old bridge in winter"


@dataclass(slots=True)
class World:
    """Servers of the tiny model: a pair, a stock one, and what one reason needs besides."""

    servers: Servers
    python: Path
    folder: Path
    plan: ServerPlan
    put: Member
    get: Member
    trio: Trio
    tokenizer: Any

    def prompt(self, text: str = TEXT) -> Prompt:
        return prompt_of(self.tokenizer, text)

    @asynccontextmanager
    async def models(self, **other: Member) -> AsyncIterator[Models]:
        """The clients, with another put or get server where one is named."""
        async with replace(self.trio, **other).models(LIMITS) as models:
            yield models


@pytest.fixture(scope="module")
def world(servers: Servers, tiny: Path, tgi_python: Path) -> Iterator[World]:
    plan = ServerPlan(tiny)
    with ExitStack() as stack:
        folder = stack.enter_context(arena_folder())
        put = stack.enter_context(member(servers, plan, "put", folder, arena_bytes=ARENA_BYTES))
        get = stack.enter_context(member(servers, plan, "get", folder))
        stock = stack.enter_context(servers.own(plan))
        trio = Trio(put, get, stock, tgi_python)
        yield World(servers, tgi_python, folder, plan, put, get, trio, tokenizer_of(tiny))


async def missed(models: Models, asked: Request, tag: str, reason: str) -> None:
    """The get leg with `tag` answers as a stock server does and is counted under `reason`."""
    get = models.trio.get
    before = dict(get.report.imports)
    expected = await models.colocated(asked)
    steps = await answer(models, replace(asked, adapter_id=tag))
    assert steps[0].import_result == reason
    assert told(steps) == told(expected)
    assert get.report.imports == before | {reason: before.get(reason, 0) + 1}
    assert get.report.faults == 0


async def answer(models: Models, leg: Request) -> list[Generation]:
    from tests.tgi.stepping import answers

    return (await answers(models.get, [leg]))[leg.id]


async def put_then(models: Models, asked: Request, **other: Any) -> str:
    """The get tag after a real put leg."""
    handle, first = await models.put_leg(asked)
    return models.get_tag(handle, first.token.id, **other)


async def test_a_pair_of_the_tiny_model_imports(world: World) -> None:
    """Or the tests below would show nothing."""
    async with world.models() as models:
        asked = models.ask(world.prompt(), STOPPING)
        separated = await models.separated(asked)
        assert separated[0].import_result == "hit"
        assert told(separated) == told(await models.colocated(asked))


async def test_missing_a_handle_that_nobody_exported(world: World) -> None:
    async with world.models() as models:
        asked = models.ask(world.prompt(), STOPPING)
        await missed(models, asked, models.get_tag(new_handle(), None), "missing")


async def test_missing_a_shard_without_an_arena(world: World) -> None:
    async with world.models() as models:
        asked = models.ask(world.prompt(), STOPPING)
        await missed(models, asked, await put_then(models, asked, shard="nobody"), "missing")


async def test_overwritten_by_later_records(world: World) -> None:
    """A ring of 1 MiB and records of about 160 KiB."""
    async with world.models() as models:
        asked = models.ask(world.prompt(), STOPPING)
        tag = await put_then(models, asked)
        long = models.ask(world.prompt(" ".join([TEXT] * 8)), STOPPING)
        for _ in range(40):
            await models.put_leg(long)
        await missed(models, asked, tag, "overwritten")


async def test_epoch_of_an_earlier_life(world: World) -> None:
    async with world.models() as models:
        asked = models.ask(world.prompt(), STOPPING)
        await missed(models, asked, await put_then(models, asked, epoch=world.put.epoch - 1), "epoch")


async def test_tokens_differ_where_the_prompt_is_another(world: World) -> None:
    async with world.models() as models:
        tag = await put_then(models, models.ask(world.prompt(TEXT.replace("old", "new")), STOPPING))
        asked = models.ask(world.prompt(), STOPPING)
        first = (await models.colocated(asked))[0].token.id
        tag = f"{tag.rpartition(':')[0]}:{first}"
        await missed(models, asked, tag, "tokens_differ")


async def test_fingerprint_of_another_revision(world: World) -> None:
    with member(world.servers, world.plan, "other", world.folder, revision="another") as other:
        async with world.models(get=other) as models:
            asked = models.ask(world.prompt(), STOPPING)
            await missed(models, asked, await put_then(models, asked), "fingerprint")


async def test_checksum_of_damaged_bytes(world: World) -> None:
    async with world.models() as models:
        asked = models.ask(world.prompt(), STOPPING)
        tag = await put_then(models, asked)
        with changed(world.put.arena, lambda data: flip_newest(data)):
            await missed(models, asked, tag, "checksum")


async def test_layout_of_an_arena_of_another_version(world: World) -> None:
    """The get server maps an arena once: one that has not seen this put server must open it now."""
    with member(world.servers, world.plan, "late", world.folder) as late:
        async with world.models(get=late) as models:
            asked = models.ask(world.prompt(), STOPPING)
            tag = await put_then(models, asked)
            with changed(world.put.arena, lambda data: bump_version(data)):
                await missed(models, asked, tag, "layout")


async def test_error_of_an_arena_that_others_may_write(world: World) -> None:
    with member(world.servers, world.plan, "later", world.folder) as later:
        async with world.models(get=later) as models:
            asked = models.ask(world.prompt(), STOPPING)
            tag = await put_then(models, asked)
            mode = world.put.arena.stat().st_mode
            world.put.arena.chmod(0o666)
            try:
                await missed(models, asked, tag, "error")
            finally:
                world.put.arena.chmod(mode)


async def test_unsupported_where_prompt_logprobs_are_asked_for(world: World) -> None:
    plan = replace(world.plan, env={"REQUEST_LOGPROBS": "1"})
    with (
        member(world.servers, plan, "logprobs", world.folder) as other,
        world.servers.own(plan) as stock,
    ):
        trio = replace(world.trio, get=other, stock=stock)
        async with trio.models(LIMITS) as models:
            asked = models.ask(world.prompt(), STOPPING, prefill_logprobs=True)
            tag = await put_then(models, replace(asked, prefill_logprobs=False))
            await missed(models, asked, tag, "unsupported")
            steps = await answer(models, replace(asked, adapter_id=tag))
            assert len(steps[0].prompt_logprobs) >= len(asked.input_ids) - 1


# --- exports -------------------------------------------------------------------------------------


async def test_an_export_without_a_ring_is_unsupported_and_the_token_comes_all_the_same(world: World) -> None:
    async with world.models(put=world.get) as models:
        asked = models.ask(world.prompt(), STOPPING)
        before = world.get.report.exports.get("unsupported", 0)
        _, first = await models.put_leg(asked)
        assert first.token == (await models.colocated(asked))[0].token
        assert world.get.report.exports == {"unsupported": before + 1}


async def test_an_export_over_a_quarter_of_the_ring_is_a_layout_miss(world: World) -> None:
    with member(world.servers, world.plan, "small", world.folder, arena_bytes=64 << 10) as small:
        async with world.models(put=small) as models:
            asked = models.ask(world.prompt(), STOPPING)
            handle, first = await models.put_leg(asked)
            assert first.token == (await models.colocated(asked))[0].token
            assert small.report.exports == {"layout": 1}
            tag = models.get_tag(handle, first.token.id, shard="small", epoch=small.epoch)
            await missed(models, asked, tag, "missing")


async def test_a_broken_handle_is_a_fault_and_the_answer_is_right(world: World) -> None:
    async with world.models() as models:
        asked = models.ask(world.prompt(), STOPPING)
        faults = world.get.report.faults
        steps = await answer(models, replace(asked, adapter_id="|kv1:get:nonsense"))
        assert told(steps) == told(await models.colocated(asked))
        await answer(models, replace(asked, adapter_id=await put_then(models, asked)))
        assert world.get.report.faults == faults + 1


# --- damage --------------------------------------------------------------------------------------


class changed:  # noqa: N801 - reads as a with statement
    """The arena file with a change, which is taken back at the end."""

    def __init__(self, path: Path, change: Callable[[mmap.mmap], list[tuple[int, bytes]]]) -> None:
        self._path = path
        self._change = change
        self._undo: list[tuple[int, bytes]] = []

    def __enter__(self) -> None:
        with self._path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            self._undo = self._change(data)

    def __exit__(self, *_: object) -> None:
        with self._path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            for offset, was in self._undo:
                data[offset : offset + len(was)] = was


def flip_newest(data: mmap.mmap) -> list[tuple[int, bytes]]:
    """Damage every byte in the last stretch of the ring that was written."""
    words = memoryview(data).cast("Q")
    ring_bytes, head = words[Word.RING_BYTES], words[Word.HEAD]
    words.release()
    start = len(data) - ring_bytes
    at = start + (head - 4096) % ring_bytes
    was = data[at : at + 1024]
    data[at : at + 1024] = bytes(byte ^ 0xFF for byte in was)
    return [(at, was)]


def bump_version(data: mmap.mmap) -> list[tuple[int, bytes]]:
    at = 8 * Word.VERSION
    was = data[at : at + 8]
    data[at : at + 8] = (int.from_bytes(was, "little") + 1).to_bytes(8, "little")
    return [(at, was)]
