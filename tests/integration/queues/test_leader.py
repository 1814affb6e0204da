"""One leader at a time, and what a deposed one can no longer do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.decision import Mode, Refuse
from orchestrator.core.routing import decide
from orchestrator.core.ticket import Grant
from orchestrator.queues import Deposed, Timings
from orchestrator.queues.conductor import Commit

World = Any
Until = Any

PATIENT = Timings(heartbeat_s=60, lease_s=60, own_decision_s=60, deadline_s=2, block_s=0.1, settle_s=0)
"""Leaves everything to the conductor."""


async def test_of_two_conductors_one_leads_and_the_other_follows_when_it_resigns(world: World) -> None:
    first, second = [await world.conductor(name) for name in ("a", "b")]
    assert await first.lead()
    assert not await second.lead()
    assert await first.lead()  # renews the same term
    assert first.leader.endswith(":1")
    await first.aclose()
    assert await second.lead()
    assert second.leader.endswith(":2")


async def test_a_leader_that_falls_silent_is_replaced(world: World, until: Until) -> None:
    first, second = [await world.conductor(name) for name in ("a", "b")]
    assert await first.lead()
    await until(second.lead)
    assert not await first.lead()
    assert first.leader == ""


async def test_a_deposed_leader_can_change_nothing(world: World, until: Until) -> None:
    old = await world.leader()
    queue = await world.gateway(timings=PATIENT)
    ticket = world.shards.ticket(queue)
    task = asyncio.create_task(queue.submit(ticket))
    await until(lambda: world.redis.hexists(world.keys.queued(queue.gateway), ticket.handle))
    views = [one.view() for one in world.shards.pair()]
    grant = decide(ticket, views)
    assert isinstance(grant, Grant)

    await world.redis.delete(world.keys.leader)  # its time ran out
    new = await world.conductor("new")
    assert await new.lead()
    with pytest.raises(Deposed):
        await old.commit([Commit(ticket, grant, views)])
    with pytest.raises(Deposed):
        await old.refuse(ticket, Refuse("too_large", "No."))
    with pytest.raises(Deposed):
        await old.publish([])
    with pytest.raises(Deposed):
        await old.retire("d0", 1)
    assert await world.reserved() == {}
    assert await world.redis.scard(world.keys.shards) == 2
    assert await new.commit([Commit(ticket, grant, views)]) == ["granted"]
    await task


async def test_a_conductor_that_knows_it_does_not_lead_never_commits_as_if_it_were_a_gateway(
    world: World, until: Until
) -> None:
    await world.leader()
    queue = await world.gateway(timings=PATIENT)
    ticket = world.shards.ticket(queue)
    task = asyncio.create_task(queue.submit(ticket))
    await until(lambda: world.redis.hexists(world.keys.queued(queue.gateway), ticket.handle))
    standby = await world.conductor("standby")
    assert not await standby.lead()
    views = [one.view() for one in world.shards.pair()]
    grant = decide(ticket, views)
    assert isinstance(grant, Grant)
    with pytest.raises(Deposed):
        await standby.commit([Commit(ticket, grant, views)])
    assert await world.reserved() == {}
    task.cancel()


async def test_the_fence_of_a_redis_that_forgot_its_count_does_not_let_the_old_leader_in(
    world: World, until: Until
) -> None:
    old = await world.leader()
    assert old.leader.endswith(":1")
    await world.redis.delete(world.keys.leader, world.keys.fence)
    new = await world.conductor("new")
    assert await new.lead()
    assert new.leader.endswith(":1")
    with pytest.raises(Deposed):
        await old.publish([])


async def test_tickets_that_a_dead_conductor_had_taken_are_claimed(world: World, until: Until) -> None:
    dead = await world.leader()
    queue = await world.gateway(timings=PATIENT)
    tickets = [world.shards.ticket(queue) for _ in range(3)]
    tasks = [asyncio.create_task(queue.submit(ticket)) for ticket in tickets]
    await until(lambda: _count(world, 3))
    taken = (await dead.read(block=True)).tickets
    assert list(taken.values()) == tickets
    assert await dead.claim(everything=True) == taken  # also what a lost answer had delivered to itself

    await world.redis.delete(world.keys.leader)
    heir = await world.conductor("heir")
    assert await heir.lead()
    assert (await heir.read(block=False)).tickets == {}
    assert await heir.claim(everything=True) == taken
    assert await heir.claim(everything=False) == {}  # all of it is its own now
    for task in tasks:
        task.cancel()


async def test_tickets_that_a_deposed_conductor_reads_late_are_found_too(world: World, until: Until) -> None:
    old = await world.leader()
    await world.redis.delete(world.keys.leader)
    heir = await world.conductor("heir")
    assert await heir.lead()
    assert await heir.claim(everything=True) == {}
    queue = await world.gateway(timings=PATIENT)
    ticket = world.shards.ticket(queue)
    task = asyncio.create_task(queue.submit(ticket))
    await until(lambda: _count(world, 1))
    assert list((await old.read(block=True)).tickets.values()) == [ticket]
    assert list((await heir.claim(everything=False)).values()) == [ticket]
    task.cancel()


async def _count(world: World, wanted: int) -> bool:
    return int(await world.redis.xlen(world.keys.tickets)) == wanted


async def test_the_mode_reaches_gateways_and_caps_their_grants(world: World, until: Until) -> None:
    conductor = await world.leader()
    queue = await world.gateway()
    await conductor.set_mode(Mode(level=2, output_cap=12))
    await until(lambda: queue.mode == Mode(2, 12))
    grant = await queue.submit(world.shards.ticket(queue))  # nobody schedules: its own decision
    assert grant.max_new_tokens == 12


async def test_the_registry_is_what_the_leader_last_published(world: World) -> None:
    pair = world.shards.pair()
    conductor = await world.leader(*pair)
    queue = await world.gateway(timings=PATIENT)
    assert [(v.shard, v.state, v.epoch) for v in queue.shards()] == [("d0", "ready", 1), ("p0", "ready", 1)]
    from orchestrator.core.shard import ShardState, Watched

    await conductor.publish([replace(pair[0], state=ShardState.SUSPECT), Watched("new", pair[1].role)])
    await queue.refresh()
    # One that never answered has nothing to show yet; one that is not named is gone.
    assert [(v.shard, v.state) for v in queue.shards()] == [("p0", "suspect")]
