"""A conductor decides tickets that come alone on the books of its last pass; Redis has the last word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from orchestrator.conductor import Conductor
from orchestrator.core.ticket import Choice, Completion, Grant, Leg, Outcome
from orchestrator.queues import GatewayQueue, calls

from .conftest import QUICK
from .fleet import PATIENT, Fleet, Until, World, knows, running

LONG = replace(QUICK, deadline_s=60.0, block_s=45.0, leader_ttl_s=60.0, heartbeat_s=60.0)
"""Without a ticket or an end, no pass in the time of a test: nothing but what is tested reads the books."""


@asynccontextmanager
async def one_slot(world: World, until: Until) -> AsyncIterator[tuple[Conductor, GatewayQueue]]:
    fleet = Fleet(world)
    fleet.told = {"slots": 1}
    async with running(world, fleet, timings=LONG) as conductor:
        await conductor.ready.wait()
        queue = await world.gateway(timings=replace(PATIENT, heartbeat_s=60.0, lease_s=60.0))
        await until(lambda: refreshed(queue))
        # The first ticket finds no books that stand; from then on they do.
        await served(world, queue)
        await until(lambda: conductor.snapshot().ended == {"done": 1})
        await until(world.clean)
        yield conductor, queue


async def refreshed(queue: GatewayQueue) -> bool:
    await queue.refresh()
    return knows(queue, p0="ready", d0="ready")()


async def served(world: World, queue: GatewayQueue) -> None:
    ticket = world.shards.ticket(queue)
    await queue.submit(ticket)
    await queue.complete(Completion(ticket.handle, Outcome.DONE))


async def test_room_that_went_behind_the_conductors_back_is_not_granted_twice(
    world: World, until: Until
) -> None:
    async with one_slot(world, until) as (conductor, queue), asyncio.timeout(20):
        leg = Leg("d0", 1, "http://d0/1")
        held = Grant("cd" * 16, Choice.MIXED, "other", leg, None, 160, 0, 60)
        await queue._runner.send(calls.restore(world.keys, "other.1", held))
        waits = asyncio.create_task(queue.submit(world.shards.ticket(queue)))
        await until(lambda: conductor.snapshot().waiting_tickets)
        await until(lambda: conductor.snapshot().reserved.slots)
        assert not waits.done()
        assert (await world.reserved())["d0.1|slots"] == 1
        ended = Completion(held.handle, Outcome.DONE)
        await queue._runner.send(calls.complete(world.keys, "other.1", ended))
        assert (await waits).decode.shard == "d0"


async def test_room_that_came_behind_the_conductors_back_is_found_at_once(world: World, until: Until) -> None:
    async with one_slot(world, until) as (conductor, queue), asyncio.timeout(20):
        await queue.submit(world.shards.ticket(queue))
        await until(lambda: conductor.snapshot().reserved.slots == 1)
        await world.redis.delete(world.keys.reserved)
        assert (await queue.submit(world.shards.ticket(queue))).decode.shard == "d0"


async def test_a_ticket_that_comes_alone_is_decided_without_reading_the_books_first(
    world: World, until: Until
) -> None:
    async with one_slot(world, until) as (_, queue):
        before = await _readings(world)
        await queue.submit(world.shards.ticket(queue))
        assert await _readings(world) == before + 1  # with the commit


async def _readings(world: World) -> int:
    """How often the books were read."""
    stats: dict[str, Any] = await world.redis.info("commandstats")
    return int(stats["cmdstat_hgetall"]["calls"])
