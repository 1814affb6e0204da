"""What is put right after Redis was away, stood still or forgot, and after words that nobody heard."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from orchestrator.core.routing import decide
from orchestrator.core.ticket import Completion, Grant, Outcome, Relayed, Ticket
from orchestrator.errors import Unreachable
from orchestrator.queues import GatewayQueue, Timings, calls
from orchestrator.queues.conductor import Commit

from .conftest import QUICK

World = Any
Until = Any
Serve = Any

ONE = {"d0.1|kv": 160, "d0.1|slots": 1, "p0.1|bytes": 1000, "p0.1|records": 1}
IMPORTED = {"d0.1|kv": 160, "d0.1|slots": 1}
HASTY = Timings(
    heartbeat_s=0.05, lease_s=60, own_decision_s=60, deadline_s=0.5, block_s=0.05, leader_ttl_s=60, settle_s=0
)
"""Gives a Redis that stands still up after a second, and leaves decisions to the conductor."""
PATIENT = replace(HASTY, deadline_s=5.0)


@contextmanager
def standing_still(world: World) -> Iterator[None]:
    os.kill(world.server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(world.server.pid, signal.SIGCONT)


async def lost(queue: GatewayQueue, until: Until) -> None:
    await until(lambda: queue.degraded and "last shard table" in queue.degraded)


async def reserves(world: World, wanted: dict[str, int]) -> bool:
    return bool(await world.reserved() == wanted)


async def granted(world: World, queue: GatewayQueue, serve: Serve, conductor: Any) -> tuple[Ticket, Grant]:
    ticket = world.shards.ticket(queue)
    task = asyncio.create_task(queue.submit(ticket))
    while not task.done():
        await serve(conductor, world.shards.pair())
    return ticket, await task


# --- a gateway ----------------------------------------------------------------------------------


async def test_a_record_that_was_imported_while_redis_stood_still_frees_its_part_and_is_told_afterwards(
    world: World, serve: Serve, until: Until
) -> None:
    conductor = await world.leader(timings=PATIENT)
    queue = await world.gateway(timings=HASTY)
    ticket, _ = await granted(world, queue, serve, conductor)
    told = Relayed(ticket.handle, first_token_s=5.0, prefill_s=0.5, relay_s=0.25, prompt_tokens=100)
    with standing_still(world):
        await lost(queue, until)
        queue.relayed(told)
    await until(lambda: reserves(world, IMPORTED))
    assert (await conductor.read(block=True)).relayed == [told]
    await queue.complete(Completion(ticket.handle, Outcome.DONE))
    assert await world.held() == 0


async def test_a_record_whose_word_was_lost_on_the_way_frees_its_part_too(
    world: World, serve: Serve, until: Until
) -> None:
    conductor = await world.leader(timings=PATIENT)
    queue = await world.gateway(timings=HASTY)
    ticket, _ = await granted(world, queue, serve, conductor)
    unheard: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    unheard.set_exception(Unreachable("The connection broke twice."))
    send, queue._runner.send = queue._runner.send, lambda call: unheard
    queue.relayed(Relayed(ticket.handle))
    queue._runner.send = send
    await until(lambda: reserves(world, IMPORTED))
    await queue.complete(Completion(ticket.handle, Outcome.DONE))
    await until(world.clean)


async def test_what_a_gateway_decided_alone_replaces_a_lease_that_redis_made_of_a_lost_decision(
    world: World, until: Until
) -> None:
    """Redis reads the lost commit when it goes on: it knows the handle, on another shard than it runs on."""
    conductor = await world.leader(timings=PATIENT)
    queue = await world.gateway(timings=replace(HASTY, heartbeat_s=1.0))
    ticket = world.shards.ticket(queue)
    with standing_still(world):
        await queue.refresh()
        served = await queue.submit(ticket)
    stale = replace(served, kv_tokens=176, record_bytes=10)
    await conductor._runner.send(calls.restore(world.keys, queue.gateway, stale))
    await until(lambda: reserves(world, ONE))
    await queue.complete(Completion(ticket.handle, Outcome.DONE))
    await until(world.clean)


async def test_an_import_told_of_another_grant_than_redis_knows_leaves_nothing_behind(world: World) -> None:
    await world.leader()
    queue = await world.gateway()
    ticket = world.shards.ticket(queue)
    served = await queue.submit(ticket)
    stale = replace(served, decode=replace(served.decode, shard="d9"), kv_tokens=32)
    await queue._runner.send(calls.restore(world.keys, queue.gateway, stale))
    queue.relayed(Relayed(ticket.handle))
    await queue.complete(Completion(ticket.handle, Outcome.DONE))
    assert await world.held() == 0


async def test_a_gateway_that_was_reaped_and_then_dies_leaves_nothing_behind(
    world: World, until: Until
) -> None:
    """It was slow, not dead: what it asks for before its next heartbeat has to be found by the reaper."""
    conductor = await world.leader()
    await conductor.aclose()
    rarely = Timings(heartbeat_s=60, lease_s=60, own_decision_s=0.01, deadline_s=2, block_s=0.1, settle_s=0)
    slow = await world.gateway("slow", timings=rarely)
    other = await world.conductor("other")
    await world.redis.delete(world.keys.gateway(slow.gateway))
    await other.reap()
    assert await world.redis.scard(world.keys.gateways) == 0
    await slow.submit(world.shards.ticket(slow))
    assert await world.reserved() == ONE
    assert await other.reap() == 1
    assert await world.held() == 0


# --- Redis that stood still ---------------------------------------------------------------------


async def test_after_a_standstill_nobody_is_reaped_and_nothing_granted_before_gateways_have_told(
    world: World, until: Until
) -> None:
    """Their keys have run out while Redis stood still; they did not die."""
    settling = replace(QUICK, deadline_s=0.2, settle_s=1.0, leader_ttl_s=60.0)
    conductor = await world.leader(timings=settling)
    queue = await world.gateway(timings=replace(settling, heartbeat_s=60, lease_s=60, own_decision_s=60))
    await world.redis.set(world.keys.born, 1)
    ticket, task = world.shards.ticket(queue), None
    task = asyncio.create_task(queue.submit(ticket))
    await until(lambda: world.redis.xlen(world.keys.tickets))
    views = [one.view() for one in world.shards.pair()]
    commit = Commit(ticket, decide(ticket, views), views)
    assert await conductor.commit([commit]) == ["granted"]
    await task

    await world.redis.delete(world.keys.gateway(queue.gateway))
    await world.redis.set(world.keys.seen, int(time.time() * 1000) - 3000)  # nobody was heard for 3 s
    assert await conductor.reap() == 0
    assert await world.reserved() == ONE
    second = world.shards.ticket(queue)
    other = asyncio.create_task(queue.submit(second))
    await until(lambda: world.redis.xlen(world.keys.tickets))
    await world.redis.set(world.keys.gateway(queue.gateway), "1")
    assert await conductor.commit([Commit(second, decide(second, views), views)]) == ["settling"]
    await world.redis.delete(world.keys.gateway(queue.gateway))

    async def reaped() -> bool:
        return bool(await conductor.reap() == 2)

    await until(reaped)
    assert await world.held() == 0
    other.cancel()


# --- words that no conductor heard --------------------------------------------------------------


async def test_ends_that_a_deposed_conductor_was_told_reach_the_new_one(
    world: World, serve: Serve, until: Until
) -> None:
    old = await world.leader(timings=PATIENT)
    queue = await world.gateway(timings=HASTY)
    (first, _), (second, _) = [await granted(world, queue, serve, old) for _ in range(2)]
    queue.relayed(Relayed(first.handle))
    done = Completion(second.handle, Outcome.DONE)
    await queue.complete(done)
    heard = await old.read(block=True)
    assert (heard.relayed, heard.completions) == ([Relayed(first.handle)], [done])

    await world.redis.delete(world.keys.leader)
    heir = await world.conductor("heir", timings=PATIENT)
    assert await heir.lead()
    assert await heir.claim(everything=True) == {}
    heard = await heir.read(block=False)
    assert (heard.relayed, heard.completions) == ([Relayed(first.handle)], [done])
    await heir.books()  # acknowledges
    assert await heir.claim(everything=True) == {}
    heard = await heir.read(block=False)
    assert (heard.relayed, heard.completions) == ([], [])
    assert await world.redis.xlen(world.keys.completions) == 0


async def test_what_is_claimed_while_its_acknowledgement_is_due_is_not_told_twice(
    world: World, serve: Serve
) -> None:
    conductor = await world.leader(timings=PATIENT)
    queue = await world.gateway(timings=HASTY)
    ticket, _ = await granted(world, queue, serve, conductor)
    await queue.complete(Completion(ticket.handle, Outcome.DONE))
    assert len((await conductor.read(block=True)).completions) == 1
    await conductor.claim(everything=True)
    assert (await conductor.read(block=False)).completions == []
