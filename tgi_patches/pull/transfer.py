"""One pull, from the first connection to the last rank's record in the pulled arena."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

from tgi_patches.contract import BridgeMiss, MissReason, PullRequest
from tgi_patches.pull import PullLimits, log
from tgi_patches.pull.link import Link, Receiving, connected
from tgi_patches.pull.rings import PulledRings, Rings
from tgi_patches.pull.wire import Described, Request, WireError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pulled:
    """Where a record's copies are."""

    epoch: int
    sequences: tuple[int, ...]
    """By rank."""
    kv_bytes: int
    """Of all ranks together."""


class Transfer:
    """Runs once.  A connection that breaks under way is made anew once, and goes on where it broke."""

    def __init__(
        self, wanted: PullRequest, digest: int, key: bytes, limits: PullLimits, rings: PulledRings
    ) -> None:
        self._wanted = wanted
        self._digest = digest
        self._key = key
        self._limits = limits
        self._rings = rings
        self._deadline_s = asyncio.get_running_loop().time() + wanted.timeout_s
        self._links = AsyncExitStack()
        self._link: Link | None = None
        self._resumed = False

    async def run(self) -> Pulled:
        """All ranks, one after another.  Raises BridgeMiss."""
        async with self._links:
            try:
                return await self._all_ranks()
            except WireError as fault:
                raise BridgeMiss(MissReason.LINK, str(fault)) from None

    async def _all_ranks(self) -> Pulled:
        self._link = await self._dial()
        first = await self._link.describe(self._request(0))
        self._rings.check(first.kv_bytes, first.ranks)
        rings = await self._rings.of(first.ranks)
        sequences = [await self._rank(rings, 0, first)]
        for rank in range(1, first.ranks):
            found = await self._describe(rank)
            if (found.token_ids, found.rows, found.ranks) != (first.token_ids, first.rows, first.ranks):
                raise BridgeMiss(MissReason.RANKS, f"rank {rank} has another record")
            sequences.append(await self._rank(rings, rank, found))
        return Pulled(rings.epoch, tuple(sequences), first.kv_bytes * first.ranks)

    async def _describe(self, rank: int) -> Described:
        return await self._resuming(lambda link: link.describe(self._request(rank)))

    async def _rank(self, rings: Rings, rank: int, found: Described) -> int:
        """Fetch and publish one rank's record; its sequence in the pulled arena."""
        handle = self._wanted.handle
        async with rings.budgets[rank].taken(found.kv_bytes):
            reservation = rings.bridges[rank].reserve(
                handle, found.token_ids, found.first, found.ended, found.plane_bytes, ranks=found.ranks
            )
            try:
                into = Receiving(found, self._limits.chunk_bytes, reservation)
                await self._resuming(lambda link: link.fetch(self._request(rank), into))
                return reservation.publish(into.checksums).sequence
            finally:
                reservation.abandon()

    async def _resuming(self, step: Callable[[Link], Awaitable[T]]) -> T:
        """Do it, over a second connection if the first one breaks."""
        assert self._link is not None
        try:
            return await step(self._link)
        except (BridgeMiss, WireError) as fault:
            broken = isinstance(fault, WireError) or fault.reason is MissReason.LINK
            if not broken or self._resumed:
                raise
            log.info("pull_resumed", address=self._wanted.address, fault=str(fault))
        self._resumed = True
        await self._links.aclose()
        self._link = await self._dial()
        return await step(self._link)

    async def _dial(self) -> Link:
        return await self._links.enter_async_context(connected(self._wanted.address, self._key, self._limits))

    def _request(self, rank: int) -> Request:
        left_s = self._deadline_s - asyncio.get_running_loop().time()
        return Request(
            handle=self._wanted.handle,
            shard=self._wanted.shard,
            epoch=self._wanted.epoch,
            rank=rank,
            digest=self._digest,
            timeout_ms=max(1, min(round(left_s * 1000), 2**32 - 1)),
        )
