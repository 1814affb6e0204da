"""The conductor: one leader decides tickets in order and keeps the shards running.

standby --lead--> leading --another one leads--> standby;  leading --stop--> drained --> stopped
All it knows can be rebuilt: tickets and reservations from Redis, shards from the launcher.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog

from orchestrator.core import degraded
from orchestrator.core.cost import Costs
from orchestrator.core.costbook import CostBook
from orchestrator.core.scheduling import Scheduler
from orchestrator.core.shard import Rules, ShardState
from orchestrator.core.snapshot import ConductorSnapshot, Reserved, ShardStatus
from orchestrator.core.ticket import ShardView
from orchestrator.dispatch import Dispatch
from orchestrator.errors import ConfigError, Unreachable
from orchestrator.queues import ConductorQueue, Deposed
from orchestrator.queues.link import unless_cancelled
from orchestrator.shards.launcher import Launcher
from orchestrator.shards.probe import StatusProbe
from orchestrator.shards.rolling import PlaceFor, RoomFor, always_room, as_planned
from orchestrator.shards.supervisor import Pace, Supervisor
from orchestrator.wishing import Wishing
from tgi_patches.contract import ShardSpec

log = structlog.get_logger()

Calibrator = Callable[[ShardView], Awaitable[Costs | None]]
"""Measures an idle shard; None where that did not work."""
DRAIN_LOOKS_S = 0.05


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
        costs: CostBook | None = None,
        calibrator: Calibrator | None = None,
        queue_size: int = 256,
        ladder: degraded.Rules | None = None,
        rules: Rules | None = None,
        pace: Pace | None = None,
        room_for: RoomFor = always_room,
        place_for: PlaceFor = as_planned,
    ) -> None:
        self._queue = queue
        self._launcher = launcher
        self._pace = pace or Pace()
        self._supervisor = Supervisor(
            launcher,
            specs,
            probe,
            until_idle=self._until_idle,
            room_for=room_for,
            place_for=place_for,
            rules=rules,
            pace=self._pace,
        )
        self._states = self._supervisor.states
        self._wishing = Wishing(queue, self._supervisor)
        self._costs = costs or CostBook()
        self._dispatch = Dispatch(
            queue,
            scheduler or Scheduler(),
            self._costs,
            self._supervisor.watched,
            retry_s=self._pace.poll_s,
        )
        self._calibrator = calibrator
        self._queue_size = queue_size
        self._ladder = ladder
        self._stopping = asyncio.Event()
        self._keep_shards = False

    @property
    def ready(self) -> asyncio.Event:
        """Set while every shard is ready that is not drained by an operator."""
        return self._states.ready

    def stop(self, *, keep_shards: bool = False) -> None:
        """Ask `run` to drain, stop all shards and return; or to return at once, and leave them serving."""
        self._keep_shards = keep_shards
        self._stopping.set()

    def want(self, orders: Sequence[ShardSpec]) -> None:
        """Other shards from now on: they are rolled one at a time.  ConfigError for what cannot be meant."""
        self._supervisor.want(orders)

    async def run(self) -> None:
        """Until `stop` or cancelled (then without a drain).  Raises ConfigError when a shard cannot start."""
        await self._wishing.begin()
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
            mode=self._dispatch.books.mode,
            waiting_tickets=self._dispatch.waiting,
            ended=dict(self._dispatch.ended),
            shards=tuple(
                ShardStatus.of(
                    watched,
                    self._dispatch.books.of(watched.shard, watched.epoch),
                    pid=self._states.pids.get(watched.shard),
                    problem=self._states.problems.get(watched.shard, ""),
                )
                for watched in self._supervisor.watched()
            ),
            roll=self._supervisor.roll,
        )

    # --- leading --------------------------------------------------------------------------------

    async def _elected(self) -> bool:
        """And knows what is wanted: shards that a predecessor began to roll must not be rolled back."""
        try:
            return await self._queue.lead() and await self._wishing.heard()
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
                group.create_task(self._dispatch.run())
                group.create_task(self._tidy())
                group.create_task(self._degrade())
                group.create_task(self._calibrate())
                group.create_task(self._wishing.run())
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
        changed = self._states.changed
        while True:
            unless_cancelled()
            changed.clear()
            try:
                await self._publish_once()
                # After the state is out, so that no commit reserves on what is being cleared.
                for shard, epoch in list(self._states.gone):
                    self._dispatch.lost(shard, epoch)
                    await self._queue.retire(shard, epoch)
                    self._states.gone.discard((shard, epoch))
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
                await self._dispatch.claim(everything=False)
            except Unreachable as error:
                log.warning("tidy_failed", error=str(error))

    async def _publish_once(self) -> None:
        views = {view.shard: view for view in self._dispatch.measured_shards()}
        await self._queue.publish(self._supervisor.watched(), self._states.problems, views)

    async def _degrade(self) -> None:
        """The ladder, once a heartbeat, unless an operator has set a level.  A stop is no emergency."""
        trend = degraded.Trend()
        while True:
            unless_cancelled()
            await asyncio.sleep(self._queue.timings.heartbeat_s)
            if self._stopping.is_set():
                return
            dispatch = self._dispatch
            # One that is replaced is not missed: its successor is ready before it is drained.
            staying = [view for view in dispatch.plain_shards() if view.shard not in self._states.leaving]
            load = degraded.Load.of(staying, dispatch.waiting, self._queue_size)
            try:
                held = (await self._queue.books()).mode
                mode, trend = degraded.decide(held, trend, load, time.monotonic(), self._ladder)
                if mode != held and await self._queue.set_mode(mode):
                    log.warning("mode_changed", level=mode.level, reason=mode.reason)
                    held = mode
                dispatch.see(held)
            except Unreachable as error:
                log.warning("mode_not_set", error=str(error))

    async def _calibrate(self) -> None:
        """Measure one shard of each kind that nobody knows, while it has nothing else to do."""
        tried: set[tuple[str, int]] = set()
        while self._calibrator is not None:
            unless_cancelled()
            await asyncio.sleep(self._pace.poll_s)
            untried = [view for view in self._dispatch.shards() if (view.shard, view.epoch) not in tried]
            view = next(filter(self._idle_unknown, untried), None)
            if view is None:
                continue
            tried.add((view.shard, view.epoch))
            costs = await self._calibrator(view)
            if costs is not None:
                self._costs.calibrated(view, costs)
            log.info("shard_calibrated", shard=view.shard, found=costs is not None)

    def _idle_unknown(self, view: ShardView) -> bool:
        busy = view.reserved_slots or view.outstanding_records or view.state != ShardState.READY
        return not busy and self._costs.unknown(view)

    async def _until_idle(self, shard: str, epoch: int) -> None:
        """Returns once nothing is reserved on a drained incarnation, and nothing can be any more."""
        while True:
            unless_cancelled()
            try:
                # First the state, so that no commit reserves after the books were read.
                await self._publish_once()
                if (await self._queue.books()).of(shard, epoch) == Reserved():
                    return
            except Unreachable as error:
                log.warning("drain_not_seen", shard=shard, error=str(error))
            await asyncio.sleep(self._pace.poll_s)

    # --- the end --------------------------------------------------------------------------------

    async def _drain_when_asked(self) -> None:
        """Nothing new, and the running requests may end, for a while."""
        await self._stopping.wait()
        if self._keep_shards:
            raise _Stopped
        self._supervisor.drain()
        end_s = time.monotonic() + self._pace.drain_s
        try:
            while time.monotonic() < end_s:
                if not (await self._queue.books()).reserved:
                    break
                await asyncio.sleep(DRAIN_LOOKS_S)
        except Unreachable as error:
            log.warning("drain_cut_short", error=str(error))
        raise _Stopped

    async def _shut_down(self) -> None:
        if self._keep_shards:
            # Gateways keep the last that they know of the shards until somebody leads again.
            await self._queue.resign()
            return
        await self._launcher.close(self._pace.grace_s)
        self._supervisor.closed()
        if self._queue.leader:
            try:
                # Dead, not removed: a gateway keeps the last it knows of a shard that is only missing.
                await self._queue.publish(self._supervisor.watched())
                await self._queue.forget_wishes()
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
