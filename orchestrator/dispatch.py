"""The scheduling half of a conductor: tickets in, decisions of the scheduler out, what they led to back in.

claim -> [ read what is new -> decide -> commit -> read the books ] until deposed
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import structlog

from orchestrator.core.cost import Costs
from orchestrator.core.costbook import CostBook
from orchestrator.core.decision import Mode
from orchestrator.core.scheduling import Scheduler
from orchestrator.core.shard import Watched
from orchestrator.core.ticket import Grant, ShardView
from orchestrator.errors import Unreachable
from orchestrator.queues import ConductorQueue, Deposed
from orchestrator.queues.conductor import Arrived, Books, Commit
from orchestrator.queues.link import unless_cancelled
from orchestrator.queues.wire import booked

log = structlog.get_logger()

PASS_MOST = 128
"""Decisions per scheduling pass."""
BACKLOG = 256
"""So many tickets wait that nobody gains by a pass for each end..."""
PASS_EVERY_S = 0.01
"""... so that they are at least this long apart: one costs the same for one ticket as for a hundred."""
HEADS = 16
"""First tickets whose presence is checked in every pass: one that was withdrawn must not hold up the rest."""
OVER = frozenset({"duplicate", "gone"})
"""Commits of tickets that others have decided, or that were withdrawn."""


class Dispatch:
    """Decides tickets while its conductor leads.  Times are of the monotonic clock."""

    def __init__(
        self,
        queue: ConductorQueue,
        scheduler: Scheduler,
        costs: CostBook,
        watched: Callable[[], Sequence[Watched]],
        *,
        retry_s: float,
    ) -> None:
        self.books = Books({})
        self.ended: Counter[str] = Counter()
        """Requests by how they ended."""
        self._queue = queue
        self._scheduler = scheduler
        self._costs = costs
        self._watched = watched
        self._retry_s = retry_s
        self._views: dict[str, tuple[Watched, Costs | None, ShardView]] = {}
        self._books_stand = False
        """They were read in the last pass, after its commits."""

    @property
    def waiting(self) -> int:
        """Tickets without a decision."""
        return len(self._scheduler.pending)

    async def run(self) -> None:
        """Until cancelled; raises Deposed."""
        term, more, clock = "", False, asyncio.get_running_loop().time
        while True:
            unless_cancelled()
            begun_s = clock()
            try:
                if term != self._queue.leader:
                    term = self._queue.leader
                    self._books_stand = False
                    self._scheduler.clear()
                    await self.claim(everything=True)
                    more = self.waiting > 0
                arrived = await self._queue.read(block=not more, within_s=self._pause_s())
                self._hear(arrived)
                ended = arrived.completions or arrived.relayed
                # Nobody waited and nothing ended: there can only be less room than the books say, if any.
                at_once = self._books_stand and not self.waiting and not ended
                self._scheduler.add(arrived.tickets, time.monotonic())
                more = await self._decide(at_once=at_once and self.waiting > 0)
                if self.waiting >= BACKLOG and not more:
                    await asyncio.sleep(max(0.0, begun_s + PASS_EVERY_S - clock()))
            except Unreachable as error:
                log.warning("scheduling_paused", error=str(error))
                term = ""
                await asyncio.sleep(self._retry_s)
            except Deposed:
                raise
            except Exception:
                # Supervision: shards serve on, and gateways help their own tickets meanwhile.
                log.exception("scheduling_failed")
                term = ""
                await asyncio.sleep(self._retry_s)

    async def claim(self, *, everything: bool) -> None:
        """Take over what other conductors were given, or all that was not decided."""
        self._scheduler.add(await self._queue.claim(everything=everything), time.monotonic())

    def lost(self, shard: str, epoch: int) -> None:
        """An incarnation is gone."""
        self._scheduler.lost(shard, epoch)
        self._costs.lost(shard, epoch)

    def see(self, mode: Mode) -> None:
        """What holds now: a ticket that comes alone is decided on the books as they stand."""
        self.books = replace(self.books, mode=mode)

    def shards(self) -> list[ShardView]:
        """Every shard that has answered once, with its costs and what is reserved on it."""
        return [booked(view, self.books.reserved) for view in self.plain_shards()]

    def plain_shards(self) -> list[ShardView]:
        """The same without reservations."""
        views = (self._view(watched) for watched in self._watched())
        return [view for view in views if view is not None]

    def measured_shards(self) -> list[ShardView]:
        """The same with what is shown besides: measured prefill batches, and hot groups that keep to them."""
        hot = self._scheduler.hot_groups(time.monotonic())
        found = []
        for view in self.plain_shards():
            requests, tokens = self._costs.batches(view.shard) or (0.0, 0.0)
            groups = hot[view.shard]
            if requests or groups:
                view = replace(view, batch_requests=requests, batch_tokens=tokens, hot_groups=groups)
            found.append(view)
        return found

    def _view(self, watched: Watched) -> ShardView | None:
        """Made anew only when something has changed: a pass asks for all of them."""
        known = self._views.get(watched.shard)
        if known is not None and _as_before(known[0], watched):
            costs = self._costs.of(known[2])
            if costs is known[1]:
                return known[2]
        plain = watched.view()
        if plain is None:
            return None
        costs = self._costs.of(plain)
        view = replace(plain, costs=costs)
        _ = view.facts  # worked out once, for all that are booked from it
        self._views[watched.shard] = watched, costs, view
        return view

    def _pause_s(self) -> float:
        """How long to wait for something to happen: until a window opens, where tickets wait for one.

        Never so long that gateways take this conductor for gone and help its tickets.
        """
        if not self.waiting:
            return math.inf
        longest_s = self._queue.timings.own_decision_s / 2
        opens_s = self._scheduler.opens_s()
        return longest_s if opens_s is None else max(0.001, min(longest_s, opens_s - time.monotonic()))

    async def _decide(self, *, at_once: bool) -> bool:
        """One pass over the queue; True when another one can bring more at once.

        `at_once`: on the books as they stand, which saves new tickets a round trip; Redis refuses what no
        longer fits.
        """
        scheduler = self._scheduler
        self._books_stand = False
        if not at_once:
            self.books = await self._queue.books(scheduler.pending.some(0, HEADS))
            scheduler.forget(self.books.gone)
        books, shards = self.books, self.shards()
        decided = list(islice(scheduler.decide(shards, books.mode, time.monotonic()), PASS_MOST))
        views = {view.shard: view for view in shards}
        await self._commit(
            [Commit(ticket, one, _named(one, views)) for ticket, one in decided if isinstance(one, Grant)]
        )
        for ticket, one in decided:
            if not isinstance(one, Grant):
                await self._queue.refuse(ticket, one)
                scheduler.forget((ticket.handle,))
                log.info("ticket_refused", handle=ticket.handle, reason=one.reason)
        self._books_stand = True
        if at_once:
            return self.waiting > 0
        return bool(books.gone) or len(decided) == PASS_MOST

    async def _commit(self, commits: Sequence[Commit]) -> None:
        """The books are those after it; what could not be committed waits on."""
        if not commits:
            return
        try:
            results, self.books = await self._queue.commit_and_read(commits)
        except (Unreachable, Deposed):
            # Whatever of it was committed is heard of when its tickets are claimed anew.
            for one in commits:
                self._scheduler.failed(one.ticket, time.monotonic())
            raise
        now_s = time.monotonic()
        for one, result in zip(commits, results, strict=True):
            if result == "granted":
                self._scheduler.granted(one.ticket, one.grant, now_s)
                self._costs.granted(one.ticket, one.grant, now_s)
                continue
            self._scheduler.failed(one.ticket, now_s)
            if result in OVER:
                self._scheduler.forget((one.ticket.handle,))

    def _hear(self, arrived: Arrived) -> None:
        """What became of requests that were granted."""
        now_s = time.monotonic()
        for relayed in arrived.relayed:
            self._scheduler.relayed(relayed, now_s)
            self._costs.relayed(relayed, now_s)
        for completion in arrived.completions:
            self.ended[str(completion.outcome)] += 1
            self._scheduler.ended(completion, now_s)
            self._costs.ended(completion, now_s)


def _as_before(known: Watched, watched: Watched) -> bool:
    """A poll that brought nothing new makes no other view."""
    if known is watched:
        return True
    addresses = (known.url, known.sidecar_url, known.pull_host)
    return (
        known.state is watched.state
        and known.status == watched.status
        and addresses == (watched.url, watched.sidecar_url, watched.pull_host)
    )


def _named(grant: Grant, views: Mapping[str, ShardView]) -> list[ShardView]:
    """The shards of a grant."""
    legs = (grant.decode,) if grant.prefill is None else (grant.decode, grant.prefill)
    return [views[leg.shard] for leg in legs]
