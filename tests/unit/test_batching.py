from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.batching import Window, Windows
from orchestrator.core.cost import Costs, DecodeCost, PrefillCost
from orchestrator.core.fleet import Fleet, Room
from orchestrator.core.ticket import ShardView
from tests.unit.test_routing import D0, P0
from tgi_patches.contract import Limits, Role

# 10 ms and 1 ms per token: 90 % of the best throughput (1 token/ms) at 90 tokens.
COST = PrefillCost(0.010, 0.001)
COSTS = Costs(prefill=COST, decode=DecodeCost(0.02, 0.0, 0.001))


def test_an_idle_shard_takes_a_prompt_of_any_length_and_then_one_group_behind_it() -> None:
    window = Window(epoch=1)
    assert window.takes(5000, 90)
    window.let_through("a", 5000, now_s=0.0)
    assert window.takes(60, 90)
    window.let_through("b", 60, now_s=0.1)
    assert window.takes(30, 90)
    assert not window.takes(31, 90), "60 + 31 is more than L_m"


def test_a_prompt_beyond_l_m_goes_alone() -> None:
    window = Window(epoch=1)
    window.let_through("first", 10, now_s=0.0)
    window.let_through("long", 200, now_s=0.0)
    assert not window.takes(1, 90)
    shorts = Window(epoch=1)
    shorts.let_through("first", 10, now_s=0.0)
    shorts.let_through("short", 60, now_s=0.0)
    assert not shorts.takes(200, 90)


def test_prompts_of_very_different_lengths_do_not_share_a_group() -> None:
    window = Window(epoch=1)
    window.let_through("running", 10, now_s=0.0)
    window.let_through("a", 10, now_s=0.0)
    assert window.takes(40, 90)
    assert not window.takes(41, 90), "more than four times as long"


def test_the_group_behind_begins_when_the_last_record_before_it_is_imported() -> None:
    window = Window(epoch=1)
    for handle, tokens in (("a", 10), ("b", 50), ("c", 30)):
        window.let_through(handle, tokens, now_s=0.0)
    assert (set(window.running.prompts), set(window.waiting.prompts)) == ({"a"}, {"b", "c"})
    assert window.done("a", now_s=1.0)
    assert (set(window.running.prompts), window.running.begun_s) == ({"b", "c"}, 1.0)
    assert window.takes(5000, 90), "nothing waits behind the running group now"
    assert window.done("b", now_s=2.0) and set(window.running.prompts) == {"c"}
    assert not window.done("b", now_s=2.0)


def test_the_time_left_is_that_of_both_groups_as_batches() -> None:
    window = Window(epoch=1)
    for handle, tokens in (("a", 100), ("b", 40), ("c", 30)):
        window.let_through(handle, tokens, now_s=0.0)
    # 10 + 100 ms for the first, of which 50 are over; 10 + 70 ms for the second.
    assert abs(window.left_s(COST, now_s=0.05) - (0.060 + 0.080)) < 1e-9
    assert abs(window.left_s(COST, now_s=9.0) - 0.080) < 1e-9
    assert Window(epoch=1).left_s(COST, now_s=0.0) == 0.0


def test_a_group_that_nobody_reports_holds_the_next_one_back_twice_its_time_and_no_longer() -> None:
    window = Window(epoch=1)
    window.let_through("a", 90, now_s=0.0)
    window.let_through("b", 90, now_s=0.0)
    window.overdue(COST, now_s=0.199)
    assert not window.takes(1000, 90)
    window.overdue(COST, now_s=0.201)
    assert window.takes(1000, 90) and set(window.running.prompts) == {"b"}
    unknown = Window(epoch=1)
    unknown.let_through("a", 90, now_s=0.0)
    unknown.overdue(None, now_s=1e6)
    assert set(unknown.running.prompts) == {"a"}


# --- all shards ---------------------------------------------------------------------------------


def rooms(*views: ShardView) -> list[Room]:
    return Fleet([*views, replace(D0, costs=COSTS)]).by_role[Role.PREFILL]


def busy(view: ShardView = P0, **changes: Any) -> ShardView:
    return replace(view, costs=COSTS, outstanding_records=1, outstanding_bytes=900, **changes)


def test_the_gate_closes_per_shard_and_opens_when_a_record_is_imported() -> None:
    windows = Windows()
    (room,) = rooms(busy())
    windows.begin([room], now_s=0.0)
    windows.let_through("a", "p0", 90)
    assert windows.gate(room, 90)
    windows.let_through("b", "p0", 90)
    assert not windows.gate(room, 90)
    windows.done("a", now_s=0.5)
    assert windows.gate(room, 90)
    windows.done("a", now_s=0.5)
    windows.done("never let through", now_s=0.5)


def test_a_shard_without_outstanding_records_starts_afresh_whatever_was_missed() -> None:
    windows = Windows()
    windows.begin(rooms(busy()), now_s=0.0)
    windows.let_through("a", "p0", 90)
    windows.let_through("b", "p0", 90)
    (idle,) = rooms(replace(P0, costs=COSTS))
    windows.begin([idle], now_s=1.0)
    assert windows.gate(idle, 5000)


def test_another_incarnation_starts_afresh() -> None:
    windows = Windows()
    windows.begin(rooms(busy()), now_s=0.0)
    windows.let_through("a", "p0", 90)
    windows.let_through("b", "p0", 90)
    (again,) = rooms(busy(epoch=2))
    windows.begin([again], now_s=1.0)
    assert windows.gate(again, 5000)
    windows.done("a", now_s=1.0)


def test_a_room_is_told_how_long_its_shard_is_busy() -> None:
    windows = Windows()
    windows.begin(rooms(busy()), now_s=0.0)
    windows.let_through("a", "p0", 90)
    (room,) = rooms(busy())
    windows.begin([room], now_s=0.04)
    assert abs(room.queue_s - 0.06) < 1e-9


def test_without_a_measurement_a_group_is_as_much_as_the_longest_prompt() -> None:
    limits = Limits(200, 4096, max_concurrent_requests=8)
    windows = Windows()
    (room,) = Fleet([replace(P0, limits=limits, outstanding_records=1), D0]).by_role[Role.PREFILL]
    windows.begin([room], now_s=0.0)
    windows.let_through("a", "p0", 150)
    windows.let_through("b", "p0", 150)
    assert windows.gate(room, 50) and not windows.gate(room, 51)


@given(st.lists(st.tuples(st.integers(1, 400), st.booleans()), max_size=60))
def test_behind_a_running_group_there_is_never_more_than_one_group_of_l_m(
    steps: list[tuple[int, bool]],
) -> None:
    window, l_m, alive = Window(epoch=1), 90, []
    for count, (tokens, ends) in enumerate(steps):
        if ends and alive:
            window.done(alive.pop(0), now_s=float(count))
        elif window.takes(tokens, l_m):
            window.let_through(str(count), tokens, now_s=float(count))
            alive.append(str(count))
        waiting = window.waiting.lengths
        assert len(waiting) <= 1 or sum(waiting) <= l_m
        assert len(window.running.prompts) + len(window.waiting.prompts) == len(alive)
        assert not waiting or window.running.prompts
