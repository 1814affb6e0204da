"""An operator's connection to a deployment's Redis, from outside of its gateways and conductors."""

from __future__ import annotations

from typing import Self

from orchestrator.errors import ConfigError, Unreachable
from orchestrator.queues.calls import Timings
from orchestrator.queues.keys import Keys
from orchestrator.queues.resp import RespClient, Say
from orchestrator.queues.scripts import SCHEMA_VERSION
from tgi_patches.contract import checked_part


class OperatorLink:
    """Leaves a Redis without this deployment untouched."""

    def __init__(self, redis_url: str, deployment: str, *, timings: Timings | None = None) -> None:
        self._keys = Keys(checked_part(deployment, "deployment name"))
        deadline_s = (timings or Timings()).deadline_s
        self._client = RespClient(redis_url, deadline_s=deadline_s, greet=self._check)

    async def __aenter__(self) -> Self:
        """Raises Unreachable without Redis or deployment, ConfigError for a foreign schema."""
        await self._client.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def _check(self, say: Say) -> None:
        found, gateways = await say([("GET", self._keys.schema), ("EXISTS", self._keys.gateways)])
        name = self._keys.deployment
        if found is None and gateways:
            return  # emptied while it ran: only a new connection writes the schema
        if found is None:
            raise Unreachable(f"This Redis holds no deployment {name!r}.")
        if found != SCHEMA_VERSION:
            raise ConfigError(
                f"Redis holds deployment {name!r} in schema {found} and this version needs {SCHEMA_VERSION}."
            )
