"""What a conductor costs that has nothing to do but to keep many shards: CPU time, as a share of a core.

Its shards are only names and their status is made up, all else is production's: polls, registry, heartbeats.
`... control URL SHARDS` is that conductor, in a process of its own; it says `{}` once all are ready.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.bench.gateway import proc
from orchestrator.bench.scheduler.control import DEPLOYMENT, probe
from orchestrator.conductor import Conductor
from orchestrator.deployment.logging import json_log
from orchestrator.embedded.redis import EmbeddedRedis, end_with_owner
from orchestrator.errors import OrchestratorError
from orchestrator.queues import ConductorQueue
from orchestrator.shards.launcher import FakeLauncher
from orchestrator.shards.supervisor import Pace
from tgi_patches.contract import Role, ShardSpec, StatusReply

READY_S = 60.0
SETTLE_S = 2.0
PREFILL_EVERY = 4
"""One shard of so many is a prefill shard."""


@dataclass(frozen=True, slots=True)
class Measured:
    """CPU time by seconds of wall time."""

    shards: int
    seconds: float
    conductor: float
    """Share of a core, of the conductor."""
    redis: float
    """The same of its Redis."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "shards": self.shards,
            "seconds": round(self.seconds, 2),
            "conductor_core_percent": round(100 * self.conductor, 2),
            "redis_core_percent": round(100 * self.redis, 2),
            "load_average": round(os.getloadavg()[0], 2),
        }


async def measure(shards: int, seconds: float) -> Measured:
    async with EmbeddedRedis() as redis, _conductor(redis.url, shards) as pid:
        await asyncio.sleep(SETTLE_S)
        clock = asyncio.get_running_loop().time
        begun = clock(), proc.cpu_s([pid]), proc.cpu_s([redis.pid])
        await asyncio.sleep(seconds)
        took_s, conductor_s, redis_s = (
            now - before
            for now, before in zip((clock(), proc.cpu_s([pid]), proc.cpu_s([redis.pid])), begun, strict=True)
        )
    return Measured(shards, took_s, conductor_s / took_s, redis_s / took_s)


@asynccontextmanager
async def _conductor(redis_url: str, shards: int) -> AsyncIterator[int]:
    """Its pid, once it says that all shards are ready."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "orchestrator.bench.control", redis_url, str(shards)),
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=end_with_owner(os.getpid()),
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(READY_S):
            if not await child.stdout.readline():
                raise OrchestratorError("The conductor ended before its shards were ready.")
        yield child.pid
    except TimeoutError:
        raise OrchestratorError(f"The conductor was not ready within {READY_S:g} s.") from None
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()


async def conduct(redis_url: str, shards: int) -> None:
    """Until SIGTERM."""
    specs = [
        ShardSpec(DEPLOYMENT, f"{role}-{number}", role, "bench", "bench")
        for number in range(shards)
        for role in ((Role.DECODE, Role.PREFILL)[number % PREFILL_EVERY == 0],)
    ]
    known: dict[str, StatusReply] = {}

    async def answered(url: str) -> StatusReply:
        """Made once: that it is made up is no part of what is measured."""
        if url not in known:
            known[url] = await probe(url)
        return known[url]

    async with ConductorQueue(redis_url, DEPLOYMENT, "conductor") as queue:
        conductor = Conductor(queue, FakeLauncher(), specs, answered, pace=Pace(drain_s=0.0))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, conductor.stop)
        telling = asyncio.create_task(_tell(conductor))
        try:
            await conductor.run()
        finally:
            telling.cancel()


async def _tell(conductor: Conductor) -> None:
    await conductor.ready.wait()
    sys.stdout.write("{}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with json_log(Path(os.devnull)):
        asyncio.run(conduct(sys.argv[1], int(sys.argv[2])))
