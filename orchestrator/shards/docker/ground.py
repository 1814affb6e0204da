"""What a deployment's containers stand on: the tmpfs volume of the arenas, and a bridge of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import docker
import structlog

from orchestrator.errors import ConfigError, ShardError
from orchestrator.shards.docker.container import Ground
from orchestrator.shards.docker.engine import Engine, Gone
from orchestrator.shards.docker.names import labels, network_name, volume_name

log = structlog.get_logger()

MODE = "2770"
"""Of the arenas' folder: its group reads and writes, and files stay the group's."""
MayAct = Callable[[], Awaitable[None]]
Look = Callable[[docker.DockerClient, str], Mapping[str, Any]]


class GroundWork:
    """Made when the first shard is launched, removed by `clear` once nothing stands there."""

    def __init__(
        self, engine: Engine, ground: Ground, owner: tuple[int, int], arena_bytes: int, may_act: MayAct
    ) -> None:
        """`owner` of the tmpfs: uid and gid; `arena_bytes` its size, 0 for half of the host's memory."""
        self._engine = engine
        self._deployment = ground.deployment
        self._labels = labels(ground.deployment, ground.owner)
        self._network = ground.network
        self._owner = owner
        self._arena_bytes = arena_bytes
        self._may_act = may_act
        self._one_at_a_time = asyncio.Lock()

    async def lay(self) -> None:
        """ConfigError for a name that somebody else took, and for a volume that is too small."""
        async with self._one_at_a_time:
            await self._lay_volume()
            if self._network == network_name(self._deployment):
                await self._lay_network()

    async def clear(self) -> None:
        """Leaves what something still uses, and what is not ours."""
        for name, look in ((self.volume, _volume), (network_name(self._deployment), _network)):
            told = await self._told(name, look)
            if told is None or not self._is_ours(told):
                continue
            await self._may_act()
            try:
                await self._engine.act(f"{name} was not removed", _remover(name, look))
            except ShardError as error:
                log.info("ground_kept", name=name, why=str(error))

    @property
    def volume(self) -> str:
        return volume_name(self._deployment)

    async def _lay_volume(self) -> None:
        name = self.volume
        told = await self._told(name, _volume)
        if told is not None:
            self._check_ours("volume", name, told)
            have = size_of(str((told.get("Options") or {}).get("o", "")))
            if not have or have >= self._arena_bytes:
                return
            await self._make_way(name, have)
        await self._may_act()
        uid, gid = self._owner
        size = f"size={self._arena_bytes}," if self._arena_bytes else ""
        options = {
            "type": "tmpfs",
            "device": "tmpfs",
            "o": f"{size}uid={uid},gid={gid},mode={MODE},nosuid,nodev,noexec",
        }
        await self._engine.act(
            f"The volume {name} was not made",
            lambda client: client.api.create_volume(
                name, driver="local", driver_opts=options, labels=self._labels
            ),
        )

    async def _make_way(self, name: str, have: int) -> None:
        """A tmpfs keeps its size: it is made anew, which only works while no container has it."""
        await self._may_act()
        try:
            await self._engine.act(f"{name} was not removed", lambda client: client.api.remove_volume(name))
        except Gone:
            pass
        except ShardError:
            raise ConfigError(
                f"The arenas' volume {name} has {have >> 20} MiB and {self._arena_bytes >> 20} are needed; "
                "it cannot grow while shards use it: run `down`, then `up`."
            ) from None

    async def _lay_network(self) -> None:
        told = await self._told(self._network, _network)
        if told is not None:
            self._check_ours("network", self._network, told)
            return
        await self._may_act()
        await self._engine.act(
            f"The network {self._network} was not made",
            lambda client: client.api.create_network(
                self._network, driver="bridge", check_duplicate=True, labels=self._labels
            ),
        )

    async def _told(self, name: str, look: Look) -> Mapping[str, Any] | None:
        try:
            return await self._engine.call(f"{name} was not looked up", lambda client: look(client, name))
        except Gone:
            return None

    def _is_ours(self, told: Mapping[str, Any]) -> bool:
        return self._labels.items() <= (told.get("Labels") or {}).items()

    def _check_ours(self, kind: str, name: str, told: Mapping[str, Any]) -> None:
        if not self._is_ours(told):
            raise ConfigError(
                f"A {kind} {name} exists and is not ours: remove it, or name the deployment otherwise."
            )


def size_of(options: str) -> int:
    """Bytes in a tmpfs's mount options, as we write them; 0 where they name none."""
    for option in options.split(","):
        key, _, value = option.partition("=")
        if key == "size" and value.isdecimal():
            return int(value)
    return 0


def _remover(name: str, look: Look) -> Callable[[docker.DockerClient], None]:
    """Removes what `look` finds."""

    def remove(client: docker.DockerClient) -> None:
        if look is _volume:
            client.api.remove_volume(name)
        else:
            client.api.remove_network(name)

    return remove


def _volume(client: docker.DockerClient, name: str) -> Mapping[str, Any]:
    told: Mapping[str, Any] = client.api.inspect_volume(name)
    return told


def _network(client: docker.DockerClient, name: str) -> Mapping[str, Any]:
    told: Mapping[str, Any] = client.api.inspect_network(name)
    return told
