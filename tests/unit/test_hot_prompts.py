from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orchestrator.core.fingerprint import simhash
from orchestrator.core.hot_prompts import HotPrompts, HotRules
from orchestrator.core.ticket import Choice, Completion, Grant, Leg, Outcome, SharedRecord, Ticket

RING = 1000
DECODES = ["d0", "d1", "d2", "d3"]
FAR = [0x0000_0000_FFFF_FFFF, 0x5555_5555_5555_5555, 0xCCCC_CCCC_3333_3333, 0xF0F0_0F0F_F0F0_0F0F]


def ticket(handle: str, text: str = "a", *, tokens: int = 100, **known: object) -> Ticket:
    simhash = FAR[ord(text[0]) % len(FAR)]
    return Ticket(
        handle, "g.1", tokens, 10, created_s=0.0, deadline_s=60.0, prompt_hash=text, simhash=simhash, **known
    )  # type: ignore[arg-type]


def separated(handle: str, *, shard: str = "p0", epoch: int = 1, record_bytes: int = 10) -> Grant:
    prefill, decode = Leg(shard, epoch, f"http://{shard}"), Leg("d0", 1, "http://d0")
    return Grant(handle, Choice.SEPARATED, "", decode, prefill, 110, record_bytes, 10)


def reading(handle: str, shared: SharedRecord) -> Grant:
    return replace(separated(handle, record_bytes=0), prefill=None, shared=shared)


def begun(
    hot: HotPrompts, handle: str = "owner", text: str = "a", now_s: float = 0.0, **placed: object
) -> None:
    """A request of this text has a prefill of its own."""
    hot.began(ticket(handle, text), separated(handle, **placed), RING, now_s)  # type: ignore[arg-type]


def owner_for(hot: HotPrompts, text: str = "a", now_s: float = 0.0, **known: object) -> str | None:
    shared = hot.record_for(ticket("reader", text, **known), now_s)
    return None if shared is None else shared.handle


def arrive(hot: HotPrompts, count: int, times_s: Iterable[float], text: str = "a", prefix: str = "h") -> None:
    for number, now_s in zip(range(count), times_s, strict=False):
        hot.seen(ticket(f"{prefix}{number}", text), now_s)


def centres(hot: HotPrompts, now_s: float) -> list[int]:
    return [group.group for group in hot.hot(now_s)]


# --- which records are shared -------------------------------------------------------------------


def test_the_second_equal_prompt_reads_the_first_ones_record_before_it_is_even_published() -> None:
    hot = HotPrompts()
    assert owner_for(hot) is None
    begun(hot)
    shared = hot.record_for(ticket("reader"), 0.1)
    assert shared == SharedRecord("owner", Leg("p0", 1, "http://p0"))


def test_an_owner_does_not_read_its_own_record() -> None:
    hot = HotPrompts()
    begun(hot)
    assert hot.record_for(ticket("owner"), 0.1) is None


@pytest.mark.parametrize(
    "other",
    [
        ticket("r", "b"),
        ticket("r", model="another"),
        ticket("r", tokens=31),
        ticket("r", choice=Choice.MIXED),
        ticket("r", splittable=False),
        replace(ticket("r"), prompt_hash=""),
    ],
)
def test_what_is_not_the_same_prompt_of_the_same_model_or_may_not_be_split_reads_nothing(
    other: Ticket,
) -> None:
    hot = HotPrompts()
    begun(hot)
    assert hot.record_for(ticket("r", choice=Choice.SEPARATED), 0.0) is not None
    assert hot.record_for(other, 0.0) is None


@pytest.mark.parametrize(
    "owner", [ticket("o", tokens=31), ticket("o", choice=Choice.MIXED), replace(ticket("o"), prompt_hash="")]
)
def test_records_of_what_is_not_shared_are_not_offered(owner: Ticket) -> None:
    hot = HotPrompts()
    hot.began(owner, separated("o"), RING, 0.0)
    assert hot.record_for(replace(owner, handle="r", prompt_tokens=100, choice=None), 0.0) is None


def test_a_mixed_grant_leaves_no_record() -> None:
    hot = HotPrompts()
    mixed = replace(separated("owner"), choice=Choice.MIXED, prefill=None, record_bytes=0)
    hot.began(ticket("owner"), mixed, RING, 0.0)
    assert owner_for(hot) is None


def test_a_burst_of_100_requests_of_three_texts_needs_three_prefills() -> None:
    hot, prefills = HotPrompts(), list[str]()
    for number in range(100):
        one, now_s = ticket(f"h{number}", "abc"[number % 3]), number / 100
        hot.seen(one, now_s)
        shared = hot.record_for(one, now_s)
        if shared is None:
            prefills.append(one.handle)
        grant = separated(one.handle) if shared is None else reading(one.handle, shared)
        hot.began(one, grant, RING, now_s)
    assert prefills == ["h0", "h1", "h2"]
    assert len(hot.hot(1.0)) == 3


# --- pinned ------------------------------------------------------------------------------------


def heated(text: str = "a", now_s: float = 0.0) -> HotPrompts:
    """`text` came 20 times at once, which is more than 2 a second for a while."""
    hot = HotPrompts()
    arrive(hot, 20, itertools.repeat(now_s), text)
    return hot


def begun_pinned(hot: HotPrompts, handle: str = "owner", now_s: float = 0.0, **placed: object) -> None:
    grant = replace(separated(handle, **placed), pinned=True)  # type: ignore[arg-type]
    hot.began(ticket(handle), grant, RING, now_s)


def test_a_prompt_of_a_hot_group_is_pinned_until_one_is() -> None:
    hot = heated()
    assert hot.pins(ticket("owner"), 0.0)
    begun(hot, "plain")
    assert hot.pins(ticket("owner"), 0.0)  # there is a record, but not a pinned one
    begun_pinned(hot)
    assert not hot.pins(ticket("next"), 0.0)
    assert hot.pins(ticket("owner"), 0.0)  # decided again: its record replaces its own
    hot.failed("owner")
    assert hot.pins(ticket("next"), 0.0)


@pytest.mark.parametrize(
    "other",
    [
        ticket("r", "b"),
        ticket("r", tokens=31),
        ticket("r", choice=Choice.MIXED),
        ticket("r", splittable=False),
        replace(ticket("r"), prompt_hash=""),
        replace(ticket("r"), simhash=0),
    ],
)
def test_what_is_not_hot_or_not_shared_is_not_pinned(other: Ticket) -> None:
    hot = heated()
    assert hot.pins(ticket("r"), 0.0)
    assert not hot.pins(other, 0.0)


def test_nothing_is_pinned_any_more_once_the_group_has_cooled_down() -> None:
    hot = heated()
    assert not hot.pins(ticket("r"), 100.0)


def test_a_pinned_record_is_not_lost_however_much_its_ring_is_written() -> None:
    hot = HotPrompts(HotRules(record_ttl_s=60.0, ring_records=2))
    begun_pinned(hot)
    for number in range(10):
        begun(hot, f"h{number}", "xyz"[number % 3], record_bytes=RING)
    assert owner_for(hot, now_s=59.9) == "owner"
    assert owner_for(hot, now_s=60.0) is None


def test_a_pinned_record_goes_with_its_incarnation_its_failure_and_a_readers_miss() -> None:
    hot = heated()
    begun_pinned(hot, epoch=5)
    hot.lost("p0", 5)
    assert (owner_for(hot), hot.pins(ticket("r"), 0.0)) == (None, True)
    begun_pinned(hot, "second")
    hot.ended(Completion("second", Outcome.FAILED), 0.0)
    assert owner_for(hot) is None
    begun_pinned(hot, "third")
    shared = hot.record_for(ticket("reader"), 0.0)
    assert shared is not None
    hot.began(ticket("reader"), reading("reader", shared), 0, 0.0)
    hot.ended(Completion("reader", Outcome.DONE, imported=False), 0.0)
    assert (owner_for(hot), hot.pins(ticket("r"), 0.0)) == (None, True)


def test_a_later_record_takes_a_pinned_ones_place_only_when_it_is_pinned_too_or_that_one_is_over() -> None:
    hot = HotPrompts(HotRules(record_ttl_s=60.0))
    begun_pinned(hot)
    begun(hot, "plain", now_s=1.0)
    assert owner_for(hot, now_s=1.0) == "owner"
    begun_pinned(hot, "again", now_s=30.0)
    assert owner_for(hot, now_s=60.0) == "again"
    begun(hot, "late", now_s=90.0)
    assert owner_for(hot, now_s=90.0) == "late"


# --- when a record is gone ----------------------------------------------------------------------


def test_a_record_is_shared_until_its_time_is_over() -> None:
    hot = HotPrompts(HotRules(record_ttl_s=60.0))
    begun(hot, now_s=5.0)
    assert owner_for(hot, now_s=64.9) == "owner"
    assert owner_for(hot, now_s=65.0) is None


def test_a_record_counts_as_lost_once_a_quarter_of_its_ring_was_granted_after_it() -> None:
    hot = HotPrompts(HotRules(ring_share=0.25))
    begun(hot, record_bytes=200)
    begun(hot, "h1", "x", record_bytes=150)
    unshared = replace(ticket("h2"), prompt_hash="")
    hot.began(unshared, separated("h2", record_bytes=100), RING, 0.0)
    assert owner_for(hot) == "owner"  # 250 of 1000 after it
    begun(hot, "h3", "y", shard="p1", record_bytes=500)
    assert owner_for(hot) == "owner"  # another shard's ring
    begun(hot, "h4", "z", record_bytes=1)
    assert owner_for(hot) is None
    assert owner_for(hot, "x") == "h1"


def test_a_record_counts_as_lost_once_so_many_records_were_granted_after_it() -> None:
    hot = HotPrompts(HotRules(ring_records=2))
    begun(hot, record_bytes=1)
    begun(hot, "h1", "x", record_bytes=1)
    begun(hot, "h2", "y", record_bytes=1)
    assert owner_for(hot) == "owner"
    begun(hot, "h3", "z", record_bytes=1)
    assert owner_for(hot) is None


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED, Outcome.REFUSED])
def test_an_owner_that_ends_before_its_record_is_published_leaves_none(outcome: Outcome) -> None:
    hot = HotPrompts()
    begun(hot)
    hot.ended(Completion("owner", outcome), 1.0)
    assert owner_for(hot, now_s=1.0) is None


def test_a_published_record_outlives_its_owner() -> None:
    hot = HotPrompts()
    begun(hot)
    hot.imported("owner", 1.0)
    hot.ended(Completion("owner", Outcome.CANCELLED), 2.0)
    assert owner_for(hot, now_s=2.0) == "owner"


def test_an_owner_that_is_done_has_published_its_record() -> None:
    hot = HotPrompts()
    begun(hot)
    hot.ended(Completion("owner", Outcome.DONE), 1.0)
    hot.ended(Completion("owner", Outcome.CANCELLED), 1.0)
    assert owner_for(hot, now_s=1.0) == "owner"


def test_a_record_that_its_own_decode_shard_missed_is_not_offered_to_others() -> None:
    hot = HotPrompts()
    begun(hot)
    hot.ended(Completion("owner", Outcome.DONE, imported=False), 1.0)
    assert owner_for(hot, now_s=1.0) is None


def test_a_readers_miss_ends_the_sharing_of_the_record_that_it_read_and_of_no_later_one() -> None:
    hot = HotPrompts()
    begun(hot)
    for handle in ("r1", "r2", "r3"):
        shared = hot.record_for(ticket(handle), 0.0)
        assert shared is not None
        hot.began(ticket(handle), reading(handle, shared), 0, 0.0)
    hot.ended(Completion("r1", Outcome.DONE, imported=True), 1.0)
    assert owner_for(hot, now_s=1.0) == "owner"
    hot.ended(Completion("r2", Outcome.DONE, imported=False), 1.0)
    assert owner_for(hot, now_s=1.0) is None
    begun(hot, "second", now_s=2.0)
    hot.ended(Completion("r3", Outcome.DONE, imported=False), 2.0)
    assert owner_for(hot, now_s=2.0) == "second"


def test_the_miss_of_a_request_that_read_no_shared_record_changes_nothing() -> None:
    hot = HotPrompts()
    begun(hot)
    hot.ended(Completion("somebody", Outcome.DONE, imported=False), 1.0)
    assert owner_for(hot, now_s=1.0) == "owner"


def test_a_grant_that_was_not_committed_leaves_no_record() -> None:
    hot = HotPrompts()
    begun(hot)
    hot.failed("owner")
    assert owner_for(hot) is None


def test_records_go_with_their_incarnation_and_with_no_other() -> None:
    hot = HotPrompts()
    begun(hot, "h1", "a", shard="p0", epoch=5)
    begun(hot, "h2", "b", shard="p1", epoch=5)
    hot.lost("p0", 4)
    assert owner_for(hot, "a") == "h1"
    hot.lost("p0", 5)
    assert owner_for(hot, "a") is None
    assert owner_for(hot, "b") == "h2"


def test_a_later_epoch_ends_the_records_of_earlier_ones_and_an_earlier_one_brings_none() -> None:
    hot = HotPrompts()
    begun(hot, "h1", "a", epoch=5)
    begun(hot, "h2", "b", epoch=6)
    assert owner_for(hot, "a") is None
    begun(hot, "h3", "c", epoch=5)
    assert owner_for(hot, "c") is None
    assert owner_for(hot, "b") == "h2"


def test_the_newest_record_of_a_prompt_is_read() -> None:
    hot = HotPrompts()
    begun(hot, "h1", now_s=0.0)
    begun(hot, "h2", shard="p1", now_s=50.0)
    assert owner_for(hot, now_s=100.0) == "h2"
    hot.ended(Completion("h1", Outcome.FAILED), 100.0)
    assert owner_for(hot, now_s=100.0) == "h2"


# --- which groups are hot -----------------------------------------------------------------------


def test_a_group_becomes_hot_and_cools_down_by_itself() -> None:
    hot = HotPrompts(HotRules(enter_per_s=2.0, leave_per_s=1.0, half_life_s=5.0))
    # 14 at once are 14 * ln 2 / 5 = 1.94 a second, 15 are 2.08
    arrive(hot, 14, [0.0] * 14)
    assert hot.group_of(ticket("h0"), 0.0) is None
    hot.seen(ticket("last"), 0.0)
    assert hot.group_of(ticket("h0"), 0.0) == ticket("h0").simhash
    # they are half as many after 5 s, and below 1 at 5.3
    assert hot.group_of(ticket("h0"), 5.2) is not None
    assert centres(hot, 5.2) == [ticket("h0").simhash]
    assert hot.group_of(ticket("h0"), 5.4) is None
    assert hot.reserved_for_hot(DECODES, 5.4) == frozenset()
    assert hot.hot(5.4) == ()


def test_it_cools_down_for_status_and_routing_without_any_further_request() -> None:
    for ask in (HotPrompts.hot, lambda hot, now_s: hot.reserved_for_hot(DECODES, now_s)):
        hot = HotPrompts()
        arrive(hot, 30, [0.0] * 30)
        assert ask(hot, 1.0)
        assert not ask(hot, 60.0)


def test_similar_prompts_are_one_group_and_others_are_ordinary_traffic() -> None:
    hot, draw = HotPrompts(), random.Random(1)
    for number in range(40):
        near = ticket(f"h{number}").simhash ^ sum(1 << bit for bit in draw.sample(range(64), number % 4))
        hot.seen(replace(ticket(f"h{number}", "a"), simhash=near, prompt_hash=str(number)), 0.0)
    hot.seen(ticket("other", "b"), 0.0)
    assert len(hot.hot(0.0)) == 1
    newcomer = replace(ticket("new"), simhash=ticket("new").simhash ^ 1)
    assert hot.group_of(newcomer, 0.0) == hot.group_of(ticket("h0"), 0.0) is not None
    assert hot.group_of(ticket("other", "b"), 0.0) is None
    assert hot.group_of(ticket("another model", "a", model="another"), 0.0) is None


def test_an_arrival_counts_once_however_often_it_is_told() -> None:
    hot = HotPrompts()
    arrive(hot, 5, [0.0] * 5)
    for _ in range(100):
        arrive(hot, 5, [0.0] * 5)
    assert hot.hot(0.0) == ()


def test_a_prompt_without_a_fingerprint_is_never_hot() -> None:
    hot = HotPrompts()
    arrive(hot, 30, [0.0] * 30)
    for number in range(1000):
        hot.seen(replace(ticket(f"n{number}"), simhash=0), 0.0)
    assert hot.group_of(replace(ticket("n0"), simhash=0), 0.0) is None
    assert len(hot.hot(0.0)) == 1


@pytest.mark.parametrize("rate", [0.5, 0.9, 1.0, 1.5, 1.9, 2.0, 2.1, 3.0, 20.0])
def test_a_group_at_a_constant_rate_changes_its_state_once_at_most(rate: float) -> None:
    hot, states = HotPrompts(), list[bool]()
    for number in range(int(200 * rate)):
        now_s = number / rate
        hot.seen(ticket(f"h{number}"), now_s)
        for later_s in (0.0, 0.5 / rate, 0.99 / rate):
            states.append(hot.group_of(ticket(f"h{number}"), now_s + later_s) is not None)
    assert sum(before is not after for before, after in itertools.pairwise(states)) <= 1
    # 1 / (1 - 2^(-1 / 5 r)) * ln 2 / 5 after an arrival: r + 0.07
    assert states[-1] is (rate > 1.93)


@pytest.mark.parametrize(("rate", "stays"), [(0.9, False), (1.2, True), (1.9, True)])
def test_a_hot_group_stays_hot_between_the_two_rates(rate: float, stays: bool) -> None:
    hot = HotPrompts()
    arrive(hot, 30, [0.0] * 30, prefix="burst")
    for number in range(200):
        now_s = 1 + number / rate
        assert hot.group_of(ticket("burst0"), now_s) is not None or not stays
        hot.seen(ticket(f"h{number}"), now_s)
    assert bool(hot.hot(1 + 200 / rate)) is stays


def test_a_thousand_different_texts_a_second_never_become_hot() -> None:
    hot, draw = HotPrompts(), random.Random(3)
    vocabulary = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(3, 9))) for _ in range(2000)]
    weights = [1 / rank for rank in range(1, 2001)]
    for number in range(10_000):
        text = " ".join(draw.choices(vocabulary, weights, k=60))
        one = replace(ticket(f"h{number}"), simhash=simhash(text), prompt_hash=str(number))
        hot.seen(one, number / 1000)
        assert hot.group_of(one, number / 1000) is None
    assert hot.hot(10.0) == ()


def test_a_hot_group_is_noticed_among_a_thousand_different_texts_a_second() -> None:
    hot, draw = HotPrompts(), random.Random(4)
    for number in range(5000):
        other = replace(ticket(f"o{number}"), simhash=draw.getrandbits(64))
        hot.seen(ticket(f"h{number}") if number % 100 == 0 else other, number / 1000)
    assert centres(hot, 5.0) == [ticket("h0").simhash]
    seen = hot.hot(5.0)[0]
    assert 4 < seen.per_s <= 10
    assert seen.share == pytest.approx(0.01, rel=0.1)


def test_a_request_that_waited_long_belongs_to_the_group_that_is_near_it_now() -> None:
    hot = HotPrompts()
    waiting = ticket("waiting")
    hot.seen(waiting, 0.0)
    near = replace(ticket("h"), simhash=waiting.simhash ^ 0b111)
    for number in range(30):
        hot.seen(replace(near, handle=f"h{number}"), 600.0)
    assert hot.group_of(waiting, 600.0) == near.simhash


def test_what_is_idle_leaves_no_memory() -> None:
    hot = HotPrompts()
    arrive(hot, 30, [0.0] * 30)
    begun(hot)
    hot.hot(600.0)
    assert len(hot._hitters) == 0
    begun(hot, "later", "b", now_s=600.0)
    assert len(hot._records) == 1


# --- where they go ------------------------------------------------------------------------------


def test_a_hot_group_keeps_to_its_part_and_the_rest_is_for_others() -> None:
    hot = HotPrompts(HotRules(share_of_decode=0.25))
    arrive(hot, 30, [0.0] * 30)
    group = hot.group_of(ticket("h0"), 0.0)
    assert group is not None
    chosen = hot.decode_set(group, DECODES, 0.0)
    assert len(chosen) == 1
    assert hot.reserved_for_hot(DECODES, 0.0) == chosen
    assert [one.decodes for one in hot.hot(0.0)] == [chosen]
    assert hot.decode_set(group, DECODES, 3.0) == chosen
    assert hot.decode_set(group, DECODES, 100.0) == frozenset(DECODES)


def test_two_hot_groups_use_different_decode_shards() -> None:
    hot = HotPrompts(HotRules(share_of_decode=0.25))
    arrive(hot, 30, [0.0] * 30, "a")
    arrive(hot, 30, [0.0] * 30, "b", prefix="i")
    first, second = (hot.decode_set(group, DECODES, 0.0) for group in centres(hot, 0.0))
    assert not first & second
    assert hot.reserved_for_hot(DECODES, 0.0) == first | second < frozenset(DECODES)


def test_no_more_groups_are_hot_than_the_rules_allow() -> None:
    hot = HotPrompts(HotRules(most_hot=2))
    for text in "abcd":
        arrive(hot, 30, [0.0] * 30, text, prefix=text)
    assert centres(hot, 0.0) == [ticket("x", text).simhash for text in "ab"]


def test_equal_events_lead_to_equal_decisions() -> None:
    def played() -> list[object]:
        hot, draw = HotPrompts(), random.Random(5)
        for number in range(2000):
            one, now_s = ticket(f"h{number}", draw.choice("abcdefgh")), number / 200
            one = replace(one, simhash=one.simhash ^ draw.getrandbits(3))
            hot.seen(one, now_s)
            shared = hot.record_for(one, now_s)
            grant = (
                separated(one.handle, shard=draw.choice(["p0", "p1"]))
                if shared is None
                else reading(one.handle, shared)
            )
            hot.began(one, grant, RING, now_s)
        return [hot.hot(10.0), [hot.decode_set(group, DECODES, 10.0) for group in centres(hot, 10.0)]]

    assert played() == played() != [(), []]


# --- bounds -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"leave_per_s": 3.0}, "leave_per_s"),
        ({"leave_per_s": 0.0}, "leave_per_s"),
        ({"distance_bits": 8}, "distance_bits"),
        ({"most_groups": 0}, "bounds"),
        ({"half_life_s": 0.0}, "half_life_s"),
    ],
)
def test_rules_that_contradict_themselves_are_refused_with_a_sentence(
    wrong: dict[str, float], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        HotRules(**wrong)  # type: ignore[arg-type]


FEW = HotRules(most_groups=4, most_hot=2, most_handles=8, most_records=4, enter_per_s=0.3, leave_per_s=0.2)


def held(hot: HotPrompts) -> int:
    """Things of any kind that it refers to, however deep."""
    count, seen, waiting = 0, set[int](), [hot.__dict__]
    while waiting:
        one: object = waiting.pop()
        if id(one) in seen or isinstance(one, str | int | float | type | HotRules):
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            count += len(one)
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            count += len(one)
            waiting += one
        else:
            slots = getattr(type(one), "__slots__", ())
            waiting += [getattr(one, slot) for slot in slots if hasattr(one, slot)]
            waiting.append(getattr(one, "__dict__", {}))
    return count


def test_memory_is_bounded_over_any_number_of_requests() -> None:
    def played(count: int) -> int:
        hot, draw = HotPrompts(FEW), random.Random(6)
        for number in range(count):
            now_s = number / 50
            one = ticket(f"h{number}", str(draw.randrange(count)))
            one = replace(one, simhash=draw.choice([draw.getrandbits(64), draw.choice(FAR), 0]))
            hot.seen(one, now_s)
            group = hot.group_of(one, now_s)
            if group is not None:
                hot.decode_set(group, DECODES, now_s)
            shared = hot.record_for(one, now_s)
            placed = separated(one.handle, shard=f"p{draw.randrange(count)}", epoch=number)
            hot.began(one, placed if shared is None else reading(one.handle, shared), RING, now_s)
            if draw.random() < 0.3:  # most of them never end
                hot.ended(
                    Completion(
                        one.handle, draw.choice(list(Outcome)), imported=draw.choice([True, False, None])
                    ),
                    now_s,
                )
        return held(hot)

    assert played(5000) <= played(500) * 1.2


class Anything(RuleBasedStateMachine):
    """Whatever arrives, in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.hot = HotPrompts(FEW)
        self.now_s = 0.0
        self.readable = dict[str, tuple[str, str]]()
        """Prompts by owner."""

    handles = st.sampled_from([f"h{number}" for number in range(40)])
    texts = st.sampled_from("abcdefgh")
    models = st.sampled_from(["", "m"])

    @rule(handle=handles, text=texts, model=models, flips=st.integers(0, 255), later_s=st.floats(0, 20))
    def a_request_comes(self, handle: str, text: str, model: str, flips: int, later_s: float) -> None:
        self.now_s += later_s
        one = ticket(handle, text, model=model)
        self.hot.seen(replace(one, simhash=one.simhash ^ flips), self.now_s)

    @rule(
        handle=handles,
        text=texts,
        model=models,
        shard=st.sampled_from(["p0", "p1", "p2"]),
        epoch=st.integers(1, 3),
        record_bytes=st.integers(0, 200),
        pinned=st.booleans(),
    )
    def a_request_is_granted(
        self, handle: str, text: str, model: str, shard: str, epoch: int, record_bytes: int, pinned: bool
    ) -> None:
        one = ticket(handle, text, model=model)
        shared = self.hot.record_for(one, self.now_s)
        if shared is not None:
            assert self.readable[shared.handle] == (text, model)
            assert shared.handle != handle
            self.hot.began(one, reading(handle, shared), 0, self.now_s)
            return
        self.readable[handle] = (text, model)
        grant = replace(separated(handle, shard=shard, epoch=epoch, record_bytes=record_bytes), pinned=pinned)
        self.hot.began(one, grant, RING, self.now_s)

    @rule(
        handle=handles, outcome=st.sampled_from(list(Outcome)), imported=st.sampled_from([True, False, None])
    )
    def a_request_ends(self, handle: str, outcome: Outcome, imported: bool | None) -> None:
        self.hot.ended(Completion(handle, outcome, imported=imported), self.now_s)

    @rule(handle=handles)
    def a_record_is_imported(self, handle: str) -> None:
        self.hot.imported(handle, self.now_s)

    @rule(handle=handles)
    def a_grant_fails(self, handle: str) -> None:
        self.hot.failed(handle)

    @rule(shard=st.sampled_from(["p0", "p1", "p2"]), epoch=st.integers(1, 3))
    def a_shard_is_lost(self, shard: str, epoch: int) -> None:
        self.hot.lost(shard, epoch)
        for handle in list(self.readable):
            shared = self.hot.record_for(
                ticket("nobody", *self.readable[handle][:1], model=self.readable[handle][1]), self.now_s
            )
            assert shared is None or shared.owner.shard != shard or shared.owner.epoch > epoch

    @rule(count=st.integers(0, 6), later_s=st.floats(0, 30))
    def somebody_asks(self, count: int, later_s: float) -> None:
        decodes = [f"d{number}" for number in range(count)]
        reserved = self.hot.reserved_for_hot(decodes, self.now_s + later_s)
        assert reserved <= frozenset(decodes)
        assert len(reserved) < count or count < 2
        for group in self.hot.hot(self.now_s + later_s):
            assert group.per_s >= FEW.leave_per_s
            assert group.decodes == self.hot.decode_set(group.group, decodes, self.now_s) <= reserved

    @invariant()
    def memory_is_bounded(self) -> None:
        hot = self.hot
        assert len(hot._hitters) <= FEW.most_groups
        assert len(hot._hitters._order) == len(hot._hitters)
        assert len(hot._hot) == len(hot._sets) <= FEW.most_hot
        assert len(hot._seen) <= 2 * FEW.most_handles
        records = hot._records
        assert len(records) <= FEW.most_records
        owners = {record.shared.handle for record in records._records.values()}
        assert set(records._prompts) == owners >= records._unpublished
        assert set().union(*(ring.owners for ring in records._rings.values())) == owners
        assert all(ring.owners for ring in records._rings.values())


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60))
def test_among_requests_at_once_each_text_has_one_prefill(texts: list[str]) -> None:
    hot, prefills = HotPrompts(), list[str]()
    for number, text in enumerate(texts):
        one = ticket(f"h{number}", text)
        shared = hot.record_for(one, 0.0)
        if shared is None:
            prefills.append(text)
        hot.began(
            one, separated(one.handle) if shared is None else reading(one.handle, shared), RING * 100, 0.0
        )
    assert sorted(prefills) == sorted(set(texts))
