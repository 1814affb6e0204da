"""The log of a shard's container, as the engine keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import docker
import requests
from docker.errors import DockerException, NotFound

from orchestrator.errors import ConfigError, Unreachable
from orchestrator.shards.docker.engine import address_of
from orchestrator.shards.docker.names import DEPLOYMENT_LABEL, SHARD_LABEL, container_name

ANSWER_S = 60
QUIET_S = 7 * 86_400


def container_log(host: str, deployment: str, shard: str, lines: int, *, follow: bool) -> Iterator[bytes]:
    """Pieces of it, oldest first; with `follow` until the container ends.  Blocks.

    ConfigError where there is no such container, Unreachable without an engine.
    """
    where = address_of(host)
    name = container_name(deployment, shard)
    try:
        # A quiet shard is no silent engine.
        client = docker.DockerClient(base_url=where, version="auto", timeout=QUIET_S if follow else ANSWER_S)
        yield from client.containers.get(name).logs(stream=True, tail=lines, follow=follow)
    except NotFound:
        of: dict[str, Any] = {"label": f"{DEPLOYMENT_LABEL}={deployment}"}
        listed = client.containers.list(all=True, filters=of)
        known = sorted(filter(None, (one.labels.get(SHARD_LABEL) for one in listed)))
        there = f"there are {', '.join([*known, 'conductor', 'gateway'])}"
        raise ConfigError(f"There is no log of {shard!r}: {there}.") from None
    except (DockerException, requests.exceptions.RequestException) as error:
        raise Unreachable(f"The Docker engine at {where} does not answer ({error}).") from None
