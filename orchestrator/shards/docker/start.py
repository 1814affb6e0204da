"""From an order to a container that runs: made, filled, its GPUs still free, started; or nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import docker
import structlog

from orchestrator.core.gpu_claims import refusal
from orchestrator.core.order import ShardOrder
from orchestrator.errors import ConfigError, OrchestratorError, ShardError
from orchestrator.shards.docker.container import Ground, create_body
from orchestrator.shards.docker.engine import Engine
from orchestrator.shards.docker.ground import GroundWork
from orchestrator.shards.docker.images import ordered_image
from orchestrator.shards.docker.ledger import claims
from orchestrator.shards.docker.listing import Found, container_named, removed
from orchestrator.shards.docker.names import container_name
from orchestrator.shards.docker.refusals import sentence
from orchestrator.shards.docker.secrets import archive, owner_of

log = structlog.get_logger()


class Start:
    """Starts containers of one deployment."""

    def __init__(
        self,
        engine: Engine,
        ground: Ground,
        ground_work: GroundWork,
        secrets: Mapping[str, bytes],
        gpu_aliases: Mapping[str, str],
        may_act: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._ground = ground
        self._ground_work = ground_work
        self._secrets = secrets
        self._gpu_aliases = gpu_aliases
        self._may_act = may_act
        self._left: set[str] = set()
        """Containers that did not start for all we know, and could not be removed: the engine was away."""

    async def run(self, order: ShardOrder) -> Found:
        """ConfigError where it can never start, ShardError or Unreachable where it did not this time."""
        image = await ordered_image(self._engine, order)
        body = create_body(order, image, self._ground)
        owner = owner_of(self._ground.user or image.user, image.name)
        name = container_name(self._ground.deployment, order.shard)
        await self._make_room(order.shard, name)
        await self._ground_work.lay()
        await self._may_act()
        container_id = await self._surely_created(order, name, body)
        try:
            await self._filled(container_id, name, owner)
            await self._check_claims(order, container_id)
            await self._may_act()
            await self._tried(order, "did not start", lambda client: client.api.start(container_id))
            found = await container_named(self._engine, name)
        except BaseException:
            # Of ours alone, and never seen by anybody: whether we lead does not matter.
            await self._discard(container_id, name)
            raise
        if found is None or found.order is None:
            raise ShardError(f"Shard {order.shard} was removed as soon as it was started.")
        return found

    async def _make_room(self, shard: str, name: str) -> None:
        """A container that ended before keeps its name; it makes way for the new one."""
        found = await container_named(self._engine, name)
        if found is None:
            return
        if found.stranger or not found.of(self._ground.deployment, self._ground.owner):
            raise ConfigError(
                f"A container {name} exists that was not launched for the deployment "
                f"{self._ground.deployment}: remove it, or name the deployment otherwise."
            )
        if found.alive and found.id not in self._left:
            raise ShardError(f"Shard {shard} is already running.")
        await self._may_act()
        await removed(self._engine, found.id, name)
        self._left.discard(found.id)

    async def _surely_created(self, order: ShardOrder, name: str, body: Mapping[str, Any]) -> str:
        """Its id; whoever is cancelled meanwhile leaves none behind."""
        creating = asyncio.ensure_future(self._created(order, name, body))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            await asyncio.wait({creating})
            if creating.exception() is None:
                await self._discard(creating.result(), name)
            raise

    async def _created(self, order: ShardOrder, name: str, body: Mapping[str, Any]) -> str:
        def create(client: docker.DockerClient) -> Any:
            return client.api.create_container_from_config(dict(body), name)  # type: ignore[no-untyped-call]

        told = await self._tried(order, "was not created", create)
        for warning in told.get("Warnings") or ():
            log.warning("engine_warns", shard=order.shard, warning=warning)
        return str(told["Id"])

    async def _filled(self, container_id: str, name: str, owner: tuple[int, int]) -> None:
        if not self._secrets:
            return
        packed = archive(self._secrets, owner)
        await self._engine.act(
            f"The secrets of {name} were not copied",
            lambda client: client.api.put_archive(container_id, "/", packed),
        )

    async def _check_claims(self, order: ShardOrder, container_id: str) -> None:
        """After it was created: whoever else comes now sees it, and the older one goes on."""
        if not order.gpus:
            return
        held = await claims(self._engine, self._gpu_aliases)
        mine = [claim for claim in held if claim.container_id == container_id]
        if why := refusal(mine, held):
            raise ConfigError(f"Shard {order.shard} is not launched. {why}")

    async def _tried(self, order: ShardOrder, what: str, act: Callable[[docker.DockerClient], Any]) -> Any:
        """ConfigError where the engine says what no second try would mend."""
        try:
            return await self._engine.act(f"Shard {order.shard} {what}", act)
        except ShardError as error:
            if told := sentence(f"Shard {order.shard}", str(error)):
                raise ConfigError(told) from None
            raise

    async def _discard(self, container_id: str, name: str) -> None:
        try:
            await removed(self._engine, container_id, name)
        except OrchestratorError as error:
            self._left.add(container_id)
            log.warning("container_left", container=name, error=str(error))
