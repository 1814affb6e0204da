"""Waits until a started deployment can serve, and tells how far it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import httpx

from orchestrator.conductor import Conductor
from orchestrator.core.shard import ShardState
from orchestrator.deployment.progress import Progress
from orchestrator.deployment.reach import Reach
from orchestrator.deployment.state import State
from orchestrator.errors import OrchestratorError
from orchestrator.shards.supervisor import CRASH_LOOP

LIMIT_S = 900.0
"""A large model takes minutes to load; what never gets ready must not wait for ever."""
POLL_S = 0.1
ASK_TIMEOUT_S = 2.0
ELSEWHERE_LIMIT_S = 10.0
"""For shards that others start: when they come, is not in our hands."""


async def until_ready(
    conductor: Conductor, parts: Sequence[asyncio.Task[None]], state: State, progress: Progress
) -> None:
    """Returns once every shard is ready and the gateway knows it.

    Shards that somebody else keeps are not waited for any longer than ELSEWHERE_LIMIT_S.  Raises what a
    part raises, and OrchestratorError for a shard that ends again and again.
    """
    try:
        async with asyncio.timeout(LIMIT_S):
            late = await _shards(conductor, parts, state, progress)
            names = {shard.shard for shard in conductor.snapshot().shards}
            await _gateway(parts, state, names - late)
    except TimeoutError:
        raise OrchestratorError(f"The deployment was not ready within {LIMIT_S:.0f} s.") from None
    progress.done(f"Gateway at {state.url}")


async def _shards(
    conductor: Conductor, parts: Sequence[asyncio.Task[None]], state: State, progress: Progress
) -> set[str]:
    """Those that are kept elsewhere and do not answer yet."""
    begun_s = time.monotonic()
    told: set[str] = set()
    while not conductor.ready.is_set():
        await _pause(parts)
        waiting = []
        for shard in conductor.snapshot().shards:
            if shard.state != ShardState.READY:
                waiting.append(shard.shard)
                if shard.failures >= CRASH_LOOP and shard.problem:
                    raise OrchestratorError(shard.problem)
            elif shard.shard not in told:
                told.add(shard.shard)
                progress.done(f"Shard {shard.shard} ({time.monotonic() - begun_s:.1f} s)")
                if shard.note:
                    progress.done(f"Shard {shard.shard} serves mixed only: {shard.note}")
        if waiting:
            progress.step(f"Waiting for {', '.join(waiting)}")
        if waiting and set(waiting) <= set(state.urls) and time.monotonic() - begun_s > ELSEWHERE_LIMIT_S:
            for late in waiting:
                progress.done(f"Shard {late} is used as soon as it answers at {state.urls[late]}")
            return set(waiting)
    return set()


async def _gateway(parts: Sequence[asyncio.Task[None]], state: State, expected: set[str]) -> None:
    """Its own table must show all those shards: the first request is then served by a pair."""
    async with Reach.of(state).admin(ASK_TIMEOUT_S) as client:
        while expected - await _seen_ready(client):
            await _pause(parts)


async def _seen_ready(client: httpx.AsyncClient) -> set[str]:
    try:
        answer = await client.get("/admin/status")
    except httpx.TransportError:
        return set()
    shards = answer.json()["shards"] if answer.status_code == 200 else []
    return {shard["shard"] for shard in shards if shard["state"] == ShardState.READY}


async def _pause(parts: Sequence[asyncio.Task[None]]) -> None:
    """A moment; at once, and raising, when a part has ended."""
    done, _ = await asyncio.wait(parts, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
    for part in done:
        part.result()
