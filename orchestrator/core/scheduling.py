"""The conductor's policy as one object: which tickets go now, and where.  No I/O and no clock.

The conductor and the simulator of `bench scheduler` feed it the same events and apply its decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from orchestrator.core.pending import Pending, Place
from orchestrator.core.routing import Mode, Policy, Refuse, first_come
from orchestrator.core.ticket import Completion, Grant, Relayed, ShardView, Ticket


class Scheduler:
    """Holds what waits, and what it must remember of what runs.  Times are seconds of one clock."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.pending = Pending()

    def add(self, tickets: Mapping[Place, Ticket], now_s: float) -> None:
        """New tickets, or claimed ones."""
        self.pending.add(tickets)

    def forget(self, handles: Iterable[str]) -> None:
        """Tickets that were withdrawn, or decided by others."""
        self.pending.forget(handles)

    def granted(self, ticket: Ticket, grant: Grant, now_s: float) -> None:
        """A decision was committed."""
        self.pending.forget((ticket.handle,))

    def relayed(self, relayed: Relayed, now_s: float) -> None:
        """A record was imported."""

    def ended(self, completion: Completion, now_s: float) -> None:
        """A request is over."""

    def decide(
        self, shards: Sequence[ShardView], mode: Mode, now_s: float
    ) -> Iterator[tuple[Ticket, Grant | Refuse]]:
        """Decisions on `shards`, which has all reservations in it, each on what the earlier ones left."""
        return first_come(self.pending, shards, mode=mode)
