"""One Docker engine, through the Docker SDK: its blocking calls in threads, its errors in our words.

Every call has a deadline.  Besides a log that is followed, nothing goes around it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from orchestrator.errors import ConfigError, ShardError, Unreachable

T = TypeVar("T")

CALL_S = 60.0
"""For one call: the engine pulls nothing here, so that a minute is generous."""
CONNECT_S = 10.0
DEFAULT_HOST = "unix:///var/run/docker.sock"
OLDEST_API = (1, 40)
"""Docker 19.03: the first one with device requests."""


class Gone(ShardError):
    """The container, volume or network is not there (any more)."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine says of itself and of its host."""

    version: str
    api: tuple[int, int]
    name: str
    """`Engine`, `Podman Engine`, ..."""
    rootless: bool
    runtimes: tuple[str, ...]
    memory_bytes: int
    cpus: int
    root: str
    """Where it keeps images and volumes."""
    cdi: bool
    """It reads CDI names of devices."""
    id: str = ""
    cgroup_driver: str = ""
    """`cgroupfs`, `systemd` or `none`."""
    cgroup_version: str = ""
    devices: tuple[str, ...] = ()
    """CDI names that it has found; engines before 28.4 do not tell."""


class Engine:
    """Opened with `connect`, closed with `aclose`."""

    def __init__(self, client: docker.DockerClient, host: str, facts: EngineFacts) -> None:
        self._client = client
        self.host = host
        self.facts = facts

    @classmethod
    async def connect(cls, host: str = "") -> Self:
        """`host` as DOCKER_HOST has it; empty asks that variable, then takes the usual socket.

        Raises Unreachable where no engine answers, ConfigError for one that we cannot use.
        """
        where = address_of(host)
        try:
            async with asyncio.timeout(CONNECT_S):
                client, facts = await asyncio.to_thread(_opened, where)
        except (DockerException, requests.exceptions.RequestException, OSError, TimeoutError) as error:
            raise Unreachable(
                f"No Docker engine answers at {where} ({_reason(error)}): start it, "
                "or name another one in docker.host or DOCKER_HOST."
            ) from None
        check_usable(facts)
        return cls(client, where, facts)

    async def aclose(self) -> None:
        await asyncio.to_thread(self._client.close)

    async def call(
        self, what: str, act: Callable[[docker.DockerClient], T], *, within_s: float = CALL_S
    ) -> T:
        """`act` in a thread, with the SDK's client; `what` begins the sentence of its failure.

        Raises Gone for what is not there, ConfigError for an image that is not, Unreachable for an
        engine that does not answer in time, ShardError for everything else that it refuses.
        """
        return await self._translated(what, asyncio.to_thread(act, self._client), within_s)

    async def act(self, what: str, act: Callable[[docker.DockerClient], T], *, within_s: float = CALL_S) -> T:
        """The same for what changes something: begun, it is over before a caller that is cancelled goes on.

        A thread cannot be stopped, and what it makes must not appear behind the back of whoever tidies up.
        """
        acting = asyncio.ensure_future(asyncio.to_thread(act, self._client))
        try:
            return await self._translated(what, asyncio.shield(acting), within_s)
        except asyncio.CancelledError:
            await asyncio.wait({acting}, timeout=within_s)
            if acting.done() and not acting.cancelled():
                acting.exception()  # nobody else asks for it
            raise

    async def _translated(self, what: str, answer: Awaitable[T], within_s: float) -> T:
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except ImageNotFound as error:
            raise ConfigError(f"{what}: {_reason(error)}.") from None
        except NotFound as error:
            raise Gone(f"{what}: {_reason(error)}.") from None
        except APIError as error:
            raise ShardError(f"{what}: {_reason(error)}.") from None
        except (requests.exceptions.RequestException, DockerException, OSError) as error:
            raise Unreachable(
                f"{what}: the engine at {self.host} does not answer ({_reason(error)})."
            ) from None
        except TimeoutError:
            raise Unreachable(
                f"{what}: the engine at {self.host} did not answer in {within_s:g} s."
            ) from None


def address_of(host: str) -> str:
    """Of the engine: the one that is named, else DOCKER_HOST's, else the usual socket."""
    return host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST


def check_usable(facts: EngineFacts) -> None:
    """ConfigError in a sentence for an engine that shards cannot be launched on."""
    if "podman" in facts.name.lower():
        raise ConfigError("Podman answers in place of Docker: shards need Docker's own engine.")
    if facts.rootless:
        raise ConfigError(
            "This Docker engine is rootless: it cannot share a tmpfs with a limit or pin GPUs as shards "
            "need it; use the engine of the system."
        )
    if facts.api < OLDEST_API:
        raise ConfigError(f"Docker {facts.version} is too old: shards need 19.03 or later.")


def _opened(host: str) -> tuple[docker.DockerClient, EngineFacts]:
    client = docker.DockerClient(base_url=host, timeout=int(CALL_S))
    try:
        return client, facts_of(client.info(), client.version())
    except BaseException:
        client.close()
        raise


def facts_of(info: Mapping[str, Any], version: Mapping[str, Any]) -> EngineFacts:
    """From the engine's answers to `/info` and `/version`."""
    major, _, minor = str(version.get("ApiVersion", "0.0")).partition(".")
    components = version.get("Components") or [{"Name": "Engine"}]
    return EngineFacts(
        version=str(version.get("Version", "")),
        api=(int(major), int(minor)),
        name=str(components[0].get("Name", "Engine")),
        rootless=any("rootless" in option for option in info.get("SecurityOptions") or ()),
        runtimes=tuple(sorted(info.get("Runtimes") or ())),
        memory_bytes=int(info.get("MemTotal", 0)),
        cpus=int(info.get("NCPU", 0)),
        root=str(info.get("DockerRootDir", "")),
        cdi=bool(info.get("CDISpecDirs")),
        id=str(info.get("ID", "")),
        cgroup_driver=str(info.get("CgroupDriver", "")),
        cgroup_version=str(info.get("CgroupVersion", "")),
        devices=tuple(str(one.get("ID", "")) for one in info.get("DiscoveredDevices") or ()),
    )


def _reason(error: BaseException) -> str:
    """In one line, without what the SDK and its HTTP library have wrapped around it."""
    explanation = getattr(error, "explanation", None)
    if explanation is None and (system := _system_error(error)) is not None and system.strerror:
        return system.strerror
    text = " ".join(str(explanation or str(error) or type(error).__name__).split())
    return text.rstrip(".")


def _system_error(error: BaseException) -> OSError | None:
    """The one that everything else was made of."""
    inner = next(
        (one for one in (*error.args, error.__cause__, error.__context__) if isinstance(one, BaseException)),
        None,
    )
    found = _system_error(inner) if inner is not None else None
    return found or (error if isinstance(error, OSError) and error.strerror else None)
