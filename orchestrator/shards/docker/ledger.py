"""Which GPUs are taken on an engine: what its containers, ours and others', were given."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import docker

from orchestrator.core.gpu_claims import ALL, Claim
from orchestrator.core.order import ShardOrder
from orchestrator.errors import ShardError
from orchestrator.shards.docker.engine import Engine, Gone
from orchestrator.shards.docker.names import DEPLOYMENT_LABEL, SPEC_LABEL
from orchestrator.shards.docker.order_label import read

HOLDING = ("created", "running", "paused", "restarting")
"""States of a container that has its GPUs, or will have them."""
NVIDIA_CDI = "nvidia.com/gpu="
_NONE = frozenset({"", "void", "none"})
_MOMENT = re.compile(r"(?P<seconds>[^.Z+]+?)(?:\.(?P<fraction>\d+))?(?P<zone>Z|[+-]\d\d:\d\d)")
_PLAIN_RUNTIME = re.compile(r"runc|crun|io\.containerd\.runc.*")


async def claims(engine: Engine, aliases: Mapping[str, str] | None = None) -> tuple[Claim, ...]:
    """Of all containers of the engine, the oldest first.

    `aliases`: UUIDs by index (`"0"`), for containers that were given an index.
    """

    found: list[Claim] = []
    for container_id in await engine.call("The containers with GPUs were not listed", _holding):
        try:
            told = await engine.call("A container was not inspected", _inspection(container_id))
        except Gone:
            continue
        found += claims_of(told, aliases or {})
    return tuple(sorted(found, key=lambda claim: claim.age))


def claims_of(told: Mapping[str, Any], aliases: Mapping[str, str]) -> list[Claim]:
    """Of one container, as the engine inspects it; each GPU once."""
    tags: Mapping[str, str] = told["Config"].get("Labels") or {}
    deployment = tags.get(DEPLOYMENT_LABEL, "")
    order: ShardOrder | None = read(tags.get(SPEC_LABEL, "")) if deployment else None
    gpus = dict.fromkeys(aliases.get(gpu, gpu) for gpu in _gpus(told))
    return [
        Claim(
            gpu=gpu,
            container=str(told["Name"]).lstrip("/"),
            deployment=deployment,
            mps_percent=order.mps_percent if order else 0,
            memory_fraction=order.gpu_memory_fraction if order else 0.0,
            created_ns=nanoseconds(str(told["Created"])),
            container_id=str(told["Id"]),
        )
        for gpu in gpus
    ]


def nanoseconds(moment: str) -> int:
    """Of the engine's `2026-11-30T16:16:53.123456789Z`, whose fraction has any length."""
    parts = _MOMENT.fullmatch(moment)
    if parts is None:
        raise ShardError(f"The engine tells a moment that is none: {moment!r}.")
    zone = parts["zone"].replace("Z", "+00:00")
    whole_s = int(datetime.fromisoformat(parts["seconds"] + zone).timestamp())
    return whole_s * 10**9 + int((parts["fraction"] or "").ljust(9, "0")[:9])


def _holding(client: docker.DockerClient) -> list[str]:
    entries = client.api.containers(all=True, filters={"status": list(HOLDING)})
    return [str(entry["Id"]) for entry in entries]


def _inspection(container_id: str) -> Callable[[docker.DockerClient], Mapping[str, Any]]:
    def inspect(client: docker.DockerClient) -> Mapping[str, Any]:
        told: Mapping[str, Any] = client.api.inspect_container(container_id)
        return told

    return inspect


def _gpus(told: Mapping[str, Any]) -> Iterator[str]:
    """By what the runtime will go: a request of the engine's API, else the variable of NVIDIA's runtime."""
    host = told.get("HostConfig") or {}
    requests = [one for one in host.get("DeviceRequests") or () if _is_gpu(one)]
    for request in requests:
        names = request.get("DeviceIDs") or ()
        count = int(request.get("Count") or 0)
        yield from (_plain(name) for name in names)
        # By count the engine takes the first ones; -1 is all of them.
        yield from (ALL,) if count < 0 else (str(index) for index in range(count))
    if not requests:
        yield from _in_variable(told["Config"].get("Env") or (), str(host.get("Runtime") or ""))


def _is_gpu(request: Mapping[str, Any]) -> bool:
    asked = {name for names in request.get("Capabilities") or () for name in names}
    return request.get("Driver") in ("nvidia", "cdi") or bool(asked & {"gpu", "nvidia"})


def _in_variable(variables: Any, runtime: str) -> Iterator[str]:
    """Every image made for CUDA says `all`, which means something to a runtime of NVIDIA's only."""
    given = dict(str(one).partition("=")[::2] for one in variables)
    for name in given.get("NVIDIA_VISIBLE_DEVICES", "").split(","):
        plain = _plain(name.strip())
        named = plain.startswith(("GPU-", "MIG-"))
        if plain not in _NONE and (named or (runtime and not _PLAIN_RUNTIME.fullmatch(runtime))):
            yield plain


def _plain(name: str) -> str:
    return name.removeprefix(NVIDIA_CDI)
