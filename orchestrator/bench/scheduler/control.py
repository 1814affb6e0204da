"""A conductor over shards that are only names, in a process of its own: `... control URL PREFILL DECODE`.

Launcher and probe are fakes, all else is production's.  It says `{}` once all shards are ready, and answers
each line on stdin with its memory after a collection.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from orchestrator.bench.gateway import proc
from orchestrator.bench.scheduler.fleet import COSTS, view_of
from orchestrator.conductor import Conductor
from orchestrator.core.hot_prompts import HotPrompts
from orchestrator.core.scheduling import Scheduler
from orchestrator.deployment.logging import json_log
from orchestrator.queues import ConductorQueue
from orchestrator.shards.launcher import FakeLauncher
from orchestrator.shards.supervisor import Pace
from tgi_patches.contract import PROTOCOL_VERSION, Role, ShardSpec, StatusReply

DEPLOYMENT = "bench"
PACE = Pace(drain_s=0.0)
"""Nobody waits for requests that do not exist."""


async def conduct(redis_url: str, prefill: int, decode: int) -> None:
    """Until SIGTERM."""
    counts = ((Role.PREFILL, prefill), (Role.DECODE, decode))
    specs = [
        ShardSpec(DEPLOYMENT, f"{role}-{number}", role, "bench", "bench")
        for role, count in counts
        for number in range(count)
    ]
    async with ConductorQueue(redis_url, DEPLOYMENT, "conductor") as queue:
        scheduler = Scheduler(hot=HotPrompts())
        conductor = Conductor(queue, FakeLauncher(), specs, probe, scheduler=scheduler, pace=PACE)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, conductor.stop)
        loop.add_reader(sys.stdin.fileno(), _tell_memory)
        telling = asyncio.create_task(_tell_ready(conductor))
        try:
            await conductor.run()
        finally:
            telling.cancel()


async def probe(url: str) -> StatusReply:
    """A shard's status, out of the URL that the fake launcher gave it: `http://<shard>/<launch>`."""
    shard, _, launch = url.removeprefix("http://").partition("/")
    view = view_of(shard, Role(shard.partition("-")[0]), COSTS)
    return StatusReply(
        protocol=PROTOCOL_VERSION,
        deployment=DEPLOYMENT,
        shard=shard,
        role=view.role,
        epoch=int(launch),
        fingerprint=view.fingerprint,
        limits=view.limits,
        kv_tokens=view.kv_tokens,
        slots=view.slots,
        ring_bytes=view.ring_bytes,
        record_limit_bytes=view.record_limit_bytes,
        bytes_per_token=view.bytes_per_token,
        arena_id=view.arena_id,
    )


async def _tell_ready(conductor: Conductor) -> None:
    await conductor.ready.wait()
    _say({})


def _tell_memory() -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        return
    gc.collect()
    _say({"rss_bytes": proc.rss_bytes([os.getpid()])})


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with json_log(Path(os.devnull)):
        asyncio.run(conduct(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
