"""Undecided tickets in the order in which they are served.

A ticket takes its turn as if it had come HEAD_START_S earlier for each class above normal, later for each
below.  So classes are told apart among requests that wait together, within a class nobody loses a place,
and nobody starves: what came more than one head start per class later never goes before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from orchestrator.core.ticket import Ticket

Place = tuple[int, int]
"""Where a ticket stands in its stream: milliseconds and count."""

HEAD_START_S = 30


def turn_ms(arrived_ms: float, priority: int) -> float:
    """The time of arrival by which a ticket is served."""
    return arrived_ms - priority * HEAD_START_S * 1000


def _turn(item: tuple[Place, Ticket]) -> tuple[float, Place]:
    place, ticket = item
    return turn_ms(place[0], ticket.priority), place


class Pending:
    """By turn, and by handle.  One place per handle: a later one replaces it."""

    def __init__(self) -> None:
        self._tickets: dict[Place, Ticket] = {}
        self._places: dict[str, Place] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets.values())

    def add(self, tickets: Mapping[Place, Ticket]) -> None:
        """New tickets usually come last; claimed ones and those of a higher class come before others."""
        last = next(reversed(self._tickets.items()), None)
        arrived = sorted(tickets.items(), key=_turn)
        for place, ticket in arrived:
            self.forget((ticket.handle,))
            self._tickets[place] = ticket
            self._places[ticket.handle] = place
        if arrived and last is not None and _turn(arrived[0]) < _turn(last):
            self._tickets = dict(sorted(self._tickets.items(), key=_turn))

    def forget(self, handles: Iterable[str]) -> None:
        """Unknown handles are ignored."""
        for handle in handles:
            place = self._places.pop(handle, None)
            if place is not None:
                del self._tickets[place]

    def clear(self) -> None:
        self._tickets.clear()
        self._places.clear()
