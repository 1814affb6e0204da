"""Checks of this machine beside its engine: GPUs, memory, disk, ports, Redis, the hub."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.config import Loaded, hidden
from orchestrator.core.topology import Topology
from orchestrator.deployment.doctor import gather, gpus, host
from orchestrator.deployment.doctor.finding import Finding, failed
from orchestrator.deployment.state import StateFolder
from orchestrator.errors import ConfigError
from orchestrator.settings import RoleSection, Settings, host_and_port
from orchestrator.shards.docker.engine import Engine

ROLES = ("prefill", "decode", "mixed")
Say = Callable[[str], None]


def sections(settings: Settings) -> list[RoleSection]:
    return [getattr(settings.shards, role) for role in ROLES]


def gpu_findings(settings: Settings, topology: Topology | None, fault: str) -> list[Finding]:
    """`fault`: why the topology is not known."""
    named = [gpu for section in sections(settings) for shard in section.gpus for gpu in shard]
    shared = any(section.mps_percent for section in sections(settings))
    wanted = list(dict.fromkeys(named)) if shared else named
    return [gpus.driver_finding(topology, fault), gpus.named_finding(topology, wanted)]


async def host_findings(loaded: Loaded, engine: Engine | None, say: Say) -> list[Finding]:
    settings = loaded.settings
    say("memory, disk and ports")
    folder = await asyncio.to_thread(gather.model_folder, settings, os.environ)
    findings = [await asyncio.to_thread(_memory, loaded, engine, folder)]
    if engine is not None:
        root = engine.facts.root
        findings.append(host.disk_finding(root, gather.disk_bytes(root) if _is_here(engine) else None))
    findings += await asyncio.to_thread(_ports, settings)
    say("Redis")
    findings.append(await asyncio.to_thread(_redis, settings))
    say("the hub")
    facts = await asyncio.to_thread(gather.hub_facts, settings, os.environ, cached=folder is not None)
    return [*findings, host.hub_finding(facts)]


def _is_here(engine: Engine) -> bool:
    """It is an engine of this machine."""
    return urlsplit(engine.host).scheme in ("unix", "")


def _memory(loaded: Loaded, engine: Engine | None, folder: Path | None) -> Finding:
    settings = loaded.settings
    elsewhere = engine is not None and not _is_here(engine)
    free = engine.facts.memory_bytes if engine is not None and elsewhere else gather.available_bytes()
    if folder is None:
        return host.unknown_memory(f"the model {settings.model.id} is not here", free)
    try:
        needed = gather.arenas_bytes(loaded, folder)
    except ConfigError as error:
        return failed("memory", str(error), "Correct the settings: `up` would refuse them, too.")
    runs = StateFolder.of(settings.deployment, os.environ).running() is not None
    return host.memory_finding(needed, free, runs=runs)


def _ports(settings: Settings) -> list[Finding]:
    gateway = settings.gateway
    state = StateFolder.of(settings.deployment, os.environ).running()
    ours = {urlsplit(url).port for url in (state.url, state.admin_url) if url} if state else set()
    addresses = {"gateway.listen": gateway.listen, "gateway.admin_listen": gateway.admin_listen}
    return [
        host.port_finding(key, listen, gather.listen_fault(listen), ours=host_and_port(listen)[1] in ours)
        for key, listen in addresses.items()
        if listen
    ]


def _redis(settings: Settings) -> Finding:
    url = settings.redis.url
    if url is not None:
        return host.redis_finding(hidden("redis.url", url), *gather.redis_facts(url))
    return host.own_redis_finding(*gather.own_redis_facts())
