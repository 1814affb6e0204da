"""Any order of calls from gateways and conductors, dead and deposed ones too, leaves the books right."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from redis import Redis

from orchestrator.core.decision import Refuse
from orchestrator.core.shard import ShardState, Watched
from orchestrator.core.ticket import Choice, Completion, Grant, Leg, Outcome, Relayed, ShardView, Ticket
from orchestrator.embedded.redis import EmbeddedRedis
from orchestrator.queues import Timings, calls, wire
from orchestrator.queues.calls import Call
from orchestrator.queues.keys import Keys
from tgi_patches.contract import PROTOCOL_VERSION, Fingerprint, Limits, Role, StatusReply

from .books_model import QUEUE_SIZE, Model, Plan, Room

ROOM = Room(kv=100, slots=3, requests=4, arena_bytes=120)
"""Small: every bound is met."""
SHARDS = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
GATEWAYS = ("g0.1", "g1.1", "g2.1")
FOREVER = Timings(lease_s=3600, shard_ttl_s=3600, leader_ttl_s=3600, deadline_s=3600, settle_s=0)
"""Nothing ends by itself: what dies is told to."""
AMOUNTS = st.sampled_from((10, 30, 50))

_deployments = itertools.count()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    with asyncio.Runner() as runner:
        server = EmbeddedRedis(Path(tmp_path_factory.mktemp("r", numbered=True)))
        runner.run(server.__aenter__())
        client = Redis.from_url(server.url, decode_responses=True, protocol=2)
        yield client
        client.close()
        runner.run(server.__aexit__(None, None, None))


class Books(RuleBasedStateMachine):
    """Three gateways and two conductors on one Redis, each call as real code builds it."""

    redis: Redis

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.keys = Keys(f"d{next(_deployments)}")
        self.model = Model(ROOM)
        self.epochs = dict.fromkeys(SHARDS, 1)
        self.terms = {"a.1": "", "b.1": ""}
        """The leader value that each conductor acts under; it may be deposed."""
        self.serving: dict[tuple[str, str], Plan] = {}
        """What a gateway took for granted first."""
        self.count = 0
        self.lives: Counter[str] = Counter()
        """How often a handle may have been answered: once for each time that its lease began."""

    # --- Redis ----------------------------------------------------------------------------------

    def run_call(self, call: Call) -> Any:
        return self.redis.eval(call.script.text, len(call.keys), *call.keys, *call.args)

    def wipe(self) -> None:
        """Of this deployment alone."""
        self.redis.delete(self.keys.prefix, *self.redis.keys(self.keys.prefix + "*"))

    def views(self) -> list[ShardView]:
        """Every incarnation there ever was: decisions may be old."""
        return [
            view
            for name, epoch in self.epochs.items()
            for past in range(1, epoch + 1)
            if (view := self.watched(name, ShardState.READY, past).view()) is not None
        ]

    @staticmethod
    def watched(name: str, state: ShardState, epoch: int) -> Watched:
        status = StatusReply(
            protocol=PROTOCOL_VERSION,
            deployment="d",
            shard=name,
            role=SHARDS[name],
            epoch=epoch,
            fingerprint=Fingerprint("m", "r", "t", "float32", "float32", 2, 1, 8),
            limits=Limits(4000, 4096, max_concurrent_requests=ROOM.requests),
            kv_tokens=ROOM.kv,
            slots=ROOM.slots,
            ring_bytes=2 * ROOM.arena_bytes,
            record_limit_bytes=1000,
            bytes_per_token=1,
        )
        return Watched(name, SHARDS[name], f"http://{name}", state, status)

    def grant(self, handle: str, plan: Plan) -> Grant:
        def leg(incarnation: str) -> Leg:
            name, _, epoch = incarnation.partition(".")
            return Leg(name, int(epoch), f"http://{name}")

        prefill = leg(plan.prefill) if plan.prefill else None
        choice = Choice.SEPARATED if prefill else Choice.MIXED
        return Grant(handle, choice, "pair", leg(plan.decode), prefill, plan.kv, plan.record_bytes, 5)

    def plan(self, data: st.DataObject) -> Plan:
        """Mostly on shards as they are, sometimes on an incarnation that is gone."""

        def incarnation(name: str) -> str:
            back = data.draw(st.sampled_from((0, 0, 0, 1)), label="back")
            return f"{name}.{max(1, self.epochs[name] - back)}"

        prefill = data.draw(st.sampled_from(("p0", "p0", "p1", "")), label="prefill")
        names = ("d0", "d0", "d1") if prefill else ("d0", "p0")
        decode = incarnation(data.draw(st.sampled_from(names), label="decode"))
        record_bytes = data.draw(AMOUNTS, label="bytes") if prefill else 0
        kv = data.draw(AMOUNTS, label="kv")
        return Plan(decode, incarnation(prefill) if prefill else "", kv, record_bytes)

    @staticmethod
    def ticket(key: tuple[str, str]) -> Ticket:
        return Ticket(key[1], key[0], 10, 5, created_s=0.0, deadline_s=1e10)

    # --- the deployment -------------------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        for gateway in GATEWAYS:
            self.heartbeat_of(gateway, [], [])
        self.lead("a.1")
        self.publish("a.1", [ShardState.READY] * len(SHARDS))

    @rule(conductor=st.sampled_from(("a.1", "b.1")))
    def lead(self, conductor: str) -> None:
        said = self.run_call(calls.lead(self.keys, conductor, FOREVER))
        if not self.model.leader:
            assert said.startswith(conductor + ":")
            assert said not in self.terms.values() or self.model.leader == ""
            self.model.leader = said
        assert said == (self.model.leader if self.model.leader.startswith(conductor + ":") else "")
        self.terms[conductor] = said or self.terms[conductor]  # one that lost the lead may not know it yet

    @rule()
    def leader_falls_silent(self) -> None:
        self.redis.delete(self.keys.leader)
        self.model.leader = ""

    @rule(
        conductor=st.sampled_from(("a.1", "b.1")),
        states=st.lists(
            st.sampled_from((ShardState.READY, ShardState.READY, ShardState.DRAINING, ShardState.DEAD)),
            min_size=len(SHARDS),
            max_size=len(SHARDS),
        ),
    )
    def publish(self, conductor: str, states: list[ShardState]) -> None:
        if not self.terms[conductor]:
            return
        shards = [
            self.watched(name, state, self.epochs[name]) for name, state in zip(SHARDS, states, strict=True)
        ]
        said = self.run_call(calls.publish(self.keys, self.terms[conductor], shards, {}, {}, FOREVER))
        leads = self.terms[conductor] == self.model.leader
        assert said == ("published" if leads else "fenced")
        if leads:
            self.model.published = {
                one.shard: (str(one.state), wire.incarnation(one.shard, one.epoch)) for one in shards
            }

    @rule(name=st.sampled_from(sorted(SHARDS)))
    def shard_starts_anew(self, name: str) -> None:
        self.epochs[name] += 1

    @rule(conductor=st.sampled_from(("a.1", "b.1")), name=st.sampled_from(sorted(SHARDS)))
    def retire(self, conductor: str, name: str) -> None:
        """Of an incarnation that the published table does not know any more, as a conductor does."""
        epoch = self.epochs[name] - 1
        gone = wire.incarnation(name, epoch)
        published = self.model.published.get(name, ("", ""))[1]
        if not self.terms[conductor] or not epoch or published in ("", gone):
            return
        said = self.run_call(calls.retire(self.keys, self.terms[conductor], name, epoch))
        leads = self.terms[conductor] == self.model.leader
        assert said == ("retired" if leads else "fenced")
        if leads:
            self.model.retired |= {gone}

    @rule()
    def redis_starts_empty(self) -> None:
        self.wipe()
        self.model.forget()
        self.lives.clear()

    # --- requests -------------------------------------------------------------------------------

    @rule(target=handles, gateway=st.sampled_from(GATEWAYS))
    def submit(self, gateway: str) -> Any:
        self.count += 1
        key = (gateway, f"h{self.count}")
        return key if self.submitted(key) == "queued" else multiple()

    @rule(key=handles)
    def submit_again(self, key: tuple[str, str]) -> None:
        """After a lost answer, or from a connection that Redis reads late."""
        self.submitted(key)

    def submitted(self, key: tuple[str, str]) -> str:
        said = self.run_call(calls.submit(self.keys, self.ticket(key), QUEUE_SIZE))
        assert said == self.model.submit(*key)
        return str(said)

    @rule(key=handles, conductor=st.sampled_from(("a.1", "b.1")), data=st.data())
    def commit(self, key: tuple[str, str], conductor: str, data: st.DataObject) -> None:
        if self.terms[conductor]:
            self.committed(self.terms[conductor], key, self.plan(data))

    @rule(target=handles, gateway=st.sampled_from(GATEWAYS), kv=AMOUNTS, record_bytes=AMOUNTS)
    def burst(self, gateway: str, kv: int, record_bytes: int) -> Any:
        """A leader that grants as much as it can, and more than there is room for."""
        mine = [h for g, h in (*self.model.waiting, *self.model.leased) if g == gateway]
        self.heartbeat_of(gateway, [], mine)
        if not self.model.leader:
            self.lead("a.1")
        conductor = self.model.leader.partition(":")[0]
        self.publish(conductor, [ShardState.READY] * len(SHARDS))
        decode = [wire.incarnation(name, self.epochs[name]) for name in ("d0", "d1")]
        prefill = wire.incarnation("p0", self.epochs["p0"])
        plans = [Plan(decode[n % 2], prefill, kv, record_bytes) for n in range(5)]
        keys = []
        for plan in (*plans, Plan(decode[0], "", 10, 0), Plan(prefill, "", 10, 0)):
            self.count += 1
            key = (gateway, f"h{self.count}")
            if self.submitted(key) == "queued":
                self.committed(self.terms[conductor], key, plan)
                keys.append(key)
        return multiple(*keys)

    @rule(key=handles, data=st.data())
    def own_decision(self, key: tuple[str, str], data: st.DataObject) -> None:
        self.committed("", key, self.plan(data))

    def committed(self, leader: str, key: tuple[str, str], plan: Plan) -> None:
        drained = [
            name
            for name in filter(None, (plan.decode, plan.prefill))
            if self.model.published.get(name.split(".")[0], ("ready", name)) != ("ready", name)
        ]
        grant = self.grant(key[1], plan)
        call = calls.commit(self.keys, leader, self.ticket(key), grant, self.views(), FOREVER)
        said, lease = self.run_call(call)
        assert said == self.model.commit(leader, *key, plan)
        if said == "granted":
            assert not drained
            self.within(plan.decode, plan.prefill)
            self.lives[key[1]] += bool(leader)
        if said in ("granted", "duplicate"):
            assert wire.leased(lease).handle == key[1]
            self.serving.setdefault(key, self.model.leased[key])

    def within(self, *incarnations: str) -> None:
        """Redis' own counters after a grant are within what the shards have."""
        reserved = self.counters()
        for name in filter(None, incarnations):
            assert reserved[f"{name}|kv"] <= ROOM.kv
            assert reserved[f"{name}|slots"] <= ROOM.slots
            assert reserved[f"{name}|slots"] + reserved[f"{name}|records"] <= ROOM.requests
            assert reserved[f"{name}|bytes"] <= ROOM.arena_bytes

    @rule(key=handles, conductor=st.sampled_from(("a.1", "b.1")))
    def refuse(self, key: tuple[str, str], conductor: str) -> None:
        if not self.terms[conductor]:
            return
        refusal = wire.Refusal(key[1], Refuse("too_large", "No."))
        call = calls.refuse(self.keys, self.terms[conductor], self.ticket(key), refusal)
        assert self.run_call(call) == self.model.refuse(self.terms[conductor], *key)

    @rule(key=consumes(handles))
    def complete(self, key: tuple[str, str]) -> None:
        call = calls.complete(self.keys, key[0], Completion(key[1], Outcome.DONE))
        assert self.run_call(call) == self.model.end(*key)
        assert self.run_call(call) == 0

    @rule(key=handles, data=st.data(), other=st.booleans())
    def relayed(self, key: tuple[str, str], data: st.DataObject, other: bool) -> None:
        """Also of a grant that is not the one that Redis knows."""
        served = self.plan(data) if other else self.serving.get(key)
        if served is None or not served.prefill:
            return
        now = served.relayed()
        call = calls.relayed(self.keys, key[0], self.grant(key[1], now), Relayed(key[1]))
        assert self.run_call(call) == self.model.relayed(*key, now)
        assert self.run_call(call) == 0
        self.serving[key] = now

    @rule(key=handles, data=st.data(), other=st.booleans())
    def restore(self, key: tuple[str, str], data: st.DataObject, other: bool) -> None:
        """What a gateway holds and Redis did not know, whatever the room."""
        plan = self.serving.get(key) or self.plan(data)
        plan = self.plan(data) if other else plan
        call = calls.restore(self.keys, key[0], self.grant(key[1], plan))
        assert self.run_call(call) == self.model.restore(*key, plan)
        assert self.run_call(call) == 0
        self.serving[key] = plan

    @rule(gateway=st.sampled_from(GATEWAYS), data=st.data())
    def heartbeat(self, gateway: str, data: st.DataObject) -> None:
        mine = sorted({h for g, h in (*self.model.waiting, *self.model.leased) if g == gateway} | {"h0"})
        opened = data.draw(st.lists(st.sampled_from(mine), unique=True), label="open")
        cut = data.draw(st.integers(0, len(opened)), label="granted")
        self.heartbeat_of(gateway, opened[:cut], opened[cut:])

    def heartbeat_of(self, gateway: str, granted: list[str], undecided: list[str]) -> None:
        missing = self.run_call(calls.heartbeat(self.keys, gateway, granted, undecided, FOREVER))
        assert set(missing) == self.model.heartbeat(gateway, granted, undecided)

    @rule(gateway=st.sampled_from(GATEWAYS))
    def gateway_falls_silent(self, gateway: str) -> None:
        self.redis.delete(self.keys.gateway(gateway))
        self.model.beating.discard(gateway)

    @rule()
    def reap(self) -> None:
        assert self.run_call(calls.reap(self.keys, FOREVER)) == self.model.reap()

    # --- what must always hold ------------------------------------------------------------------

    def counters(self) -> Counter[str]:
        found: dict[str, str] = self.redis.hgetall(self.keys.reserved)
        return Counter({name: int(amount) for name, amount in found.items()})

    @invariant()
    def counters_are_the_sum_over_the_leases(self) -> None:
        found = self.counters()
        assert all(amount > 0 for amount in found.values())
        live = {n: amount for n, amount in found.items() if n.split("|")[0] not in self.model.retired}
        assert live == self.model.reserved()
        # On an incarnation that is gone some may have gone too, but nothing is there that nobody holds.
        every: Counter[str] = Counter()
        for plan in self.model.leased.values():
            every.update(plan.holds())
        assert found <= every

    @invariant()
    def a_ticket_waits_or_is_leased_or_is_over(self) -> None:
        waiting = {(g, h) for g in GATEWAYS for h in self.redis.hkeys(self.keys.queued(g))}
        leases = {
            (g, h): text for g in GATEWAYS for h, text in self.redis.hgetall(self.keys.leases(g)).items()
        }
        assert waiting == set(self.model.waiting)
        assert leases.keys() == self.model.leased.keys()
        assert not waiting & leases.keys()
        assert self.redis.xlen(self.keys.tickets) == len(waiting)
        for key, text in leases.items():
            kv, record_bytes, decode, prefill, _ = text.split("|", 4)
            assert Plan(decode, prefill, int(kv), int(record_bytes)) == self.model.leased[key]
        assert self.model.submitted == len(waiting) + len(leases) + self.model.ended

    @invariant()
    def nobody_is_answered_twice_in_one_life(self) -> None:
        answers: Counter[str] = Counter()
        for gateway in GATEWAYS:
            for _, entry in self.redis.xrange(self.keys.grants(gateway)):
                told = json.loads(entry["b"])
                answers[told["handle"]] += "refused" not in told
        assert answers <= self.lives

    def teardown(self) -> None:
        """Half of the gateways end what they have, the others die: nothing is left."""
        for key in [*self.model.leased, *self.model.waiting]:
            if key[0] == GATEWAYS[0]:
                self.run_call(calls.complete(self.keys, key[0], Completion(key[1], Outcome.DONE)))
        for gateway in GATEWAYS:
            self.redis.delete(self.keys.gateway(gateway))
        self.run_call(calls.reap(self.keys, FOREVER))
        assert self.redis.hgetall(self.keys.reserved) == {}
        assert self.redis.xlen(self.keys.tickets) == 0
        for gateway in GATEWAYS:
            assert not self.redis.exists(self.keys.leases(gateway), self.keys.queued(gateway))
        self.wipe()


@pytest.mark.slow
def test_any_order_of_calls_leaves_the_books_right(redis: Redis) -> None:
    machine = type("BooksOnThisRedis", (Books,), {"redis": redis})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=200,
            stateful_step_count=40,
            deadline=None,
            # Add Phase.shrink, which takes minutes, to look for the shortest way to a failure.
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )
