"""Undecided tickets in the order in which they came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from orchestrator.core.ticket import Ticket

Place = tuple[int, int]
"""Where a ticket stands in its stream: milliseconds and count."""


class Pending:
    """By place, oldest first, and by handle.  One place per handle: a later one replaces it."""

    def __init__(self) -> None:
        self._tickets: dict[Place, Ticket] = {}
        self._places: dict[str, Place] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets.values())

    def add(self, tickets: Mapping[Place, Ticket]) -> None:
        """New tickets usually come last; claimed ones may be older than what is known."""
        last = next(reversed(self._tickets), (-1, -1))
        for place, ticket in sorted(tickets.items()):
            self.forget((ticket.handle,))
            self._tickets[place] = ticket
            self._places[ticket.handle] = place
        if tickets and min(tickets) < last:
            self._tickets = dict(sorted(self._tickets.items()))

    def forget(self, handles: Iterable[str]) -> None:
        """Unknown handles are ignored."""
        for handle in handles:
            place = self._places.pop(handle, None)
            if place is not None:
                del self._tickets[place]

    def clear(self) -> None:
        self._tickets.clear()
        self._places.clear()
