"""The containers of one deployment, as one call to the engine lists them, and how one of them ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import docker

from orchestrator.core.order import ShardOrder
from orchestrator.shards.docker.container import PORT
from orchestrator.shards.docker.engine import Engine, Gone
from orchestrator.shards.docker.names import (
    DEPLOYMENT_LABEL,
    OWNER_LABEL,
    SHARD_LABEL,
    SPEC_LABEL,
    TASK_LABEL,
    container_name,
)
from orchestrator.shards.docker.order_label import read
from orchestrator.shards.launcher import Exit, Running
from orchestrator.shards.process import running_of

ALIVE = frozenset({"running", "paused", "restarting"})
HOST_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Found:
    """A container with a deployment's label."""

    id: str
    name: str
    state: str
    """The engine's word: `created`, `running`, `exited`, ..."""
    deployment: str = ""
    owner: str = ""
    shard: str = ""
    task: str = ""
    order: ShardOrder | None = None
    """None for one that we cannot have launched."""
    address: str = ""
    """In its network; empty where it has none (any more)."""
    on_host: bool = False

    @property
    def alive(self) -> bool:
        return self.state in ALIVE

    @property
    def stranger(self) -> bool:
        """It carries our label and is none of ours: it is left alone."""
        return self.order is None and not self.task

    def of(self, deployment: str, owner: str) -> bool:
        """Whether it was launched for that deployment and by that owner; empty for any owner."""
        return self.deployment == deployment and owner in ("", self.owner)

    @property
    def running(self) -> Running:
        """Where it answers.  One that has ended already has no address: its name stands for it."""
        assert self.order is not None
        host = HOST_ADDRESS if self.on_host else self.address or self.name
        inside = dataclasses.replace(self.order, host=host, port=self.order.port or PORT)
        return dataclasses.replace(running_of(inside), order=self.order)


async def containers_of(engine: Engine, deployment: str) -> list[Found]:
    """All with the label of `deployment`, in any state."""

    def listed(client: docker.DockerClient) -> list[Mapping[str, Any]]:
        wanted = {"label": [f"{DEPLOYMENT_LABEL}={deployment}"]}
        found: list[Mapping[str, Any]] = client.api.containers(all=True, filters=wanted)
        return found

    return [
        found_in(entry)
        for entry in await engine.call(f"The containers of {deployment} were not listed", listed)
    ]


async def container_named(engine: Engine, name: str) -> Found | None:
    """Whoever it belongs to."""

    def listed(client: docker.DockerClient) -> list[Mapping[str, Any]]:
        # A pattern, which has to meet the whole name.
        found: list[Mapping[str, Any]] = client.api.containers(all=True, filters={"name": f"^/{name}$"})
        return found

    entries = await engine.call(f"The container {name} was not looked up", listed)
    return found_in(entries[0]) if entries else None


def found_in(entry: Mapping[str, Any]) -> Found:
    """Of one entry of the engine's list."""
    tags: Mapping[str, str] = entry.get("Labels") or {}
    name = str((entry.get("Names") or ["/"])[0]).lstrip("/")
    networks: Mapping[str, Mapping[str, Any]] = (entry.get("NetworkSettings") or {}).get("Networks") or {}
    deployment, shard = tags.get(DEPLOYMENT_LABEL, ""), tags.get(SHARD_LABEL, "")
    order = read(tags.get(SPEC_LABEL, ""))
    # A name and an order that contradict the labels were not written by us.
    ours = order is not None and order.shard == shard and name == container_name(deployment, shard)
    return Found(
        id=str(entry["Id"]),
        name=name,
        state=str(entry.get("State", "")),
        deployment=deployment,
        owner=tags.get(OWNER_LABEL, ""),
        shard=shard,
        task=tags.get(TASK_LABEL, ""),
        order=order if ours else None,
        address=next((str(one["IPAddress"]) for one in networks.values() if one.get("IPAddress")), ""),
        on_host="host" in networks,
    )


async def removed(engine: Engine, container_id: str, name: str) -> None:
    """It is gone, whatever its state was; its anonymous volumes too."""

    def remove(client: docker.DockerClient) -> None:
        client.api.remove_container(container_id, v=True, force=True)

    try:
        await engine.act(f"The container {name} was not removed", remove)
    except Gone:
        pass


async def exit_of(engine: Engine, found: Found) -> Exit | None:
    """How it ended: 128 and the signal where one killed it; None where it has been removed."""
    try:
        state, limit_bytes = await engine.call(
            f"{found.name} was not inspected", lambda c: _state(c, found.id)
        )
        lines = await lines_of(engine, found, 1)
    except Gone:
        return None
    code = int(state.get("ExitCode", 0))
    return Exit(found.shard, code, _last_word(state, limit_bytes) or (lines[0] if lines else ""))


async def lines_of(engine: Engine, found: Found, lines: int) -> list[str]:
    """The last lines of its log that are not empty, oldest first."""
    if lines < 1:
        return []
    raw = await engine.call(
        f"The log of {found.name} was not read",
        lambda client: client.api.logs(found.id, stdout=True, stderr=True, tail=lines + _SPARE_LINES),
    )
    text = raw.decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


_SPARE_LINES = 20
"""For empty ones among the last."""


def _state(client: docker.DockerClient, container_id: str) -> tuple[Mapping[str, Any], int]:
    told: Mapping[str, Any] = client.api.inspect_container(container_id)
    return told["State"], int((told.get("HostConfig") or {}).get("Memory") or 0)


def _last_word(state: Mapping[str, Any], limit_bytes: int) -> str:
    """What the container could not write into its log itself."""
    if state.get("OOMKilled") and state.get("ExitCode"):
        limit = f"its limit is {limit_bytes / 2**20:.0f} MiB" if limit_bytes else "it has no limit of its own"
        return (
            f"The kernel killed it for memory: {limit}, which its own memory and the pages of its arena "
            "share (memory_bytes)."
        )
    return " ".join(str(state.get("Error") or "").split())
