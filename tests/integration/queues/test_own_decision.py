"""Gateways that decide for themselves: without an answer, without a conductor, without Redis."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.ticket import Completion, Outcome
from orchestrator.errors import Overloaded, Unavailable, Unreachable
from orchestrator.queues import GatewayQueue, Timings

World = Any
Until = Any

ONE = {"d0.1|kv": 160, "d0.1|slots": 1, "p0.1|bytes": 1000, "p0.1|records": 1}


async def test_without_a_conductor_a_gateway_serves_and_says_so(world: World) -> None:
    conductor = await world.leader()
    await conductor.aclose()
    queue = await world.gateway()
    assert queue.degraded is not None
    assert "No conductor" in queue.degraded
    ticket = world.shards.ticket(queue)
    grant = await queue.submit(ticket)
    assert grant.prefill is not None
    assert (grant.prefill.shard, grant.decode.shard) == ("p0", "d0")
    assert await world.reserved() == ONE
    assert await world.redis.xlen(world.keys.tickets) == 0
    await queue.complete(Completion(ticket.handle, Outcome.DONE))
    assert await world.held() == 0


@pytest.mark.parametrize("gone", ["conductor", "redis"])
async def test_where_nobody_else_decides_room_that_an_end_frees_is_taken_at_once(
    world: World, until: Until, gone: str
) -> None:
    conductor = await world.leader(*world.shards.pair(slots=1))
    if gone == "conductor":
        await conductor.aclose()
    rarely = Timings(heartbeat_s=60, lease_s=90, own_decision_s=60, deadline_s=2, block_s=0.1, settle_s=0)
    queue = await world.gateway(timings=rarely)
    if gone == "redis":
        await world.stop_redis()
        await queue.refresh()
    tickets = [world.shards.ticket(queue) for _ in range(2)]
    await queue.submit(tickets[0])
    second = asyncio.create_task(queue.submit(tickets[1]))
    await until(lambda: queue._timed)
    queue.complete(Completion(tickets[0].handle, Outcome.DONE))
    async with asyncio.timeout(10):
        assert (await second).handle == tickets[1].handle


async def test_the_table_outlives_the_registry_while_nobody_leads(world: World, until: Until) -> None:
    conductor = await world.leader()
    queue = await world.gateway()
    await conductor.aclose()
    await world.redis.delete(world.keys.shards, world.keys.shard("p0"), world.keys.shard("d0"))
    await until(lambda: queue.degraded)
    await queue.refresh()
    await queue.submit(world.shards.ticket(queue))
    assert await world.reserved() == ONE


async def test_a_conductor_that_leads_but_does_not_answer_is_helped_in_the_order_of_the_queue(
    world: World, until: Until
) -> None:
    """Two gateways, room for one request, a leader that is stuck: the older ticket goes first."""
    await world.leader(*world.shards.pair(slots=1))
    never = Timings(heartbeat_s=0.05, lease_s=9, own_decision_s=60, deadline_s=2, block_s=0.1, settle_s=0)
    older, younger = await world.gateway("older", timings=never), await world.gateway("younger")
    first = world.shards.ticket(older)
    waits = asyncio.create_task(older.submit(first))
    await until(lambda: world.redis.xlen(world.keys.tickets))
    second = world.shards.ticket(younger)
    hurries = asyncio.create_task(younger.submit(second))
    await until(lambda: _tries(world, 3))  # own decisions of the younger one, all in vain
    assert await world.reserved() == {}
    await older.cancel(first.handle)
    with pytest.raises(Unavailable):
        await waits
    assert (await hurries).handle == second.handle


async def test_beside_a_stuck_conductor_room_that_an_end_frees_is_taken_at_once(
    world: World, until: Until
) -> None:
    await world.leader(*world.shards.pair(slots=1))
    rarely = Timings(heartbeat_s=60, lease_s=90, own_decision_s=30, deadline_s=2, block_s=0.1, settle_s=0)
    queue = await world.gateway(timings=rarely)
    tickets = [world.shards.ticket(queue) for _ in range(2)]
    first, second = [asyncio.create_task(queue.submit(ticket)) for ticket in tickets]
    await until(lambda: _queued(world, 2))
    for ticket in tickets:
        queue._requests.get(ticket.handle).since_s -= 60.0  # waits for as long as that
    queue._wake.set()
    await first
    await until(lambda: queue._timed)
    assert not second.done()
    queue.complete(Completion(tickets[0].handle, Outcome.DONE))
    async with asyncio.timeout(10):
        assert (await second).handle == tickets[1].handle


async def _queued(world: World, count: int) -> bool:
    return bool(await world.redis.xlen(world.keys.tickets) == count)


async def _tries(world: World, more: int) -> bool:
    """Own decisions that looked for the head of the queue."""
    stats = await world.redis.info("commandstats")
    return int(stats.get("cmdstat_xrange", {"calls": 0})["calls"]) >= more


async def test_a_grant_that_comes_twice_is_taken_once(world: World, until: Until) -> None:
    """The conductor commits while the gateway decides for itself: one lease, one grant."""
    from orchestrator.core.routing import decide
    from orchestrator.queues.conductor import Commit

    conductor = await world.leader()
    queue = await world.gateway()
    views = [one.view() for one in world.shards.pair()]
    for _ in range(4):
        ticket = world.shards.ticket(queue)
        task = asyncio.create_task(queue.submit(ticket))
        commit = Commit(ticket, decide(ticket, views), views)
        results = [(await conductor.commit([commit]))[0] for _ in range(20)]
        grant = await task
        assert set(results) <= {"gone", "granted", "duplicate"}
        assert grant.handle == ticket.handle
    assert {name: amount / 4 for name, amount in (await world.reserved()).items()} == ONE


async def test_the_lease_is_for_the_grant_that_is_served(world: World, until: Until) -> None:
    """Decided here while Redis was away, and by a conductor from the ticket that survived."""
    from orchestrator.core.ticket import Leg
    from orchestrator.queues import calls, wire

    conductor = await world.leader()
    queue = await world.gateway()
    ticket = world.shards.ticket(queue)
    served = await queue.submit(ticket)
    other = replace(served, decode=Leg("d9", 1, "http://d9"), kv_tokens=176)
    await conductor._runner.send(calls.restore(world.keys, queue.gateway, other))
    assert (await world.reserved())["d9.1|kv"] == 176
    await world.redis.xadd(world.keys.grants(queue.gateway), {"b": wire.encode(other)})
    await until(lambda: _reserves_one(world))
    await queue.complete(Completion(ticket.handle, Outcome.DONE))
    assert await world.held() == 0


async def _reserves_one(world: World) -> bool:
    return bool(await world.reserved() == ONE)


# --- without Redis ------------------------------------------------------------------------------


async def test_redis_gone_half_of_the_capacity_is_served_and_said(world: World, until: Until) -> None:
    await world.leader()
    queue: GatewayQueue = await world.gateway()
    assert queue.degraded is None
    await world.stop_redis()
    tickets = [world.shards.ticket(queue) for _ in range(3)]
    tasks = [asyncio.create_task(queue.submit(ticket)) for ticket in tickets]
    # Four slots: two of them now.
    first, second = await asyncio.gather(*tasks[:2])
    assert (first.decode.shard, second.decode.shard) == ("d0", "d0")
    assert queue.degraded is not None
    assert "last shard table" in queue.degraded
    assert queue.waiting == 1
    assert not tasks[2].done()
    await queue.complete(Completion(tickets[0].handle, Outcome.DONE))
    assert (await tasks[2]).handle == tickets[2].handle


async def test_redis_gone_and_back_the_books_are_right_again(world: World, until: Until) -> None:
    await world.leader()
    queue = await world.gateway()
    before = world.shards.ticket(queue)
    await queue.submit(before)
    await world.stop_redis()
    during, ended = world.shards.ticket(queue), world.shards.ticket(queue)
    await queue.submit(during)
    await queue.complete(Completion(before.handle, Outcome.DONE))
    await queue.submit(ended)
    await queue.complete(Completion(ended.handle, Outcome.DONE))
    await world.start_redis()
    await until(lambda: queue.degraded is None or "conductor" in queue.degraded)
    assert await world.reserved() == ONE  # only `during` is still open
    await queue.complete(Completion(during.handle, Outcome.DONE))
    assert await world.held() == 0
    after = world.shards.ticket(queue)
    await queue.submit(after)
    assert await world.reserved() == ONE


async def test_redis_gone_the_bounds_and_refusals_stay(world: World) -> None:
    await world.leader(*world.shards.pair(slots=2))
    queue = await world.gateway(queue_size=1)
    await world.stop_redis()
    await queue.submit(world.shards.ticket(queue))
    waiting = asyncio.create_task(queue.submit(world.shards.ticket(queue)))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="full"):
        await queue.submit(world.shards.ticket(queue))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    with pytest.raises(Overloaded, match="deadline"):
        await queue.submit(world.shards.ticket(queue, deadline_s=0.05))
    with pytest.raises(Unavailable, match="1600"):
        await queue.submit(world.shards.ticket(queue, prompt_tokens=1600))


async def test_a_request_over_half_of_every_shard_waits_for_redis_without_holding_up_others(
    world: World, until: Until
) -> None:
    await world.leader()
    queue = await world.gateway()
    await world.stop_redis()
    large = asyncio.create_task(queue.submit(world.shards.ticket(queue, prompt_tokens=900)))
    small = await queue.submit(world.shards.ticket(queue))
    assert small.decode.shard == "d0"
    assert not large.done()
    await world.start_redis()
    assert (await large).kv_tokens == 960


async def test_a_redis_that_hangs_is_given_up_within_two_deadlines(world: World, until: Until) -> None:
    await world.leader()
    hasty = Timings(heartbeat_s=0.05, lease_s=60, own_decision_s=0.05, deadline_s=0.2, block_s=0.05)
    queue = await world.gateway(timings=hasty)
    os.kill(world.server.pid, signal.SIGSTOP)
    try:
        grant = await queue.submit(world.shards.ticket(queue))
        assert queue.degraded is not None
        assert "does not answer" in queue.degraded
    finally:
        os.kill(world.server.pid, signal.SIGCONT)
    await until(lambda: queue.degraded is None)
    await queue.complete(Completion(grant.handle, Outcome.DONE))
    await until(world.clean)


async def test_scripts_that_redis_forgot_are_loaded_again(world: World) -> None:
    conductor = await world.leader()
    await conductor.aclose()
    queue = await world.gateway()
    await world.redis.script_flush()
    await queue.submit(world.shards.ticket(queue))
    assert await world.reserved() == ONE


async def test_a_gateway_does_not_start_without_redis(world: World) -> None:
    await world.stop_redis()
    with pytest.raises(Unreachable, match="Redis does not answer"):
        await world.gateway()
    with pytest.raises(Unreachable, match="Redis does not answer"):
        await world.conductor()


async def test_closing_while_redis_is_gone_is_quick_and_quiet(world: World) -> None:
    await world.leader()
    queue = await world.gateway()
    await world.stop_redis()
    await queue.submit(world.shards.ticket(queue))
    async with asyncio.timeout(5):
        await queue.aclose()


# --- many at once -------------------------------------------------------------------------------


async def test_200_requests_over_4_gateways_without_a_conductor_conserve_everything(world: World) -> None:
    conductor = await world.leader()
    await conductor.aclose()
    gateways = [await world.gateway(f"g{n}") for n in range(4)]
    served: list[str] = []
    most = 0

    async def request(queue: GatewayQueue) -> None:
        nonlocal most
        ticket = world.shards.ticket(queue)
        grant = await queue.submit(ticket)
        assert grant.handle == ticket.handle
        most = max(most, (await world.reserved())["d0.1|slots"])
        await queue.complete(Completion(ticket.handle, Outcome.DONE))
        served.append(ticket.handle)

    await asyncio.gather(*(request(gateways[n % 4]) for n in range(200)))
    assert len(set(served)) == 200
    assert 1 <= most <= 4
    assert await world.held() == 0
