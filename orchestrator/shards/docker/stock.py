"""Reads one container of an engine as it is, whoever started it.  Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import docker

from orchestrator.core.stock import env_of, runs_tgi
from orchestrator.errors import ConfigError
from orchestrator.shards.docker.engine import Engine, Gone


async def read_container(engine: Engine, name: str) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """(what `docker inspect` shows, what its image sets in the environment; empty where that is gone).

    ConfigError for a container that is not there, with those that run TGI.
    """

    def look(client: docker.DockerClient) -> Mapping[str, Any]:
        told: Mapping[str, Any] = client.api.inspect_container(name)
        return told

    try:
        told = await engine.call(f"The container {name!r} cannot be read", look)
    except Gone:
        raise ConfigError(
            f"There is no container {name!r} on {engine.host}{await _others(engine)}."
        ) from None
    return told, await _image_env(engine, str(told["Image"]))


async def _others(engine: Engine) -> str:
    """Those that run and look like TGI, as the rest of a sentence."""

    def listed(client: docker.DockerClient) -> list[Mapping[str, Any]]:
        told: list[Mapping[str, Any]] = client.api.containers()
        return told

    running = await engine.call("The engine's containers cannot be listed", listed)
    names = sorted(
        str(each["Names"][0]).lstrip("/")
        for each in running
        if runs_tgi(str(each.get("Image", "")), str(each.get("Command", "")))
    )
    return f"; TGI runs in {', '.join(names)}" if names else ", and none runs TGI there"


async def _image_env(engine: Engine, image: str) -> dict[str, str]:
    def look(client: docker.DockerClient) -> Mapping[str, Any]:
        return dict(client.images.get(image).attrs)

    try:
        told = await engine.call("The container's image cannot be read", look)
    except (Gone, ConfigError):
        return {}
    return env_of((told.get("Config") or {}).get("Env") or ())
