"""What a gateway needs of the queue; `GatewayQueue` and `FakeQueue` implement it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from orchestrator.core.decision import Mode
from orchestrator.core.ticket import Completion, Grant, Relayed, ShardView, Ticket


class RequestQueue(Protocol):
    """A gateway's side of the queue."""

    @property
    def gateway(self) -> str:
        """`<gateway id>.<gateway epoch>`, as tickets carry it."""

    @property
    def connected(self) -> bool:
        """Redis answers."""

    @property
    def degraded(self) -> str | None:
        """One sentence while the queue works with less than it should have; None when all is well."""

    @property
    def mode(self) -> Mode:
        """The mode as last read."""

    @property
    def waiting(self) -> int:
        """Tickets without a decision, of all gateways, as last read."""

    async def start(self) -> None:
        """Raises Unreachable without Redis, ConfigError for a foreign schema."""

    async def aclose(self) -> None:
        """Gives everything back."""

    async def submit(self, ticket: Ticket) -> Grant:
        """Shards for the ticket, at the latest at its deadline.

        Raises Overloaded (queue full, or the deadline passed in the queue) and Unavailable (no shard is
        known, none is ready by the deadline, or none could ever hold the request).
        """

    def complete(self, completion: Completion) -> Awaitable[None]:
        """End a granted request and free what it held, once.

        It is said at once and cannot fail: reservations are leases, which expire even if nobody hears
        of it.  Awaiting the result is for who needs to know that it has been heard, or cannot be.
        """

    def relayed(self, relayed: Relayed) -> None:
        """The record of a granted request was imported: the prefill shard's part is free, once.

        Said at once and cannot fail, as `complete`.
        """

    def cancel(self, handle: str) -> Awaitable[None]:
        """End a request in the queue, likewise: withdraw its ticket, free what a raced commit reserved."""

    def shards(self) -> tuple[ShardView, ...]:
        """The shard table with reservations, as last read."""

    async def refresh(self) -> None:
        """Read the shard table now; keeps the last one when Redis does not answer."""
