"""A conductor in a process of its own, over shards that others keep: `... conduct REDIS_URL URLS_AS_JSON`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping

import httpx

from orchestrator.conductor import Conductor
from orchestrator.deployment.logging import log_json_to
from orchestrator.queues import ConductorQueue
from orchestrator.shards.launcher import FakeLauncher
from orchestrator.shards.probe import http_probe
from orchestrator.shards.static import StaticLauncher
from tgi_patches.contract import Role, ShardSpec

DEPLOYMENT = "chaos"
MODEL = "fake"


async def conduct(redis_url: str, urls: Mapping[str, str]) -> None:
    """Until SIGTERM.  A shard's role is what its name begins with."""
    specs = [ShardSpec(DEPLOYMENT, name, Role(name.partition("-")[0]), MODEL, MODEL) for name in urls]
    async with (
        httpx.AsyncClient(timeout=5.0, trust_env=False) as client,
        ConductorQueue(redis_url, DEPLOYMENT, f"conductor-{os.getpid()}") as queue,
    ):
        conductor = Conductor(queue, StaticLauncher(urls, FakeLauncher()), specs, http_probe(client))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, conductor.stop)
        await conductor.run()


if __name__ == "__main__":
    log_json_to(sys.stderr)
    asyncio.run(conduct(sys.argv[1], json.loads(sys.argv[2])))
