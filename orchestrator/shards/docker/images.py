"""What an image that shards are launched from says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import docker
import structlog

from orchestrator.core.order import ShardOrder
from orchestrator.errors import ConfigError, ShardError
from orchestrator.shards.docker.container import ImageFacts
from orchestrator.shards.docker.engine import Engine, Gone

log = structlog.get_logger()


async def image_facts(engine: Engine, name: str) -> ImageFacts:
    """ConfigError where the engine does not have it: nothing is pulled here."""

    def look(client: docker.DockerClient) -> Mapping[str, Any]:
        told: Mapping[str, Any] = client.api.inspect_image(name)  # type: ignore[no-untyped-call]
        return told

    try:
        told = await engine.call(f"The image {name} was not looked up", look)
    except (ConfigError, Gone):
        raise ConfigError(
            f"The engine at {engine.host} has no image {name}: build or pull it first (docs/docker.md)."
        ) from None
    except ShardError as error:
        if "invalid reference" not in str(error):
            raise
        raise ConfigError(f"The image {name!r} is no name that an image can have.") from None
    config = told.get("Config") or {}
    return ImageFacts(
        name, dict(config.get("Labels") or {}), str(config.get("User") or ""), str(told.get("Id") or "")
    )


async def ordered_image(engine: Engine, order: ShardOrder) -> ImageFacts:
    """The one that its name had when it was ordered, as long as the engine keeps that."""
    if order.image_id:
        try:
            return replace(await image_facts(engine, order.image_id), name=order.image)
        except ConfigError:
            log.warning("image_replaced", shard=order.shard, image=order.image, gone=order.image_id)
    return await image_facts(engine, order.image)
