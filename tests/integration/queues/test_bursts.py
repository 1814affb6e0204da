"""Thousands of tickets at once over 64 shards, with a conductor that dies on a part of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from orchestrator.conductor import Conductor
from orchestrator.core.ticket import Completion, Outcome
from orchestrator.queues import GatewayQueue, Timings
from tgi_patches.contract import Role, ShardSpec

from .fleet import PACE, RULES, Fleet

World = Any
Until = Any

TICKETS = 5000
SHARDS = 32
"""Of each role."""
TIMINGS = Timings(
    heartbeat_s=0.5, lease_s=60, own_decision_s=90, deadline_s=20, block_s=0.1, leader_ttl_s=0.6, settle_s=0
)
"""Everything is left to the conductors."""
SPECS = [
    ShardSpec("test", f"{letter}{number}", role, "model", "m")
    for letter, role in (("p", Role.PREFILL), ("d", Role.DECODE))
    for number in range(SHARDS)
]


@asynccontextmanager
async def conducting(world: World, fleet: Fleet, name: str) -> AsyncIterator[Conductor]:
    queue = await world.conductor(name, timings=TIMINGS)
    conductor = Conductor(queue, fleet.launcher, SPECS, fleet.probe, rules=RULES, pace=PACE)
    task = asyncio.create_task(conductor.run())
    try:
        yield conductor
    finally:
        conductor.stop()
        await asyncio.wait_for(task, 30)
        await queue.aclose()


async def test_5000_tickets_of_3_gateways_are_granted_once_each_also_those_a_dead_conductor_had_taken(
    world: World, until: Until
) -> None:
    fleet = Fleet(world)
    dead = await world.conductor("dead", timings=replace(TIMINGS, leader_ttl_s=60))
    assert await dead.lead()
    watched = [world.shards.ready(spec.shard, spec.role) for spec in SPECS]
    await dead.publish(watched)
    gateways = [await world.gateway(f"g{n}", timings=TIMINGS, queue_size=TICKETS) for n in range(3)]
    over: list[str] = []

    async def request(queue: GatewayQueue, number: int) -> None:
        ticket = world.shards.ticket(
            queue, prompt_tokens=1 + number % 90, prompt_hash=str(number), deadline_s=100.0
        )
        grant = await queue.submit(ticket)
        assert grant.handle == ticket.handle
        over.append(grant.handle)
        await queue.complete(Completion(ticket.handle, Outcome.DONE))

    async with AsyncExitStack() as stack, asyncio.timeout(100):
        tasks = [asyncio.create_task(request(gateways[n % 3], n)) for n in range(TICKETS)]

        async def all_wait() -> bool:
            return bool(await world.redis.xlen(world.keys.tickets) == TICKETS)

        await until(all_wait)
        taken = [len((await dead.read(block=False)).tickets) for _ in range(3)]
        assert sum(taken) > 1000
        await world.redis.delete(world.keys.leader)  # it is dead
        both = [await stack.enter_async_context(conducting(world, fleet, name)) for name in ("a", "b")]
        await asyncio.gather(*tasks)
        assert len(over) == len(set(over)) == TICKETS
        answers: Counter[str] = Counter()
        for queue in gateways:
            entries = await world.redis.xrange(world.keys.grants(queue.gateway))
            answers.update(queue.gateway for _ in entries)
        assert answers.total() == TICKETS  # one answer each, and nobody helped itself
        await until(world.clean)
        assert (await world.redis.xpending(world.keys.tickets, "conductors"))["pending"] == 0
        # On a machine that stalls, the second may lead by now; what the first knew then is of no account.
        await until(lambda: [c.snapshot().waiting_tickets for c in both if c.snapshot().leader] == [0])
