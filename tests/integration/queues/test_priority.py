"""Which of several waiting requests is served first, with a conductor and without one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from orchestrator.core.pending import Pending
from orchestrator.core.ticket import Completion, Outcome
from orchestrator.queues import GatewayQueue, Timings

World = Any
Until = Any

PATIENT = Timings(heartbeat_s=0.05, lease_s=9, own_decision_s=60, deadline_s=2, block_s=0.1, settle_s=0)
HURRIED = Timings(heartbeat_s=0.05, lease_s=9, own_decision_s=0.01, deadline_s=2, block_s=0.1, settle_s=0)


async def _waiting(
    world: World, until: Until, queue: GatewayQueue, priorities: Sequence[int]
) -> dict[int, asyncio.Task[Any]]:
    """One request of each priority, which came in this order and have no room yet."""
    tasks = {}
    for count, priority in enumerate(priorities, 1):
        ticket = world.shards.ticket(queue, priority=priority)
        tasks[priority] = asyncio.create_task(queue.submit(ticket))
        await until(lambda count=count: _queued(world, count))
    return tasks


async def _queued(world: World, count: int) -> bool:
    return int(await world.redis.xlen(world.keys.tickets)) == count


async def test_a_conductor_reads_the_priority_of_each_ticket_and_orders_them(
    world: World, until: Until
) -> None:
    conductor = await world.leader()
    queue = await world.gateway(timings=PATIENT)
    tasks = await _waiting(world, until, queue, [-1, 0, 1])
    pending = Pending()
    pending.add((await conductor.read(block=True)).tickets)
    assert [ticket.priority for ticket in pending] == [1, 0, -1]
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


async def test_without_a_conductor_a_gateway_serves_the_higher_class_first(
    world: World, until: Until
) -> None:
    conductor = await world.leader(*world.shards.pair(slots=1))
    queue = await world.gateway(timings=HURRIED)
    first = world.shards.ticket(queue)
    await queue.submit(first)
    await conductor.aclose()
    await until(lambda: queue.degraded)
    tasks = await _waiting(world, until, queue, [-1, 0, 1])
    granted = (await _next(queue, tasks, first.handle)).handle
    assert tasks[1].done()
    granted = (await _next(queue, tasks, granted)).handle
    assert tasks[0].done()
    await _next(queue, tasks, granted)


async def _next(queue: GatewayQueue, tasks: dict[int, asyncio.Task[Any]], ended: str) -> Any:
    """The one grant that the end of a request makes room for."""
    open_ones = [task for task in tasks.values() if not task.done()]
    await queue.complete(Completion(ended, Outcome.DONE))
    done, rest = await asyncio.wait(open_ones, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert len(rest) == len(open_ones) - 1
    return done.pop().result()


async def test_a_conductor_that_does_not_answer_is_helped_with_the_oldest_ticket_whatever_its_class(
    world: World, until: Until
) -> None:
    """Only that one may a gateway decide: were the high one tried in its place, nobody would be served."""
    await world.leader(*world.shards.pair(slots=1))
    queue = await world.gateway(timings=HURRIED)
    first = world.shards.ticket(queue)
    await queue.submit(first)
    tasks = await _waiting(world, until, queue, [0, 1])
    granted = await _next(queue, tasks, first.handle)
    assert tasks[0].done()
    await _next(queue, tasks, granted.handle)
    assert tasks[1].done()
