"""The ladder: how much is left decides the level at rest, and time decides when it is taken."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.decision import Mode
from orchestrator.core.degraded import (
    HIGHEST,
    LEVELS,
    Load,
    Trend,
    decide,
    facts,
    fitting,
    mode_of,
    needed,
    told,
)
from orchestrator.core.ticket import ShardView
from tgi_patches.contract import Fingerprint, Limits, Role

WHOLE = Load(1000, 1000, 0, 100)


def view(shard: str, role: Role, state: str, kv_tokens: int = 1000) -> ShardView:
    return ShardView(
        shard=shard,
        role=role,
        epoch=1,
        url="http://s",
        state=state,
        fingerprint=Fingerprint("m", "r", "t", "float32", "float32", 2, 1, 8),
        limits=Limits(4000, 4096),
        kv_tokens=kv_tokens,
        slots=4,
        ring_bytes=1000,
        record_limit_bytes=1000,
        bytes_per_token=1,
    )


def load(ready: int, waiting: int = 0) -> Load:
    """So many of 100 tokens of KV, and a queue of 100."""
    return Load(ready, 100, waiting, 100)


def levels(start: Mode, loads: list[Load], trend: Trend | None = None) -> list[int]:
    """The level after each second."""
    mode, trend = start, trend or Trend()
    seen = []
    for second, each in enumerate(loads):
        mode, trend = decide(mode, trend, each, 1000.0 + second)
        seen.append(mode.level)
    return seen


# --- the levels ---------------------------------------------------------------------------------


def test_answers_get_shorter_before_anybody_is_refused() -> None:
    assert [level.output_cap for level in LEVELS] == [None, 512, 256, 128, 128]
    assert [level.shed_below for level in LEVELS] == [None, None, None, None, 0]


def test_a_level_beyond_the_ladder_does_not_exist() -> None:
    for level in (-1, 5):
        with pytest.raises(IndexError):
            mode_of(level)


@pytest.mark.parametrize(
    ("ready", "waiting", "level"),
    [
        (100, 0, 0),
        (100, 100, 0),  # all that there is has much to do
        (80, 0, 0),
        (79, 0, 1),
        (50, 0, 1),
        (49, 0, 2),
        (25, 0, 2),
        (24, 0, 3),
        (0, 0, 3),
        (50, 49, 1),
        (50, 50, 2),
        (50, 75, 3),
        (0, 89, 3),
        (50, 90, 4),
    ],
)
def test_the_level_follows_from_the_decode_capacity_and_a_full_queue_makes_it_worse(
    ready: int, waiting: int, level: int
) -> None:
    assert needed(load(ready, waiting)) == level


def test_a_mode_says_why_it_is_not_normal() -> None:
    assert fitting(load(50)) == Mode(1, 512, None, True, "50 % of the decode capacity was ready.")
    assert fitting(load(100)) == Mode(0, None, None, True, "")
    assert told(load(33, 60)) == "33 % of the decode capacity was ready and the queue was 60 % full."
    assert told(Load(999, 1000, 0, 1)) == "99 % of the decode capacity was ready."


def test_facts_name_the_level_and_who_has_set_it() -> None:
    told = facts(mode_of(2, auto=False, reason="Maintenance."))
    assert told == {
        "level": 2,
        "name": "tight",
        "output_cap": 256,
        "shed_below": None,
        "auto": False,
        "reason": "Maintenance.",
        "set_by": "operator",
    }
    assert facts(mode_of(0))["set_by"] == "conductor"
    assert facts(Mode(9, auto=True))["name"] == "shedding", "of a newer version"


# --- the load -----------------------------------------------------------------------------------


def test_capacity_is_that_of_the_shards_that_decode() -> None:
    shards = [
        view("prefill-0", Role.PREFILL, "dead", 9000),
        view("decode-0", Role.DECODE, "ready", 300),
        view("decode-1", Role.DECODE, "dead", 500),
        view("mixed-0", Role.MIXED, "ready", 200),
    ]
    assert Load.of(shards, 7, 9) == Load(500, 1000, 7, 9)


@pytest.mark.parametrize("state", ["starting", "draining", "dead"])
def test_a_shard_that_does_not_serve_does_not_count(state: str) -> None:
    shards = [view("decode-0", Role.DECODE, "ready"), view("decode-1", Role.DECODE, state)]
    assert Load.of(shards, 0, 1).capacity == 0.5


def test_where_no_shard_was_launched_to_decode_the_prefill_shards_count() -> None:
    shards = [view("prefill-0", Role.PREFILL, "ready"), view("prefill-1", Role.PREFILL, "dead")]
    assert Load.of(shards, 0, 1).capacity == 0.5


def test_a_deployment_of_which_nothing_is_known_yet_is_not_degraded() -> None:
    assert needed(Load.of([], 0, 0)) == 0


# --- time ---------------------------------------------------------------------------------------


def test_the_level_rises_straight_to_what_is_needed_after_three_seconds() -> None:
    assert levels(mode_of(0), [load(0)] * 6) == [0, 0, 0, 3, 3, 3]


def test_a_shard_that_is_back_within_three_seconds_was_not_missed() -> None:
    assert set(levels(mode_of(0), [load(0), load(0), load(0), WHOLE] * 20)) == {0}


def test_it_falls_one_level_at_a_time_each_after_a_calm_while() -> None:
    seen = levels(mode_of(3), [WHOLE] * 60)
    assert [seen.index(level) for level in (2, 1, 0)] == [15, 31, 47]


def test_on_the_way_down_the_mode_says_so() -> None:
    calm = Trend(lower_since_s=0.0)
    assert decide(mode_of(2), calm, WHOLE, 15.0)[0].reason == (
        "Recovering: 100 % of the decode capacity was ready."
    )
    assert decide(mode_of(1), calm, WHOLE, 15.0)[0] == Mode(0, None, None, True, "")


def test_calm_that_is_interrupted_begins_anew() -> None:
    assert 0 not in levels(mode_of(1), ([WHOLE] * 14 + [load(50)]) * 5)


def test_capacity_just_above_a_threshold_keeps_the_level() -> None:
    assert set(levels(mode_of(1), [load(82)] * 100)) == {1}
    assert set(levels(mode_of(0), [load(82)] * 100)) == {0}


def test_what_an_operator_has_set_stays_whatever_happens() -> None:
    for level in range(HIGHEST + 1):
        held = mode_of(level, auto=False, reason="Maintenance.")
        for each in (load(0, 100), WHOLE):
            assert decide(held, Trend(0.0, 0.0), each, 1e6) == (held, Trend())


def test_a_level_of_a_newer_version_is_left_step_by_step() -> None:
    strange = Mode(7, output_cap=1, auto=True)
    assert decide(strange, Trend(lower_since_s=0.0), WHOLE, 15.0)[0].level == 3


LOADS = st.builds(load, st.integers(0, 100), st.integers(0, 100))
START = st.builds(mode_of, st.integers(0, HIGHEST))
LONG = 150
"""Seconds after which every constant load is at rest."""


@given(START, LOADS, st.integers(0, 100))
def test_less_capacity_never_gives_a_lower_level_at_rest(start: Mode, more: Load, ready: int) -> None:
    less = replace(more, ready_kv_tokens=min(ready, more.ready_kv_tokens))
    assert levels(start, [less] * LONG)[-1] >= levels(start, [more] * LONG)[-1]


@given(START, LOADS, st.integers(0, 100))
def test_a_fuller_queue_never_gives_a_lower_level_at_rest(start: Mode, fuller: Load, waiting: int) -> None:
    emptier = replace(fuller, waiting=min(waiting, fuller.waiting))
    assert levels(start, [fuller] * LONG)[-1] >= levels(start, [emptier] * LONG)[-1]


@given(START, LOADS)
def test_a_load_that_stays_as_it_is_moves_the_level_in_one_direction_and_to_a_rest(
    start: Mode, constant: Load
) -> None:
    seen = [start.level, *levels(start, [constant] * LONG)]
    assert seen in (sorted(seen), sorted(seen, reverse=True))
    assert len(set(seen[LONG // 2 :])) == 1
    assert seen[-1] >= needed(constant)


@given(START, st.lists(LOADS, max_size=60), st.integers(0, 100))
def test_once_all_capacity_is_back_the_mode_is_normal_within_a_minute_and_a_half(
    start: Mode, before: list[Load], waiting: int
) -> None:
    seen = levels(start, before + [load(100, waiting)] * 90)
    assert seen[-1] == 0


@given(START, st.lists(LOADS, min_size=1, max_size=300))
def test_no_level_is_left_for_a_lower_one_before_it_was_held_for_fifteen_seconds(
    start: Mode, any_loads: list[Load]
) -> None:
    seen = [start.level, *levels(start, any_loads)]
    held = 0
    for before, after in itertools.pairwise(seen):
        if after < before:
            assert after == before - 1
            assert held >= 15
        held = held + 1 if after == before else 0


def test_a_shard_that_missed_a_few_polls_is_not_given_up() -> None:
    shards = [view("decode-0", Role.DECODE, "ready"), view("decode-1", Role.DECODE, "suspect")]
    assert Load.of(shards, 0, 1).capacity == 1.0
