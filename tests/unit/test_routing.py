from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.decision import Mode, Refuse, Wait
from orchestrator.core.routing import decide, first_come, release, reserve
from orchestrator.core.shard import ShardState
from orchestrator.core.ticket import Choice, Grant, ShardView, Ticket
from tgi_patches.contract import Fingerprint, Limits, Role

PRINT = Fingerprint("m", "r", "t", "float32", "float32", layers=2, kv_heads=1, head_dim=8, block_size=16)


def view(shard: str, role: Role, **changes: Any) -> ShardView:
    """1600 KV tokens, 4 slots, a ring of 40,000 bytes, 10 bytes per token (a record: at most 1000 tokens)."""
    base = ShardView(
        shard=shard,
        role=role,
        epoch=1,
        url=f"http://{shard}",
        state=ShardState.READY,
        fingerprint=PRINT,
        limits=Limits(4000, 4096, max_concurrent_requests=8),
        kv_tokens=1600,
        slots=4,
        ring_bytes=40_000,
        record_limit_bytes=10_000,
        bytes_per_token=10,
    )
    return replace(base, **changes)


def ticket(prompt: int = 100, new: int = 60, handle: str = "h", **changes: Any) -> Ticket:
    return Ticket(handle, "g.1", prompt, new, created_s=0.0, deadline_s=60.0, **changes)


P0, P1 = view("p0", Role.PREFILL), view("p1", Role.PREFILL)
D0, D1 = view("d0", Role.DECODE), view("d1", Role.DECODE)
M0 = view("m0", Role.MIXED)


def granted(ticket_: Ticket, *shards: ShardView, mode: Mode | None = None) -> Grant:
    decision = decide(ticket_, shards, mode=mode)
    assert isinstance(decision, Grant), decision
    return decision


def legs(grant: Grant) -> tuple[str | None, str]:
    return (grant.prefill.shard if grant.prefill else None, grant.decode.shard)


# --- separated ----------------------------------------------------------------------------------


def test_a_plain_request_gets_a_pair_with_what_it_needs_reserved() -> None:
    grant = granted(ticket(prompt=100, new=60), P0, D0, M0)
    assert (grant.choice, grant.reason, legs(grant)) == (Choice.SEPARATED, "pair", ("p0", "d0"))
    assert (grant.kv_tokens, grant.record_bytes, grant.max_new_tokens) == (160, 1000, 60)
    assert (grant.decode.epoch, grant.decode.url) == (1, "http://d0")


def test_kv_tokens_are_counted_in_whole_blocks() -> None:
    assert granted(ticket(prompt=100, new=61), P0, D0).kv_tokens == 176  # 11 blocks of 16
    one_sized = replace(D0, fingerprint=replace(PRINT, block_size=1))
    assert granted(ticket(prompt=100, new=61), P0, one_sized).kv_tokens == 161


def test_the_prefill_shard_with_the_least_outstanding_work_is_chosen() -> None:
    busy = replace(P0, outstanding_bytes=2000, outstanding_records=1)
    assert legs(granted(ticket(), busy, P1, D0))[0] == "p1"
    # 300 reserved tokens of mixed work are 3000 bytes: more than one record of 2000.
    mixed_work = replace(P1, reserved_kv_tokens=300, reserved_slots=1)
    assert legs(granted(ticket(), busy, mixed_work, D0))[0] == "p0"


def test_the_emptiest_decode_shard_is_chosen() -> None:
    assert legs(granted(ticket(), P0, replace(D0, reserved_slots=2), D1))[1] == "d1"
    assert legs(granted(ticket(), P0, D0, replace(D1, reserved_kv_tokens=800)))[1] == "d0"


@pytest.mark.parametrize(
    "full",
    [
        {"reserved_kv_tokens": 1600 - 159},
        {"reserved_slots": 4},
        {"reserved_slots": 3, "outstanding_records": 5},
    ],
)
def test_a_full_decode_shard_makes_the_request_wait(full: dict[str, int]) -> None:
    assert decide(ticket(100, 60), [P0, replace(D0, **full)]) == Wait("decode_full")
    assert legs(granted(ticket(100, 60), P0, replace(D0, **full), D1))[1] == "d1"


def test_the_last_free_tokens_and_slot_are_used() -> None:
    nearly = replace(D0, reserved_kv_tokens=1600 - 160, reserved_slots=3)
    assert legs(granted(ticket(100, 60), P0, nearly)) == ("p0", "d0")


@pytest.mark.parametrize(
    "full",
    [
        {"outstanding_bytes": 20_000 - 999},
        {"outstanding_records": 8},
        {"outstanding_records": 4, "reserved_slots": 4},
    ],
)
def test_records_stay_under_half_the_ring_and_requests_under_the_limit(full: dict[str, int]) -> None:
    assert decide(ticket(100, 60), [replace(P0, **full), D0]) == Wait("prefill_full")
    fits = replace(P0, outstanding_bytes=20_000 - 1000, outstanding_records=7)
    assert legs(granted(ticket(100, 60), fits, D0)) == ("p0", "d0")


def test_a_shard_for_mixed_work_takes_what_finds_no_pair_with_room() -> None:
    grant = granted(ticket(), P0, replace(D0, reserved_slots=4), M0)
    assert (grant.choice, grant.reason, legs(grant)) == (Choice.MIXED, "decode_full", (None, "m0"))


def test_room_on_a_prefill_shard_is_not_used_for_a_request_that_waits_for_decode() -> None:
    assert decide(ticket(), [P0, P1, replace(D0, reserved_slots=4)]) == Wait("decode_full")


# --- mixed --------------------------------------------------------------------------------------


def test_what_cannot_be_split_is_served_mixed_by_a_mixed_shard_then_decode_then_prefill() -> None:
    whole = ticket(splittable=False)
    assert granted(whole, P0, D0, M0).reason == "unsplittable"
    assert legs(granted(whole, P0, D0, M0)) == (None, "m0")
    assert legs(granted(whole, P0, D0, replace(M0, reserved_slots=4))) == (None, "d0")
    assert legs(granted(whole, P0, replace(D0, reserved_slots=4))) == (None, "p0")
    assert decide(whole, [replace(P0, reserved_slots=4), replace(D0, reserved_slots=4)]) == Wait("full")


def test_a_mixed_grant_reserves_tokens_on_the_shard_that_serves_and_no_record() -> None:
    grant = granted(ticket(100, 60, splittable=False), P0, D0, M0)
    assert (grant.kv_tokens, grant.record_bytes, grant.prefill) == (160, 0, None)


def test_one_token_is_all_prefill() -> None:
    grant = granted(ticket(new=1), P0, D0, M0)
    assert (grant.reason, legs(grant)) == ("one_token", (None, "p0"))
    assert legs(granted(ticket(new=1), replace(P0, reserved_slots=4), D0, M0)) == (None, "m0")


@pytest.mark.parametrize("state", ["starting", "suspect", "draining", "dead"])
def test_without_a_ready_decode_shard_any_ready_shard_serves_mixed(state: str) -> None:
    grant = granted(ticket(), P0, replace(D0, state=state))
    assert (grant.choice, grant.reason, legs(grant)) == (Choice.MIXED, "no_decode_shard", (None, "p0"))
    assert legs(granted(ticket(), P0, replace(D0, state=state), M0)) == (None, "m0")


def test_without_a_ready_prefill_shard_decode_serves_mixed() -> None:
    grant = granted(ticket(), replace(P0, state="dead"), D0)
    assert (grant.reason, legs(grant)) == ("no_prefill_shard", (None, "d0"))


def test_a_record_over_the_limit_is_never_made() -> None:
    assert granted(ticket(1000, 10), P0, D0).choice is Choice.SEPARATED
    grant = granted(ticket(1001, 10), P0, D0)
    assert (grant.choice, grant.reason) == (Choice.MIXED, "record_too_large")
    # A bigger ring elsewhere takes it.
    assert legs(granted(ticket(1001, 10), P0, replace(P1, record_limit_bytes=20_000), D0)) == ("p1", "d0")


def test_a_shard_without_a_ring_never_prefills_for_others() -> None:
    bare = replace(P0, ring_bytes=0, record_limit_bytes=0)
    assert granted(ticket(), bare, D0).reason == "record_too_large"


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "bfloat16"), ("revision", "other"), ("overlay", "old"), ("kv_heads", 4)],
)
def test_unlike_shards_never_pair_and_the_reason_names_the_difference(field: str, value: object) -> None:
    other = replace(D0, fingerprint=replace(PRINT, **{field: value}))  # type: ignore[arg-type]
    grant = granted(ticket(), P0, other)
    assert (grant.choice, grant.reason) == (Choice.MIXED, f"fingerprint_{field}")
    assert legs(granted(ticket(), P0, other, D1)) == ("p0", "d1")


def test_geometry_may_differ_where_every_rank_has_whole_heads() -> None:
    def ranks(shard: ShardView, count: int, kv_heads: int = 6) -> ShardView:
        geometry = replace(PRINT, kv_heads=kv_heads, tensor_parallel=count, block_size=32)
        return replace(shard, fingerprint=geometry)

    assert legs(granted(ticket(), ranks(P0, 6), ranks(D0, 3))) == ("p0", "d0")
    assert legs(granted(ticket(), ranks(P0, 3), ranks(D0, 2))) == ("p0", "d0")  # neither divides the other
    for odd in ((4, 2), (2, 4)):
        pair = ranks(P0, odd[0]), ranks(D0, odd[1])
        assert granted(ticket(), *pair).reason == "fingerprint_tensor_parallel"
    # A single head is copied to every rank.
    assert legs(granted(ticket(), ranks(P0, 5, 1), ranks(D0, 4, 1))) == ("p0", "d0")


# --- links --------------------------------------------------------------------------------------

FAR = replace(P1, url="http://10.0.0.2:3001", arena_id="far", pull_port=3101)
HERE = replace(D0, url="http://10.0.0.1:3002", arena_id="here", pulls=True)


def test_shards_of_one_arena_pair_without_a_pull() -> None:
    grant = granted(ticket(), replace(FAR, arena_id="here"), HERE)
    assert (legs(grant), grant.pull) == (("p1", "d0"), "")


@pytest.mark.parametrize("silent", [{"arena_id": ""}, {"arena_id": "", "pull_port": 0}])
def test_a_shard_that_does_not_tell_its_arena_is_taken_for_one_of_this_host(silent: dict[str, Any]) -> None:
    assert granted(ticket(), replace(FAR, **silent), HERE).pull == ""
    assert granted(ticket(), FAR, replace(HERE, arena_id="")).pull == ""


def test_across_hosts_the_grant_says_where_to_pull_from() -> None:
    assert granted(ticket(), FAR, HERE).pull == "10.0.0.2:3101"
    named = replace(FAR, pull_host="192.168.7.2")
    assert granted(ticket(), named, HERE).pull == "192.168.7.2:3101"
    # Its own loopback is no other host's: something at the address of its URL leads there.
    assert granted(ticket(), replace(FAR, pull_host="127.0.0.1"), HERE).pull == "10.0.0.2:3101"
    sixth = replace(FAR, url="http://[fd00::2]:3001")
    assert granted(ticket(), sixth, HERE).pull == "[fd00::2]:3101"


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (replace(FAR, pull_port=0), HERE),
        (FAR, replace(HERE, pulls=False)),
        # What the gateway reaches at its own loopback, another host does not.
        (replace(FAR, url="http://127.0.0.1:20001"), HERE),
    ],
)
def test_without_a_way_for_the_record_the_request_is_served_mixed(
    prefill: ShardView, decode: ShardView
) -> None:
    grant = granted(ticket(), prefill, decode)
    assert (grant.choice, grant.reason, grant.pull) == (Choice.MIXED, "no_link", "")


def test_a_loopback_address_is_a_way_for_a_decode_shard_on_it() -> None:
    local = replace(FAR, url="http://127.0.0.1:20001")
    assert granted(ticket(), local, replace(HERE, url="http://127.0.0.1:20002")).pull == "127.0.0.1:3101"


def test_a_record_stays_on_its_host_where_loads_are_equal_and_travels_where_they_are_not() -> None:
    there = replace(D1, url="http://10.0.0.2:3002", arena_id="far")
    assert legs(granted(ticket(), FAR, HERE, there)) == ("p1", "d1")  # d0 is first by name
    busy = replace(there, reserved_slots=1, reserved_kv_tokens=160)
    grant = granted(ticket(), FAR, HERE, busy)
    assert (legs(grant), grant.pull) == (("p1", "d0"), "10.0.0.2:3101")


def test_a_leg_knows_where_its_sidecar_answers() -> None:
    grant = granted(ticket(), replace(P0, sidecar_url="http://p0:9"), D0)
    assert grant.prefill is not None
    assert (grant.prefill.control_url, grant.decode.control_url) == ("http://p0:9", "http://d0")


def test_unhooked_shards_serve_mixed_only() -> None:
    assert granted(ticket(), replace(P0, hooked=False), D0).reason == "unhooked"
    grant = granted(ticket(), P0, replace(D0, hooked=False))
    assert (grant.choice, grant.reason, legs(grant)) == (Choice.MIXED, "unhooked", (None, "d0"))
    assert legs(granted(ticket(), P0, replace(D0, hooked=False), D1)) == ("p0", "d1")


def test_a_request_that_only_a_prefill_shard_could_hold_is_served_there() -> None:
    grant = granted(ticket(900, 100), P0, replace(D0, kv_tokens=800))
    assert (grant.reason, legs(grant)) == ("decode_too_small", (None, "p0"))


# --- no shard, cap ------------------------------------------------------------------------------


def test_a_request_larger_than_any_shard_is_refused_even_when_all_are_busy_or_away() -> None:
    for shards in ([P0, D0, M0], [replace(P0, reserved_slots=4), replace(D0, state="suspect")]):
        decision = decide(ticket(1500, 101), shards)
        assert isinstance(decision, Refuse)
        assert decision.reason == "too_large"
        assert "1601" in decision.detail
        assert "1600" in decision.detail
    assert not isinstance(decide(ticket(1500, 100), [P0, D0, M0]), Refuse)


def test_a_request_that_a_shard_could_hold_later_waits() -> None:
    assert decide(ticket(1500, 100), [replace(D0, state="starting")]) == Wait("no_shard_ready")
    assert decide(ticket(), []) == Wait("no_shard_ready")


def test_the_output_cap_of_the_mode_shrinks_the_reservation() -> None:
    grant = granted(ticket(100, 60), P0, D0, mode=Mode(level=1, output_cap=12))
    assert (grant.max_new_tokens, grant.kv_tokens) == (12, 112)
    assert granted(ticket(100, 60), P0, D0, mode=Mode(output_cap=100)).max_new_tokens == 60
    assert granted(ticket(100, 60), P0, D0, mode=Mode(output_cap=0)).reason == "one_token"


# --- in order -----------------------------------------------------------------------------------


def test_nobody_overtakes_a_request_that_waits() -> None:
    tickets = [ticket(handle="a"), ticket(900, 700, handle="b"), ticket(handle="c")]
    one_busy = [P0, replace(D0, reserved_kv_tokens=16)]
    assert [one.handle for one, _ in first_come(tickets, one_busy)] == ["a"]


def test_a_batch_never_counts_the_same_room_twice() -> None:
    tickets = [ticket(handle=str(n)) for n in range(9)]
    decided = list(first_come(tickets, [P0, D0, D1]))
    # Two decode shards with four slots each.
    assert len(decided) == 8
    assert [legs(grant)[1] for _, grant in decided if isinstance(grant, Grant)] == ["d0", "d1"] * 4


def test_a_refusal_does_not_hold_up_the_rest() -> None:
    tickets = [ticket(9999, 1, handle="big"), ticket(handle="small")]
    kinds = [(one.handle, type(decision)) for one, decision in first_come(tickets, [P0, D0])]
    assert kinds == [("big", Refuse), ("small", Grant)]


# --- properties ---------------------------------------------------------------------------------

FINGERPRINTS = st.sampled_from([PRINT, replace(PRINT, dtype="bfloat16"), replace(PRINT, block_size=1)])


@st.composite
def views(draw: st.DrawFn) -> ShardView:
    kv_tokens = draw(st.integers(1, 2000))
    slots = draw(st.integers(1, 5))
    ring = draw(st.integers(0, 40_000))
    requests = draw(st.integers(1, 8))
    reserved_slots = draw(st.integers(0, min(slots, requests)))
    return view(
        "-",
        draw(st.sampled_from(Role)),
        epoch=draw(st.integers(1, 9)),
        state=draw(st.sampled_from([*ShardState, ShardState.READY, ShardState.READY, ShardState.READY])),
        fingerprint=draw(FINGERPRINTS),
        limits=Limits(4000, 4096, max_concurrent_requests=requests),
        kv_tokens=kv_tokens,
        slots=slots,
        ring_bytes=ring,
        record_limit_bytes=ring // 4,
        reserved_kv_tokens=draw(st.integers(0, kv_tokens)),
        reserved_slots=reserved_slots,
        outstanding_bytes=draw(st.integers(0, ring // 2)),
        outstanding_records=draw(st.integers(0, requests - reserved_slots)),
        hooked=draw(st.sampled_from([True, True, True, False])),
    )


TABLES = st.lists(views(), max_size=6).map(
    lambda found: [replace(one, shard=f"s{place}") for place, one in enumerate(found)]
)
TICKETS = st.builds(
    ticket,
    st.integers(1, 1500),
    st.integers(1, 500),
    splittable=st.sampled_from([True, True, False]),
)
MODES = st.builds(Mode, level=st.just(0), output_cap=st.none() | st.integers(1, 100))


@given(st.lists(TICKETS, max_size=12), TABLES, MODES)
def test_never_over_reserves_and_never_uses_a_shard_that_is_not_ready(
    tickets: list[Ticket], shards: list[ShardView], mode: Mode
) -> None:
    by_name = {one.shard: one for one in shards}
    for _, grant in first_come(tickets, shards, mode=mode):
        if not isinstance(grant, Grant):
            continue
        shards = list(reserve(shards, grant))
        for leg in (grant.decode, grant.prefill):
            assert leg is None or by_name[leg.shard].state == "ready"
            assert leg is None or by_name[leg.shard].epoch == leg.epoch
    for one in shards:
        assert one.reserved_kv_tokens <= one.kv_tokens
        assert one.reserved_slots <= one.slots
        assert 2 * one.outstanding_bytes <= one.ring_bytes
        assert one.reserved_slots + one.outstanding_records <= one.limits.max_concurrent_requests


@given(TICKETS, TABLES, MODES)
def test_a_grant_keeps_the_rules_of_its_kind(asked: Ticket, shards: list[ShardView], mode: Mode) -> None:
    decision = decide(asked, shards, mode=mode)
    if not isinstance(decision, Grant):
        return
    by_name = {one.shard: one for one in shards}
    decode = by_name[decision.decode.shard]
    output = asked.max_new_tokens if mode.output_cap is None else min(asked.max_new_tokens, mode.output_cap)
    assert decision.max_new_tokens == output
    block = decode.fingerprint.block_size
    assert asked.prompt_tokens + output <= decision.kv_tokens < asked.prompt_tokens + output + block
    if decision.prefill is None:
        assert (decision.choice, decision.record_bytes) == (Choice.MIXED, 0)
        return
    prefill = by_name[decision.prefill.shard]
    assert asked.splittable
    assert output > 1
    assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
    assert prefill.hooked
    assert decode.hooked
    assert prefill.fingerprint.dtype == decode.fingerprint.dtype
    assert decision.record_bytes == 10 * asked.prompt_tokens <= prefill.record_limit_bytes


@given(TICKETS, TABLES, st.data())
def test_more_room_never_takes_a_grant_away(
    asked: Ticket, shards: list[ShardView], data: st.DataObject
) -> None:
    if not isinstance(decide(asked, shards), Grant):
        return
    roomier = [
        replace(
            one,
            reserved_kv_tokens=data.draw(st.integers(0, one.reserved_kv_tokens)),
            reserved_slots=data.draw(st.integers(0, one.reserved_slots)),
            outstanding_bytes=data.draw(st.integers(0, one.outstanding_bytes)),
            outstanding_records=data.draw(st.integers(0, one.outstanding_records)),
        )
        for one in shards
    ]
    assert isinstance(decide(asked, roomier), Grant)


@given(TICKETS, TABLES)
def test_only_what_fits_no_shard_at_all_is_refused(asked: Ticket, shards: list[ShardView]) -> None:
    tokens = asked.prompt_tokens + asked.max_new_tokens
    decision = decide(asked, shards)
    if isinstance(decision, Refuse):
        assert all(tokens > one.kv_tokens - one.kv_tokens % one.fingerprint.block_size for one in shards)
    elif shards:
        assert any(tokens <= one.kv_tokens for one in shards)


@given(TICKETS, TABLES)
def test_what_was_reserved_is_given_back_exactly(asked: Ticket, shards: list[ShardView]) -> None:
    decision = decide(asked, shards)
    if isinstance(decision, Grant):
        booked = reserve(shards, decision)
        assert booked != tuple(shards)
        assert release(booked, decision) == tuple(shards)


def test_another_incarnation_is_not_charged() -> None:
    grant = granted(ticket(), P0, D0)
    reborn = (replace(P0, epoch=2), replace(D0, epoch=2))
    assert reserve(reborn, grant) == reborn
