"""The conductor with shards that ask to be started again, and with shards that somebody else keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.conductor import Conductor
from orchestrator.core.ticket import Completion, Outcome
from orchestrator.shards.launcher import Running
from orchestrator.shards.static import StaticLauncher
from tgi_patches.contract import Fingerprint

from .fleet import PACE, RULES, Fleet, Until, World, gone, knows, ready_gateway, running


@pytest.fixture
def fleet(world: World) -> Fleet:
    return Fleet(world)


# --- shards that ask to be started again --------------------------------------------------------


async def test_a_shard_that_asks_is_started_again_once_its_requests_are_done(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet) as conductor:
        queue = await ready_gateway(world, until)
        ticket = world.shards.ticket(queue)
        await queue.submit(ticket)
        fleet.relaunch["d0/1"] = "Its prefix cache may be poisoned."
        await until(knows(queue, p0="ready", d0="draining"))
        await until(lambda: queue.degraded)
        assert "prefix cache may be poisoned" in str(queue.degraded)
        assert (await queue.submit(world.shards.ticket(queue))).decode.shard == "p0"  # nothing new for it
        assert fleet.launcher.launches["d0"] == 1
        await queue.complete(Completion(ticket.handle, Outcome.DONE))
        await until(lambda: any(view.shard == "d0" and view.epoch == 2 for view in queue.shards()))
        await until(knows(queue, p0="ready", d0="ready"))
        assert fleet.launcher.stopped == ["d0"]
        assert (await queue.submit(world.shards.ticket(queue))).decode.epoch == 2
        await until(lambda: queue.degraded is None)
        assert [one.problem for one in conductor.snapshot().shards] == ["", ""]


async def test_requests_that_do_not_end_hold_a_relaunch_up_for_a_while_only(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet, pace=replace(PACE, replace_s=0.1)):
        queue = await ready_gateway(world, until)
        ticket = world.shards.ticket(queue)
        await queue.submit(ticket)
        fleet.relaunch["d0/1"] = "It leaks."
        await until(lambda: fleet.launcher.launches["d0"] == 2)
        await until(lambda: gone(world, "d0.1|kv"))


async def test_a_shard_that_always_asks_is_started_less_and_less_often(
    world: World, fleet: Fleet, until: Until
) -> None:
    fleet.relaunch.update({f"d0/{launch}": "It always asks." for launch in range(1, 99)})
    async with running(world, fleet) as conductor:
        await until(lambda: fleet.launcher.launches.get("d0", 0) >= 4)
        failures = next(one.failures for one in conductor.snapshot().shards if one.shard == "d0")
        assert failures >= 3  # 0.01, 0.02, 0.04 s: what `backoff_s` makes of a crash loop
        assert fleet.launcher.launches["p0"] == 1


async def test_shards_that_ask_together_are_replaced_one_after_the_other(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet) as conductor:
        queue = await ready_gateway(world, until)
        ticket = world.shards.ticket(queue)
        await queue.submit(ticket)  # holds both up
        fleet.relaunch.update({"p0/1": "Both leak.", "d0/1": "Both leak."})
        states = lambda: sorted(one.state for one in conductor.snapshot().shards)  # noqa: E731
        await until(lambda: states() == ["draining", "ready"])
        first = next(one.shard for one in conductor.snapshot().shards if one.state == "draining")
        other = {"p0": "d0", "d0": "p0"}[first]
        meanwhile = world.shards.ticket(queue)
        assert (await queue.submit(meanwhile)).decode.shard == other
        assert states() == ["draining", "ready"]
        for one in (ticket, meanwhile):
            await queue.complete(Completion(one.handle, Outcome.DONE))
        await until(lambda: fleet.launcher.launches == {first: 2, other: 2})
        assert fleet.launcher.stopped == [first, other]


# --- shards that somebody else keeps ------------------------------------------------------------


def with_static_prefill(world: World, fleet: Fleet, **options: Any) -> AbstractAsyncContextManager[Conductor]:
    """`p0` is only observed, `d0` launched; the epoch of `p0` is the number in its URL."""
    launcher = StaticLauncher({"p0": "http://p0/7"}, fleet.launcher)
    return running(world, fleet, launcher=launcher, **options)


async def test_a_shard_that_is_kept_elsewhere_serves_and_is_never_launched_or_stopped(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with with_static_prefill(world, fleet):
        queue = await ready_gateway(world, until)
        grant = await queue.submit(world.shards.ticket(queue))
        assert grant.prefill is not None
        assert (grant.prefill.url, grant.prefill.epoch) == ("http://p0/7", 7)
    assert fleet.launcher.launches == {"d0": 1}
    assert fleet.launcher.stopped == ["d0"]


async def test_a_silent_shard_that_is_kept_elsewhere_is_waited_for_with_the_epoch_it_has(
    world: World, fleet: Fleet, until: Until
) -> None:
    rules = replace(RULES, silent_dead_s=0.05, start_dead_s=0.05)
    fleet.mute.add("p0")
    async with with_static_prefill(world, fleet, rules=rules):
        queue = await world.gateway("g")
        await until(knows(queue, d0="ready"))
        await until(lambda: queue.degraded)
        assert queue.degraded == "Shard p0, which is kept elsewhere, is silent at http://p0/7."
        fleet.mute.clear()
        await until(knows(queue, p0="ready", d0="ready"))
        await until(lambda: queue.degraded is None)
        fleet.mute.add("p0")
        await until(knows(queue, p0="suspect", d0="ready"))
        await asyncio.sleep(0.2)  # four times what makes a launched shard dead
        assert knows(queue, p0="suspect", d0="ready")()
        fleet.mute.clear()
        await until(knows(queue, p0="ready", d0="ready"))


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"deployment": "other"}, "At http://p0/7, which is to be shard p0, deployment 'other' answers"),
        ({"fingerprint": Fingerprint("b", "r", "t", "float32", "float32", 2, 1, 8)}, "model 'b' answers"),
    ],
)
async def test_a_stranger_at_the_url_is_told_in_a_sentence_and_gets_nothing(
    world: World, fleet: Fleet, until: Until, told: dict[str, Any], sentence: str
) -> None:
    fleet.told = told
    async with with_static_prefill(world, fleet) as conductor:
        queue = await world.gateway("g")
        await until(lambda: queue.degraded)
        assert sentence in str(queue.degraded)
        assert [one.state for one in conductor.snapshot().shards if one.shard == "p0"] == ["starting"]


class KeptElsewhere(StaticLauncher):
    """`p0` is observed at a sidecar of its own."""

    async def running(self) -> Mapping[str, Running]:
        kept = Running("p0", "http://p0", sidecar_url="http://p0/7", pull_host="10.1.0.2", observed=True)
        return {**await super().running(), "p0": kept}


async def test_a_shard_that_is_kept_elsewhere_is_started_anew_at_the_same_addresses(
    world: World, fleet: Fleet, until: Until
) -> None:
    launcher = KeptElsewhere({"p0": "http://p0"}, fleet.launcher)
    async with running(world, fleet, launcher=launcher):
        queue = await ready_gateway(world, until)
        for epoch in (7, 8):
            fleet.told = {"epoch": epoch}
            await until(lambda at=epoch: any((v.shard, v.epoch) == ("p0", at) for v in queue.shards()))
            (view,) = [view for view in queue.shards() if view.shard == "p0"]
            assert (view.url, view.sidecar_url, view.pull_host) == ("http://p0", "http://p0/7", "10.1.0.2")


async def test_a_shard_that_is_kept_elsewhere_and_asks_is_drained_until_somebody_restarts_it(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with with_static_prefill(world, fleet):
        queue = await ready_gateway(world, until)
        fleet.relaunch["p0/7"] = "It leaks."
        await until(knows(queue, p0="draining", d0="ready"))
        await until(lambda: queue.degraded)
        assert queue.degraded == "Shard p0 gets nothing new until it is restarted: It leaks."
        fleet.relaunch.clear()
        fleet.told = {"epoch": 8}
        await until(lambda: any(view.shard == "p0" and view.epoch == 8 for view in queue.shards()))
        await until(knows(queue, p0="ready", d0="ready"))
