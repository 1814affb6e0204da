from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.batching import Window, Windows, limit_of
from orchestrator.core.cost import Costs, DecodeCost, PrefillCost
from orchestrator.core.fleet import Fleet, Room
from orchestrator.core.ticket import ShardView
from tests.unit.test_routing import D0, P0, P1
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


def test_behind_a_group_nothing_is_let_through_before_it_is_nearly_done() -> None:
    window = Window(epoch=1)
    window.let_through("running", 10, now_s=0.0)
    assert not window.takes(10, 90, left_s=0.031)
    assert window.takes(10, 90, left_s=0.029)


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
    assert window.done("b", now_s=2.0)
    assert set(window.running.prompts) == {"c"}
    assert not window.done("b", now_s=2.0)


def test_the_time_left_is_that_of_both_groups_as_batches() -> None:
    window = Window(epoch=1)
    for handle, tokens in (("a", 100), ("b", 40), ("c", 30)):
        window.let_through(handle, tokens, now_s=0.0)
    # 10 + 100 ms for the first, of which 50 are over; 10 + 70 ms for the second.
    assert abs(window.left_s(COST, now_s=0.05) - (0.060 + 0.080)) < 1e-9
    assert abs(window.left_s(COST, now_s=9.0) - 0.080) < 1e-9
    assert Window(epoch=1).left_s(COST, now_s=0.0) == 0.0


def test_a_group_that_nobody_reports_is_taken_for_done_when_it_should_be() -> None:
    window = Window(epoch=1)
    window.let_through("a", 90, now_s=0.0)  # 100 ms
    window.let_through("b", 40, now_s=0.0)  # 50 ms
    window.overdue(COST, now_s=0.099)
    assert set(window.running.prompts) == {"a"}
    window.overdue(COST, now_s=0.120)
    assert set(window.running.prompts) == {"b"}
    assert abs(window.running.begun_s - 0.1) < 1e-9
    window.overdue(COST, now_s=0.151)
    assert not window.running.prompts
    assert window.takes(1000, 90)
    unknown = Window(epoch=1)
    unknown.let_through("a", 90, now_s=0.0)
    unknown.overdue(None, now_s=1e6)
    assert set(unknown.running.prompts) == {"a"}


# --- all shards ---------------------------------------------------------------------------------


def rooms(*views: ShardView) -> list[Room]:
    return Fleet([*views, replace(D0, costs=COSTS)]).by_role[Role.PREFILL]


def busy(view: ShardView = P0, **changes: Any) -> ShardView:
    return replace(view, costs=COSTS, outstanding_records=1, outstanding_bytes=900, **changes)


def begun(windows: Windows, *views: ShardView, now_s: float, waiting_tokens: int = 0) -> list[Room]:
    found = rooms(*views)
    windows.begin(found, waiting_tokens, now_s)
    return found


def test_the_gate_closes_per_shard_and_opens_just_before_it_is_free() -> None:
    windows = Windows()
    (room,) = begun(windows, busy(), now_s=0.0)
    windows.let_through("a", "p0", 90)  # until 0.1 s
    assert not windows.gate(room, 90)
    assert abs((windows.opens_s() or 0) - 0.07) < 1e-9
    (room,) = begun(windows, busy(), now_s=0.071)
    assert windows.gate(room, 90)
    windows.let_through("b", "p0", 90)
    assert not windows.gate(room, 1)
    windows.done("a", now_s=0.08)
    (room,) = begun(windows, busy(), now_s=0.08)
    assert not windows.gate(room, 1), "b runs until 0.18 s"
    windows.done("a", now_s=0.08)
    windows.done("never let through", now_s=0.08)
    begun(windows, busy(), now_s=0.2)
    assert windows.opens_s() is None


def test_a_shard_without_outstanding_records_starts_afresh_whatever_was_missed() -> None:
    windows = Windows()
    begun(windows, busy(), now_s=0.0)
    windows.let_through("a", "p0", 90)
    (idle,) = begun(windows, replace(P0, costs=COSTS), now_s=0.01)
    assert windows.gate(idle, 5000)


def test_another_incarnation_starts_afresh() -> None:
    windows = Windows()
    begun(windows, busy(), now_s=0.0)
    windows.let_through("a", "p0", 90)
    (again,) = begun(windows, busy(epoch=2), now_s=0.01)
    assert windows.gate(again, 5000)
    windows.done("a", now_s=0.01)
    windows.let_through("b", "p0", 90)
    windows.done("a", now_s=0.02)
    assert not windows.gate(again, 10)


def test_a_room_is_told_how_long_its_shard_is_busy() -> None:
    windows = Windows()
    begun(windows, busy(), now_s=0.0)
    windows.let_through("a", "p0", 90)
    (room,) = begun(windows, busy(), now_s=0.04)
    assert abs(room.queue_s - 0.06) < 1e-9
    assert room.rank[0] == room.queue_s


def test_more_go_together_the_more_waits_between_90_and_99_percent_of_the_best_throughput() -> None:
    (room,) = rooms(busy())
    limit = limit_of(room)
    # 10 / n + 1 = 1 / 0.9 and 1 / 0.99 ms per token
    assert (limit.least, limit.most) == (91, 991)  # rounded up from a hair above
    assert [limit.tokens(waiting) for waiting in (0, 180, 400, 5000)] == [91, 91, 200, 991]


def test_what_waits_is_shared_among_the_prefill_shards() -> None:
    windows = Windows()
    two = begun(windows, busy(), busy(P1), now_s=0.0)
    windows.let_through("a", "p0", 20)  # until 0.03 s: one may gather behind it at once
    windows.let_through("b", "p0", 80)
    assert not windows.gate(two[0], 70)
    two = begun(windows, busy(), busy(P1), now_s=0.0, waiting_tokens=700)
    assert windows.gate(two[0], 70)
    assert not windows.gate(two[0], 96)


def test_without_a_measurement_a_group_is_as_much_as_the_longest_prompt() -> None:
    limits = Limits(200, 4096, max_concurrent_requests=8)
    windows = Windows()
    found = Fleet([replace(P0, limits=limits, outstanding_records=1), D0]).by_role[Role.PREFILL]
    windows.begin(found, 10_000, now_s=0.0)
    windows.let_through("a", "p0", 150)
    windows.let_through("b", "p0", 150)
    assert windows.gate(found[0], 50)
    assert not windows.gate(found[0], 51)
    assert windows.opens_s() is None


@given(st.lists(st.tuples(st.integers(1, 400), st.booleans()), max_size=60))
def test_behind_a_running_group_there_is_never_more_than_one_group_of_l_m(
    steps: list[tuple[int, bool]],
) -> None:
    window, l_m, alive = Window(epoch=1), 90, list[str]()
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
