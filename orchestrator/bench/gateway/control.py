"""The conductor of the mock shards, for our gateway with a real Redis: `... control URL PREFILL DECODE`.

It decides in a process of its own, as in production; its CPU time is not the gateway's.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import httpx

from orchestrator.bench.gateway.shards import DEPLOYMENT, name_of, spec_of, url_of
from orchestrator.conductor import Conductor
from orchestrator.deployment.logging import log_json_to
from orchestrator.queues import ConductorQueue
from orchestrator.shards.launcher import FakeLauncher
from orchestrator.shards.probe import http_probe
from orchestrator.shards.static import StaticLauncher
from tgi_patches.contract import Role

READY = "ready"
"""The line on stdout once both shards are known."""


async def conduct(redis_url: str, ports: dict[Role, int]) -> None:
    """Until SIGTERM."""
    async with (
        httpx.AsyncClient(timeout=5.0, trust_env=False) as client,
        ConductorQueue(redis_url, DEPLOYMENT, "conductor-bench") as queue,
    ):
        urls = {name_of(role): url_of(port) for role, port in ports.items()}
        specs = [spec_of(role, port) for role, port in ports.items()]
        launcher = StaticLauncher(urls, FakeLauncher())
        conductor = Conductor(queue, launcher, specs, http_probe(client))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, conductor.stop)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(conductor.run())
            telling = group.create_task(_tell(conductor))
            running.add_done_callback(lambda _: telling.cancel())


async def _tell(conductor: Conductor) -> None:
    await conductor.ready.wait()
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    log_json_to(sys.stderr)
    asyncio.run(conduct(sys.argv[1], {Role.PREFILL: int(sys.argv[2]), Role.DECODE: int(sys.argv[3])}))
