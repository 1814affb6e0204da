"""The whole conductor with gateways on a real Redis; its shards are only names."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.conductor import Conductor
from orchestrator.core.ticket import Completion, Grant, Outcome
from orchestrator.errors import ConfigError, Unavailable
from orchestrator.queues import GatewayQueue
from orchestrator.shards.launcher import FakeLauncher

from .fleet import PACE, PATIENT, RULES, SPECS, Fleet, Until, World, gone, knows, ready_gateway, running


@pytest.fixture
def fleet(world: World) -> Fleet:
    return Fleet(world)


async def test_shards_come_up_and_a_request_is_granted_by_the_conductor(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet) as conductor:
        await asyncio.wait_for(conductor.ready.wait(), 10)
        queue = await ready_gateway(world, until)
        assert queue.degraded is None
        ticket = world.shards.ticket(queue)
        grant = await queue.submit(ticket)
        assert grant.prefill is not None
        assert (grant.prefill.url, grant.decode.url) == ("http://p0/1", "http://d0/1")
        assert await world.redis.xlen(world.keys.grants(queue.gateway)) == 1  # not its own decision
        await queue.complete(Completion(ticket.handle, Outcome.DONE))
        await until(lambda: conductor.snapshot().ended == {"done": 1})
        assert await world.held() == 0
    assert sorted(fleet.launcher.stopped) == ["d0", "p0"]
    await queue.refresh()
    assert knows(queue, p0="dead", d0="dead")()


async def test_the_snapshot_shows_what_is_reserved_and_what_waits(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet) as conductor:
        queue = await ready_gateway(world, until)
        tickets = [world.shards.ticket(queue) for _ in range(6)]
        tasks = [asyncio.create_task(queue.submit(ticket)) for ticket in tickets]
        await until(lambda: conductor.snapshot().waiting_tickets == 2)
        await until(lambda: conductor.snapshot().reserved.slots == 4)
        shown = conductor.snapshot().to_dict()
        assert shown["reserved"] == {"kv_tokens": 640, "slots": 4, "record_bytes": 4000, "records": 4}
        assert [(one["shard"], one["state"], one["epoch"]) for one in shown["shards"]] == [
            ("p0", "ready", 1),
            ("d0", "ready", 1),
        ]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # First come, first served: the first four.
        assert {task.result().handle for task in done} <= {ticket.handle for ticket in tickets[:4]}
        for ticket, task in zip(tickets, tasks, strict=True):
            await task
            await queue.complete(Completion(ticket.handle, Outcome.DONE))
        await until(lambda: conductor.snapshot().reserved.slots == 0)
        assert conductor.snapshot().waiting_tickets == 0


async def test_a_shard_that_exits_is_dead_at_once_and_comes_back_with_a_new_epoch(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet):
        queue = await ready_gateway(world, until)
        ticket = world.shards.ticket(queue)
        await queue.submit(ticket)
        fleet.mute.add("d0")
        fleet.launcher.crash("d0")
        await until(lambda: gone(world, "d0.1|kv"))
        assert (await world.redis.hget(world.keys.shard("d0"), "state")) in ("dead", "starting")
        # Its own request ends with an error; what it held on the other shard comes back.
        await queue.complete(Completion(ticket.handle, Outcome.FAILED))
        assert await world.held() == 0
        fleet.mute.clear()
        await until(lambda: any(view.shard == "d0" and view.epoch == 2 for view in queue.shards()))
        await until(knows(queue, p0="ready", d0="ready"))
        grant = await queue.submit(world.shards.ticket(queue))
        assert (grant.decode.shard, grant.decode.epoch) == ("d0", 2)


async def test_a_shard_that_misses_polls_gets_nothing_new_until_it_answers(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet):
        queue = await ready_gateway(world, until)
        fleet.mute.add("d0")
        await until(knows(queue, p0="ready", d0="suspect"))
        grant = await queue.submit(world.shards.ticket(queue))
        assert (grant.reason, grant.decode.shard) == ("no_decode_shard", "p0")
        fleet.mute.clear()
        await until(knows(queue, p0="ready", d0="ready"))
        assert fleet.launcher.launches == {"p0": 1, "d0": 1}


async def test_a_shard_that_stays_silent_is_stopped_and_launched_again(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet, rules=replace(RULES, silent_dead_s=0.2)) as conductor:
        await asyncio.wait_for(conductor.ready.wait(), 10)
        fleet.mute.add("d0")
        await until(lambda: fleet.launcher.launches["d0"] == 2)
        assert fleet.launcher.stopped == ["d0"]


async def test_a_crash_loop_is_told_with_the_end_of_the_log(world: World, fleet: Fleet, until: Until) -> None:
    fleet.launcher.log_lines["d0"] = ["loading", "Segmentation fault"]
    async with running(world, fleet) as conductor:
        for count in (1, 2, 3):
            await until(lambda count=count: fleet.launcher.launches.get("d0") == count)
            fleet.launcher.crash("d0", code=-11)
        problem = lambda: next(s.problem for s in conductor.snapshot().shards if s.shard == "d0")  # noqa: E731
        await until(lambda: "3 times" in problem())
        assert "signal 11" in problem()
        assert "Segmentation fault" in problem()
        await until(lambda: not problem())  # it answers again


async def test_bad_input_at_the_first_start_ends_the_conductor_with_the_shards_sentence(
    world: World, fleet: Fleet, until: Until
) -> None:
    fleet.mute.add("d0")
    conductor = Conductor(await world.conductor(), fleet.launcher, SPECS, fleet.probe, rules=RULES, pace=PACE)
    task = asyncio.create_task(conductor.run())
    await until(lambda: fleet.launcher.launches.get("d0") == 1)
    fleet.launcher.crash("d0", code=2, last_line="The folder /x holds no model.")
    with pytest.raises(ConfigError, match=r"d0 cannot start: The folder /x holds no model\."):
        await asyncio.wait_for(task, 10)
    assert fleet.launcher.launches["d0"] == 1
    assert fleet.launcher.stopped == ["p0"]


async def test_bad_input_later_gives_up_that_shard_only(world: World, fleet: Fleet, until: Until) -> None:
    async with running(world, fleet) as conductor:
        queue = await ready_gateway(world, until)
        fleet.launcher.crash("d0", code=2, last_line="The model is gone.")
        await until(knows(queue, p0="ready", d0="dead"))
        problems = {one.shard: one.problem for one in conductor.snapshot().shards}
        assert "The model is gone." in problems["d0"]
        assert (await queue.submit(world.shards.ticket(queue))).decode.shard == "p0"
        assert fleet.launcher.launches["d0"] == 1


async def test_what_can_never_fit_is_refused_by_the_conductor(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet):
        queue = await ready_gateway(world, until)
        with pytest.raises(Unavailable, match="1600"):
            await queue.submit(world.shards.ticket(queue, prompt_tokens=1600))


async def test_a_cancelled_request_at_the_head_does_not_hold_up_the_queue(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet) as conductor:
        queue = await ready_gateway(world, until, timings=PATIENT)
        running_ticket = world.shards.ticket(queue)
        await queue.submit(running_ticket)
        # 1504 tokens in whole blocks do not fit beside the 160 of the running one: it waits.
        large = world.shards.ticket(queue, prompt_tokens=900, max_new_tokens=600)
        large_task = asyncio.create_task(queue.submit(large))
        await until(lambda: conductor.snapshot().waiting_tickets == 1)
        small_task = asyncio.create_task(queue.submit(world.shards.ticket(queue)))
        await until(lambda: conductor.snapshot().waiting_tickets == 2)
        assert not small_task.done()
        await queue.cancel(large.handle)
        await small_task
        with pytest.raises(Unavailable):
            await large_task


async def test_tickets_survive_a_connection_that_breaks_under_the_conductor(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet) as conductor:
        queue = await ready_gateway(world, until, timings=PATIENT)
        held = [world.shards.ticket(queue) for _ in range(4)]
        await asyncio.gather(*(queue.submit(ticket) for ticket in held))
        waiting = [world.shards.ticket(queue) for _ in range(2)]
        tasks = [asyncio.create_task(queue.submit(ticket)) for ticket in waiting]
        await until(lambda: conductor.snapshot().waiting_tickets == 2)
        for _ in range(3):
            await world.redis.client_kill_filter(_type="normal", skipme=True)
            await asyncio.sleep(0.05)
        for ticket in held[:2]:
            await queue.complete(Completion(ticket.handle, Outcome.DONE))
        assert [(await task).handle for task in tasks] == [ticket.handle for ticket in waiting]


async def test_a_standby_takes_over_and_keeps_order_and_reservations(
    world: World, fleet: Fleet, until: Until
) -> None:
    """The first leader dies without a word in mid-load; its heir has the same shards."""
    leading = await world.conductor("first")
    unowned: Any = _Unowned(fleet.launcher)  # its shards outlive it, as containers would
    first = Conductor(leading, unowned, SPECS, fleet.probe, rules=RULES, pace=PACE)
    task = asyncio.create_task(first.run())
    queue = await ready_gateway(world, until, timings=PATIENT)
    held = [world.shards.ticket(queue) for _ in range(4)]
    await asyncio.gather(*(queue.submit(ticket) for ticket in held))
    waiting = [world.shards.ticket(queue) for _ in range(3)]
    tasks = [asyncio.create_task(queue.submit(ticket)) for ticket in waiting]
    await until(lambda: first.snapshot().waiting_tickets == 3)
    leading.leader = ""  # dead: it neither resigns nor clears the registry
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    async with running(world, fleet, "second") as second:
        await until(lambda: second.snapshot().waiting_tickets == 3)
        assert fleet.launcher.launches == {"p0": 1, "d0": 1}
        granted: list[Grant] = []
        for ticket, waiter in zip(held, tasks, strict=False):
            await queue.complete(Completion(ticket.handle, Outcome.DONE))
            granted.append(await waiter)
        assert [one.handle for one in granted] == [ticket.handle for ticket in waiting]
        await queue.complete(Completion(held[3].handle, Outcome.DONE))
        for ticket in waiting:
            await queue.complete(Completion(ticket.handle, Outcome.DONE))
        assert await world.held() == 0


class _Unowned:
    """A launcher whose shards do not end with the conductor."""

    def __init__(self, inner: FakeLauncher) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def close(self, grace_s: float) -> None:
        """Leaves them."""


async def test_two_conductors_never_both_launch(world: World, until: Until) -> None:
    fleets = [Fleet(world), Fleet(world)]
    async with running(world, fleets[0], "a"):
        await until(lambda: fleets[0].launcher.launches == {"p0": 1, "d0": 1})
        async with running(world, fleets[1], "b") as standby:
            await asyncio.sleep(0.5)
            assert standby.snapshot().leader == ""
            assert fleets[1].launcher.launches == {}


async def test_stopping_lets_running_requests_end_and_grants_nothing_new(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet, pace=replace(PACE, drain_s=20.0)) as conductor:
        queue = await ready_gateway(world, until)
        ticket = world.shards.ticket(queue)
        await queue.submit(ticket)
        conductor.stop()
        await until(knows(queue, p0="draining", d0="draining"))
        late = asyncio.create_task(queue.submit(world.shards.ticket(queue, deadline_s=0.3)))
        with pytest.raises(Unavailable):
            await late
        assert fleet.launcher.stopped == []
        await queue.complete(Completion(ticket.handle, Outcome.DONE))
        await until(lambda: sorted(fleet.launcher.stopped) == ["d0", "p0"])


async def test_redis_restarted_empty_under_a_conductor_every_request_is_still_answered(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet) as conductor:
        queue = await ready_gateway(world, until)
        before = world.shards.ticket(queue)
        await queue.submit(before)
        await world.stop_redis()
        fleet.launcher.crash("p0")  # shards are kept all the same
        await until(lambda: fleet.launcher.launches["p0"] == 2)
        await world.start_redis()
        await until(lambda: queue.degraded is None)
        await until(lambda: any(view.shard == "p0" and view.epoch == 2 for view in queue.shards()))
        after = world.shards.ticket(queue)
        assert (await queue.submit(after)).prefill is not None
        for ticket in (before, after):
            await queue.complete(Completion(ticket.handle, Outcome.DONE))
        await until(world.clean)
        await until(lambda: conductor.snapshot().reserved.slots == 0)


async def test_200_requests_over_4_gateways_with_cancellations_conserve_everything(
    world: World, fleet: Fleet, until: Until
) -> None:
    """Every request is granted or cancelled, none twice, and all gauges return to 0."""
    chance = random.Random(7)
    async with running(world, fleet) as conductor:
        gateways = [await ready_gateway(world, until, f"g{n}") for n in range(4)]
        ended: dict[str, str] = {}

        async def request(queue: GatewayQueue, patience_s: float | None) -> None:
            ticket = world.shards.ticket(
                queue, prompt_tokens=chance.randint(1, 400), max_new_tokens=chance.randint(1, 200)
            )
            try:
                async with asyncio.timeout(patience_s):
                    await queue.submit(ticket)
                    await asyncio.sleep(chance.random() * 0.004)
            except TimeoutError:
                assert ticket.handle not in ended
                ended[ticket.handle] = "cancelled"
                await queue.cancel(ticket.handle)
            else:
                assert ticket.handle not in ended
                ended[ticket.handle] = "done"
                await queue.complete(Completion(ticket.handle, Outcome.DONE))

        impatient = [None if n % 3 else chance.random() * 0.2 for n in range(200)]
        await asyncio.gather(*(request(gateways[n % 4], impatient[n]) for n in range(200)))
        assert len(ended) == 200
        assert list(ended.values()).count("done") >= 133
        await until(world.clean)
        await until(lambda: conductor.snapshot().reserved.slots == 0)
        assert conductor.snapshot().waiting_tickets == 0
        wanted = Counter(ended.values())
        await until(lambda: sum(conductor.snapshot().ended.values()) >= 200)
        assert conductor.snapshot().ended == wanted
