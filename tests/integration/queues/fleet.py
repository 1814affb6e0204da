"""A conductor over shards that are only names, and what tests wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from orchestrator.conductor import Conductor
from orchestrator.core.shard import Rules
from orchestrator.errors import ShardError
from orchestrator.queues import GatewayQueue, Timings
from orchestrator.shards.launcher import FakeLauncher, Launcher
from orchestrator.shards.supervisor import Pace
from tgi_patches.contract import Role, ShardSpec, StatusReply

World = Any
Until = Any

PACE = Pace(poll_s=0.02, probe_deadline_s=1.0, grace_s=1.0, drain_s=0.2, proof_s=0.1)
RULES = Rules(backoff_first_s=0.01, backoff_most_s=0.05)
PATIENT = Timings(heartbeat_s=0.05, lease_s=9, own_decision_s=60, deadline_s=2, block_s=0.1, settle_s=0)
"""A gateway that leaves everything to the conductor."""
SPECS = [
    ShardSpec("test", "p0", Role.PREFILL, "model", "m"),
    ShardSpec("test", "d0", Role.DECODE, "model", "m"),
]


class Fleet:
    """Answers status polls for a fake launcher: the epoch is the number of the launch."""

    def __init__(self, world: World) -> None:
        self.launcher = FakeLauncher()
        self.mute: set[str] = set()
        self.relaunch: dict[str, str] = {}
        """By `<shard>/<launch>`: what that incarnation asks for."""
        self.told: dict[str, Any] = {}
        """Of every status, besides what a shard says by itself."""
        self._world = world

    async def probe(self, url: str) -> StatusReply:
        name = url.removeprefix("http://")
        shard, _, launch = name.partition("/")
        if shard in self.mute:
            raise ShardError("mute")
        role = Role.PREFILL if shard.startswith("p") else Role.DECODE
        asked = {"relaunch": self.relaunch.get(name, "")}
        status: StatusReply = self._world.shards.status(shard, role, int(launch), **asked)
        return replace(status, **self.told)


@asynccontextmanager
async def running(
    world: World,
    fleet: Fleet,
    name: str = "c",
    launcher: Launcher | None = None,
    timings: Timings | None = None,
    **options: Any,
) -> AsyncIterator[Conductor]:
    """Stopped in order at the end; `launcher` is the fleet's own unless given."""
    queue = await world.conductor(name, **({} if timings is None else {"timings": timings}))
    settings = {"rules": RULES, "pace": PACE} | options
    conductor = Conductor(queue, launcher or fleet.launcher, SPECS, fleet.probe, **settings)
    task = asyncio.create_task(conductor.run())
    try:
        yield conductor
    finally:
        if not conductor._stopping.is_set():
            conductor.stop()
        await asyncio.wait_for(task, 20)
        await queue.aclose()


def knows(queue: GatewayQueue, **states: str) -> Callable[[], bool]:
    return lambda: {view.shard: view.state for view in queue.shards()} == states


async def ready_gateway(world: World, until: Until, name: str = "g", **options: Any) -> GatewayQueue:
    queue: GatewayQueue = await world.gateway(name, **options)
    await until(knows(queue, p0="ready", d0="ready"))
    return queue


async def gone(world: World, name: str) -> bool:
    return name not in await world.reserved()
