"""The requests a gateway has open, from ticket to end, and the first answer each one got."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from orchestrator.core.pending import turn_ms
from orchestrator.core.shard import ShardState
from orchestrator.core.ticket import Grant, ShardView, Ticket, relayed
from orchestrator.errors import GatewayError, Overloaded, Unavailable


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request between its ticket and its end."""

    ticket: Ticket
    answer: asyncio.Future[Grant]
    since_s: float
    """When it was submitted, on the loop's clock."""
    announced: bool = False
    """Its ticket is in Redis, or Redis is known to be gone."""
    grant: Grant | None = None
    held: Grant | None = None
    """What is reserved for it: less than the grant once the record was imported."""

    def age_s(self) -> float:
        return asyncio.get_running_loop().time() - self.since_s

    def turn_ms(self) -> float:
        return turn_ms(self.since_s * 1000, self.ticket.priority)


class OpenRequests:
    """By handle; those without a grant also in order of arrival."""

    def __init__(self) -> None:
        self._open: dict[str, OpenRequest] = {}
        self._undecided: dict[str, OpenRequest] = {}

    def add(self, ticket: Ticket) -> OpenRequest:
        """ValueError for a handle that is open already."""
        if ticket.handle in self._open:
            raise ValueError(f"The handle {ticket.handle} is already open.")
        loop = asyncio.get_running_loop()
        request = OpenRequest(ticket, loop.create_future(), since_s=loop.time())
        self._open[ticket.handle] = self._undecided[ticket.handle] = request
        return request

    def get(self, handle: str) -> OpenRequest | None:
        return self._open.get(handle)

    def settle(self, ticket: Ticket, grant: Grant) -> None:
        """First grant wins; a later one, or one for a request that ended, changes nothing."""
        request = self._open.get(ticket.handle)
        if request is not None and request.ticket is ticket and request.grant is None:
            request.grant = request.held = grant
            del self._undecided[ticket.handle]
            if not request.answer.done():
                request.answer.set_result(grant)

    def forget(self, handle: str) -> bool:
        """True if it was open."""
        self._undecided.pop(handle, None)
        return self._open.pop(handle, None) is not None

    def drop(self, request: OpenRequest, error: GatewayError) -> None:
        """Forget it and tell its waiter why."""
        if self._open.get(request.ticket.handle) is request:
            self.forget(request.ticket.handle)
        if not request.answer.done():
            request.answer.set_exception(error)
            request.answer.exception()  # the waiter may have left: then nobody else retrieves it

    def drop_all(self, error: Callable[[], GatewayError]) -> None:
        for request in list(self._open.values()):
            self.drop(request, error())

    def relayed(self, handle: str) -> Grant | None:
        """What a granted request holds from now on; None where nothing changes."""
        request = self._open.get(handle)
        if request is None or request.held is None or request.held.prefill is None:
            return None
        request.held = relayed(request.held)
        return request.held

    def held(self) -> list[Grant]:
        """What is reserved for the granted ones."""
        return [request.held for request in self._open.values() if request.held is not None]

    def undecided(self) -> list[str]:
        return list(self._undecided)

    @property
    def undecided_count(self) -> int:
        return len(self._undecided)

    def oldest_age_s(self) -> float | None:
        """Of those without a grant; None when there are none."""
        oldest = next(iter(self._undecided.values()), None)
        return None if oldest is None else oldest.age_s()

    def due(self, age_s: float, most: int, *, by_turn: bool) -> list[Ticket]:
        """Tickets of announced requests that have waited `age_s` without a grant, by turn or by arrival."""
        until_s = asyncio.get_running_loop().time() - age_s
        old = itertools.takewhile(lambda request: request.since_s <= until_s, self._undecided.values())
        announced = (request for request in old if request.announced)
        # The sort is stable: within a class nobody loses a place.
        ordered = sorted(announced, key=OpenRequest.turn_ms) if by_turn else announced
        return [request.ticket for request in itertools.islice(ordered, most)]


def no_shard() -> Unavailable:
    return Unavailable("No shard is known yet: try again in a moment.")


def queue_full(queue_size: int) -> Overloaded:
    return Overloaded(f"The queue is full ({queue_size} requests wait): try again later.")


def too_late(shards: Iterable[ShardView]) -> GatewayError:
    """For a request that reached its deadline in the queue: too many others, or nobody to serve it."""
    if any(view.state == ShardState.READY for view in shards):
        return Overloaded("The request waited in the queue until its deadline: try again later.")
    return Unavailable("No shard was ready before the request's deadline.")


def cancelled() -> Unavailable:
    return Unavailable("The request was cancelled while it waited.")


def closed() -> Unavailable:
    return Unavailable("The gateway is shutting down.")
