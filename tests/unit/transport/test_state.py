"""A link's life: every step of the drawing, its deadlines, and rests that grow."""

from __future__ import annotations

import math

import pytest

from tgi_patches.transport.state import Event, LinkLimits, LinkState, Phase, step

LIMITS = LinkLimits(connect_s=5.0, offer_s=2.0, move_s=3.0, rest_s=0.5, rest_max_s=3.0)
P, E = Phase, Event

DRAWN = {
    (P.IDLE, E.CONNECT): (P.CONNECTING, 105.0),
    (P.CONNECTING, E.CONNECTED): (P.READY, math.inf),
    (P.READY, E.OFFER): (P.OFFERED, 102.0),
    (P.OFFERED, E.REFUSED): (P.READY, math.inf),
    (P.OFFERED, E.ACCEPTED): (P.MOVING, 103.0),
    (P.MOVING, E.MOVED): (P.READY, math.inf),
    (P.CONNECTING, E.FAILED): (P.ABORTED, 100.5),
    (P.READY, E.FAILED): (P.ABORTED, 100.5),
    (P.OFFERED, E.FAILED): (P.ABORTED, 100.5),
    (P.MOVING, E.FAILED): (P.ABORTED, 100.5),
}


@pytest.mark.parametrize("phase", P)
@pytest.mark.parametrize("event", [event for event in E if event is not E.TICK])
def test_only_what_is_drawn_changes_anything(phase: Phase, event: Event) -> None:
    before = LinkState(phase, until_s=1000.0)
    after = step(before, event, 100.0, LIMITS, "broken")
    if (phase, event) in DRAWN:
        assert (after.phase, after.until_s) == DRAWN[phase, event]
    else:
        assert after == before


@pytest.mark.parametrize("phase", [P.CONNECTING, P.OFFERED, P.MOVING])
def test_a_deadline_that_passes_is_a_failure_with_a_reason(phase: Phase) -> None:
    state = LinkState(phase, until_s=10.0)
    assert step(state, E.TICK, 9.999, LIMITS) == state
    assert step(state, E.TICK, 10.0, LIMITS) == LinkState(P.ABORTED, 10.5, 1, f"{phase} took too long")


def test_rests_double_up_to_a_bound_until_something_has_moved() -> None:
    state, rests, now_s = LinkState(), [], 0.0
    for _ in range(5):
        for event in (E.CONNECT, E.CONNECTED, E.FAILED):
            state = step(state, event, now_s, LIMITS)
        rests.append(state.until_s - now_s)
        now_s = state.until_s
        assert step(state, E.TICK, now_s - 0.001, LIMITS).phase is P.ABORTED
        state = step(state, E.TICK, now_s, LIMITS)
        assert (state.phase, state.until_s) == (P.IDLE, math.inf)
    assert rests == [0.5, 1.0, 2.0, 3.0, 3.0]
    for event in (E.CONNECT, E.CONNECTED, E.OFFER, E.ACCEPTED, E.MOVED, E.FAILED):
        state = step(state, event, now_s, LIMITS)
    assert state.until_s - now_s == 0.5


def test_quiet_phases_have_no_deadline() -> None:
    for phase in (P.IDLE, P.READY):
        assert step(LinkState(phase), E.TICK, 1e9, LIMITS).phase is phase
