from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.decode_sets import DecodeSets


def shards(count: int) -> list[str]:
    return [f"d{number:02}" for number in range(count)]


def hot(*groups: int, share: float = 0.25, pool_share: float = 0.5) -> DecodeSets:
    sets = DecodeSets(share=share, pool_share=pool_share)
    for group in groups:
        sets.add(group)
    return sets


@pytest.mark.parametrize(
    ("count", "share", "size"),
    [
        (0, 0.5, 0),
        (1, 0.5, 1),
        (2, 0.5, 1),
        (2, 1.0, 1),
        (3, 0.5, 1),
        (8, 0.25, 2),
        (8, 1.0, 7),
        (100, 0.29, 29),
    ],
)
def test_a_set_has_its_share_but_one_at_least_and_never_all_of_several(
    count: int, share: float, size: int
) -> None:
    assert len(hot(7, share=share).of(7, shards(count))) == size


def test_a_group_that_is_not_hot_may_go_anywhere() -> None:
    assert hot(7).of(8, shards(4)) == frozenset(shards(4))


def test_other_traffic_keeps_the_rest_however_many_groups_are_hot() -> None:
    sets = hot(*range(1, 30))
    assert len(sets.union(shards(8))) == 4
    assert len(hot(1, 2, 3, share=0.75).union(shards(8))) == 6  # where one group alone may have more


@pytest.mark.parametrize("groups", [(number, number + 100, number + 200) for number in range(10)])
def test_groups_overlap_only_where_they_must(groups: tuple[int, int, int]) -> None:
    sets = hot(*groups)
    first, second, third = (sets.of(group, shards(8)) for group in groups)
    assert not first & second
    assert third <= first | second == sets.union(shards(8))


def test_different_groups_prefer_different_shards() -> None:
    assert len({hot(group).of(group, shards(16)) for group in range(50)}) > 20


def test_a_shard_that_goes_moves_only_what_was_on_it() -> None:
    sets = hot(1, share=0.5)
    before = sets.of(1, shards(8))
    gone = min(before)
    after = sets.of(1, [shard for shard in shards(8) if shard != gone])
    assert after == before - {gone}  # half of seven is three
    assert sets.of(1, shards(8)) > after


def test_a_set_stays_while_other_groups_come_and_go_and_shards_are_added() -> None:
    sets = hot(1)
    before = sets.of(1, shards(8))
    sets.add(2)
    sets.add(3)
    assert sets.of(1, shards(8)) == before
    sets.remove(2)
    assert sets.of(1, shards(8)) == before
    assert sets.of(1, shards(9)) == before
    sets.remove(1)
    assert sets.of(1, shards(8)) == frozenset(shards(8))
    assert len(sets) == 1


def test_a_set_that_made_way_for_another_stays_when_the_other_has_cooled_down() -> None:
    moved = 0
    for group in range(20):
        sets = hot(1, group + 2)
        before = sets.of(group + 2, shards(8))
        sets.remove(1)
        assert sets.of(group + 2, shards(8)) == before
        moved += before != hot(group + 2).of(group + 2, shards(8))
    assert moved > 0


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.sets(st.sampled_from(shards(12)))), max_size=30),
    st.floats(0.01, 1),
    st.floats(0.01, 1),
)
def test_sets_stay_within_their_bounds_whatever_happens(
    steps: list[tuple[bool, int, set[str]]], share: float, pool_share: float
) -> None:
    sets = DecodeSets(share=share, pool_share=pool_share)
    groups = set[int]()
    for adds, group, there in steps:
        if adds and group not in groups:
            sets.add(group)
            groups.add(group)
        elif not adds and group in groups:
            sets.remove(group)
            groups.remove(group)
        present = sorted(there)
        chosen = [sets.of(one, present) for one in sorted(groups)]
        most = max(1, int(share * len(present) + 1e-9))
        for one in chosen:
            assert one <= there
            assert min(1, len(present)) <= len(one) <= most
            assert len(one) < len(present) or len(present) < 2
        assert sets.union(present) == frozenset().union(*chosen)
        assert len(sets.union(present)) <= max(most, int(pool_share * len(present) + 1e-9))
        assert len(sets.union(present)) < len(present) or len(present) < 2


@given(st.integers(2, 20), st.integers(0, 2**64 - 1))
def test_a_lone_group_keeps_most_of_its_shards_when_one_is_added(count: int, group: int) -> None:
    sizes = [hot(group, share=0.5).of(group, shards(n)) for n in (count, count + 1)]
    for fewer, more in pairwise(sizes):
        assert len(fewer - more) <= 1
