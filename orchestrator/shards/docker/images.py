"""What an image that shards are launched from says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import docker

from orchestrator.errors import ConfigError
from orchestrator.shards.docker.container import ImageFacts
from orchestrator.shards.docker.engine import Engine, Gone


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
    config = told.get("Config") or {}
    return ImageFacts(name, dict(config.get("Labels") or {}), str(config.get("User") or ""))
