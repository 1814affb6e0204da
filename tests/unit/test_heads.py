"""Which heads a rank reads of which record: every one exactly once, from where it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_patches.heads import Share, held, shares


def test_equal_shards_read_their_own_rank_as_a_whole() -> None:
    assert shares(6, writers=3, rank=1, ranks=3) == (
        Share(1, heads=2, theirs=0, ours=0, count=2, whole=True),
    )


def test_one_rank_gathers_the_halves_of_two() -> None:
    assert shares(4, writers=2, rank=0, ranks=1) == (
        Share(0, heads=2, theirs=0, ours=0, count=2, whole=False),
        Share(1, heads=2, theirs=0, ours=2, count=2, whole=False),
    )


def test_two_ranks_cut_one_record() -> None:
    assert shares(4, writers=1, rank=1, ranks=2) == (
        Share(0, heads=4, theirs=2, ours=0, count=2, whole=False),
    )


def test_ranks_that_are_no_multiples_of_each_other_share_as_well() -> None:
    """Six heads: the middle one of three ranks has heads 2 and 3, one from each of two writers."""
    assert shares(6, writers=2, rank=1, ranks=3) == (
        Share(0, heads=3, theirs=2, ours=0, count=1, whole=False),
        Share(1, heads=3, theirs=0, ours=1, count=1, whole=False),
    )


@pytest.mark.parametrize("writers", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_single_head_is_on_every_rank(writers: int, ranks: int) -> None:
    for rank in range(ranks):
        (share,) = shares(1, writers, rank, ranks)
        assert share.whole
        assert 0 <= share.rank < writers


@pytest.mark.parametrize(("writers", "ranks"), [(3, 1), (1, 3)])
def test_heads_that_do_not_divide_are_refused(writers: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="4 KV heads cannot be split over 3 ranks"):
        shares(4, writers, 0, ranks)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_all_heads_of_all_ranks_come_from_their_own_place(writers: int, ranks: int, times: int) -> None:
    kv_heads = writers * ranks * times + (writers * ranks * times == 1)
    for rank in range(ranks):
        first, after = held(kv_heads, ranks, rank)
        got: list[int | None] = [None] * (after - first)
        for share in shares(kv_heads, writers, rank, ranks):
            start, end = held(kv_heads, writers, share.rank)
            assert share.heads == end - start
            for i in range(share.count):
                assert got[share.ours + i] is None
                got[share.ours + i] = start + share.theirs + i
        assert got == list(range(first, after))
