"""Containers, networks and volumes of one measurement: made under one label, removed however it ends."""

from __future__ import annotations

import asyncio
import io
import secrets
import tarfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import docker
from docker.types import DeviceRequest, LogConfig

from orchestrator.errors import ShardError
from orchestrator.shards.docker.engine import Engine, Gone
from orchestrator.shards.docker.names import ARENAS, SECRETS, USER

T = TypeVar("T")

DOCTOR_LABEL = "tgi-orchestrator.doctor"
"""Of what belongs to a measurement, with its name.  Not a deployment's: nobody takes these for shards."""
FORGOTTEN_S = 1800.0
"""What is older was left by a doctor that was killed."""
POLL_S = 0.1
REMOVE_S = 30.0
KEY_FILE = f"{SECRETS}/key"
CDI = "="
"""In the name of a device as CDI has it; never in a UUID of NVIDIA's."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """What a container is made from: bare of rights, with the arenas and nothing else."""

    image: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    network: str = "none"
    volume: str = ""
    """Mounted at /arenas; empty for none."""
    gpus: Sequence[str] = ()
    key: bytes = b""
    """In a file, not in the environment, which everybody may look at."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a container said, both streams, and its exit code."""

    code: int
    output: str
    errors: str


def new_token() -> str:
    """Of one measurement: when it began, and which of those it is."""
    return f"{int(time.time()):x}-{secrets.token_hex(3)}"


def made_s(token: str) -> float:
    """When it began; now for what is no token."""
    try:
        return int(token.partition("-")[0], 16)
    except ValueError:
        return time.time()


class Lab:
    """`async with Lab(engine, token)`; every name begins with `tgio-doctor-<token>`."""

    def __init__(self, engine: Engine, token: str) -> None:
        self._engine = engine
        self.token = token
        self._labels = {DOCTOR_LABEL: token}

    async def __aenter__(self) -> Self:
        await self._remove_forgotten()
        return self

    async def __aexit__(self, *_: object) -> None:
        await _whole(self._remove_all())

    def name(self, part: str) -> str:
        return f"tgio-doctor-{self.token}-{part}"

    async def network(self) -> str:
        """A new bridge."""
        name = self.name("net")
        await self._do(
            "The network of the measurement cannot be made",
            lambda client: client.networks.create(name, driver="bridge", labels=self._labels),
        )
        return name

    async def volume(self, size_bytes: int, part: str = "arenas") -> str:
        """A new tmpfs as shards have it."""
        name = self.name(part)
        options = {
            "type": "tmpfs",
            "device": "tmpfs",
            "o": f"size={size_bytes},uid={USER},gid={USER},mode=2770",
        }
        await self._do(
            "The tmpfs of the measurement cannot be made",
            lambda client: client.volumes.create(
                name, driver="local", driver_opts=options, labels=self._labels
            ),
        )
        return name

    async def start(self, part: str, sandbox: Sandbox) -> str:
        """Its name, once the engine has started it.  Raises ShardError and what Engine.call raises."""
        name = self.name(part)
        options = _options(sandbox) | {"name": name, "labels": self._labels}

        def launch(client: docker.DockerClient) -> None:
            container = client.containers.create(sandbox.image, **options)
            if sandbox.key:
                container.put_archive("/", _key_archive(sandbox.key))
            container.start()

        await self._do(f"The container {name} cannot be started", launch)
        return name

    async def first_line(self, name: str, within_s: float) -> str:
        """Of its output.  Raises ShardError where it ends before, or takes too long."""

        def look(client: docker.DockerClient) -> tuple[str, bool]:
            container = client.containers.get(name)
            running = container.status == "running"
            return container.logs(stdout=True, stderr=False).decode(errors="replace"), running

        ends_s = time.monotonic() + within_s
        while time.monotonic() < ends_s:
            text, running = await self._do(f"The container {name} cannot be looked at", look)
            if "\n" in text:
                return text.partition("\n")[0]
            if not running:
                raise ShardError(f"The container {name} ended at once: {last_line(await self._said(name))}.")
            await asyncio.sleep(POLL_S)
        raise ShardError(f"The container {name} said nothing in {within_s:g} s.")

    async def ended(self, part: str, sandbox: Sandbox, within_s: float) -> Ended:
        """Run it to its end.  Raises ShardError where that takes too long."""
        name = await self.start(part, sandbox)

        def look(client: docker.DockerClient) -> Ended | None:
            container = client.containers.get(name)
            if container.status in ("created", "running"):
                return None
            said = [
                container.logs(stdout=out, stderr=not out).decode(errors="replace") for out in (True, False)
            ]
            return Ended(int(container.attrs["State"]["ExitCode"]), *said)

        ends_s = time.monotonic() + within_s
        while time.monotonic() < ends_s:
            if (ended := await self._do(f"The container {name} cannot be looked at", look)) is not None:
                return ended
            await asyncio.sleep(POLL_S)
        raise ShardError(f"The container {name} was not done in {within_s:g} s.")

    async def address(self, name: str, network: str) -> str:
        """Its own in that network."""

        def look(client: docker.DockerClient) -> str:
            found = client.containers.get(name).attrs["NetworkSettings"]["Networks"]
            return str((found.get(network) or {}).get("IPAddress") or "")

        return await self._do(f"The address of {name} cannot be found", look)

    async def _said(self, name: str) -> str:
        return await self._do(
            f"The log of {name} cannot be read",
            lambda client: client.containers.get(name).logs().decode(errors="replace"),
        )

    async def _do(self, what: str, act: Callable[[docker.DockerClient], T]) -> T:
        return await _whole(self._engine.call(what, act))

    async def _remove_all(self) -> None:
        filters: dict[str, str | list[str] | bool] = {"label": f"{DOCTOR_LABEL}={self.token}"}

        def remove(client: docker.DockerClient) -> None:
            for container in client.containers.list(all=True, filters=filters):
                container.remove(force=True, v=True)
            for network in client.networks.list(filters=filters):
                network.remove()
            for volume in client.volumes.list(filters=filters):
                volume.remove()

        await self._engine.call(
            "The containers of the measurement cannot be removed", remove, within_s=REMOVE_S
        )

    async def _remove_forgotten(self) -> None:
        """A doctor that was killed could not do it itself."""

        def left(client: docker.DockerClient) -> set[str]:
            containers = client.api.containers(all=True, filters={"label": DOCTOR_LABEL})
            networks = client.api.networks(filters={"label": DOCTOR_LABEL})
            volumes = client.api.volumes(filters={"label": DOCTOR_LABEL})["Volumes"] or ()
            return {one["Labels"][DOCTOR_LABEL] for one in (*containers, *networks, *volumes)}

        tokens = await self._do("What an earlier measurement left cannot be listed", left)
        for token in (one for one in tokens if made_s(one) < time.time() - FORGOTTEN_S):
            try:
                await Lab(self._engine, token)._remove_all()
            except Gone:  # another doctor was faster
                continue


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "it said nothing"


def _options(sandbox: Sandbox) -> dict[str, Any]:
    where = (
        {"network_mode": sandbox.network}
        if sandbox.network in ("host", "none")
        else {"network": sandbox.network}
    )
    return where | {
        "entrypoint": list(sandbox.command[:1]),
        "command": list(sandbox.command[1:]),
        "environment": dict(sandbox.env),
        "user": f"{USER}:{USER}",
        "volumes": {sandbox.volume: {"bind": ARENAS, "mode": "rw"}} if sandbox.volume else {},
        "device_requests": [_request(gpu) for gpu in sandbox.gpus],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "healthcheck": {"test": ["NONE"]},
        # Whatever the engine's default is: the answers are read from the log.
        "log_config": LogConfig(type=LogConfig.types.JSON),
    }


def _request(gpu: str) -> DeviceRequest:
    if CDI in gpu:
        return DeviceRequest(driver="cdi", device_ids=[gpu])
    return DeviceRequest(device_ids=[gpu], capabilities=[["gpu", "compute", "utility"]])


def _key_archive(key: bytes) -> bytes:
    """The folder of secrets with the key, for the user of our images alone."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, mode, content in ((SECRETS, 0o500, None), (KEY_FILE, 0o400, key)):
            info = tarfile.TarInfo(name.lstrip("/"))
            info.uid = info.gid = USER
            info.mode = mode
            info.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            info.size = len(content or b"")
            tar.addfile(info, None if content is None else io.BytesIO(content))
    return packed.getvalue()


async def _whole(doing: Coroutine[Any, Any, T]) -> T:
    """To its end, even where we are cancelled: its thread goes on, and what it makes must be known."""
    task = asyncio.ensure_future(doing)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
