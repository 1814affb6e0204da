from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.cost import Costs, DecodeCost, PrefillCost
from orchestrator.core.decision import Mode, Policy, Refuse
from orchestrator.core.hot_prompts import HotPrompts, HotRules
from orchestrator.core.pending import Place
from orchestrator.core.routing import release, reserve
from orchestrator.core.scheduling import PATIENCE, Scheduler, Tuning
from orchestrator.core.ticket import Choice, Completion, Grant, Outcome, Relayed, ShardView, Ticket, relayed
from tests.unit.test_routing import D0, D1, M0, P0, P1, legs, view
from tgi_patches.contract import Limits, Role

# 10 ms + 1 ms a token: 991 tokens give 99 % of the best throughput, in 1.001 s.
COSTS = Costs(prefill=PrefillCost(0.010, 0.001), decode=DecodeCost(0.020, 0.0, 0.001))
GROUP_S = 1.001
NORMAL = Mode()
SPLIT = Policy(choice=Choice.SEPARATED)


def priced(shard: ShardView, **changes: Any) -> ShardView:
    return replace(shard, costs=COSTS, **changes)


P, D = priced(P0), priced(D0)
ROOMY: dict[str, Any] = {
    "kv_tokens": 1_000_000,
    "slots": 1000,
    "ring_bytes": 10_000_000,
    "record_limit_bytes": 1_000_000,
    "limits": Limits(4000, 4096, max_concurrent_requests=1000),
}
BIG_P, BIG_D = priced(P0, **ROOMY), priced(D0, **ROOMY)


def ticket(handle: str, prompt: int = 100, new: int = 60, **changes: Any) -> Ticket:
    return Ticket(handle, "g.1", prompt, new, created_s=0.0, deadline_s=600.0, **changes)


class World:
    """A scheduler with its shards and books; every decision is committed."""

    def __init__(self, *shards: ShardView, policy: Policy = SPLIT, **changes: Any) -> None:
        self.scheduler = Scheduler(policy, **changes)
        self.shards: tuple[ShardView, ...] = shards
        self.grants: dict[str, Grant] = {}
        self.held: dict[str, Grant] = {}
        self.now_s = 0.0
        self._count = 0
        self.run()  # it learns what prompts cost

    def arrive(self, *tickets: Ticket) -> None:
        for one in tickets:
            self._count += 1
            place: Place = (round(self.now_s * 1000), self._count)
            self.scheduler.add({place: one}, self.now_s)

    def run(self, mode: Mode = NORMAL) -> list[str]:
        """Handles in the order in which they are granted."""
        decided = []
        for one, decision in self.scheduler.decide(self.shards, mode, self.now_s):
            assert isinstance(decision, Grant)
            decided.append((one, decision))
        for one, grant in decided:
            self.shards = reserve(self.shards, grant)
            self.grants[one.handle] = self.held[one.handle] = grant
            self.scheduler.granted(one, grant, self.now_s)
        return [one.handle for one, _ in decided]

    def imported(self, handle: str) -> None:
        after = relayed(self.held[handle])
        self.shards = reserve(release(self.shards, self.held[handle]), after)
        self.held[handle] = after
        self.scheduler.relayed(Relayed(handle), self.now_s)

    def end(self, handle: str, outcome: Outcome = Outcome.DONE, **facts: Any) -> None:
        self.shards = release(self.shards, self.held.pop(handle))
        self.scheduler.ended(Completion(handle, outcome, **facts), self.now_s)


# --- order --------------------------------------------------------------------------------------


def waiting_behind(*tickets: Ticket, gaps_s: Sequence[float] = ()) -> list[str]:
    """The order in which they go through one prefill shard that is busy while they arrive."""
    world = World(BIG_P, BIG_D)
    world.arrive(ticket("first", 1000))
    world.run()
    gaps = list(gaps_s) or [0.0] * len(tickets)
    for one, gap_s in zip(tickets, gaps, strict=True):
        world.now_s += gap_s
        world.arrive(one)
    order: list[str] = []
    world.now_s = max(world.now_s, 2.0)
    for handle in ("first", *[one.handle for one in tickets]):
        if handle in world.held:
            world.imported(handle)
        else:
            assert order, "nothing went"
            world.imported(order[-1])
        order += world.run()
        world.now_s += 2.0
    return order


def test_of_those_that_wait_together_the_shorter_prompts_go_first() -> None:
    order = waiting_behind(ticket("long", 3000), ticket("short", 20), ticket("middle", 500))
    assert order == ["short", "middle", "long"]


def test_what_is_longer_than_a_group_keeps_its_turn() -> None:
    order = waiting_behind(ticket("longer", 3000), ticket("long", 1000), ticket("longest", 3500))
    assert order == ["longer", "long", "longest"]


def test_patience_ends_after_so_many_prefills_of_a_group() -> None:
    just = PATIENCE * GROUP_S
    early = waiting_behind(ticket("long", 3000), ticket("short", 10), gaps_s=[0, just - 0.1])
    late = waiting_behind(ticket("long", 3000), ticket("short", 10), gaps_s=[0, just + 0.1])
    assert (early, late) == (["short", "long"], ["long", "short"])


def test_a_higher_class_goes_before_a_shorter_prompt() -> None:
    assert waiting_behind(ticket("short", 10), ticket("high", 3000, priority=1)) == ["high", "short"]


def test_without_a_cost_model_everything_goes_in_turn() -> None:
    world = World(replace(P0, **ROOMY), replace(D0, **ROOMY))
    world.arrive(ticket("long", 3000), ticket("short", 20), ticket("middle", 70), ticket("other", 500))
    # Behind the first one a group of alike prompts, up to the longest that the shard takes.
    assert world.run() == ["long", "short", "middle"]
    world.imported("long")
    assert world.run() == ["other"]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 3000), st.floats(0, 3), st.sampled_from([0, 0, 0, 1])),
        min_size=1,
        max_size=40,
    )
)
def test_nobody_starves(arrivals: list[tuple[int, float, int]]) -> None:
    """Whose turn it is goes whenever the shard is free, whoever joins a group before others do.

    A turn is 14 s after arrival at the latest, so no later arrival comes before it for longer than that.
    """
    world = World(BIG_P, BIG_D)
    turns: dict[str, float] = {}
    for number, (tokens, gap_s, priority) in enumerate(arrivals):
        world.now_s += gap_s
        share = min(1.0, (0.010 + 0.001 * tokens) / GROUP_S)
        turns[f"h{number}"] = world.now_s + 14 * GROUP_S * share**2 - 30 * priority
        world.arrive(ticket(f"h{number}", tokens, priority=priority))
    waiting = dict(turns)
    for _ in arrivals:
        if not waiting:
            break
        world.now_s += 5.0
        went = world.run()
        first = min(waiting.values())
        assert any(waiting[handle] <= first + 0.001 for handle in went)
        for handle in went:
            del waiting[handle]
            world.imported(handle)
            world.end(handle)
    assert not waiting


# --- windows ------------------------------------------------------------------------------------


def test_behind_a_running_prompt_one_group_is_let_through_and_the_rest_waits() -> None:
    world = World(BIG_P, BIG_D)
    world.arrive(*[ticket(f"h{n}", 40) for n in range(5)])
    assert world.run() == ["h0"]  # 50 ms; the next group goes 30 ms before it is done
    assert abs((world.scheduler.opens_s() or 0) - 0.02) < 1e-9
    world.now_s = 0.021
    assert world.run() == ["h1", "h2"]  # 40 + 40 of 91 tokens
    world.now_s = 0.05
    world.imported("h0")
    assert world.run() == []
    world.imported("h1")
    world.imported("h2")
    assert world.run() == ["h3"]


def test_what_cannot_join_the_group_is_passed_by_what_can_and_goes_next() -> None:
    world = World(BIG_P, BIG_D)
    world.arrive(ticket("running", 20))
    world.run()
    world.arrive(ticket("a", 50), ticket("too-long", 60), ticket("b", 20))
    assert world.run() == ["b", "a"]  # 70 tokens; 60 more would be too many
    world.imported("running")
    world.now_s = 0.06
    assert world.run() == ["too-long"]


def test_a_grant_that_was_not_committed_frees_its_window_and_waits_on() -> None:
    world = World(BIG_P, BIG_D)
    world.arrive(ticket("a", 500), ticket("b", 500))
    (first, _), *_ = world.scheduler.decide(world.shards, NORMAL, 0.0)
    world.scheduler.failed(first, 0.0)
    assert world.run() == ["a"]


def test_two_prefill_shards_have_a_window_each() -> None:
    world = World(BIG_P, priced(P1, **ROOMY), BIG_D)
    world.arrive(*[ticket(f"h{n}", 500) for n in range(4)])
    assert world.run() == ["h0", "h1"]
    assert {legs(grant)[0] for grant in world.grants.values()} == {"p0", "p1"}


def test_an_idle_scheduler_has_no_time_to_look_at() -> None:
    world = World(BIG_P, BIG_D)
    world.arrive(ticket("a", 500))
    world.run()
    assert world.scheduler.opens_s() is None


def test_what_waits_for_decode_room_stops_everything_behind_it() -> None:
    world = World(P, replace(D, reserved_kv_tokens=1500))
    world.arrive(ticket("large", 100, 60), ticket("small", 10, 10))
    # By turn the small one is first and takes the last 32 tokens of 100.
    assert world.run() == ["small"]
    other = World(P, replace(D, reserved_kv_tokens=1500))
    other.arrive(ticket("large", 10, 200), ticket("small", 11, 10))
    assert other.run() == []


def test_unsplittable_requests_pass_a_closed_window() -> None:
    world = World(BIG_P, BIG_D, priced(M0))
    world.arrive(ticket("a", 3000))
    world.run()
    world.arrive(ticket("b", 500), ticket("tools", 600, splittable=False))
    assert world.run() == ["tools"]
    assert legs(world.grants["tools"]) == (None, "m0")


# --- hot prompts --------------------------------------------------------------------------------

TEXTS = [("a" * 32, 0b1111), ("b" * 32, 0b1110), ("c" * 32, 0b1101)]


def hot_world(decodes: int = 4, **changes: Any) -> World:
    prefills = [priced(view(f"p{n}", Role.PREFILL), **ROOMY) for n in range(2)]
    others = [priced(view(f"d{n}", Role.DECODE), **(ROOMY | changes)) for n in range(decodes)]
    return World(*prefills, *others, hot=HotPrompts(HotRules(share_of_decode=0.5)))


def burst(count: int, prompt: int = 200) -> list[Ticket]:
    return [
        ticket(f"hot{n}", prompt, prompt_hash=TEXTS[n % 3][0], simhash=TEXTS[n % 3][1]) for n in range(count)
    ]


def test_a_burst_of_three_texts_has_three_prefills() -> None:
    world = hot_world()
    for one in burst(100):
        world.now_s += 0.01
        world.arrive(one)
        world.run()
    world.now_s += 1.0
    world.run()
    prefills = [handle for handle, grant in world.grants.items() if grant.prefill is not None]
    assert (len(world.grants), prefills) == (100, ["hot0", "hot1", "hot2"])
    shared = [grant for grant in world.grants.values() if grant.shared is not None]
    assert len(shared) == 97
    assert {grant.reason for grant in shared} == {"shared"}
    for handle, grant in world.grants.items():
        text = int(handle.removeprefix("hot")) % 3
        assert grant.shared is None or grant.shared.handle == f"hot{text}"


def test_a_hot_group_keeps_to_half_of_the_decode_shards_and_others_to_the_rest() -> None:
    world = hot_world()
    for one in burst(60):
        world.now_s += 0.01
        world.arrive(one)
        world.run()
    used = {grant.decode.shard for handle, grant in world.grants.items() if int(handle[3:]) >= 40}
    assert 1 <= len(used) <= 2
    world.now_s += 0.5
    for n in range(4):
        world.arrive(ticket(f"other{n}", 200, prompt_hash=f"{n}" * 32, simhash=(2**64 - 1) // (n + 3)))
        world.now_s += 1.0
        world.run()
    others = {world.grants[f"other{n}"].decode.shard for n in range(4)}
    assert not others & used


def test_a_hot_group_without_room_waits_and_holds_nobody_up() -> None:
    world = hot_world(slots=8)
    for one in burst(60):
        world.now_s += 0.01
        world.arrive(one)
        world.run()
    waiting = len(world.scheduler.pending)
    assert waiting > 0
    world.arrive(ticket("other", 200, prompt_hash="f" * 32, simhash=0xAAAA5555AAAA5555))
    world.now_s += 1.0
    assert world.run() == ["other"]
    assert len(world.scheduler.pending) == waiting


def test_an_owner_that_failed_is_replaced_by_the_next_request() -> None:
    world = hot_world()
    first, second, third = burst(9)[::3]
    world.arrive(first)
    world.run()
    world.end("hot0", Outcome.FAILED)
    world.now_s = 1.0
    world.arrive(second)
    world.run()
    assert world.grants["hot3"].prefill is not None
    world.arrive(third)
    world.run()
    assert world.grants["hot6"].shared is not None
    assert world.grants["hot6"].shared.handle == "hot3"


def test_records_of_a_lost_incarnation_are_not_shared() -> None:
    world = hot_world()
    first, second, _ = burst(9)[::3]
    world.arrive(first)
    world.run()
    owner = world.grants["hot0"].prefill
    assert owner is not None
    world.scheduler.lost(owner.shard, owner.epoch)
    world.now_s = 1.0
    world.arrive(second)
    world.run()
    assert world.grants["hot3"].shared is None


# --- whatever happens ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["arrive", "arrive", "run", "import", "end", "fail", "wait", "drain", "relaunch"]
            ),
            st.integers(1, 900),
            st.integers(0, 5),
        ),
        max_size=60,
    ),
    st.booleans(),
)
def test_every_ticket_is_waiting_granted_or_over_and_no_shard_is_overfull(
    steps: list[tuple[str, int, int]], priced_shards: bool
) -> None:
    shards = [one if priced_shards else replace(one, costs=None) for one in (P, priced(P1), D, priced(D1))]
    world = World(*shards, policy=Policy(), hot=HotPrompts())
    arrived, over = 0, 0
    for number, (what, tokens, pick) in enumerate(steps):
        if what == "arrive":
            text = TEXTS[pick % 3]
            world.arrive(ticket(f"h{number}", tokens, 20, prompt_hash=text[0], simhash=text[1]))
            arrived += 1
        elif what == "run":
            world.run()
        elif what == "wait":
            world.now_s += pick
        elif what in ("drain", "relaunch"):
            name = world.shards[pick % 4].shard
            change: dict[str, Any] = {"state": "draining"}
            if what == "relaunch":
                before = world.shards[pick % 4]
                world.scheduler.lost(name, before.epoch)
                change = {"state": "ready", "epoch": before.epoch + 1, "reserved_kv_tokens": 0}
                change |= {"reserved_slots": 0, "outstanding_bytes": 0, "outstanding_records": 0}
            world.shards = tuple(replace(s, **change) if s.shard == name else s for s in world.shards)
        elif world.held:
            handle = sorted(world.held)[pick % len(world.held)]
            if what == "import" and world.held[handle].prefill is not None:
                world.imported(handle)
            elif what != "import":
                world.end(handle, Outcome.DONE if what == "end" else Outcome.FAILED, generated_tokens=tokens)
                over += 1
        assert len(world.scheduler.pending) + len(world.held) + over == arrived
        for shard in world.shards:
            assert shard.reserved_kv_tokens <= shard.kv_tokens
            assert shard.reserved_slots <= shard.slots
            assert shard.outstanding_bytes <= shard.ring_bytes // 2
            assert shard.reserved_slots + shard.outstanding_records <= shard.limits.max_concurrent_requests


def test_nothing_is_granted_on_a_draining_or_suspect_shard() -> None:
    for state in ("draining", "suspect", "starting", "dead"):
        world = World(P, priced(P1, state=state), D, priced(D1, state=state), policy=Policy())
        world.arrive(*[ticket(f"h{n}", 20, 20) for n in range(6)])
        world.run()
        world.now_s = 5.0
        world.run()
        assert {grant.decode.shard for grant in world.grants.values()} == {"d0"}
        assert {grant.prefill.shard for grant in world.grants.values() if grant.prefill} <= {"p0"}


def test_what_never_fits_is_refused_and_what_follows_is_served() -> None:
    world = World(P, D)
    world.arrive(ticket("huge", 2000), ticket("small", 10))
    decided = {
        one.handle: type(decision) for one, decision in world.scheduler.decide(world.shards, NORMAL, 0.0)
    }
    assert decided == {"small": Grant, "huge": Refuse}


@pytest.mark.parametrize("windows", [True, False])
def test_windows_can_be_switched_off(windows: bool) -> None:
    world = World(BIG_P, BIG_D, tuning=Tuning(windows=windows))
    world.arrive(*[ticket(f"h{n}", 500) for n in range(4)])
    assert len(world.run()) == (1 if windows else 4)


def test_the_record_of_a_hot_prompt_is_pinned_where_the_shard_has_room_for_that() -> None:
    for pinned_bytes in (1_000_000, 0):
        world = hot_world()
        world.shards = tuple(replace(shard, pinned_bytes=pinned_bytes) for shard in world.shards)
        for one in burst(60):
            world.now_s += 0.01
            world.arrive(one)
            world.run()
        assert not world.grants["hot0"].pinned, "nothing was hot when it began"
        for text in range(3):
            world.end(f"hot{text}", Outcome.FAILED)
        world.arrive(*[replace(one, handle=f"late{number}") for number, one in enumerate(burst(3))])
        for _ in range(2):
            world.now_s += 0.25
            world.run()
        late = [world.grants[f"late{number}"] for number in range(3)]
        assert [grant.prefill is not None for grant in late] == [True] * 3
        assert [grant.pinned for grant in late] == [pinned_bytes > 0] * 3


# --- what has gone wrong once -------------------------------------------------------------------


def test_an_end_that_comes_late_from_a_prefill_shard_that_is_gone_changes_nothing() -> None:
    world = World(BIG_P, BIG_D)
    world.arrive(ticket("a", 500), ticket("b", 500))
    world.run()
    world.now_s = 5.0  # both should be done by now, and nobody has said so
    world.run()
    for state in ("suspect", "ready"):
        world.shards = tuple(
            replace(shard, state=state) if shard.shard == "p0" else shard for shard in world.shards
        )
        world.run()
    world.imported("a")
    world.end("a")
    world.end("b")
    world.arrive(ticket("c", 500))
    assert world.run() == ["c"]


def test_what_cannot_share_does_not_wait_for_an_equal_prompt() -> None:
    world = hot_world()
    same: dict[str, Any] = {"prompt_hash": "e" * 32, "simhash": 99}
    world.arrive(*[ticket(f"busy{n}", 3000) for n in range(2)])
    world.run()
    world.arrive(
        ticket("first", 3000, **same),
        ticket("whole", 3100, choice=Choice.MIXED, **same),
        ticket("other", 3100, model="another", choice=Choice.MIXED, **same),
        ticket("again", 3100, **same),
    )
    assert sorted(world.run()) == ["other", "whole"]


def test_a_deployment_that_splits_nothing_shares_nothing() -> None:
    world = hot_world()
    same: dict[str, Any] = {"prompt_hash": "e" * 32, "simhash": 99}
    world.arrive(ticket("first", 300, choice=Choice.SEPARATED, **same))
    world.run()
    world.scheduler.policy = Policy(choice=Choice.MIXED)
    world.arrive(ticket("second", 300, **same))
    world.run()
    assert (world.grants["second"].choice, world.grants["second"].reason) == (Choice.MIXED, "forced")


def test_behind_many_that_wait_for_a_window_others_are_still_looked_at() -> None:
    world = World(BIG_P, BIG_D)
    world.arrive(*[ticket(f"h{n}", 1500) for n in range(40)])
    assert world.run() == ["h0"]
    world.arrive(ticket("tools", 3000, splittable=False))
    assert world.run() == ["tools"]


def test_a_full_ring_sends_a_short_prompt_to_an_idle_decode_shard() -> None:
    full = replace(P, outstanding_bytes=20_000, outstanding_records=2)
    world = World(full, D, policy=Policy())
    world.arrive(ticket("short", 20, 20))
    world.run()
    assert (world.grants["short"].reason, legs(world.grants["short"])) == ("break_even", (None, "d0"))


def test_with_the_quickest_shard_full_another_one_may_serve_whole() -> None:
    # d0 is quicker by its costs and has no room left.
    quick = Costs(COSTS.prefill, DecodeCost(0.001, 0.0, 0.0))
    full = replace(D, costs=quick, reserved_slots=4)
    world = World(P, full, priced(D1), policy=Policy())
    world.arrive(ticket("a", 20, 20))
    world.run()
    assert (world.grants["a"].reason, world.grants["a"].decode.shard) == ("break_even", "d1")
