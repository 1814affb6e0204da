"""The conductor: one leader decides tickets in order and keeps the shards running.

standby --lead--> leading --another one leads--> standby;  leading --stop--> drained --> stopped
All it knows can be rebuilt: tickets and reservations from Redis, shards from the launcher.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import structlog

from orchestrator.core.scheduling import Scheduler
from orchestrator.core.shard import Rules
from orchestrator.core.snapshot import ConductorSnapshot, Reserved, ShardStatus
from orchestrator.core.ticket import Grant, ShardView
from orchestrator.errors import ConfigError, Unreachable
from orchestrator.queues import ConductorQueue, Deposed
from orchestrator.queues.conductor import Arrived, Books, Commit
from orchestrator.queues.link import unless_cancelled
from orchestrator.queues.wire import booked
from orchestrator.shards.launcher import Launcher
from orchestrator.shards.probe import StatusProbe
from orchestrator.shards.supervisor import Pace, Supervisor
from tgi_patches.contract import ShardSpec

log = structlog.get_logger()

PASS_MOST = 128
"""Decisions per scheduling pass."""
HEADS = 16
"""First tickets whose presence is checked in every pass: one that was withdrawn must not hold up the rest."""
OVER = frozenset({"duplicate", "gone"})
"""Commits of tickets that others have decided, or that were withdrawn."""


class _Stopped(Exception):
    """Ends the leader's tasks after a drain."""


class Conductor:
    """Owns the launcher's shards while it runs; the queue is opened and closed by the caller."""

    def __init__(
        self,
        queue: ConductorQueue,
        launcher: Launcher,
        specs: Sequence[ShardSpec],
        probe: StatusProbe,
        *,
        scheduler: Scheduler | None = None,
        rules: Rules | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._queue = queue
        self._launcher = launcher
        self._pace = pace or Pace()
        self._supervisor = Supervisor(
            launcher, specs, probe, until_idle=self._until_idle, rules=rules, pace=self._pace
        )
        self._scheduler = scheduler or Scheduler()
        self._books = Books({})
        self._books_stand = False
        """They were read in the last pass, after its commits."""
        self._ended: Counter[str] = Counter()
        self._stopping = asyncio.Event()

    @property
    def ready(self) -> asyncio.Event:
        """Set while every shard is ready."""
        return self._supervisor.ready

    def stop(self) -> None:
        """Ask `run` to drain, stop all shards and return."""
        self._stopping.set()

    async def run(self) -> None:
        """Until `stop` or cancelled (then without a drain).  Raises ConfigError when a shard cannot start."""
        try:
            while not self._stopping.is_set():
                if await self._elected():
                    await self._lead()
                else:
                    await self._pause(self._queue.timings.leader_ttl_s / 5)
        finally:
            await self._shut_down()

    def snapshot(self) -> ConductorSnapshot:
        """What `status` shows, from memory."""
        return ConductorSnapshot(
            leader=self._queue.leader,
            mode=self._books.mode,
            waiting_tickets=len(self._scheduler.pending),
            ended=dict(self._ended),
            shards=tuple(
                ShardStatus.of(
                    watched,
                    self._books.of(watched.shard, watched.epoch),
                    pid=self._supervisor.pids.get(watched.shard),
                    problem=self._supervisor.problems.get(watched.shard, ""),
                )
                for watched in self._supervisor.watched()
            ),
        )

    # --- leading --------------------------------------------------------------------------------

    async def _elected(self) -> bool:
        try:
            return await self._queue.lead()
        except Unreachable as error:
            log.warning("election_failed", error=str(error))
            return False

    async def _lead(self) -> None:
        log.info("leading", leader=self._queue.leader)
        failed: ConfigError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._supervisor.run())
                group.create_task(self._stay_leader())
                group.create_task(self._publish())
                group.create_task(self._schedule())
                group.create_task(self._tidy())
                group.create_task(self._drain_when_asked())
        except* (Deposed, _Stopped):
            log.info("no_longer_leading")
        except* ConfigError as caught:
            failed = _first(caught)
        if failed is not None:
            raise failed

    async def _stay_leader(self) -> None:
        while True:
            unless_cancelled()
            await asyncio.sleep(self._queue.timings.leader_ttl_s / 3)
            try:
                if not await self._queue.lead():
                    raise Deposed("Another conductor leads.")
            except Unreachable as error:
                # Shards are kept all the same; nothing is granted, for commits need Redis.
                log.warning("lead_not_renewed", error=str(error))

    async def _publish(self) -> None:
        """The registry, at once on a change and often enough to stay alive."""
        changed = self._supervisor.changed
        while True:
            unless_cancelled()
            changed.clear()
            try:
                await self._queue.publish(self._supervisor.watched(), self._supervisor.problems)
                # After the state is out, so that no commit reserves on what is being cleared.
                for shard, epoch in list(self._supervisor.gone):
                    await self._queue.retire(shard, epoch)
                    self._supervisor.gone.discard((shard, epoch))
            except Unreachable as error:
                log.warning("registry_not_published", error=str(error))
                await asyncio.sleep(self._pace.poll_s)
                continue
            try:
                async with asyncio.timeout(self._pace.poll_s):
                    await changed.wait()
            except TimeoutError:
                pass

    async def _tidy(self) -> None:
        """End what dead gateways left, take over what other conductors were given."""
        while True:
            unless_cancelled()
            await asyncio.sleep(self._queue.timings.heartbeat_s)
            try:
                if ended := await self._queue.reap():
                    log.info("gateway_reaped", requests=ended)
                self._scheduler.add(await self._queue.claim(everything=False), time.time())
            except Unreachable as error:
                log.warning("tidy_failed", error=str(error))

    # --- scheduling -----------------------------------------------------------------------------

    async def _schedule(self) -> None:
        term, more = "", False
        while True:
            unless_cancelled()
            try:
                if term != self._queue.leader:
                    term = self._queue.leader
                    self._books_stand = False
                    self._scheduler.clear()
                    self._scheduler.add(await self._queue.claim(everything=True), time.time())
                    more = self._waiting > 0
                arrived = await self._queue.read(block=not more)
                self._hear(arrived)
                # Nobody waited and nothing ended: there can only be less room than the books say, if any.
                ended = arrived.completions or arrived.relayed
                at_once = self._books_stand and not self._waiting and not ended
                self._scheduler.add(arrived.tickets, time.time())
                more = await self._decide(at_once=at_once and self._waiting > 0)
            except Unreachable as error:
                log.warning("scheduling_paused", error=str(error))
                term = ""
                await asyncio.sleep(self._pace.poll_s)

    async def _decide(self, *, at_once: bool) -> bool:
        """One pass over the queue; True when another one can bring more at once.

        `at_once`: on the books as they stand, which saves new tickets a round trip; Redis refuses what no
        longer fits.
        """
        scheduler = self._scheduler
        self._books_stand = False
        if not at_once:
            self._books = await self._queue.books(scheduler.pending.first(HEADS))
            scheduler.forget(self._books.gone)
        books = self._books
        shards = self._shards(books)
        decided = list(islice(scheduler.decide(shards, books.mode, time.time()), PASS_MOST))
        await self._commit([Commit(ticket, one, shards) for ticket, one in decided if isinstance(one, Grant)])
        for ticket, one in decided:
            if not isinstance(one, Grant):
                await self._queue.refuse(ticket, one)
                scheduler.forget((ticket.handle,))
                log.info("ticket_refused", handle=ticket.handle, reason=one.reason)
        self._books_stand = True
        if at_once:
            return self._waiting > 0
        return bool(books.gone) or len(decided) == PASS_MOST

    async def _commit(self, commits: Sequence[Commit]) -> None:
        """The books are those after it; what could not be committed waits on."""
        if not commits:
            return
        results, self._books = await self._queue.commit_and_read(commits)
        now_s = time.time()
        for one, result in zip(commits, results, strict=True):
            if result == "granted":
                self._scheduler.granted(one.ticket, one.grant, now_s)
                continue
            self._scheduler.failed(one.ticket, now_s)
            if result in OVER:
                self._scheduler.forget((one.ticket.handle,))

    def _hear(self, arrived: Arrived) -> None:
        """What became of requests that were granted."""
        now_s = time.time()
        for relayed in arrived.relayed:
            self._scheduler.relayed(relayed, now_s)
        for completion in arrived.completions:
            self._ended[str(completion.outcome)] += 1
            self._scheduler.ended(completion, now_s)

    @property
    def _waiting(self) -> int:
        return len(self._scheduler.pending)

    def _shards(self, books: Books) -> list[ShardView]:
        views = (watched.view() for watched in self._supervisor.watched())
        return [booked(view, books.reserved) for view in views if view is not None]

    async def _until_idle(self, shard: str, epoch: int) -> None:
        """Returns once nothing is reserved on a drained incarnation, and nothing can be any more."""
        while True:
            unless_cancelled()
            try:
                # First the state, so that no commit reserves after the books were read.
                await self._queue.publish(self._supervisor.watched(), self._supervisor.problems)
                if (await self._queue.books()).of(shard, epoch) == Reserved():
                    return
            except Unreachable as error:
                log.warning("drain_not_seen", shard=shard, error=str(error))
            await asyncio.sleep(self._pace.poll_s)

    # --- the end --------------------------------------------------------------------------------

    async def _drain_when_asked(self) -> None:
        """Nothing new, and the running requests may end, for a while."""
        await self._stopping.wait()
        self._supervisor.drain()
        end_s = time.monotonic() + self._pace.drain_s
        try:
            while time.monotonic() < end_s:
                if not (await self._queue.books()).reserved:
                    break
                await asyncio.sleep(0.05)
        except Unreachable as error:
            log.warning("drain_cut_short", error=str(error))
        raise _Stopped

    async def _shut_down(self) -> None:
        await self._launcher.close(self._pace.grace_s)
        self._supervisor.closed()
        if self._queue.leader:
            try:
                # Dead, not removed: a gateway keeps the last it knows of a shard that is only missing.
                await self._queue.publish(self._supervisor.watched())
            except (Deposed, Unreachable) as error:
                log.warning("registry_not_closed", error=str(error))

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass


def _first(group: BaseExceptionGroup[ConfigError]) -> ConfigError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return ConfigError(str(error))
