from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.cost import Costs, DecodeCost, PrefillCost, RelayCost
from orchestrator.core.decision import Hint, Mode, Policy, Refuse, Wait
from orchestrator.core.fleet import Fleet
from orchestrator.core.routing import decide
from orchestrator.core.ticket import Choice, Grant, Leg, ShardView, SharedRecord, Ticket
from tests.unit.test_routing import D0, D1, M0, P0, P1, legs, ticket

# 10 ms + 1 ms a token; a step of 20 ms + 1 ms a sequence; 2 ms + 1 GB/s in place, 50 ms + 1 MB/s from afar.
COSTS = Costs(
    prefill=PrefillCost(0.010, 0.001),
    decode=DecodeCost(0.020, 0.0, 0.001),
    relay=RelayCost(0.002, 1e9),
    pull=RelayCost(0.050, 1e6),
)


def priced(view: ShardView, costs: Costs | None = COSTS, **changes: Any) -> ShardView:
    return replace(view, costs=costs, **changes)


P, D = priced(P0), priced(D0)


def grant_of(asked: Ticket, *shards: ShardView, policy: Policy | None = None, **hint: Any) -> Grant:
    decision = decide(asked, shards, policy=policy, hint=Hint(**hint))
    assert isinstance(decision, Grant), decision
    return decision


def way(grant: Grant) -> tuple[Choice, str]:
    return grant.choice, grant.reason


MIXED = (Choice.MIXED, "break_even")
SPLIT = (Choice.SEPARATED, "pair")


def test_on_an_idle_decode_shard_nothing_is_won_by_splitting() -> None:
    grant = grant_of(ticket(100, 60), P, D)
    assert way(grant) == MIXED
    # 110 ms of prefill either way; 60 steps of 21 ms after a relay of 2 ms, or 59 without.
    assert abs(grant.predicted[Choice.SEPARATED] - (0.110 + 0.002001 + 60 * 0.021)) < 1e-9
    assert abs(grant.predicted[Choice.MIXED] - (0.110 + 59 * 0.021)) < 1e-9


def test_a_prefill_that_would_stop_others_for_longer_than_the_relay_takes_is_split() -> None:
    one_decodes = replace(D, reserved_slots=1)
    # 110 ms for one other sequence, against a relay of 2 ms, a step of 22 ms more, and a forward of 21 ms
    # that redoes the last prompt token and stops the other as well.
    assert way(grant_of(ticket(100, 60), P, one_decodes)) == SPLIT
    # 15 ms for one other are less than that, and 3 x 15 less than 2 + 24 + 3 x 21.
    assert way(grant_of(ticket(5, 60), P, one_decodes)) == MIXED
    assert way(grant_of(ticket(5, 60), P, replace(D, reserved_slots=3))) == MIXED
    # 3 x 50 are more than that.
    assert way(grant_of(ticket(40, 60), P, replace(D, reserved_slots=3))) == SPLIT


def test_a_long_queue_of_prefills_is_worth_more_than_the_harm() -> None:
    one_decodes = replace(D, reserved_slots=1)
    # One record of 1000 bytes is 100 tokens: 110 ms until the prefill shard is free.
    behind_one = replace(P, outstanding_bytes=1000, outstanding_records=1)
    assert way(grant_of(ticket(100, 60), behind_one, one_decodes)) == MIXED


def test_the_time_to_first_token_decides_where_one_way_misses_it() -> None:
    behind_one = replace(P, outstanding_bytes=5000, outstanding_records=1)
    busy = replace(D, reserved_slots=3)
    split = grant_of(ticket(300, 60), behind_one, busy)
    assert way(split) == SPLIT  # 510 ms of waiting, against 3 x 310 ms of others' time
    assert way(grant_of(ticket(300, 60), behind_one, busy, policy=Policy(ttft_s=0.5))) == MIXED


def test_the_time_per_token_of_the_others_decides_where_one_way_misses_it() -> None:
    behind = replace(P, outstanding_bytes=5000, outstanding_records=1)
    one_decodes = replace(D, reserved_slots=1)
    assert way(grant_of(ticket(200, 60), behind, one_decodes)) == MIXED
    # 210 ms more over 60 tokens: 22 + 3.5 ms.
    assert way(grant_of(ticket(200, 60), behind, one_decodes, policy=Policy(tpot_s=0.0254))) == SPLIT
    assert way(grant_of(ticket(200, 60), behind, one_decodes, policy=Policy(tpot_s=0.0256))) == MIXED


def test_either_way_can_be_forced_for_all_or_for_one() -> None:
    assert way(grant_of(ticket(100, 60), P, D, policy=Policy(choice=Choice.SEPARATED))) == SPLIT
    busy = replace(D, reserved_slots=3)
    assert way(grant_of(ticket(100, 60), P, busy, policy=Policy(choice=Choice.MIXED))) == (
        Choice.MIXED,
        "forced",
    )
    assert way(grant_of(ticket(100, 60, choice=Choice.SEPARATED), P, D)) == SPLIT
    asked = ticket(100, 60, choice=Choice.MIXED)
    assert way(grant_of(asked, P, busy, policy=Policy(choice=Choice.SEPARATED))) == (Choice.MIXED, "forced")


def test_without_a_cost_model_of_every_ready_shard_a_request_is_split() -> None:
    assert way(grant_of(ticket(100, 60), P0, D0)) == SPLIT
    assert way(grant_of(ticket(100, 60), P, D0)) == SPLIT
    assert way(grant_of(ticket(100, 60), P, priced(D0, Costs(prefill=COSTS.prefill)))) == SPLIT
    assert way(grant_of(ticket(100, 60), P, D, priced(M0, Costs(prefill=COSTS.prefill)))) == SPLIT
    assert way(grant_of(ticket(100, 60), P, D, priced(D1, None, state="starting"))) == MIXED


def test_what_a_role_does_not_do_need_not_be_known() -> None:
    prefill = priced(P0, Costs(prefill=COSTS.prefill))
    assert way(grant_of(ticket(100, 60), prefill, D)) == MIXED
    # What decode shards take for a prompt is unknown: they are not asked to compute one.
    decode = priced(D0, Costs(decode=COSTS.decode))
    grant = grant_of(ticket(100, 60), prefill, decode)
    assert way(grant) == SPLIT
    assert list(grant.predicted) == [Choice.SEPARATED]


def test_a_mixed_shard_competes_where_costs_are_known() -> None:
    busy = replace(D, reserved_slots=3)
    assert legs(grant_of(ticket(100, 60), P, busy, priced(M0))) == (None, "m0")
    mixed_busy = priced(M0, reserved_slots=3)
    assert legs(grant_of(ticket(100, 60), P, busy, mixed_busy)) == ("p0", "d0")


def test_a_closed_window_waits_unless_another_shard_serves_at_once_for_less() -> None:
    shut: dict[str, Any] = {"gate": lambda room, tokens: False}
    busy = replace(D, reserved_slots=3)
    assert decide(ticket(100, 60), [P, busy], hint=Hint(**shut)) == Wait("prefill_window")
    assert way(grant_of(ticket(100, 60), P, D, **shut)) == MIXED
    assert decide(ticket(100, 60), [P0, D0], hint=Hint(**shut)) == Wait("prefill_window")
    assert legs(grant_of(ticket(100, 60), P0, D0, M0, **shut)) == (None, "m0")


def test_a_prefill_shard_whose_window_is_open_goes_before_one_that_is_less_busy() -> None:
    open_: dict[str, Any] = {"gate": lambda room, tokens: room.view.shard == "p1"}
    forced = ticket(100, 60, choice=Choice.SEPARATED)
    more_busy = priced(P1, outstanding_bytes=1000, outstanding_records=1)
    assert legs(grant_of(forced, P, more_busy, D, **open_)) == ("p1", "d0")


# --- links, prefixes ----------------------------------------------------------------------------

FAR = {"arena_id": "there", "pulls": True}


def test_a_decode_shard_that_reads_in_place_goes_before_one_that_pulls_until_it_is_slower_by_more() -> None:
    prefill = replace(P, arena_id="here", pull_port=9000, url="http://10.0.0.1:1")
    near, far = replace(D, arena_id="here"), priced(D1, **FAR)
    forced = ticket(100, 60, choice=Choice.SEPARATED)
    assert legs(grant_of(forced, prefill, near, far)) == ("p0", "d0")
    # 51 ms of pull over 60 tokens are less than a step that is 1 ms longer.
    busier = replace(near, reserved_slots=1)
    grant = grant_of(forced, prefill, busier, far)
    assert (legs(grant), grant.pull) == (("p0", "d1"), "10.0.0.1:9000")
    slow = replace(far, costs=replace(COSTS, pull=RelayCost(0.5, 1e6)))
    assert legs(grant_of(forced, prefill, busier, slow)) == ("p0", "d0")


def test_the_holder_of_a_prefix_is_chosen_until_it_has_a_quarter_more_than_the_mean() -> None:
    forced = ticket(100, 60, choice=Choice.SEPARATED)
    one = priced(P1, outstanding_bytes=1000, outstanding_records=1)
    assert legs(grant_of(forced, P, one, D))[0] == "p0"
    assert legs(grant_of(forced, P, one, D, holder="p1"))[0] == "p0", "1 is more than 1.25 x 0.5"
    both = replace(P, outstanding_bytes=900, outstanding_records=1)
    assert legs(grant_of(forced, both, one, D, holder="p1"))[0] == "p1"
    assert legs(grant_of(forced, both, one, D, holder="gone"))[0] == "p0"


# --- shared records -----------------------------------------------------------------------------

OWNER = Leg("p0", 1, "http://p0")
SHARED = SharedRecord("a" * 32, OWNER)


def test_a_record_of_the_same_prompt_is_read_by_the_least_loaded_decode_shard() -> None:
    grant = grant_of(ticket(100, 60), P, replace(D, reserved_slots=1), priced(D1), shared=SHARED)
    assert (grant.choice, grant.reason, legs(grant)) == (Choice.SEPARATED, "shared", (None, "d1"))
    assert (grant.shared, grant.record_bytes, grant.kv_tokens) == (SHARED, 0, 160)


def test_a_record_is_not_shared_where_it_cannot_be_read_in_place() -> None:
    prefill = replace(P0, arena_id="here", pull_port=9000, url="http://10.0.0.1:1")
    elsewhere = replace(D0, **FAR)
    grant = grant_of(ticket(100, 60), prefill, elsewhere, shared=SHARED)
    assert (grant.reason, grant.shared, legs(grant)) == ("pair", None, ("p0", "d0"))


def test_a_record_of_an_incarnation_that_is_gone_is_not_shared() -> None:
    assert grant_of(ticket(100, 60), replace(P0, epoch=2), D0, shared=SHARED).reason == "pair"
    assert grant_of(ticket(100, 60), replace(P0, state="dead"), P1, D0, shared=SHARED).reason == "pair"


def test_a_hot_request_keeps_to_its_shards_and_waits_for_them() -> None:
    assert legs(grant_of(ticket(), P0, D0, D1, only={"d1"})) == ("p0", "d1")
    full = replace(D1, reserved_slots=4)
    assert decide(ticket(), [P0, D0, full], hint=Hint(only={"d1"})) == Wait("hot_full")
    assert decide(ticket(), [P0, D0, full], hint=Hint(only={"d1"}, shared=SHARED)) == Wait("hot_full")


def test_others_leave_those_shards_alone_while_there_are_others_with_room() -> None:
    assert legs(grant_of(ticket(), P0, D0, replace(D1, reserved_slots=3), avoid={"d0"})) == ("p0", "d1")
    full = replace(D1, reserved_slots=4)
    assert legs(grant_of(ticket(), P0, D0, full, avoid={"d0"})) == ("p0", "d0")
    # Neither does the cost model send them there.
    assert legs(grant_of(ticket(100, 60), P, D, priced(D1, reserved_slots=3), avoid={"d0"})) == ("p0", "d1")


# --- never more than there is -------------------------------------------------------------------

SOME_COSTS = st.one_of(
    st.none(),
    st.builds(
        lambda a, b, s: Costs(PrefillCost(a, b), DecodeCost(s, 0.0, s / 10), RelayCost(a, 1e9), None),
        st.floats(0, 0.1),
        st.floats(0, 0.01),
        st.floats(0, 0.1),
    ),
)


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 600), st.booleans()), max_size=30),
    SOME_COSTS,
    st.sampled_from([None, Choice.SEPARATED, Choice.MIXED]),
    st.sampled_from([None, 64]),
)
def test_whatever_it_costs_nothing_is_promised_twice(
    sizes: list[tuple[int, int, bool]], costs: Costs | None, choice: Choice | None, cap: int | None
) -> None:
    views = [priced(view, costs) for view in (P0, P1, D0, D1, M0)]
    fleet, promised = Fleet(views), dict.fromkeys([view.shard for view in views], (0, 0, 0, 0))
    for number, (prompt, new, splittable) in enumerate(sizes):
        asked = ticket(prompt, new, f"h{number}", splittable=splittable)
        decision = decide(asked, fleet, mode=Mode(output_cap=cap), policy=Policy(choice))
        assert not isinstance(decision, Refuse)
        if isinstance(decision, Wait):
            continue
        fleet.book(decision)
        kv, slots, bytes_, records = promised[decision.decode.shard]
        promised[decision.decode.shard] = kv + decision.kv_tokens, slots + 1, bytes_, records
        if decision.prefill is not None:
            kv, slots, bytes_, records = promised[decision.prefill.shard]
            promised[decision.prefill.shard] = kv, slots, bytes_ + decision.record_bytes, records + 1
        assert decision.max_new_tokens == min(new, cap or new)
        assert decision.kv_tokens >= prompt + decision.max_new_tokens
    for kv, slots, bytes_, records in promised.values():
        assert kv <= 1600
        assert slots <= 4
        assert bytes_ <= 20_000
        assert slots + records <= 8
