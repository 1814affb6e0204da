"""A private Redis per test, and what the tests build on it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from orchestrator.core.shard import ShardState, Watched
from orchestrator.core.ticket import Grant, ShardView, Ticket
from orchestrator.embedded.redis import EmbeddedRedis
from orchestrator.queues import ConductorQueue, GatewayQueue, Timings
from orchestrator.queues.conductor import Commit
from orchestrator.queues.scripts import Keys
from tgi_patches.contract import (
    PROTOCOL_VERSION,
    Fingerprint,
    Limits,
    Role,
    StatusReply,
    new_handle,
)

QUICK = Timings(
    heartbeat_s=0.05,
    lease_s=1.0,
    own_decision_s=0.05,
    deadline_s=2.0,
    block_s=0.1,
    shard_ttl_s=20.0,
    leader_ttl_s=0.6,
    settle_s=0.0,
)
BINARY = os.environ.get("ORCHESTRATOR_TEST_REDIS_SERVER")
"""Another redis-server than the one that is found, to test an older version."""


class Shards:
    """Shards of 1600 KV tokens, 4 slots, a ring of 40,000 bytes and 10 bytes a token; and tickets."""

    def status(self, shard: str, role: Role, epoch: int = 1, **changes: Any) -> StatusReply:
        base = StatusReply(
            protocol=PROTOCOL_VERSION,
            deployment="test",
            shard=shard,
            role=role,
            epoch=epoch,
            fingerprint=Fingerprint("m", "r", "t", "float32", "float32", 2, 1, 8),
            limits=Limits(4000, 4096),
            kv_tokens=1600,
            slots=4,
            ring_bytes=40_000,
            record_limit_bytes=10_000,
            bytes_per_token=10,
        )
        return replace(base, **changes)

    def ready(self, shard: str, role: Role, epoch: int = 1, **changes: Any) -> Watched:
        status = self.status(shard, role, epoch, **changes)
        return Watched(shard, role, f"http://{shard}", ShardState.READY, status)

    def pair(self, **changes: Any) -> list[Watched]:
        return [self.ready("p0", Role.PREFILL, **changes), self.ready("d0", Role.DECODE, **changes)]

    def ticket(self, queue: GatewayQueue, *, deadline_s: float = 30.0, **changes: Any) -> Ticket:
        now_s = time.time()
        base = Ticket(new_handle(), queue.gateway, 100, 60, created_s=now_s, deadline_s=now_s + deadline_s)
        return replace(base, **changes)


class World:
    """One Redis with gateways and conductors on it; everything is closed at the end."""

    def __init__(self, stack: AsyncExitStack, server: EmbeddedRedis, directory: Path) -> None:
        self.server = server
        self.keys = Keys("test")
        self.shards = Shards()
        self.redis = Redis.from_url(server.url, decode_responses=True, protocol=2)
        self._stack = stack
        self._directory = directory

    async def gateway(self, name: str = "g", *, timings: Timings = QUICK, **options: Any) -> GatewayQueue:
        queue = GatewayQueue(self.server.url, "test", name, timings=timings, **options)
        return await self._stack.enter_async_context(queue)

    async def conductor(self, name: str = "c", *, timings: Timings = QUICK) -> ConductorQueue:
        queue = ConductorQueue(self.server.url, "test", name, timings=timings)
        return await self._stack.enter_async_context(queue)

    async def leader(self, *watched: Watched, timings: Timings = QUICK) -> ConductorQueue:
        """A conductor that leads for a minute and has published these shards, a pair by default."""
        queue = await self.conductor(timings=replace(timings, leader_ttl_s=60.0))
        assert await queue.lead()
        await queue.publish(watched or self.shards.pair())
        return queue

    async def restart_redis(self) -> None:
        """Stopped, and started again with nothing in it, at the same address."""
        await self.stop_redis()
        await self.start_redis()

    async def stop_redis(self) -> None:
        await self.server.__aexit__(None, None, None)

    async def start_redis(self) -> None:
        self.server = await self._stack.enter_async_context(_server(self._directory))

    async def reserved(self) -> dict[str, int]:
        found: dict[str, str] = await self.redis.hgetall(self.keys.reserved)
        return {name: int(value) for name, value in found.items()}

    async def held(self) -> int:
        """Everything that is left of requests: reservations, tickets, leases."""
        left = len(await self.reserved()) + int(await self.redis.xlen(self.keys.tickets))
        async for key in self.redis.scan_iter(self.keys.prefix + "*"):
            if key.startswith((self.keys.leases(""), self.keys.queued(""))):
                left += int(await self.redis.hlen(key))
        return left

    async def clean(self) -> bool:
        return await self.held() == 0


Until = Callable[[Callable[[], Any]], Awaitable[None]]


async def _until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while True:
            met = condition()
            if await met if asyncio.iscoroutine(met) else met:
                return
            await asyncio.sleep(0.005)


@pytest.fixture
def until() -> Until:
    """Waits for a condition, a plain or an async one; fails after 20 s."""
    return _until


def _server(directory: Path) -> EmbeddedRedis:
    return EmbeddedRedis(directory, Path(BINARY) if BINARY else None)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(_server(tmp_path))
        made = World(stack, server, tmp_path)
        stack.push_async_callback(made.redis.aclose)
        yield made


async def _serve(conductor: ConductorQueue, watched: list[Watched]) -> list[str]:
    """One scheduling pass of a conductor, first come first served; results of the commits."""
    from orchestrator.core.routing import first_come
    from orchestrator.queues.wire import booked

    arrived = await conductor.read(block=True)
    books = await conductor.books()
    shards: list[ShardView] = [booked(v, books.reserved) for w in watched if (v := w.view()) is not None]
    decided = list(first_come(arrived.tickets.values(), shards))
    return await conductor.commit([Commit(t, one, shards) for t, one in decided if isinstance(one, Grant)])


@pytest.fixture
def serve() -> Callable[[ConductorQueue, list[Watched]], Awaitable[list[str]]]:
    return _serve
