"""A conductor that is told to have other shards: one at a time, new before old, and nothing lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.conductor import Conductor
from orchestrator.core.order import ShardOrder
from orchestrator.core.roll import RollState
from orchestrator.core.ticket import Completion, Outcome
from orchestrator.errors import ConfigError
from orchestrator.queues.wishes import Wanted, WishKeys
from orchestrator.shards.launcher import FakeLauncher
from tgi_patches.contract import Role, ShardSpec, StatusReply

from .fleet import PACE, PATIENT, RULES, SPECS, Fleet, Until, World, gone, knows, ready_gateway, running

P0, D0 = SPECS
NEW = replace(D0, max_concurrent_requests=64)
"""The decode shard with another limit."""


class Crew(Fleet):
    """`sick`: orders of this limit crash; the role of a shard is what its order says."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.sick: set[int] = set()
        self.most: dict[str, int] = {}
        """By role: the most and the fewest shards that ran at once since it was last cleared."""
        self.fewest: dict[str, int] = {}

    async def probe(self, url: str) -> StatusReply:
        shard = url.removeprefix("http://").partition("/")[0]
        runs = await self.launcher.running()
        order = runs[shard].order if shard in runs else None
        if order is not None and order.max_concurrent_requests in self.sick:
            self.launcher.crash(shard, code=1, last_line="CUDA out of memory.")
        for role in ("prefill", "decode"):
            count = sum(one.order is not None and one.order.role == role for one in runs.values())
            self.most[role] = max(count, self.most.get(role, count))
            self.fewest[role] = min(count, self.fewest.get(role, count))
        return await super().probe(url)


@pytest.fixture
def fleet(world: World) -> Crew:
    return Crew(world)


def shards_of(conductor: Conductor) -> dict[str, str]:
    return {one.shard: one.state for one in conductor.snapshot().shards}


def is_over(conductor: Conductor, state: RollState) -> Callable[[], bool]:
    return lambda: conductor.snapshot().roll.state is state


def rolled(conductor: Conductor, wanted: Wanted, state: RollState = RollState.DONE) -> Callable[[], bool]:
    def over() -> bool:
        roll = conductor.snapshot().roll
        return (roll.id, roll.state) == (wanted.id, state)

    return over


async def wish(world: World, *orders: ShardSpec) -> Wanted:
    """As `apply` does."""
    wanted = Wanted.of(orders)
    async with WishKeys(world.server.url, "test") as keys:
        await keys.want(wanted)
    return wanted


async def limits(fleet: Crew) -> dict[str, int]:
    """Of what runs, by name."""
    return {
        shard: one.order.max_concurrent_requests
        for shard, one in (await fleet.launcher.running()).items()
        if one.order is not None
    }


# --- rolling ------------------------------------------------------------------------------------


async def test_a_changed_shard_is_replaced_new_before_old_and_streams_end_first(
    world: World, fleet: Crew, until: Until
) -> None:
    async with running(world, fleet) as conductor:
        queue = await ready_gateway(world, until, timings=PATIENT)
        stream = world.shards.ticket(queue)
        assert (await queue.submit(stream)).decode.shard == "d0"
        wanted = await wish(world, P0, NEW)
        await until(lambda: shards_of(conductor) == {"p0": "ready", "d0": "draining", "decode-0": "ready"})
        assert (await queue.submit(world.shards.ticket(queue))).decode.shard == "decode-0"
        await until(lambda: "is stopped once its requests are done" in str(queue.degraded))
        assert fleet.launcher.stopped == []
        await queue.complete(Completion(stream.handle, Outcome.DONE))
        await until(is_over(conductor, RollState.DONE))
        assert conductor.snapshot().roll.id == wanted.id
        assert conductor.snapshot().roll.done == ("Shard decode-0 is ready.", "Shard d0 is stopped.")
        assert fleet.launcher.stopped == ["d0"]
        assert await limits(fleet) == {"p0": 128, "decode-0": 64}
        await until(knows(queue, p0="ready", **{"decode-0": "ready"}))
        await until(lambda: gone(world, "d0.1|kv"))
        assert queue.degraded is None


async def test_no_grant_is_lost_while_requests_keep_coming(world: World, fleet: Crew, until: Until) -> None:
    orders = [replace(D0, shard=f"d{n}") for n in range(2)]
    async with running(world, fleet) as conductor:
        conductor.want([P0, *orders])
        await until(is_over(conductor, RollState.DONE))
        queue = await world.gateway("g", timings=PATIENT)
        await until(knows(queue, p0="ready", d0="ready", d1="ready"))
        ended: list[str] = []
        stopping = asyncio.Event()

        async def client() -> None:
            while not stopping.is_set():
                ticket = world.shards.ticket(queue)
                grant = await queue.submit(ticket)
                await asyncio.sleep(0.03)
                # Whoever serves it is still there, as the incarnation that it was granted on.
                runs = {shard: one.url for shard, one in (await fleet.launcher.running()).items()}
                for leg in (grant.decode, *([grant.prefill] if grant.prefill else [])):
                    assert runs.get(leg.shard) == leg.url
                await queue.complete(Completion(ticket.handle, Outcome.DONE))
                ended.append(grant.decode.shard)

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(client())
            await until(lambda: len(ended) >= 5)
            fleet.most.clear()
            fleet.fewest.clear()
            wanted = await wish(
                world,
                replace(P0, max_concurrent_requests=64),
                *(replace(o, max_concurrent_requests=64) for o in orders),
            )
            await until(rolled(conductor, wanted))
            before = len(ended)
            await until(lambda: len(ended) >= before + 5)
            stopping.set()
        assert set((await limits(fleet)).values()) == {64}
        assert len(await limits(fleet)) == 3
        assert (fleet.most, fleet.fewest) == ({"prefill": 2, "decode": 3}, {"prefill": 1, "decode": 2})
        await until(world.clean)


async def test_a_new_shard_that_crashes_stops_the_roll_and_the_old_ones_stay(
    world: World, fleet: Crew, until: Until
) -> None:
    fleet.sick.add(64)
    async with running(world, fleet) as conductor:
        queue = await ready_gateway(world, until)
        wanted = await wish(world, P0, NEW)
        await until(is_over(conductor, RollState.FAILED))
        said = "Shard decode-0 did not get ready: it ended (exit code 1): CUDA out of memory."
        assert conductor.snapshot().roll.problem == said
        assert shards_of(conductor) == {"p0": "ready", "d0": "ready"}
        assert fleet.launcher.launches == {"p0": 1, "d0": 1, "decode-0": 1}
        assert await limits(fleet) == {"p0": 128, "d0": 128}
        async with WishKeys(world.server.url, "test") as keys:
            await until(lambda: _seen_over(keys, wanted.id))
            assert (await keys.seen()).roll.problem == said
        await until(lambda: queue.degraded == f"Shard d0 stays as it was. {said}")
        ticket = world.shards.ticket(queue)
        assert (await queue.submit(ticket)).decode.shard == "d0"
        await queue.complete(Completion(ticket.handle, Outcome.DONE))
        fleet.sick.clear()
        await wish(world, P0, NEW)  # the same once more is another try
        await until(lambda: _has(fleet, {"p0": 128, "decode-0": 64}))
        await until(is_over(conductor, RollState.DONE))
        await until(lambda: queue.degraded is None)


async def test_one_that_crashes_soon_after_it_was_ready_is_no_successor(
    world: World, fleet: Crew, until: Until
) -> None:
    async with running(world, fleet, pace=replace(PACE, proof_s=10.0)) as conductor:
        await ready_gateway(world, until)
        await wish(world, P0, NEW)
        await until(lambda: shards_of(conductor).get("decode-0") == "ready")
        fleet.launcher.crash("decode-0", code=-9)
        await until(is_over(conductor, RollState.FAILED))
        assert conductor.snapshot().roll.problem == "Shard decode-0 did not get ready: signal 9."
        assert await limits(fleet) == {"p0": 128, "d0": 128}


async def _seen_over(keys: WishKeys, wish_id: str) -> bool:
    roll = (await keys.seen()).roll
    return roll.id == wish_id and roll.over


async def _has(fleet: Crew, wanted: dict[str, int]) -> bool:
    return await limits(fleet) == wanted


@pytest.mark.parametrize("how", ["bad input", "not launched", "silent"])
async def test_whatever_keeps_a_new_shard_from_getting_ready_is_told(
    world: World, fleet: Crew, until: Until, how: str
) -> None:
    fleet.mute.add("decode-0")
    launcher: Any = fleet.launcher
    if how == "not launched":
        launcher = _Refusing(fleet.launcher)
    async with running(world, fleet, launcher=launcher, pace=replace(PACE, ready_s=0.3)) as conductor:
        await ready_gateway(world, until)
        await wish(world, P0, NEW)
        if how == "bad input":
            await until(lambda: fleet.launcher.launches.get("decode-0"))
            fleet.launcher.crash("decode-0", code=2, last_line="The flag --x is unknown.")
        await until(is_over(conductor, RollState.FAILED))
        because = {
            "bad input": "it ended (exit code 2): The flag --x is unknown.",
            "not launched": "There is no image tgi:9.",
            "silent": "it was not ready within 0.3 s.",
        }[how]
        assert conductor.snapshot().roll.problem == f"Shard decode-0 did not get ready: {because}"
        assert shards_of(conductor) == {"p0": "ready", "d0": "ready"}
        assert await limits(fleet) == {"p0": 128, "d0": 128}


class _Refusing:
    """A launcher that does not take new shards."""

    def __init__(self, inner: FakeLauncher) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def launch(self, spec: ShardSpec) -> Any:
        if spec.shard not in ("p0", "d0"):
            raise ConfigError("There is no image tgi:9.")
        return await self._inner.launch(spec)


async def test_without_room_the_old_one_goes_first(world: World, fleet: Crew, until: Until) -> None:
    async def room(order: ShardSpec) -> str:
        decode = [shard for shard, one in (await fleet.launcher.running()).items() if shard != "p0"]
        return f"all GPUs are taken by {decode[0]}." if decode else ""

    async with running(world, fleet, room_for=room) as conductor:
        queue = await ready_gateway(world, until)
        stream = world.shards.ticket(queue)
        await queue.submit(stream)
        await wish(world, P0, NEW)
        await until(lambda: shards_of(conductor) == {"p0": "ready", "d0": "draining"})
        assert "all GPUs are taken by d0" in str(conductor.snapshot().shards[1].problem)
        assert fleet.launcher.stopped == []
        await queue.complete(Completion(stream.handle, Outcome.DONE))
        await until(is_over(conductor, RollState.DONE))
        assert fleet.launcher.launches == {"p0": 1, "d0": 2}
        assert await limits(fleet) == {"p0": 128, "d0": 64}


async def test_what_made_room_comes_back_where_its_successor_fails(
    world: World, fleet: Crew, until: Until
) -> None:
    fleet.sick.add(64)

    async def room(order: ShardSpec) -> str:
        return "no" if len(await fleet.launcher.running()) > 1 else ""

    async with running(world, fleet, room_for=room) as conductor:
        await ready_gateway(world, until)
        await wish(world, P0, NEW)
        await until(is_over(conductor, RollState.FAILED))
        await until(lambda: shards_of(conductor) == {"p0": "ready", "d0": "ready"})
        assert await limits(fleet) == {"p0": 128, "d0": 128}
        assert fleet.launcher.launches == {"p0": 1, "d0": 3}


async def test_room_that_never_comes_costs_one_shard_only_and_that_comes_back(
    world: World, fleet: Crew, until: Until
) -> None:
    taken = ""
    pair = [D0, replace(D0, shard="d1")]
    async with running(world, fleet, room_for=lambda _: taken) as conductor:
        await ready_gateway(world, until)
        await until(is_over(conductor, RollState.DONE))
        wanted = await wish(world, P0, *pair)
        await until(rolled(conductor, wanted))
        taken = "another deployment has the GPU"
        wanted = await wish(world, P0, *(replace(one, max_concurrent_requests=64) for one in pair))
        await until(rolled(conductor, wanted, RollState.FAILED))
        problem = "There is no room for shard d0: another deployment has the GPU."
        assert conductor.snapshot().roll.problem == problem
        await until(lambda: shards_of(conductor) == {"p0": "ready", "d0": "ready", "d1": "ready"})
        assert fleet.launcher.stopped == ["d0"]
        assert await limits(fleet) == {"p0": 128, "d0": 128, "d1": 128}
        more = await wish(world, P0, *pair, replace(D0, shard="d2"))
        await until(rolled(conductor, more, RollState.FAILED))
        assert fleet.launcher.stopped == ["d0"], "nobody goes for one more of the same"


async def test_counts_grow_and_shrink_and_roles_come_and_go(world: World, fleet: Crew, until: Until) -> None:
    async with running(world, fleet) as conductor:
        await ready_gateway(world, until)
        await wish(world, P0, *(replace(D0, shard=f"decode-{n}") for n in range(3)))
        await until(
            lambda: (
                shards_of(conductor)
                == {"p0": "ready", "d0": "ready", "decode-1": "ready", "decode-2": "ready"}
                or None
            )
        )
        await until(is_over(conductor, RollState.DONE))
        await wish(world, P0, D0)
        await until(lambda: shards_of(conductor) == {"p0": "ready", "d0": "ready"})
        assert fleet.launcher.stopped == ["decode-2", "decode-1"]
        await until(is_over(conductor, RollState.DONE))
        fleet.mute.add("mixed-0")  # the fleet knows no such role: it never gets ready by itself
        await wish(world, replace(D0, shard="d9"))
        await until(lambda: shards_of(conductor) == {"d0": "ready"})
        assert fleet.launcher.stopped == ["decode-2", "decode-1", "p0"]
        assert fleet.launcher.launches["d0"] == 1  # what it is called does not matter


async def test_what_cannot_be_read_changes_nothing(world: World, fleet: Crew, until: Until) -> None:
    async with running(world, fleet) as conductor:
        await ready_gateway(world, until)
        for broken in ("{", "[]", '{"id": "x", "orders": []}', '{"id": "", "orders": [{}]}', '{"orders": 1}'):
            await world.redis.set(world.keys.wanted, broken)
            await asyncio.sleep(0.12)  # more than two heartbeats
        assert shards_of(conductor) == {"p0": "ready", "d0": "ready"}
        assert conductor.snapshot().roll.id == ""
        with pytest.raises(ConfigError, match="same name"):
            conductor.want([P0, P0])
        with pytest.raises(ConfigError, match="at least one"):
            conductor.want([])


async def test_another_wish_ends_the_start_of_a_shard_that_it_does_not_want(
    world: World, fleet: Crew, until: Until
) -> None:
    fleet.mute.add("decode-0")
    async with running(world, fleet) as conductor:
        await ready_gateway(world, until)
        await wish(world, P0, NEW)
        await until(lambda: shards_of(conductor).get("decode-0") == "starting")
        second = await wish(world, P0, D0)
        await until(lambda: conductor.snapshot().roll.id == second.id)
        await until(is_over(conductor, RollState.DONE))
        assert shards_of(conductor) == {"p0": "ready", "d0": "ready"}
        assert fleet.launcher.stopped == ["decode-0"]


async def test_what_runs_is_told_to_operators(world: World, fleet: Crew, until: Until) -> None:
    async with running(world, fleet) as conductor:
        await ready_gateway(world, until)
        async with WishKeys(world.server.url, "test") as keys:
            await until(lambda: _orders(keys, ["p0", "d0"]))
            seen = await keys.seen()
            assert seen.orders is not None
            assert [type(order) for order in seen.orders] == [ShardOrder, ShardOrder]
            assert seen.orders[1].spec == D0
            await wish(world, P0, NEW)
            await until(lambda: _orders(keys, ["p0", "decode-0"]))
            await until(is_over(conductor, RollState.DONE))
            await world.restart_redis()
            await until(lambda: _orders_again(world, ["p0", "decode-0"]))
    assert await world.redis.exists(world.keys.orders, world.keys.wanted, world.keys.roll) == 0


async def _orders(keys: WishKeys, names: list[str]) -> bool:
    orders = (await keys.seen()).orders
    return [order.shard for order in orders or ()] == names


async def _orders_again(world: World, names: list[str]) -> bool:
    if not await world.redis.exists(world.keys.schema):
        return False
    async with WishKeys(world.server.url, "test") as keys:
        return await _orders(keys, names)


# --- drained by an operator ---------------------------------------------------------------------


async def test_a_shard_that_an_operator_drains_ends_its_streams_and_gets_nothing_new(
    world: World, fleet: Crew, until: Until
) -> None:
    async with running(world, fleet) as conductor, WishKeys(world.server.url, "test") as keys:
        queue = await ready_gateway(world, until)
        stream = world.shards.ticket(queue)
        await queue.submit(stream)
        assert await keys.drain("d0")
        assert not await keys.drain("d0")
        await until(knows(queue, p0="ready", d0="draining"))
        await until(lambda: "Shard d0 is drained by an operator" in str(queue.degraded))
        assert (await queue.submit(world.shards.ticket(queue))).decode.shard == "p0"
        await queue.complete(Completion(stream.handle, Outcome.DONE))
        await until(lambda: gone(world, "d0.1|kv"))
        assert fleet.launcher.stopped == []
        fleet.launcher.crash("d0")
        await until(lambda: fleet.launcher.launches["d0"] == 2)
        await until(lambda: conductor.snapshot().shards[1].epoch == 2)
        assert shards_of(conductor)["d0"] == "draining"
        assert conductor.ready.is_set()
        assert await keys.give_back("d0")
        await until(knows(queue, p0="ready", d0="ready"))
        await until(lambda: queue.degraded is None)


async def test_a_drained_shard_that_asks_to_be_started_again_holds_up_no_other_one(
    world: World, fleet: Crew, until: Until
) -> None:
    async with running(world, fleet) as conductor, WishKeys(world.server.url, "test") as keys:
        await ready_gateway(world, until)
        await keys.drain("d0")
        await until(lambda: shards_of(conductor)["d0"] == "draining")
        fleet.relaunch["d0/1"] = "It leaks."
        await until(lambda: conductor.snapshot().shards[1].epoch == 2)
        fleet.relaunch["p0/1"] = "It leaks as well."
        await until(lambda: conductor.snapshot().shards[0].epoch == 2)
        assert shards_of(conductor) == {"p0": "ready", "d0": "draining"}


async def test_a_drain_survives_the_conductor_and_an_emptied_redis(
    world: World, fleet: Crew, until: Until
) -> None:
    async with running(world, fleet) as first:
        async with WishKeys(world.server.url, "test") as keys:
            await keys.drain("d0")
        await until(lambda: shards_of(first)["d0"] == "draining")
        await world.restart_redis()
        await until(lambda: _drained(world, {"d0"}))
        first.stop(keep_shards=True)
    assert fleet.launcher.stopped == []
    async with running(world, fleet, "second") as second:
        await until(lambda: shards_of(second) == {"p0": "ready", "d0": "draining"})
        assert fleet.launcher.launches == {"p0": 1, "d0": 1}
        await wish(world, P0, NEW)
        await until(is_over(second, RollState.DONE))
        await until(lambda: _drained(world, set()))  # its successor is not drained
        assert shards_of(second) == {"p0": "ready", "decode-0": "ready"}


async def _drained(world: World, names: set[str]) -> bool:
    return bool(await world.redis.smembers(world.keys.drained) == names)


# --- conductors that come and go ----------------------------------------------------------------


async def test_shards_that_are_kept_serve_on_and_the_lead_is_free_at_once(
    world: World, fleet: Crew, until: Until
) -> None:
    async with running(world, fleet, timings=replace(PATIENT, leader_ttl_s=60.0)) as conductor:
        queue = await ready_gateway(world, until)
        await queue.submit(world.shards.ticket(queue))
        conductor.stop(keep_shards=True)
        await until(lambda: _leaderless(world))
    assert fleet.launcher.stopped == []
    assert await world.redis.hget(world.keys.shard("d0"), "state") == "ready"
    await queue.refresh()
    assert knows(queue, p0="ready", d0="ready")()
    async with running(world, fleet, "second"):
        await until(lambda: queue.degraded is None)
    assert fleet.launcher.launches == {"p0": 1, "d0": 1}
    assert sorted(fleet.launcher.stopped) == ["d0", "p0"]


async def _leaderless(world: World) -> bool:
    return not await world.redis.exists(world.keys.leader)


async def test_a_found_shard_that_has_not_answered_yet_is_not_stopped_under_its_requests(
    world: World, fleet: Crew, until: Until
) -> None:
    async with running(world, fleet) as first:
        queue = await ready_gateway(world, until, timings=PATIENT)
        stream = world.shards.ticket(queue)
        await queue.submit(stream)
        first.stop(keep_shards=True)
    fleet.mute.add("d0")
    queue_of = await world.conductor("second")
    second = Conductor(queue_of, fleet.launcher, [P0, NEW], fleet.probe, rules=RULES, pace=PACE)
    task = asyncio.create_task(second.run())
    await until(lambda: shards_of(second) == {"p0": "ready", "d0": "draining", "decode-0": "ready"})
    await asyncio.sleep(0.2)  # ten polls
    assert fleet.launcher.stopped == []
    fleet.mute.clear()
    await until(lambda: next(one.epoch for one in second.snapshot().shards if one.shard == "d0") == 1)
    await asyncio.sleep(0.2)
    assert fleet.launcher.stopped == []
    await queue.complete(Completion(stream.handle, Outcome.DONE))
    await until(is_over(second, RollState.DONE))
    assert fleet.launcher.stopped == ["d0"]
    second.stop()
    await asyncio.wait_for(task, 20)


async def test_a_standby_goes_on_with_a_roll_that_its_predecessor_began(
    world: World, fleet: Crew, until: Until
) -> None:
    """It was there when `apply` came, and was started with the settings before."""
    orders = [P0, *(replace(NEW, shard=f"d{n}") for n in range(2))]
    async with running(world, fleet, "first") as first:
        queue = await ready_gateway(world, until, timings=PATIENT)
        stream = world.shards.ticket(queue)
        await queue.submit(stream)
        async with running(world, fleet, "second") as second:
            await until(lambda: second._wishing._seen is not None)
            await wish(world, *orders)
            await until(lambda: shards_of(first).get("d0") == "draining")
            first.stop(keep_shards=True)
            await until(lambda: shards_of(second).get("d0") == "draining")
            assert fleet.launcher.stopped == []
            assert fleet.launcher.launches == {"p0": 1, "d0": 1, "decode-0": 1, "d1": 1}
            await queue.complete(Completion(stream.handle, Outcome.DONE))
            await until(is_over(second, RollState.DONE))
            assert await limits(fleet) == {"p0": 128, "decode-0": 64, "d1": 64}
            assert fleet.launcher.launches == {"p0": 1, "d0": 1, "decode-0": 1, "d1": 1}


async def test_a_conductor_that_comes_with_other_settings_adopts_and_rolls(
    world: World, fleet: Crew, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(world, fleet) as first:
        queue = await ready_gateway(world, until, timings=PATIENT)
        stream = world.shards.ticket(queue)
        await queue.submit(stream)
        await wish(world, P0, replace(D0, max_total_tokens=5000))
        await until(lambda: shards_of(first).get("d0") == "draining")
        first.stop(keep_shards=True)
    # An older wish stands in Redis: the settings of the conductor that comes now are the later word.
    queue_of = await world.conductor("second")
    specs = [P0, NEW, replace(NEW, shard="d1")]
    second = Conductor(queue_of, fleet.launcher, specs, fleet.probe, rules=RULES, pace=PACE)
    task = asyncio.create_task(second.run())
    await until(lambda: "d1" in shards_of(second))
    assert fleet.launcher.stopped == []
    assert fleet.launcher.launches["p0"] == fleet.launcher.launches["d0"] == 1
    await queue.complete(Completion(stream.handle, Outcome.DONE))
    await until(is_over(second, RollState.DONE))
    assert sorted((await limits(fleet)).values()) == [64, 64, 128]
    assert second.snapshot().roll.id == ""
    second.stop()
    await asyncio.wait_for(task, 20)


async def test_that_a_shard_cannot_start_does_not_end_those_that_were_found(
    world: World, fleet: Crew, until: Until
) -> None:
    async with running(world, fleet) as first:
        await ready_gateway(world, until)
        first.stop(keep_shards=True)
    fleet.mute.add("m0")
    queue = await world.conductor("second")
    specs = [P0, D0, ShardSpec("test", "m0", Role.MIXED, "model", "m")]
    second = Conductor(queue, fleet.launcher, specs, fleet.probe, rules=RULES, pace=PACE)
    task = asyncio.create_task(second.run())
    await until(lambda: fleet.launcher.launches.get("m0"))
    fleet.launcher.crash("m0", code=2, last_line="There is no such model.")
    await until(lambda: "no such model" in {one.shard: one.problem for one in second.snapshot().shards}["m0"])
    assert shards_of(second) == {"p0": "ready", "d0": "ready", "m0": "dead"}
    second.stop()
    await asyncio.wait_for(task, 20)
