"""Who holds a reservation, and how it comes back when its holder dies or Redis forgets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.ticket import Completion, Outcome
from orchestrator.errors import Unavailable
from orchestrator.queues import Timings

World = Any
Until = Any

ONE = {"d0.1|kv": 160, "d0.1|slots": 1, "p0.1|bytes": 1000, "p0.1|records": 1}
TWO = {name: 2 * amount for name, amount in ONE.items()}


async def silence(queue: Any) -> None:
    """The gateway dies as by SIGKILL: it says nothing more."""
    queue._task.cancel()
    await asyncio.gather(queue._task, return_exceptions=True)


async def test_what_a_dead_gateway_held_comes_back_after_its_lease(world: World, until: Until) -> None:
    conductor = await world.leader()
    dead, alive = [await world.gateway(name) for name in ("dead", "alive")]
    await dead.submit(world.shards.ticket(dead))
    await alive.submit(world.shards.ticket(alive))
    await silence(dead)
    assert await conductor.reap() == 0  # its lease still runs
    assert await world.reserved() == TWO
    await until(lambda: _reaped(conductor))
    assert await world.reserved() == ONE
    assert await world.redis.smembers(world.keys.gateways) == {alive.gateway}
    ended = [c for c in (await conductor.read(block=True)).completions if c.outcome is Outcome.CANCELLED]
    assert len(ended) == 1


async def _reaped(conductor: Any) -> bool:
    return bool(await conductor.reap())


async def test_tickets_of_a_dead_gateway_leave_the_queue(world: World, until: Until) -> None:
    conductor = await world.leader()
    patient = Timings(heartbeat_s=60, lease_s=0.3, own_decision_s=60, deadline_s=2, block_s=0.1, settle_s=0)
    queue = await world.gateway(timings=patient)
    task = asyncio.create_task(queue.submit(world.shards.ticket(queue)))
    await until(lambda: world.redis.xlen(world.keys.tickets))
    await until(lambda: _reaped(conductor))
    assert await world.held() == 0
    task.cancel()


async def test_without_a_conductor_the_other_gateways_reap(world: World, until: Until) -> None:
    conductor = await world.leader()
    dead = await world.gateway("dead")
    await dead.submit(world.shards.ticket(dead))
    await conductor.aclose()
    await world.gateway("alive")
    await silence(dead)
    await until(world.clean)


async def test_a_grant_for_a_gateway_that_fell_silent_waits_for_the_reaper(
    world: World, until: Until
) -> None:
    from orchestrator.core.routing import decide
    from orchestrator.queues.conductor import Commit

    conductor = await world.leader()
    patient = Timings(heartbeat_s=60, lease_s=60, own_decision_s=60, deadline_s=2, block_s=0.1, settle_s=0)
    queue = await world.gateway(timings=patient)
    ticket = world.shards.ticket(queue)
    task = asyncio.create_task(queue.submit(ticket))
    await until(lambda: world.redis.hexists(world.keys.queued(queue.gateway), ticket.handle))
    await world.redis.delete(world.keys.gateway(queue.gateway))
    views = [one.view() for one in world.shards.pair()]
    commit = Commit(ticket, decide(ticket, views), views)
    assert await conductor.commit([commit]) == ["silent"]
    assert await world.reserved() == {}
    task.cancel()


async def test_a_gateway_that_was_only_slow_tells_what_it_holds_again(world: World, until: Until) -> None:
    conductor = await world.leader()
    queue = await world.gateway()
    ticket = world.shards.ticket(queue)
    await queue.submit(ticket)
    await world.redis.delete(world.keys.gateway(queue.gateway))
    while not await conductor.reap():
        await world.redis.delete(world.keys.gateway(queue.gateway))
    await until(lambda: _reserves(world, ONE))
    await queue.complete(Completion(ticket.handle, Outcome.DONE))
    assert await world.held() == 0


async def _reserves(world: World, wanted: dict[str, int]) -> bool:
    return bool(await world.reserved() == wanted)


async def test_a_lease_that_its_gateway_does_not_know_is_freed_by_the_heartbeat(
    world: World, until: Until
) -> None:
    await world.leader()
    queue = await world.gateway()
    ticket = world.shards.ticket(queue)
    await queue.submit(ticket)
    queue._requests.forget(ticket.handle)  # its completion was lost
    await until(world.clean)


async def test_after_redis_restarted_empty_reservations_are_what_gateways_hold(
    world: World, until: Until
) -> None:
    await world.leader()
    gateways = [await world.gateway(name) for name in ("g1", "g2")]
    held = [(queue, world.shards.ticket(queue)) for queue in gateways]
    for queue, ticket in held:
        await queue.submit(ticket)
    await world.restart_redis()
    await until(lambda: _reserves(world, TWO))
    await until(lambda: all(queue.degraded and "conductor" in queue.degraded for queue in gateways))
    for queue, ticket in held:
        await queue.complete(Completion(ticket.handle, Outcome.DONE))
    assert await world.held() == 0


async def test_a_queued_ticket_survives_a_redis_that_forgot_it(world: World, until: Until) -> None:
    patient = Timings(
        heartbeat_s=0.05, lease_s=5, own_decision_s=60, deadline_s=2, block_s=0.1, settle_s=0, leader_ttl_s=60
    )
    conductor = await world.leader()
    queue = await world.gateway(timings=patient)
    ticket = world.shards.ticket(queue)
    task = asyncio.create_task(queue.submit(ticket))
    await until(lambda: world.redis.hexists(world.keys.queued(queue.gateway), ticket.handle))
    await world.redis.delete(world.keys.tickets, world.keys.queued(queue.gateway))
    await until(lambda: world.redis.xlen(world.keys.tickets))
    assert list((await conductor.read(block=True)).tickets.values()) == [ticket]
    task.cancel()


async def test_a_redis_that_came_up_empty_grants_nothing_until_gateways_have_told(
    world: World, until: Until
) -> None:
    from orchestrator.core.routing import decide
    from orchestrator.queues.conductor import Commit

    timings = Timings(heartbeat_s=0.05, own_decision_s=60, deadline_s=2, block_s=0.1, settle_s=0.5)
    conductor = await world.leader(timings=timings)
    queue = await world.gateway(timings=timings)
    ticket = world.shards.ticket(queue)
    task = asyncio.create_task(queue.submit(ticket))
    await until(lambda: world.redis.hexists(world.keys.queued(queue.gateway), ticket.handle))
    views = [one.view() for one in world.shards.pair()]
    commit = Commit(ticket, decide(ticket, views), views)
    await world.redis.delete(world.keys.born)
    assert await conductor.commit([commit]) == ["settling"]
    assert await world.reserved() == {}

    async def granted() -> bool:
        return bool(await conductor.commit([commit]) == ["granted"])

    await until(granted)
    await task


async def test_reservations_on_a_dead_incarnation_vanish_and_their_leases_free_nothing_else(
    world: World, until: Until
) -> None:
    conductor = await world.leader()
    queue = await world.gateway()
    first, second = [world.shards.ticket(queue) for _ in range(2)]
    await queue.submit(first)
    from tgi_patches.contract import Role

    reborn = [world.shards.ready("p0", Role.PREFILL), world.shards.ready("d0", Role.DECODE, epoch=2)]
    await conductor.publish(reborn)
    await conductor.retire("d0", 1)
    assert await world.reserved() == {"p0.1|bytes": 1000, "p0.1|records": 1}
    await queue.submit(second)
    await queue.complete(Completion(first.handle, Outcome.FAILED))
    assert await world.reserved() == {"d0.2|kv": 160, "d0.2|slots": 1, "p0.1|bytes": 1000, "p0.1|records": 1}
    await queue.complete(Completion(second.handle, Outcome.DONE))
    assert await world.held() == 0


async def test_a_gateway_that_closes_gives_everything_back_and_tells_who_waits(
    world: World, until: Until
) -> None:
    await world.leader(*world.shards.pair(slots=1))
    queue = await world.gateway()
    await queue.submit(world.shards.ticket(queue))
    ticket = world.shards.ticket(queue)
    waiter = asyncio.create_task(queue.submit(ticket))
    await until(lambda: world.redis.hexists(world.keys.queued(queue.gateway), ticket.handle))
    too_late = asyncio.create_task(queue.submit(world.shards.ticket(queue)))  # starts while it closes
    await queue.aclose()
    for task in (waiter, too_late):
        with pytest.raises(Unavailable, match="shutting down"):
            await task
    assert await world.held() == 0
    with pytest.raises(Unavailable, match="shutting down"):
        await queue.submit(world.shards.ticket(queue))


async def test_two_incarnations_of_one_gateway_do_not_share_leases(world: World) -> None:
    await world.leader()
    first, second = [await world.gateway("same") for _ in range(2)]
    assert first.gateway != second.gateway
    await first.submit(world.shards.ticket(first))
    await second.submit(replace(world.shards.ticket(second)))
    await first.aclose()
    assert await world.reserved() == ONE
