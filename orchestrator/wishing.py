"""What an operator wants, on its way from Redis to the supervisor, and what becomes of it on its way back.

The later word counts: a wish that stood in Redis before this conductor came is older than its settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from orchestrator.core.roll import Roll
from orchestrator.errors import Unreachable
from orchestrator.queues import ConductorQueue
from orchestrator.queues.link import unless_cancelled
from orchestrator.queues.wishes import Wanted, read_wanted
from orchestrator.shards.supervisor import Supervisor
from tgi_patches.contract import ShardSpec

log = structlog.get_logger()


class Wishing:
    """One conductor's; `run` while it leads."""

    def __init__(self, queue: ConductorQueue, supervisor: Supervisor) -> None:
        self._queue = queue
        self._supervisor = supervisor
        self._seen: str | None = None
        """The last text of wanted orders; None before the first look."""
        self._wanted: Wanted | None = None
        """What is followed; None for the conductor's own settings."""
        self._told: tuple[Sequence[ShardSpec], Roll] | None = None
        """In this term."""
        self._has_told = False
        """In any: a Redis that holds nothing of it has come up empty."""

    async def begin(self) -> None:
        """Before the first term: what is wanted already is none of its concern."""
        try:
            self._seen = (await self._queue.wishes()).wanted
        except Unreachable:
            pass  # the first look that succeeds counts

    async def heard(self) -> bool:
        """Before each term: what is wanted, before anything is compared with it.  May raise Unreachable."""
        self._told = None
        wishes = await self._queue.wishes()
        if not wishes.fresh:
            self._supervisor.states.hold(wishes.drained)
            self._hear(wishes.wanted)
        return True

    async def run(self) -> None:
        """Until cancelled; raises Deposed.  Follows within a heartbeat, tells at once."""
        told = self._supervisor.told
        while True:
            unless_cancelled()
            told.clear()
            try:
                await self._look()
            except Unreachable as error:
                log.warning("wishes_not_read", error=str(error))
            try:
                async with asyncio.timeout(self._queue.timings.heartbeat_s):
                    await told.wait()
            except TimeoutError:
                pass

    async def _look(self) -> None:
        states = self._supervisor.states
        for shard in list(states.released):
            await self._queue.give_back(shard)
            states.released.discard(shard)
        wishes = await self._queue.wishes()
        lost = wishes.fresh and self._has_told
        if not lost:
            states.hold(wishes.drained)
            self._hear(wishes.wanted)
        told = (self._supervisor.orders(), self._supervisor.roll)
        if lost or told != self._told:
            held = states.held if lost else ()
            await self._queue.tell(*told, self._wanted if lost else None, held)
            self._told, self._has_told = told, True

    def _hear(self, text: str) -> None:
        if self._seen is None:
            self._seen = text
        if text == self._seen:
            return
        self._seen = text
        try:
            wanted = read_wanted(text)
        except ValueError as error:
            log.error("wanted_unreadable", error=str(error))
            return
        if wanted is not None:
            self._wanted = wanted
            log.info("shards_wanted", wish=wanted.id, shards=len(wanted.orders))
            self._supervisor.want(wanted.orders, wanted.id)
