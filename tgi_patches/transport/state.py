"""The life of one link, as one pure function.

    idle -> connecting -> ready -> offered -> moving -> ready
                 |          |  ^      |         |
                 |          |  +------+         |     the offer was refused
                 +----------+---------+---------+--> aborted -> idle

A deadline that passes is a failure: connecting, offered and moving have one each.  An aborted link rests
before it is idle again: twice as long after every failure until something has moved.  What does not fit the
phase (an answer that comes after the abort) changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum


class Phase(StrEnum):
    IDLE = "idle"
    CONNECTING = "connecting"
    READY = "ready"
    OFFERED = "offered"
    MOVING = "moving"
    ABORTED = "aborted"


class Event(StrEnum):
    CONNECT = "connect"
    CONNECTED = "connected"
    OFFER = "offer"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    MOVED = "moved"
    FAILED = "failed"
    TICK = "tick"
    """Time went by."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Seconds each phase may take, and how long an aborted link rests after its first failure."""

    connect_s: float = 5.0
    offer_s: float = 2.0
    move_s: float = 5.0
    rest_s: float = 0.5
    rest_max_s: float = 30.0


@dataclass(frozen=True, slots=True)
class LinkState:
    """`until_s`: the phase's deadline, or the end of the rest."""

    phase: Phase = Phase.IDLE
    until_s: float = math.inf
    failures: int = 0
    """In a row, since something moved."""
    reason: str = ""
    """Of the last failure."""


_NEXT = {
    (Phase.IDLE, Event.CONNECT): Phase.CONNECTING,
    (Phase.CONNECTING, Event.CONNECTED): Phase.READY,
    (Phase.READY, Event.OFFER): Phase.OFFERED,
    (Phase.OFFERED, Event.REFUSED): Phase.READY,
    (Phase.OFFERED, Event.ACCEPTED): Phase.MOVING,
    (Phase.MOVING, Event.MOVED): Phase.READY,
}
_RESTING = (Phase.IDLE, Phase.ABORTED)


def step(state: LinkState, event: Event, now_s: float, limits: LinkLimits, reason: str = "") -> LinkState:
    """The state after `event`; `reason` says why, for FAILED."""
    if event is Event.FAILED:
        return state if state.phase in _RESTING else _aborted(state, now_s, limits, reason)
    if event is Event.TICK:
        return _later(state, now_s, limits)
    following = _NEXT.get((state.phase, event))
    if following is None:
        return state
    failures = 0 if event is Event.MOVED else state.failures
    return replace(state, phase=following, until_s=_deadline(following, now_s, limits), failures=failures)


def _later(state: LinkState, now_s: float, limits: LinkLimits) -> LinkState:
    if now_s < state.until_s:
        return state
    if state.phase is Phase.ABORTED:
        return replace(state, phase=Phase.IDLE, until_s=math.inf)
    return _aborted(state, now_s, limits, f"{state.phase} took too long")


def _aborted(state: LinkState, now_s: float, limits: LinkLimits, reason: str) -> LinkState:
    rest_s = min(limits.rest_s * 2.0 ** min(state.failures, 30), limits.rest_max_s)
    return LinkState(Phase.ABORTED, now_s + rest_s, state.failures + 1, reason)


def _deadline(phase: Phase, now_s: float, limits: LinkLimits) -> float:
    allowed = {
        Phase.CONNECTING: limits.connect_s,
        Phase.OFFERED: limits.offer_s,
        Phase.MOVING: limits.move_s,
    }
    return now_s + allowed.get(phase, math.inf)
