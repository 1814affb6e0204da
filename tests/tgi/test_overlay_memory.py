"""Out of memory in a step fails the requests of that step; stock TGI ends its server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.embedded.shard.seam import Batch, Request
from orchestrator.embedded.tgi.model import TgiModel
from orchestrator.errors import GenerationFailed, ShardError
from tests.tgi.pair import Member, arena_folder, member
from tests.tgi.servers import Server, ServerPlan, Servers
from tests.tgi.stepping import Slots, answers, greedy, warm

FAIL_VARIABLE = "IPEX_STAND_IN_FAIL"
END_LIMIT_S = 30.0


@dataclass(slots=True)
class World:
    """A server with the overlay whose forwards fail when a test says so."""

    member: Member
    told: Path
    python: Path

    @asynccontextmanager
    async def model(self) -> AsyncIterator[tuple[TgiModel, Slots]]:
        async with warm(self.member.server, self.python) as model:
            yield model, Slots(await model.info())

    @contextmanager
    def failing(self, how: str) -> Iterator[None]:
        with failing(self.told, how):
            yield


@contextmanager
def failing(told: Path, how: str) -> Iterator[None]:
    told.write_text(how)
    try:
        yield
    finally:
        told.unlink()


@pytest.fixture(scope="module")
def world(
    servers: Servers, tiny: Path, tgi_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    told = tmp_path_factory.mktemp("told") / "fail"
    plan = ServerPlan(tiny, env={FAIL_VARIABLE: str(told)})
    with arena_folder() as folder, member(servers, plan, "put", folder, arena_bytes=1 << 22) as started:
        yield World(started, told, tgi_python)


def ask(slots: Slots, number: int) -> Request:
    return greedy(slots, number, "hello there", range(30, 40), 4)


@pytest.mark.parametrize("how", ["device", "host"])
async def test_a_prefill_without_memory_fails_alone(world: World, how: str) -> None:
    async with world.model() as (model, slots):
        expected = (await answers(model, [ask(slots, 1)]))[1]
        with world.failing(how), pytest.raises(GenerationFailed, match="Out of memory in this step"):
            await answers(model, [ask(slots, 2)])
        again = (await answers(model, [ask(slots, 3)]))[3]
        assert [step.token for step in again] == [step.token for step in expected]
    assert world.member.server.alive


async def test_a_decode_without_memory_fails_its_batch_alone(world: World) -> None:
    async with world.model() as (model, slots):
        _, running = await model.prefill(Batch(90_001, (ask(slots, 4),)))
        assert running is not None
        with world.failing("device"), pytest.raises(GenerationFailed, match="Out of memory in this step"):
            await model.decode([running])
        await model.clear_cache()
        assert len((await answers(model, [ask(slots, 5)]))[5]) == 4
    assert world.member.server.alive


async def test_with_prefix_caching_a_failed_prefill_asks_for_a_relaunch_or_ends_the_server(
    servers: Servers, tiny: Path, tgi_python: Path, tmp_path: Path
) -> None:
    """TGI's router puts the prompt into its trie although nothing was computed."""
    told = tmp_path / "fail"
    plan = ServerPlan(tiny, env={FAIL_VARIABLE: str(told), "PREFIX_CACHING": "1"})
    with arena_folder() as folder, member(servers, plan, "put", folder, arena_bytes=1 << 22) as started:
        async with warm(started.server, tgi_python) as model:
            slots = Slots(await model.info())
            await answers(model, [ask(slots, 1)])
            assert started.report.relaunch == ""
            with failing(told, "input"), pytest.raises(GenerationFailed):
                await answers(model, [ask(slots, 6)])
            assert started.server.alive
            assert "prefix caching" in started.report.relaunch
        await fails_and_ends(started.server, tgi_python, told, "device")


async def test_any_other_error_of_the_device_still_ends_the_server(
    servers: Servers, tiny: Path, tgi_python: Path, tmp_path: Path
) -> None:
    plan = ServerPlan(tiny, env={FAIL_VARIABLE: str(tmp_path / "fail")})
    with arena_folder() as folder, member(servers, plan, "put", folder, arena_bytes=1 << 22) as started:
        await fails_and_ends(started.server, tgi_python, tmp_path / "fail", "other")


async def test_stock_tgi_ends_when_it_has_no_memory(
    servers: Servers, tiny: Path, tgi_python: Path, tmp_path: Path
) -> None:
    """What the overlay is for."""
    plan = ServerPlan(tiny, env={FAIL_VARIABLE: str(tmp_path / "fail")})
    with servers.own(plan) as server:
        await fails_and_ends(server, tgi_python, tmp_path / "fail", "device")


async def fails_and_ends(server: Server, python: Path, told: Path, how: str) -> None:
    async with warm(server, python) as model:
        slots = Slots(await model.info())
        with failing(told, how), pytest.raises((GenerationFailed, ShardError)):
            await answers(model, [ask(slots, 7)])
        await asyncio.to_thread(server.processes[0].wait, END_LIMIT_S)
