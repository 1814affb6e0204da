"""The queue in memory: the same decisions and errors as `GatewayQueue`, without Redis or a conductor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Iterable
from dataclasses import replace

from orchestrator.core.decision import Decision, Mode, Refuse
from orchestrator.core.routing import decide, first_come, release, reserve
from orchestrator.core.shard import ShardState
from orchestrator.core.ticket import Completion, Grant, Outcome, Relayed, ShardView, Ticket
from orchestrator.errors import Unavailable
from orchestrator.queues.open import OpenRequests, cancelled, closed, no_shard, queue_full, too_late


class FakeQueue:
    """See `RequestQueue`.  `completions` keeps every end, `granted` every grant, both in order."""

    def __init__(
        self,
        shards: Iterable[ShardView] = (),
        *,
        queue_size: int = 1024,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.gateway = "fake.1"
        self.mode = Mode()
        self.connected = True
        self.degraded: str | None = None
        self.granted: list[Grant] = []
        self.completions: list[Completion] = []
        self.imported: list[Relayed] = []
        """Records that were said to be imported, once each."""
        self._shards = tuple(shards)
        self._queue_size = queue_size
        self._now = now
        self._requests = OpenRequests()

    @property
    def waiting(self) -> int:
        return self._requests.undecided_count

    def shards(self) -> tuple[ShardView, ...]:
        return self._shards

    def set_shards(self, shards: Iterable[ShardView]) -> None:
        """Another table; reservations on incarnations that stay are kept."""
        self._shards = tuple(shards)
        for grant in self._requests.held():
            self._shards = reserve(self._shards, grant)
        self._decide()

    def set_state(self, shard: str, state: ShardState) -> None:
        """Another state for one shard."""
        self._shards = tuple(
            replace(view, state=state) if view.shard == shard else view for view in self._shards
        )
        self._decide()

    async def start(self) -> None:
        """Nothing to open."""

    async def aclose(self) -> None:
        self._requests.drop_all(closed)

    async def refresh(self) -> None:
        """The table is always fresh."""

    async def submit(self, ticket: Ticket) -> Grant:
        if not self._shards:
            raise no_shard()
        if self._requests.undecided_count >= self._queue_size:
            raise queue_full(self._queue_size)
        alone = not self._requests.undecided_count
        request = self._requests.add(ticket)
        request.announced = True
        if alone:
            self._apply(ticket, decide(ticket, self._shards, mode=self.mode))
        else:
            self._decide()
        if request.answer.done():
            return request.answer.result()
        try:
            async with asyncio.timeout(ticket.deadline_s - self._now()):
                return await request.answer
        except BaseException as error:
            if self._requests.get(ticket.handle) is request:
                self._end(Completion(ticket.handle, Outcome.CANCELLED))
            if isinstance(error, TimeoutError):
                raise too_late(self._shards) from None
            raise

    def complete(self, completion: Completion) -> Awaitable[None]:
        self._end(completion)
        return _Told()

    def relayed(self, relayed: Relayed) -> None:
        request = self._requests.get(relayed.handle)
        before = None if request is None else request.held
        after = self._requests.relayed(relayed.handle)
        if before is not None and after is not None:
            self._shards = reserve(release(self._shards, before), after)
            self.imported.append(relayed)
            self._decide()

    def cancel(self, handle: str) -> Awaitable[None]:
        request = self._requests.get(handle)
        if request is not None and request.grant is None:
            self._requests.drop(request, cancelled())
        return self.complete(Completion(handle, Outcome.CANCELLED))

    def _end(self, completion: Completion) -> None:
        """Once per request; a second end changes nothing."""
        request = self._requests.get(completion.handle)
        if request is None:
            return
        self._requests.forget(completion.handle)
        self.completions.append(completion)
        if request.held is not None:
            self._shards = release(self._shards, request.held)
        self._decide()

    def _decide(self) -> None:
        if not self._requests.undecided_count:
            return
        due = self._requests.due(0.0, self._queue_size, by_turn=True)
        for ticket, decision in first_come(due, self._shards, mode=self.mode):
            self._apply(ticket, decision)

    def _apply(self, ticket: Ticket, decision: Decision) -> None:
        if isinstance(decision, Grant):
            self._shards = reserve(self._shards, decision)
            self.granted.append(decision)
            self._requests.settle(ticket, decision)
        elif isinstance(decision, Refuse) and (request := self._requests.get(ticket.handle)) is not None:
            self._requests.drop(request, Unavailable(decision.detail))


class _Told:
    """Nothing to wait for."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()
