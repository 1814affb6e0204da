"""Where this process itself runs: the container around it, its networks and what is mounted in it.

A path of ours means nothing to the engine when we are in a container: what is mounted here is handed on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import docker

from orchestrator.errors import ConfigError
from orchestrator.shards.docker.container import Bind
from orchestrator.shards.docker.engine import Engine, Gone

MOUNTS = Path("/proc/self/mountinfo")
_ID = re.compile(r"/containers/([0-9a-f]{64})/")


@dataclass(frozen=True, slots=True)
class OwnContainer:
    """The container that this process runs in."""

    name: str
    networks: tuple[str, ...]
    mounts: tuple[Bind, ...]


async def own_container(engine: Engine, mounts: Path = MOUNTS) -> OwnContainer | None:
    """None outside of a container, and where that is one of another engine."""
    own_id = await asyncio.to_thread(own_id_in, mounts)
    if own_id is None:
        return None

    def look(client: docker.DockerClient) -> Mapping[str, Any]:
        told: Mapping[str, Any] = client.api.inspect_container(own_id)
        return told

    try:
        return own_from(await engine.call("The container of the orchestrator was not found", look))
    except Gone:
        return None


def own_id_in(mounts: Path) -> str | None:
    """The engine mounts a few files of its own in every container, from a folder with the container's id."""
    found = _ID.search(mounts.read_text(errors="replace")) if mounts.exists() else None
    return found[1] if found else None


def own_from(told: Mapping[str, Any]) -> OwnContainer:
    """From what the engine tells of a container."""
    networks = told.get("NetworkSettings", {}).get("Networks") or {}
    mounts = [
        Bind(mount.get("Name") or mount["Source"], mount["Destination"])
        for mount in told.get("Mounts") or ()
        if mount.get("Type") in ("bind", "volume")
    ]
    return OwnContainer(str(told["Name"]).lstrip("/"), tuple(sorted(networks)), tuple(mounts))


def bind_for(path: Path, own: OwnContainer | None, *, read_only: bool = True) -> Bind:
    """How a container gets a folder of ours at the same path.

    ConfigError for a folder that only this container has.
    """
    if own is None:
        return Bind(str(path), str(path), read_only)
    mount = _covering(PurePosixPath(path), own.mounts)
    if mount is None:
        raise ConfigError(
            f"The shards cannot get {path}: it is in the orchestrator's own container {own.name} only; "
            "mount a volume or a folder of the host there."
        )
    if not mount.source.startswith("/"):
        return Bind(mount.source, mount.target, read_only)  # a volume is mounted as a whole
    inside = PurePosixPath(path).relative_to(mount.target)
    return Bind(str(PurePosixPath(mount.source) / inside), str(path), read_only)


def _covering(path: PurePosixPath, mounts: Sequence[Bind]) -> Bind | None:
    """The mount that `path` is on: of several the deepest."""
    over = [mount for mount in mounts if path.is_relative_to(mount.target)]
    return max(over, key=lambda mount: len(mount.target), default=None)
