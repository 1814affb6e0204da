"""What an engine is asked: images and their labels, the network, GPUs that nobody has, GPUs from inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import docker

from orchestrator.core.topology import Topology
from orchestrator.deployment import containers
from orchestrator.deployment.doctor.finding import Finding, failed, skipped
from orchestrator.deployment.doctor.gpus import Inside, inside_finding
from orchestrator.deployment.doctor.lab import Lab, Sandbox, new_token
from orchestrator.errors import ConfigError, ShardError
from orchestrator.settings import Settings
from orchestrator.shards.docker.container import HOST_NETWORK
from orchestrator.shards.docker.engine import Engine
from orchestrator.shards.docker.own import own_container

"""Networks in which containers have no names."""
LISTED_WITHIN_S = 60.0


async def labels_of(engine: Engine, image: str) -> Mapping[str, str] | None:
    """None for an image that is not there."""

    def look(client: docker.DockerClient) -> Mapping[str, str]:
        return dict(client.images.get(image).labels or {})

    try:
        return await engine.call(f"The image {image} cannot be looked at", look)
    except (ConfigError, ShardError):
        return None


async def network_of(settings: Settings, engine: Engine) -> tuple[str, Finding | None]:
    """The one that shards will have, empty for one that has yet to be made; or what is wrong with it."""
    name = containers.network_of(settings, await own_container(engine))
    if name == HOST_NETWORK:
        return name, None

    def look(client: docker.DockerClient) -> bool:
        return any(one.name == name for one in client.networks.list(names=[name]))

    if await engine.call("Networks cannot be listed", look):
        return name, None
    if settings.docker.network:
        told = f"The engine has no network {name}, which docker.network names."
        return "", failed("network", told, f"`docker network create {name}`, or leave docker.network out.")
    return "", None


async def free_gpus(engine: Engine, topology: Topology | None) -> tuple[tuple[str, ...], str]:
    """Two GPUs that no container has, for NCCL; or why not."""
    if topology is None or not topology.gpus:
        return (), "there are no GPUs here"

    def requested(client: docker.DockerClient) -> list[Mapping[str, Any]]:
        running = client.containers.list()
        return [request for one in running for request in one.attrs["HostConfig"].get("DeviceRequests") or ()]

    taken = held(topology, await engine.call("Containers cannot be listed", requested))
    free = [gpu.uuid for gpu in topology.gpus if not gpu.mig_mode and gpu.uuid not in taken]
    if len(free) < 2:
        return (), f"NCCL needs two whole GPUs that no container has, and {len(free) or 'none'} is free"
    return tuple(free[:2]), ""


def held(topology: Topology, requests: Sequence[Mapping[str, Any]]) -> set[str]:
    """UUIDs of the GPUs that device requests name; all of them where one counts in place of naming."""
    taken: set[str] = set()
    for request in requests:
        if request.get("Count"):
            return {gpu.uuid for gpu in topology.gpus}
        for name in request.get("DeviceIDs") or ():
            try:
                taken.add(topology.find(name).gpu.uuid)
            except ConfigError:  # a device of another kind
                continue
    return taken


async def seen_inside(engine: Engine, image: str, topology: Topology | None) -> Finding:
    """A container of `image` for each GPU and slice, which must see that one alone."""
    devices = [device.uuid for device in topology.devices()] if topology else []
    if not devices:
        return skipped("gpus inside", "No GPU is known here: no container was given one.")
    seen: dict[str, Inside] = {}
    async with Lab(engine, new_token()) as lab:
        for at, uuid in enumerate(devices):
            sandbox = Sandbox(image, ("nvidia-smi", "-L"), gpus=[uuid])
            try:
                ended = await lab.ended(f"gpu-{at}", sandbox, LISTED_WITHIN_S)
                seen[uuid] = Inside(ended.output + ended.errors, ended.code)
            except ShardError as error:
                seen[uuid] = Inside(str(error), -1)
    return inside_finding(seen)
