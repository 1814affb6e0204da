"""What a leading conductor does with its policies: windows, costs, calibration, modes, shared records."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core import degraded
from orchestrator.core.cost import Costs, DecodeCost, PrefillCost
from orchestrator.core.costbook import CostBook, profile
from orchestrator.core.decision import Mode, Policy
from orchestrator.core.hot_prompts import HotPrompts
from orchestrator.core.scheduling import Scheduler
from orchestrator.core.ticket import Choice, Completion, Grant, Outcome, Relayed, ShardView, Ticket
from orchestrator.queues import GatewayQueue
from tgi_patches.contract import Limits, Role

from .conftest import QUICK
from .fleet import PACE, PATIENT, Fleet, Until, World, ready_gateway, running

COSTS = Costs(prefill=PrefillCost(0.1, 0.001), decode=DecodeCost(0.02, 0.0, 0.001))
"""A prompt of 100 tokens takes 0.2 s."""
SPLIT = Policy(choice=Choice.SEPARATED)


@pytest.fixture
def fleet(world: World) -> Fleet:
    return Fleet(world)


def known(world: World) -> CostBook:
    """Every shard of the tests is of one kind, and that was measured before."""
    view = world.shards.ready("p0", Role.PREFILL).view()
    assert view is not None
    return CostBook({profile(view): COSTS})


def submitted(queue: GatewayQueue, ticket: Ticket) -> asyncio.Task[Grant]:
    return asyncio.create_task(queue.submit(ticket))


async def test_the_next_prompt_goes_when_the_first_should_be_done_although_nobody_says_so(
    world: World, fleet: Fleet, until: Until
) -> None:
    costs = known(world)
    async with running(world, fleet, scheduler=Scheduler(SPLIT), costs=costs):
        queue = await ready_gateway(world, until, timings=PATIENT)
        first = await queue.submit(world.shards.ticket(queue))
        second, third = (submitted(queue, world.shards.ticket(queue)) for _ in range(2))
        await asyncio.sleep(0.05)
        assert not second.done()
        assert not third.done()
        async with asyncio.timeout(5):
            await asyncio.wait([second, third], return_when=asyncio.FIRST_COMPLETED)
        assert second.done() != third.done(), "one more group, not all of them"
        queue.relayed(Relayed(first.handle))
        async with asyncio.timeout(5):
            await asyncio.gather(second, third)


async def test_an_imported_record_makes_room_at_once(world: World, fleet: Fleet, until: Until) -> None:
    slow = CostBook(
        {name: Costs(PrefillCost(60.0, 0.0), COSTS.decode) for name in known(world).to_dict()["profiles"]}
    )
    async with running(world, fleet, scheduler=Scheduler(SPLIT), costs=slow):
        queue = await ready_gateway(world, until, timings=PATIENT)
        first = await queue.submit(world.shards.ticket(queue))
        second = submitted(queue, world.shards.ticket(queue))
        await asyncio.sleep(0.05)
        assert not second.done()
        queue.relayed(Relayed(first.handle))
        async with asyncio.timeout(5):
            assert (await second).prefill is not None


async def test_gateways_read_the_costs_and_decide_by_them(world: World, fleet: Fleet, until: Until) -> None:
    async with running(world, fleet, costs=known(world)):
        queue = await ready_gateway(world, until, timings=PATIENT)
        await until(lambda: all(view.costs is not None for view in queue.shards()))
        assert {view.costs for view in queue.shards()} == {COSTS}
        grant = await queue.submit(world.shards.ticket(queue))
        assert (grant.choice, grant.reason) == (Choice.MIXED, "break_even")
        # 0.2 s of prefill and 59 steps of 21 ms; a relay of unknown cost, and a step more.
        assert grant.predicted == pytest.approx({"mixed": 0.2 + 59 * 0.021, "separated": 0.2 + 60 * 0.021})


async def test_one_shard_of_an_unknown_kind_is_calibrated_once(
    world: World, fleet: Fleet, until: Until
) -> None:
    measured: list[str] = []

    async def calibrator(view: ShardView) -> Costs | None:
        measured.append(view.shard)
        return COSTS

    costs = CostBook()
    async with running(world, fleet, costs=costs, calibrator=calibrator):
        queue = await ready_gateway(world, until)
        await until(lambda: all(view.costs == COSTS for view in queue.shards()))
        await asyncio.sleep(0.1)
    assert len(measured) == 1
    assert list(costs.to_dict()["profiles"].values()) == [
        {
            "prefill": {"fixed_s": 0.1, "per_token_s": 0.001, "per_square_s": 0.0},
            "decode": {"fixed_s": 0.02, "per_context_s": 0.0, "per_sequence_s": 0.001},
            "relay": None,
            "pull": None,
        }
    ]


async def test_a_calibration_that_fails_is_tried_once_for_each_incarnation(
    world: World, fleet: Fleet, until: Until
) -> None:
    measured: list[tuple[str, int]] = []

    async def calibrator(view: ShardView) -> Costs | None:
        measured.append((view.shard, view.epoch))
        return None

    async with running(world, fleet, calibrator=calibrator):
        await ready_gateway(world, until)
        await until(lambda: sorted(measured) == [("d0", 1), ("p0", 1)])
        fleet.launcher.crash("d0")
        await until(lambda: ("d0", 2) in measured)
        await asyncio.sleep(0.1)
    assert len(measured) == 3


async def test_a_busy_shard_is_not_calibrated(world: World, fleet: Fleet, until: Until) -> None:
    free = asyncio.Event()
    measured: list[str] = []

    async def calibrator(view: ShardView) -> Costs | None:
        measured.append(view.shard)
        await free.wait()
        return None

    async with running(world, fleet, calibrator=calibrator):
        queue = await ready_gateway(world, until)
        await until(lambda: bool(measured))
        ticket = world.shards.ticket(queue)
        await queue.submit(ticket)
        free.set()
        await asyncio.sleep(0.1)
        assert len(measured) == 1
        await queue.complete(Completion(ticket.handle, Outcome.DONE))
        await until(lambda: len(measured) == 2)


# --- modes --------------------------------------------------------------------------------------

LADDER = degraded.Rules(rise_after_s=0.1, fall_after_s=0.2)


async def test_with_too_little_decode_capacity_answers_are_capped_and_later_not_any_more(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet, ladder=LADDER) as conductor:
        queue = await ready_gateway(world, until, timings=PATIENT)
        assert queue.mode == Mode()
        fleet.mute.add("d0")
        fleet.launcher.crash("d0")
        await until(
            lambda: queue.mode.level == 3 and conductor.snapshot().mode.level == 3
        )  # none of the decode shards is ready
        assert queue.mode.output_cap == 128
        assert queue.mode.auto
        assert queue.mode.reason
        grant = await queue.submit(world.shards.ticket(queue, max_new_tokens=600))
        assert (grant.max_new_tokens, grant.decode.shard) == (128, "p0")
        await queue.complete(Completion(grant.handle, Outcome.DONE))
        fleet.mute.clear()
        await until(lambda: queue.mode.level == 0 and conductor.snapshot().mode.level == 0)
        grant = await queue.submit(world.shards.ticket(queue, max_new_tokens=600))
        assert grant.max_new_tokens == 600


async def test_an_operators_level_stands_whatever_the_ladder_says(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet, ladder=LADDER):
        queue = await ready_gateway(world, until)
        await world.redis.set(world.keys.mode, '{"level":0,"auto":false,"output_cap":7}')
        await until(lambda: queue.mode.output_cap == 7)
        fleet.mute.add("d0")
        fleet.launcher.crash("d0")
        await asyncio.sleep(0.5)
        assert queue.mode == Mode(output_cap=7, auto=False)


# --- shared records -----------------------------------------------------------------------------


async def test_equal_prompts_of_two_gateways_share_one_prefill(
    world: World, fleet: Fleet, until: Until
) -> None:
    fleet.told = {"slots": 64, "kv_tokens": 100_000, "limits": Limits(4000, 4096, max_concurrent_requests=64)}
    fleet.told["fingerprint"] = embedded(world)
    scheduler = Scheduler(SPLIT, hot=HotPrompts())
    async with running(world, fleet, scheduler=scheduler):
        gateways = [await ready_gateway(world, until, name, timings=PATIENT) for name in ("g1", "g2")]
        same: dict[str, Any] = {"prompt_hash": "ab" * 16, "simhash": 12345}
        grants = [
            await queue.submit(world.shards.ticket(queue, **same)) for _ in range(5) for queue in gateways
        ]
        owner, *others = grants
        assert owner.prefill is not None
        assert owner.shared is None
        for grant in others:
            assert (grant.prefill, grant.reason) == (None, "shared")
            assert grant.shared is not None
            assert grant.shared.handle == owner.handle
            assert (grant.shared.owner.shard, grant.shared.owner.epoch) == ("p0", 1)
        reserved = await world.reserved()
        assert (reserved["p0.1|records"], reserved["d0.1|slots"]) == (1, 10)
        # The owner is gone before its record was published: the next one computes it.
        await gateways[0].complete(Completion(owner.handle, Outcome.CANCELLED))
        await until(
            lambda: (
                scheduler.hot is not None
                and scheduler.hot.record_for(fresh(world, gateways[0], same), 1e12) is None
            )
        )
        again = await gateways[1].submit(world.shards.ticket(gateways[1], **same))
        assert again.prefill is not None


def fresh(world: World, queue: GatewayQueue, same: dict[str, Any]) -> Ticket:
    ticket: Ticket = world.shards.ticket(queue, **same)
    return ticket


def embedded(world: World) -> Any:
    return replace(world.shards.status("p0", Role.PREFILL).fingerprint, attention="embedded")


# --- gateways beside it -------------------------------------------------------------------------

HASTY = replace(PATIENT, own_decision_s=0.1)


async def test_a_gateway_leaves_a_ticket_alone_that_the_conductor_lets_wait(
    world: World, fleet: Fleet, until: Until
) -> None:
    profiles = known(world).to_dict()["profiles"]
    slow = CostBook({name: Costs(PrefillCost(50.0, 0.0), COSTS.decode) for name in profiles})
    timings = replace(QUICK, own_decision_s=0.1)
    async with running(world, fleet, scheduler=Scheduler(SPLIT), costs=slow, timings=timings):
        queue = await ready_gateway(world, until, timings=HASTY, policy=SPLIT)
        await queue.submit(world.shards.ticket(queue))
        second = submitted(queue, world.shards.ticket(queue))
        await asyncio.sleep(0.6)
        assert not second.done(), "its window is closed, and the conductor has said that it looks"
        second.cancel()


async def test_a_gateway_helps_where_a_leader_does_not_look(world: World, until: Until) -> None:
    await world.leader()
    queue = await ready_gateway(world, until, timings=HASTY)
    async with asyncio.timeout(5):
        assert (await queue.submit(world.shards.ticket(queue))).prefill is not None


class Stumbling(Scheduler):
    """Fails the first time that it has something to decide."""

    stumbled = False

    def decide(self, *arguments: Any) -> Any:
        if len(self.pending) and not self.stumbled:
            self.stumbled = True
            raise ZeroDivisionError
        return super().decide(*arguments)


async def test_a_mistake_of_the_scheduler_stops_no_shard_and_loses_no_ticket(
    world: World, fleet: Fleet, until: Until
) -> None:
    scheduler = Stumbling()
    async with running(world, fleet, scheduler=scheduler):
        queue = await ready_gateway(world, until, timings=PATIENT)
        async with asyncio.timeout(5):
            grant = await queue.submit(world.shards.ticket(queue))
        assert scheduler.stumbled
        assert grant.decode.epoch == 1
        assert fleet.launcher.stopped == []


async def test_a_stop_leaves_the_mode_as_it_was(world: World, fleet: Fleet, until: Until) -> None:
    at_once = degraded.Rules(rise_after_s=0.0, fall_after_s=60.0)
    pace = replace(PACE, drain_s=1.0)
    async with running(world, fleet, ladder=at_once, pace=pace) as conductor:
        queue = await ready_gateway(world, until, timings=PATIENT)
        await queue.submit(world.shards.ticket(queue))
        conductor.stop()  # waits a second for this request
    assert await world.redis.get(world.keys.mode) is None
