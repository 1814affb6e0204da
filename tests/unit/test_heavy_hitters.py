from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.heavy_hitters import HeavyHitters
from orchestrator.core.near_index import BUCKET_MOST, DISTANCE_MOST, NearIndex
from orchestrator.core.recent import Recent

fingerprints = st.integers(1, 2**64 - 1)


def hitters(most: int = 64, half_life_s: float = 5.0) -> HeavyHitters:
    return HeavyHitters(most=most, half_life_s=half_life_s, distance_bits=DISTANCE_MOST)


def flipped(fingerprint: int, bits: set[int]) -> int:
    return fingerprint ^ sum(1 << bit for bit in bits)


@given(fingerprints, st.sets(st.integers(0, 63), max_size=12))
def test_the_index_finds_exactly_what_is_near_enough(fingerprint: int, bits: set[int]) -> None:
    index = NearIndex(DISTANCE_MOST)
    index.add(fingerprint)
    expected = fingerprint if len(bits) <= DISTANCE_MOST else None
    assert index.nearest(flipped(fingerprint, bits)) == expected


def test_of_several_the_nearest_is_found_and_of_equally_near_ones_the_smallest() -> None:
    index = NearIndex(DISTANCE_MOST)
    for near in (0b111, 0b1, 0b10):
        index.add(near)
    assert index.nearest(0) == 0b1
    index.remove(0b1)
    assert index.nearest(0) == 0b10
    index.remove(0b10)
    assert index.nearest(0) == 0b111
    index.remove(0b111)
    assert index.nearest(0) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=80), st.integers(0, 40))
def test_the_index_finds_what_comparing_all_would_find(steps: list[tuple[bool, int]], asked: int) -> None:
    def spread(number: int) -> int:
        return random.Random(number // 5).getrandbits(64) ^ (number % 5 * 0x0101)

    index, model = NearIndex(DISTANCE_MOST), set[int]()
    for adds, number in steps:
        (index.add if adds else index.remove)(spread(number))
        (model.add if adds else model.discard)(spread(number))
    query = spread(asked)
    near = [(bin(other ^ query).count("1"), other) for other in model]
    expected = min((pair for pair in near if pair[0] <= DISTANCE_MOST), default=(0, None))[1]
    assert index.nearest(query) == expected


def test_a_bucket_does_not_grow_without_bound() -> None:
    index = NearIndex(DISTANCE_MOST)
    for number in range(1000):
        index.add(number << 8)  # all agree on the lowest band
    assert max(len(bucket) for band in index._bands for bucket in band) <= BUCKET_MOST
    assert index.nearest((999 << 8) | 1) is not None


def test_a_steady_rate_is_estimated() -> None:
    counted = hitters()
    for arrival in range(6000):
        group = counted.count(1 << 60, arrival / 100)
    # 100 a second weigh 1 + q + q^2 + ... with q = 2^(-1 / 500), times ln 2 / 5
    assert counted.per_s(group, 59.99) == pytest.approx(100.07, abs=0.03)


def test_a_rate_halves_in_a_half_life_without_arrivals() -> None:
    counted = hitters(half_life_s=3.0)
    for _ in range(30):
        group = counted.count(1 << 60, 10.0)
    at_once = 30 * 0.6931471805599453 / 3.0
    assert counted.per_s(group, 10.0) == pytest.approx(at_once)
    assert counted.per_s(group, 13.0) == pytest.approx(at_once / 2)
    assert counted.per_s(group, 22.0) == pytest.approx(at_once / 16)


def test_near_arrivals_count_for_one_group_and_others_for_their_own() -> None:
    counted = hitters()
    first = counted.count(0xFF00FF00FF00FF00, 0.0)
    assert counted.count(0xFF00FF00FF00FF0F, 0.0) is first
    assert counted.count(0x00FF00FF00FF00FF, 0.0) is not first
    assert len(counted) == 2
    assert counted.share(first) == pytest.approx(2 / 3)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 5)), min_size=1, max_size=200))
def test_a_rate_is_never_above_the_truth_and_the_count_never_below_it(
    arrivals: list[tuple[int, float]],
) -> None:
    counted = HeavyHitters(most=4, half_life_s=5.0, distance_bits=0)
    now_s, times = 0.0, dict[int, list[float]]()
    for name, later_s in arrivals:
        now_s += later_s
        counted.count(name + 1, now_s)
        times.setdefault(name + 1, []).append(now_s)
    assert len(counted) <= 4
    for group in counted:
        truth = sum(2.0 ** ((at_s - now_s) / 5.0) for at_s in times[group.centre])
        weight = group.own / counted.per_s(group, now_s) * 0.6931471805599453 / 5.0
        assert group.own / weight <= truth * (1 + 1e-9)
        assert group.counted / weight >= truth * (1 - 1e-9)


def test_a_frequent_group_is_never_lost_among_many_that_come_once() -> None:
    counted = hitters(most=32)
    draw = random.Random(1)
    frequent = 0xABCDEF
    for arrival in range(20_000):
        # one in 20 arrivals is above one in 32
        counted.count(frequent if arrival % 20 == 0 else draw.getrandbits(64), arrival / 1000)
    group = counted.find(frequent)
    assert group is not None
    assert counted.per_s(group, 20.0) > 20  # of 50 in truth; it may have been counted anew at the start


def test_idle_groups_are_forgotten() -> None:
    counted = hitters(half_life_s=5.0)
    for name in range(20):
        counted.count(name << 32 | name << 10, 0.0)
    counted.drop_idle(30.0)
    kept = len(counted)
    assert kept > 0
    counted.drop_idle(5.0 * 9 + 30.0)
    assert len(counted) == 0
    assert counted.find(1 << 32 | 1 << 10) is None


def test_rates_hold_over_days() -> None:
    counted = hitters()
    for now_s in (0.0, 86_400.0, 90_000.0, 1e9):
        for arrival in range(400):
            group = counted.count(7, now_s + arrival / 10)
        assert counted.per_s(group, now_s + 39.9) == pytest.approx(10.0, rel=0.02)
        assert counted.share(group) == pytest.approx(1.0)


def test_what_was_set_twice_is_taken_once() -> None:
    recent = Recent[int](2)
    for handle, value in (("a", 1), ("b", 2), ("a", 3)):
        recent[handle] = value
    assert recent.pop("a") == 3
    assert recent.get("a") is None
    assert len(recent) == 1


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=100))
def test_the_newest_are_remembered_and_never_more_than_twice_the_bound(steps: list[tuple[int, bool]]) -> None:
    recent, order = Recent[int](4), list[str]()
    for count, (name, takes) in enumerate(steps):
        handle = f"h{name}"
        if takes:
            recent.pop(handle)
        else:
            recent[handle] = count
        order = [other for other in order if other != handle] + ([] if takes else [handle])
        assert (handle in recent) is not takes
        assert len(recent) <= 2 * 4
        if takes:
            # With a newer one gone, one that was forgotten before may stand among the last three.
            order = [other for other in order if other in recent]
        assert all(other in recent for other in order[-3:])
