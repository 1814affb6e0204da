"""The launcher that a plan needs, opened and closed; and who may act on containers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import structlog

from orchestrator.core.container_memory import tmpfs_bytes
from orchestrator.deployment.ledger import Ledger
from orchestrator.deployment.plan import Plan
from orchestrator.errors import Unreachable
from orchestrator.queues import ConductorQueue, Deposed
from orchestrator.settings import RoleSection, Settings
from orchestrator.shards.docker.container import KEY_FILE
from orchestrator.shards.docker.engine import Engine
from orchestrator.shards.docker.launcher import DockerLauncher
from orchestrator.shards.docker.listing import containers_of
from orchestrator.shards.launcher import Launcher
from orchestrator.shards.process import ProcessLauncher
from orchestrator.shards.rolling import PlaceFor, RoomFor, always_room, as_planned
from orchestrator.shards.static import StaticLauncher
from tgi_patches.key import key_from

log = structlog.get_logger(__name__)

RETRY_S = 0.5
GRACE_S = 5.0


class Wanted(Protocol):
    """What is to be launched."""

    @property
    def settings(self) -> Settings: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def logs(self) -> Path:
        """Folder for the logs of processes."""

    @property
    def key_env(self) -> Mapping[str, str]:
        """Where every process finds the deployment's key."""


@dataclass(frozen=True, slots=True)
class Launching:
    launcher: Launcher
    room_for: RoomFor = always_room
    """Why an order cannot be launched beside all that runs; empty where it can."""
    place_for: PlaceFor = as_planned


@asynccontextmanager
async def launching(
    wanted: Wanted, may_act: Callable[[], Awaitable[None]], rolls_back: Callable[[], bool]
) -> AsyncIterator[Launching]:
    """Shards at given URLs are observed, all others are launched as the settings say.

    Where `rolls_back` says so at the end, the containers that were launched in here are removed.
    """
    settings, plan = wanted.settings, wanted.plan
    sidecars = sidecar_urls(settings, plan.urls)
    if plan.containers is None:
        processes = ProcessLauncher(wanted.logs, env=wanted.key_env)
        yield Launching(StaticLauncher(plan.urls, processes, sidecars))
        return
    async with engine_of(settings) as engine:
        containers = DockerLauncher(
            engine,
            settings.deployment,
            network=plan.containers.network,
            secrets={KEY_FILE: key_from(wanted.key_env)},
            mounts=plan.containers.binds,
            user=plan.containers.user,
            log_bytes=settings.docker.log_bytes,
            may_act=may_act,
            owner=plan.containers.owner,
            gpu_aliases=plan.containers.gpus_by_index,
            arena_bytes=tmpfs_bytes(plan.containers.arena_bytes, engine.facts.memory_bytes),
        )
        try:
            observing = StaticLauncher(plan.urls, containers, sidecars)
            ledger = Ledger(engine, settings.deployment, plan.containers)
            yield Launching(observing, ledger.room_for, ledger.place_for)
        finally:
            if rolls_back():
                await containers.roll_back(GRACE_S)


@asynccontextmanager
async def engine_of(settings: Settings) -> AsyncIterator[Engine]:
    engine = await Engine.connect(settings.docker.host)
    try:
        yield engine
    finally:
        await engine.aclose()


def while_leading(queue: ConductorQueue) -> Callable[[], Awaitable[None]]:
    """Asked before each act: raises Deposed where another conductor leads.

    Who leads cannot be known without Redis: then it waits, and nothing is done.
    """

    async def may_act() -> None:
        while True:
            try:
                if await queue.lead():
                    return
                raise Deposed("Another conductor leads.")
            except Unreachable as error:
                log.warning("containers_left_alone", error=str(error))
                await asyncio.sleep(RETRY_S)

    return may_act


def sidecar_urls(settings: Settings, urls: Mapping[str, str]) -> dict[str, str]:
    """By shard, of those at given URLs whose sidecar has a port of its own."""
    found = {}
    for shard, url in urls.items():
        section: RoleSection = getattr(settings.shards, shard.rpartition("-")[0])
        if section.sidecar_port:
            parts = urlsplit(url)
            host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
            found[shard] = f"http://{host}:{section.sidecar_port}"
    return found


async def removed(docker_host: str, deployment: str, owner: str) -> list[str]:
    """Stop and remove every container of the deployment, then its volume and network; their names.

    Those of another `owner` are left; empty for everybody's.
    """

    async def may_act() -> None:
        """Whoever calls holds the lock of the folder that they were launched from, or does not care."""

    engine = await Engine.connect(docker_host)
    try:
        found = await containers_of(engine, deployment)
        launcher = DockerLauncher(
            engine,
            deployment,
            network="",
            secrets={},
            mounts=(),
            log_bytes=0,
            may_act=may_act,
            owner=owner,
        )
        await launcher.close(GRACE_S)
    finally:
        await engine.aclose()
    return [one.name for one in found if not one.stranger and one.of(deployment, owner)]
