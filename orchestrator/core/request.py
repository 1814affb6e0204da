"""The life of one request, as one pure function.

queued -granted-> granted -put_sent-> prefilling -published-> relaying -get_sent-> decoding -ended-> done
                  granted -get_sent (no put leg)-> decoding  prefilling -ended (at its first token)-> done
decoding -moved (to another shard)-> queued                any of these -> refused | cancelled | failed
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a request is.  Spans, metrics and chaos cells use these names."""

    QUEUED = "queued"
    GRANTED = "granted"
    PREFILLING = "prefilling"
    RELAYING = "relaying"
    DECODING = "decoding"
    DONE = "done"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        """True when nothing can follow."""
        return self in _TERMINAL


class Event(StrEnum):
    """What happens to a request."""

    GRANTED = "granted"
    """Shards are reserved for it."""
    PUT_SENT = "put_sent"
    """The prefill shard has the body."""
    PUBLISHED = "published"
    """The prefill shard is finished with it, and there is more to generate."""
    GET_SENT = "get_sent"
    """The shard that answers has the body."""
    ENDED = "ended"
    """The last token is out."""
    MOVED = "moved"
    """The decode shard is given up; the request asks for another one."""
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"


class IllegalTransition(ValueError):
    """An event that cannot happen in this state: a bug of ours."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"A request that is {state} cannot be {event}.")
        self.state = state
        self.event = event


_TERMINAL = frozenset({State.DONE, State.REFUSED, State.CANCELLED, State.FAILED})
_STEPS: dict[tuple[State, Event], State] = {
    (State.QUEUED, Event.GRANTED): State.GRANTED,
    (State.GRANTED, Event.PUT_SENT): State.PREFILLING,
    (State.GRANTED, Event.GET_SENT): State.DECODING,
    (State.PREFILLING, Event.PUBLISHED): State.RELAYING,
    (State.PREFILLING, Event.ENDED): State.DONE,
    (State.RELAYING, Event.GET_SENT): State.DECODING,
    (State.DECODING, Event.ENDED): State.DONE,
    (State.DECODING, Event.MOVED): State.QUEUED,
}
_GIVEN_UP = {
    Event.REFUSED: State.REFUSED,
    Event.CANCELLED: State.CANCELLED,
    Event.FAILED: State.FAILED,
}


def step(state: State, event: Event) -> State:
    """The state after `event`; IllegalTransition where the drawing has no arrow."""
    if event in _GIVEN_UP and not state.terminal:
        return _GIVEN_UP[event]
    try:
        return _STEPS[state, event]
    except KeyError:
        raise IllegalTransition(state, event) from None
