"""Undecided tickets in the order in which they are served.

A ticket takes its turn as if it had come HEAD_START_S earlier for each class above normal, later for each
below, and later by what its own length is worth.  So classes and lengths are told apart among requests that
wait together, equals never lose a place, and nobody starves: whatever comes more than that later goes behind.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping

from orchestrator.core.ticket import Ticket

Place = tuple[int, int]
"""Where a ticket stands in its stream: milliseconds and count."""

HEAD_START_S = 30


def turn_ms(arrived_ms: float, priority: int) -> float:
    """The time of arrival by which a ticket is served."""
    return arrived_ms - priority * HEAD_START_S * 1000


def by_arrival(_ticket: Ticket) -> float:
    """Lengths count for nothing."""
    return 0.0


def _place(item: tuple[Place, Ticket]) -> Place:
    return item[0]


class Pending:
    """By turn, and by handle.  One place per handle: a later one replaces it.

    `later_s`: by how much a ticket stands behind one that came with it and costs nothing.
    """

    def __init__(self, later_s: Callable[[Ticket], float] = by_arrival) -> None:
        self._later_s = later_s
        self._turns: list[tuple[float, Place]] = []
        self._tickets: dict[Place, Ticket] = {}
        self._turn_of: dict[str, tuple[float, Place]] = {}
        self.tokens = 0
        """Of all their prompts."""

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Ticket]:
        """In order, of those that wait now."""
        return iter(self.some(0, len(self)))

    def some(self, start: int, end: int) -> list[Ticket]:
        """Those at these places of the order, as far as there are so many."""
        return [self._tickets[place] for _, place in self._turns[start:end]]

    def add(self, tickets: Mapping[Place, Ticket]) -> None:
        """New tickets usually come last; claimed ones and those of a higher class come before others."""
        for place, ticket in sorted(tickets.items(), key=_place):
            self.forget((ticket.handle,))
            turn = (turn_ms(place[0], ticket.priority) + self._later_s(ticket) * 1000, place)
            insort(self._turns, turn)
            self._tickets[place] = ticket
            self._turn_of[ticket.handle] = turn
            self.tokens += ticket.prompt_tokens

    def forget(self, handles: Iterable[str]) -> None:
        """Unknown handles are ignored."""
        for handle in handles:
            turn = self._turn_of.pop(handle, None)
            if turn is not None:
                del self._turns[bisect_left(self._turns, turn)]
                self.tokens -= self._tickets.pop(turn[1]).prompt_tokens

    def clear(self) -> None:
        self._turns.clear()
        self._tickets.clear()
        self._turn_of.clear()
        self.tokens = 0
