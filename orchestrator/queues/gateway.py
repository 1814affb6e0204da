"""A gateway's side of the queue: tickets out, grants in, leases kept alive.

Redis is called a fixed number of times per request: a ticket, a read that brings grants, an end.
Without an answer the gateway decides for itself; without Redis it serves from its last shard table with
half of the capacity, and says so.  Calls reach Redis in the order in which they are made: a withdrawal
always follows what it races with.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

import structlog

from orchestrator.core.decision import Mode, Policy, Refuse
from orchestrator.core.routing import decide, first_come
from orchestrator.core.ticket import Completion, Grant, Outcome, Relayed, ShardView, Ticket
from orchestrator.errors import OrchestratorError, Unavailable, Unreachable
from orchestrator.queues import calls, wire
from orchestrator.queues.answers import Answers
from orchestrator.queues.calls import Call, Timings
from orchestrator.queues.keys import Keys
from orchestrator.queues.link import BATCH, ScriptRunner, unless_cancelled
from orchestrator.queues.open import (
    OpenRequest,
    OpenRequests,
    cancelled,
    closed,
    no_shard,
    queue_full,
    too_late,
)
from orchestrator.queues.table import Table, conservative
from orchestrator.queues.untold import Untold
from tgi_patches.contract import checked_part, new_epoch

log = structlog.get_logger()


class GatewayQueue:
    """See `RequestQueue`.  `queue_size` bounds the undecided tickets of all gateways together."""

    def __init__(
        self,
        redis_url: str,
        deployment: str,
        gateway_id: str,
        *,
        queue_size: int = 1024,
        timings: Timings | None = None,
        policy: Policy | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.gateway = checked_part(f"{gateway_id}.{new_epoch()}", "gateway name")
        self._timings = timings or Timings()
        self._keys = Keys(checked_part(deployment, "deployment name"))
        self._runner = ScriptRunner(redis_url, self._keys, self._timings)
        self._answers = Answers(redis_url, self._keys, self.gateway, self._timings)
        self._queue_size = queue_size
        self._policy = policy
        self._now = now
        self._requests = OpenRequests()
        self._untold = Untold(self._keys, self.gateway, queue_size)
        self._table = Table()
        self._lost: str | None = None
        self._wake = asyncio.Event()
        self._timed = False
        """The loop that `_wake` wakes will look by itself when the oldest request has waited too long."""
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    # --- state ----------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._lost is None

    @property
    def degraded(self) -> str | None:
        if self._lost is not None:
            return self._lost
        if not self._table.leader:
            return "No conductor leads: this gateway decides for itself."
        return " ".join(self._table.problems) or None

    @property
    def mode(self) -> Mode:
        return self._table.mode

    @property
    def waiting(self) -> int:
        return self._table.waiting if self._lost is None else self._requests.undecided_count

    def shards(self) -> tuple[ShardView, ...]:
        return self._table.shards

    # --- life -----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        try:
            await self._runner.start()
            await self._runner.send(self._heartbeat())
            self._table = Table.parse(await self._runner.send(calls.table(self._keys)))
        except OrchestratorError:
            await self.aclose()
            raise
        self._task = asyncio.create_task(self._run(), name=f"queue {self.gateway}")

    async def aclose(self) -> None:
        """Free everything this gateway holds, then stop; quick even when Redis hangs."""
        self._closing = True
        self._requests.drop_all(closed)
        if self._task is not None:
            if self._lost is None:
                await asyncio.wait([self._runner.send(self._heartbeat())], timeout=self._timings.deadline_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._runner.aclose()
        await self._answers.aclose()

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_alive())
                group.create_task(self._read_answers())
                group.create_task(self._decide_late_ones())
        except Exception:
            # Supervision: clients that wait must hear of it.
            log.exception("queue_stopped", gateway=self.gateway)
        finally:
            self._lost = "The queue is closed."
            self._requests.drop_all(closed)

    # --- a request ------------------------------------------------------------------------------

    async def submit(self, ticket: Ticket) -> Grant:
        if self._closing or self._task is None or self._task.done():
            raise closed()
        if not self._table.shards and self._lost is None:
            await self.refresh()  # they may have come since the last heartbeat
        if not self._table.shards:
            raise no_shard()
        request = self._requests.add(ticket)
        try:
            async with asyncio.timeout(ticket.deadline_s - self._now()):
                self._announce(request)
                return await request.answer
        except BaseException as error:
            # The caller has no grant, whatever was decided meanwhile: nothing may stay behind.
            if self._requests.get(ticket.handle) is request:
                self._end(Completion(ticket.handle, Outcome.CANCELLED))
            if isinstance(error, TimeoutError):
                raise too_late(self._table.shards) from None
            raise

    def complete(self, completion: Completion) -> Awaitable[None]:
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ended = self._end(completion)
        if ended is None:
            told.set_result(None)
        else:
            ended.add_done_callback(lambda reply: self._told(reply, told))
        return told

    def relayed(self, relayed: Relayed) -> None:
        held = self._requests.relayed(relayed.handle)
        if held is None:
            return
        if self._lost is None:
            reply = self._runner.send(calls.relayed(self._keys, self.gateway, held, relayed))
            reply.add_done_callback(lambda reply: self._relay_told(relayed, reply))
        else:
            self._untold.add(relayed.handle, relayed)

    def cancel(self, handle: str) -> Awaitable[None]:
        request = self._requests.get(handle)
        if request is not None and request.grant is None:
            self._requests.drop(request, cancelled())
        return self.complete(Completion(handle, Outcome.CANCELLED))

    def _told(self, reply: asyncio.Future[Any], told: asyncio.Future[None]) -> None:
        self._replied(reply)
        if not told.done():
            told.set_result(None)

    def _relay_told(self, relayed: Relayed, reply: asyncio.Future[Any]) -> None:
        if self._replied(reply) is None and self._requests.get(relayed.handle) is not None:
            self._untold.add(relayed.handle, relayed)

    async def refresh(self) -> None:
        try:
            await self._read_table()
        except Unreachable as error:
            self._lose(error)

    def _announce(self, request: OpenRequest) -> None:
        """Put the ticket into Redis; without Redis only the local bound holds."""
        if self._lost is None:
            reply = self._runner.send(self._untold.submission(request))
            reply.add_done_callback(lambda reply: self._announced(request, self._replied(reply)))
        else:
            self._announced(request, None)

    def _announced(self, request: OpenRequest, reply: Any) -> None:
        full = reply == "full"
        if self._lost is not None:
            full = self._requests.undecided_count > self._queue_size
        if full and request.grant is None:
            self._requests.drop(request, queue_full(self._queue_size))
            self._end(Completion(request.ticket.handle, Outcome.CANCELLED))
            return
        request.announced = True
        self._stir()

    def _replied(self, reply: asyncio.Future[Any]) -> Any:
        """What Redis said to a call, or None and the knowledge that it is gone."""
        if reply.cancelled():
            return None
        error = reply.exception()
        if isinstance(error, Unreachable):
            self._lose(error)
        elif error is not None:
            raise error
        return None if error is not None else reply.result()

    def _end(self, completion: Completion) -> asyncio.Future[Any] | None:
        """Forget the request here at once and in Redis in order; without Redis a later heartbeat does it."""
        self._requests.forget(completion.handle)
        self._untold.forget(completion.handle)
        self._stir()
        if self._lost is not None:
            return None
        return self._runner.send(calls.complete(self._keys, self.gateway, completion))

    async def _heard(self, reply: asyncio.Future[Any]) -> Any:
        """The reply of a call, or None and the knowledge that Redis is gone."""
        try:
            return await reply
        except Unreachable as error:
            self._lose(error)
            return None

    # --- loops ----------------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        while True:
            unless_cancelled()
            await asyncio.sleep(self._timings.heartbeat_s)
            try:
                missing = await self._runner.tell(self._heartbeat)
                telling, told = self._untold.telling(missing, self._requests.get)
                await self._runner.run(telling)
                self._untold.told(told)
                await self._read_table()
                if not self._table.leader:
                    await self._runner.send(calls.reap(self._keys, self._timings))
            except Unreachable as error:
                self._lose(error)
            else:
                self._found()

    async def _read_answers(self) -> None:
        """Grants and refusals, as they come."""
        while True:
            unless_cancelled()
            try:
                for answer in await self._answers.read():
                    self._take(answer)
            except Unreachable as error:
                self._lose(error)
                await asyncio.sleep(self._timings.heartbeat_s)

    def _take(self, answer: Grant | wire.Refusal) -> None:
        request = self._requests.get(answer.handle)
        if request is None:
            return
        if isinstance(answer, wire.Refusal):
            if request.grant is None:
                self._requests.drop(request, Unavailable(answer.refused.detail))
        elif request.grant is None:
            self._requests.settle(request.ticket, answer)
        elif request.held is not None and request.grant != answer:
            # Decided here without Redis, and by a conductor from the ticket that survived: ours is served.
            self._untold.add(answer.handle)

    async def _decide_late_ones(self) -> None:
        """The gateway's own decisions; one pass at a time, in order."""
        while True:
            unless_cancelled()
            try:
                pause_s = self._pause_s()
                self._timed = pause_s is not None
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._timed = False
            self._wake.clear()
            if self._due() and self._lost is None:
                await self.refresh()
            # Only now: while the table was read, requests ended and Redis may have gone.
            due = self._due()
            if due and self._lost is None:
                await self._decide_together(due)
            elif due:
                self._decide_locally(due)

    def _stir(self) -> None:
        """A request came or went: look at once, unless a conductor leads and nobody waits for too long."""
        if self._timed and self._lost is None and self._table.leader:
            age_s = self._requests.oldest_age_s()
            if age_s is None or age_s < self._timings.own_decision_s:
                return
        self._wake.set()

    def _due(self) -> list[Ticket]:
        """What this gateway decides itself now, by turn where nobody else decides.

        Where a conductor leads, Redis lets a gateway help only the oldest ticket of all: it must not stand
        behind a higher class here.
        """
        if self._lost is not None or not self._table.leader:
            return self._requests.due(0.0, BATCH, by_turn=True)
        return self._requests.due(self._timings.own_decision_s, BATCH, by_turn=False)

    def _pause_s(self) -> float | None:
        """Until the oldest request has waited long enough, then once per period; None while none waits."""
        age_s = self._requests.oldest_age_s()
        if age_s is None:
            return None
        left_s = self._timings.own_decision_s - age_s
        return left_s if left_s > 0 else self._timings.own_decision_s

    async def _decide_together(self, due: Sequence[Ticket]) -> None:
        """The conductor's decision and its script; in order, up to the first that waits."""
        shards = self._table.shards
        sent: list[tuple[Ticket, asyncio.Future[Any]]] = []
        for ticket, decision in first_come(due, shards, mode=self.mode, policy=self._policy):
            if isinstance(decision, Refuse):
                self._refuse(ticket, decision)
            else:
                commit = calls.commit(self._keys, "", ticket, decision, shards, self._timings)
                sent.append((ticket, self._runner.send(commit)))
        for ticket, reply in sent:
            result, lease = await self._heard(reply) or ("lost", "")
            if result in ("granted", "duplicate"):
                self._requests.settle(ticket, wire.leased(lease))

    def _decide_locally(self, due: Sequence[Ticket]) -> None:
        """Without Redis: this gateway's share of half of what was there, less what it holds itself."""
        shards = conservative(self._table, self._requests.held())
        for ticket, decision in first_come(due, shards, mode=self.mode, policy=self._policy):
            if isinstance(decision, Grant):
                self._requests.settle(ticket, decision)
                self._untold.add(ticket.handle)
            elif isinstance(never := decide(ticket, self._table.shards, mode=self.mode), Refuse):
                self._refuse(ticket, never)

    def _refuse(self, ticket: Ticket, refused: Refuse) -> None:
        request = self._requests.get(ticket.handle)
        if request is not None and request.ticket is ticket:
            self._requests.drop(request, Unavailable(refused.detail))
            self._end(Completion(ticket.handle, Outcome.REFUSED))

    # --- Redis ----------------------------------------------------------------------------------

    async def _read_table(self) -> None:
        self._table = Table.parse(await self._runner.send(calls.table(self._keys)), self._table)

    def _heartbeat(self) -> Call:
        granted = [grant.handle for grant in self._requests.held()]
        return calls.heartbeat(self._keys, self.gateway, granted, self._requests.undecided(), self._timings)

    def _lose(self, error: Exception) -> None:
        if self._lost is None:
            log.warning("redis_lost", gateway=self.gateway, error=str(error))
        self._lost = f"{error} This gateway serves from its last shard table with half of the capacity."
        self._wake.set()

    def _found(self) -> None:
        if self._lost is not None:
            log.info("redis_back", gateway=self.gateway)
            self._lost = None
        self._wake.set()
