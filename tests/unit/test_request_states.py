from __future__ import annotations

from itertools import product

import pytest

from orchestrator.core.request import Event, IllegalTransition, State, step

# The arrows of the design, written out once more.
ARROWS = {
    ("queued", "granted"): "granted",
    ("granted", "put_sent"): "prefilling",
    ("granted", "get_sent"): "decoding",
    ("prefilling", "published"): "relaying",
    ("prefilling", "ended"): "done",
    ("relaying", "get_sent"): "decoding",
    ("decoding", "ended"): "done",
    ("decoding", "moved"): "queued",
}
LIVE = ("queued", "granted", "prefilling", "relaying", "decoding")
ENDS = ("refused", "cancelled", "failed")


def expected(state: str, event: str) -> str | None:
    if event in ENDS and state in LIVE:
        return event
    return ARROWS.get((state, event))


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_state_and_event_follows_the_drawing(state: State, event: Event) -> None:
    after = expected(str(state), str(event))
    if after is None:
        with pytest.raises(IllegalTransition, match=f"{state} cannot be {event}"):
            step(state, event)
    else:
        assert step(state, event) == State(after)


def test_a_separated_request_passes_all_states() -> None:
    state = State.QUEUED
    seen = [state]
    for event in (Event.GRANTED, Event.PUT_SENT, Event.PUBLISHED, Event.GET_SENT, Event.ENDED):
        state = step(state, event)
        seen.append(state)
    assert [str(one) for one in seen] == ["queued", "granted", "prefilling", "relaying", "decoding", "done"]


def test_only_the_four_ends_are_terminal() -> None:
    assert {str(state) for state in State if state.terminal} == {"done", "refused", "cancelled", "failed"}
