"""What the commit and the completion promise, on a real Redis."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.routing import decide
from orchestrator.core.shard import ShardState
from orchestrator.core.ticket import Completion, Grant, Outcome, ShardView, Ticket
from orchestrator.errors import ConfigError, Overloaded, Unavailable
from orchestrator.queues import ConductorQueue, GatewayQueue, calls
from orchestrator.queues.conductor import Commit
from orchestrator.queues.scripts import Keys

World = Any
Until = Any
Serve = Any

ONE = {"d0.1|kv": 160, "d0.1|slots": 1, "p0.1|bytes": 1000, "p0.1|records": 1}
"""100 prompt tokens and 60 new ones at 10 bytes a token, on the pair."""


async def commit(conductor: ConductorQueue, ticket: Ticket, views: list[ShardView]) -> str:
    grant = decide(ticket, views)
    assert isinstance(grant, Grant)
    (result,) = await conductor.commit([Commit(ticket, grant, views)])
    return result


def views_of(world: World, **changes: Any) -> list[ShardView]:
    return [one.view() for one in world.shards.pair(**changes)]


async def submitted(world: World, queue: GatewayQueue, until: Until) -> tuple[Ticket, asyncio.Task[Grant]]:
    """A ticket that stands in Redis, undecided."""
    ticket = world.shards.ticket(queue)
    task = asyncio.create_task(queue.submit(ticket))
    await until(lambda: world.redis.hexists(world.keys.queued(queue.gateway), ticket.handle))
    return ticket, task


SLOW: dict[str, float] = {"own_decision_s": 60.0, "heartbeat_s": 60.0, "lease_s": 60.0}
"""A gateway that leaves everything to the conductor."""


@pytest.fixture
async def slow(world: World) -> Any:
    from orchestrator.queues import Timings

    return Timings(deadline_s=2.0, block_s=0.1, settle_s=0.0, **SLOW)


async def test_a_ticket_becomes_a_grant_and_a_completion_frees_it(
    world: World, serve: Serve, slow: Any, until: Until
) -> None:
    conductor = await world.leader()
    queue = await world.gateway(timings=slow)
    ticket, task = await submitted(world, queue, until)
    assert await serve(conductor, world.shards.pair()) == ["granted"]
    grant = await task
    assert grant.handle == ticket.handle
    assert grant.prefill is not None
    assert (grant.prefill.shard, grant.decode.shard) == ("p0", "d0")
    assert await world.reserved() == ONE
    assert await world.redis.xlen(world.keys.tickets) == 0
    assert (await world.redis.xpending(world.keys.tickets, "conductors"))["pending"] == 0
    await queue.refresh()
    assert {v.shard: v.reserved_kv_tokens + v.outstanding_bytes for v in queue.shards()} == {
        "d0": 160,
        "p0": 1000,
    }
    done = Completion(ticket.handle, Outcome.DONE, {"prefill": 0.5}, 100, 3, imported=True)
    await queue.complete(done)
    assert await world.held() == 0
    assert (await conductor.read(block=True)).completions == [done]


async def test_a_commit_is_idempotent_by_handle(world: World, slow: Any, until: Until) -> None:
    conductor = await world.leader()
    queue = await world.gateway(timings=slow)
    ticket, task = await submitted(world, queue, until)
    views = views_of(world)
    assert [await commit(conductor, ticket, views) for _ in range(3)] == ["granted", "duplicate", "duplicate"]
    assert await world.reserved() == ONE
    assert await world.redis.xlen(world.keys.grants(queue.gateway)) == 1
    await task


async def test_a_completion_frees_exactly_once(world: World, slow: Any, until: Until) -> None:
    conductor = await world.leader()
    queue = await world.gateway(timings=slow)
    (first, task), (second, other) = [await submitted(world, queue, until) for _ in range(2)]
    for ticket in (first, second):
        assert await commit(conductor, ticket, views_of(world)) == "granted"
    await asyncio.gather(task, other)
    completion = Completion(first.handle, Outcome.DONE)
    call = calls.complete(Keys("test"), queue.gateway, completion)
    replies = [await conductor._runner.send(call) for _ in range(3)]
    assert replies == [1, 0, 0]
    assert await world.reserved() == ONE
    assert await world.redis.xlen(world.keys.completions) == 1


@pytest.mark.parametrize(
    ("limit", "count"),
    [({"kv_tokens": 479}, 2), ({"kv_tokens": 480}, 3), ({"slots": 2}, 2), ({"ring_bytes": 5998}, 2)],
)
async def test_redis_itself_refuses_what_does_not_fit_even_if_the_snapshot_was_empty(
    world: World, slow: Any, until: Until, limit: dict[str, int], count: int
) -> None:
    conductor = await world.leader(*world.shards.pair(**limit))
    queue = await world.gateway(timings=slow)
    stale = views_of(world, **limit)
    results = []
    for _ in range(4):
        ticket, task = await submitted(world, queue, until)
        results.append(await commit(conductor, ticket, stale))
        if results[-1] == "granted":
            await task
        task.cancel()
        await world.redis.hdel(world.keys.queued(queue.gateway), ticket.handle)
        queue._requests.forget(ticket.handle)  # neither withdrawn nor completed
        await asyncio.gather(task, return_exceptions=True)
    assert results == ["granted"] * count + ["full"] * (4 - count)
    assert (await world.reserved())["d0.1|slots"] == count


@pytest.mark.parametrize("place", [0, 1])
async def test_legs_of_both_kinds_stay_under_each_servers_request_limit(
    world: World, slow: Any, until: Until, place: int
) -> None:
    from tgi_patches.contract import Limits, Role

    pair = world.shards.pair()
    name, role = [("p0", Role.PREFILL), ("d0", Role.DECODE)][place]
    pair[place] = world.shards.ready(name, role, limits=Limits(4000, 4096, max_concurrent_requests=1))
    conductor = await world.leader(*pair)
    queue = await world.gateway(timings=slow)
    stale = [one.view() for one in pair]
    first, second = [await submitted(world, queue, until) for _ in range(2)]
    assert [await commit(conductor, ticket, stale) for ticket, _ in (first, second)] == ["granted", "full"]


@pytest.mark.parametrize("state", [ShardState.SUSPECT, ShardState.DRAINING, ShardState.DEAD])
@pytest.mark.parametrize("place", [0, 1])
async def test_nothing_is_granted_on_a_shard_that_changed_since_the_decision(
    world: World, slow: Any, until: Until, state: ShardState, place: int
) -> None:
    pair = world.shards.pair()
    conductor = await world.leader(*pair)
    queue = await world.gateway(timings=slow)
    ticket, _ = await submitted(world, queue, until)
    changed = list(pair)
    changed[place] = replace(pair[place], state=state)
    await conductor.publish(changed)
    assert await commit(conductor, ticket, views_of(world)) == "stale"
    reborn = list(pair)
    reborn[place] = world.shards.ready(pair[place].shard, pair[place].role, epoch=2)
    await conductor.publish(reborn)
    assert await commit(conductor, ticket, views_of(world)) == "stale"
    await conductor.publish([pair[1 - place]])  # removed
    assert await commit(conductor, ticket, views_of(world)) == "stale"
    assert await world.reserved() == {}
    await conductor.publish(pair)
    assert await commit(conductor, ticket, views_of(world)) == "granted"


async def test_epochs_of_19_digits_are_told_apart(world: World, slow: Any, until: Until) -> None:
    epoch = 1_764_435_392_123_456_789
    pair = world.shards.pair(epoch=epoch)
    conductor = await world.leader(*pair)
    queue = await world.gateway(timings=slow)
    ticket, task = await submitted(world, queue, until)
    assert await commit(conductor, ticket, views_of(world, epoch=epoch + 1)) == "stale"
    assert await commit(conductor, ticket, views_of(world, epoch=epoch)) == "granted"
    assert (await task).decode.epoch == epoch
    assert f"d0.{epoch}|kv" in await world.reserved()


async def test_a_withdrawn_ticket_is_never_granted(world: World, slow: Any, until: Until) -> None:
    conductor = await world.leader()
    queue = await world.gateway(timings=slow)
    ticket, task = await submitted(world, queue, until)
    await queue.cancel(ticket.handle)
    with pytest.raises(Unavailable, match="cancelled"):
        await task
    assert await commit(conductor, ticket, views_of(world)) == "gone"
    assert await world.held() == 0
    assert [c.outcome for c in (await conductor.read(block=True)).completions] == [Outcome.CANCELLED]


async def test_cancelling_after_a_commit_frees_what_it_reserved(
    world: World, slow: Any, until: Until
) -> None:
    conductor = await world.leader()
    queue = await world.gateway(timings=slow)
    ticket, task = await submitted(world, queue, until)
    assert await commit(conductor, ticket, views_of(world)) == "granted"
    await queue.cancel(ticket.handle)
    await asyncio.gather(task, return_exceptions=True)
    assert await world.held() == 0


async def test_a_waiter_that_is_cancelled_withdraws_its_ticket_by_itself(
    world: World, slow: Any, until: Until
) -> None:
    queue = await world.leader() and await world.gateway(timings=slow)
    _, task = await submitted(world, queue, until)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(world.clean)


async def test_a_deadline_in_the_queue_is_overload_and_leaves_nothing(
    world: World, slow: Any, until: Until
) -> None:
    queue = await world.leader() and await world.gateway(timings=slow)
    with pytest.raises(Overloaded, match="deadline"):
        await queue.submit(world.shards.ticket(queue, deadline_s=0.1))
    await until(world.clean)


async def test_a_full_queue_refuses_at_once(world: World, slow: Any, until: Until) -> None:
    await world.leader()
    one, two = [await world.gateway(name, timings=slow, queue_size=2) for name in ("g1", "g2")]
    await submitted(world, one, until)
    await submitted(world, two, until)
    with pytest.raises(Overloaded, match="full"):
        await one.submit(world.shards.ticket(one))
    await one.refresh()
    assert one.waiting == 2


async def test_shards_that_came_since_the_last_heartbeat_are_found_by_the_first_request(
    world: World, serve: Serve, slow: Any
) -> None:
    queue = await world.gateway(timings=slow)
    conductor = await world.leader()
    task = asyncio.create_task(queue.submit(world.shards.ticket(queue)))
    assert await serve(conductor, world.shards.pair()) == ["granted"]
    assert (await task).decode.shard == "d0"


async def test_without_any_known_shard_the_answer_is_unavailable(world: World, slow: Any) -> None:
    queue = await world.gateway(timings=slow)
    with pytest.raises(Unavailable, match="No shard"):
        await queue.submit(world.shards.ticket(queue))


async def test_a_conductors_refusal_reaches_the_waiter(world: World, slow: Any, until: Until) -> None:
    from orchestrator.core.decision import Refuse

    conductor = await world.leader()
    queue = await world.gateway(timings=slow)
    ticket, task = await submitted(world, queue, until)
    await conductor.refuse(ticket, Refuse("too_large", "It fits nowhere."))
    with pytest.raises(Unavailable, match="It fits nowhere"):
        await task
    await until(world.clean)


async def test_a_ticket_that_cannot_be_read_is_removed(
    world: World, serve: Serve, slow: Any, until: Until
) -> None:
    conductor = await world.leader()
    queue = await world.gateway(timings=slow)
    await world.redis.xadd(world.keys.tickets, {"b": "{not json"})
    _, task = await submitted(world, queue, until)
    assert await serve(conductor, world.shards.pair()) == ["granted"]
    await task
    assert await world.redis.xlen(world.keys.tickets) == 0


async def test_another_schema_is_refused_with_a_sentence(world: World) -> None:
    await world.redis.set(world.keys.schema, "99")
    with pytest.raises(ConfigError, match="schema 99"):
        await world.gateway()
    with pytest.raises(ConfigError, match="schema 99"):
        await world.conductor()


async def test_a_request_costs_a_fixed_number_of_calls(
    world: World, serve: Serve, slow: Any, until: Until
) -> None:
    conductor = await world.leader()
    queue = await world.gateway(timings=slow)

    async def scripts_run() -> int:
        stats = await world.redis.info("commandstats")
        return int(stats["cmdstat_evalsha"]["calls"])

    before = await scripts_run()
    tasks = [await submitted(world, queue, until) for _ in range(3)]
    await serve(conductor, world.shards.pair())
    for ticket, task in tasks:
        await task
        await queue.complete(Completion(ticket.handle, Outcome.DONE))
    # Each request: submit, commit, complete.
    assert await scripts_run() - before == 9
