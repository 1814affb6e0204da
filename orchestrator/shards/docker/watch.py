"""Tells all who wait for containers of one deployment that one has ended: one thread for them together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import docker

from orchestrator.errors import OrchestratorError, ShardError, Unreachable
from orchestrator.shards.docker.engine import Engine
from orchestrator.shards.docker.ledger import nanoseconds
from orchestrator.shards.docker.listing import Found, containers_of
from orchestrator.shards.docker.names import DEPLOYMENT_LABEL

SLICE_S = 2.0
"""So long one call waits for an event; whoever is cancelled leaves a thread behind for no longer."""
AWAY_S = 0.5
"""Between two questions to an engine that is not there."""


class Watch:
    """The engine's events, in slices: a call ends at the first death, or when the slice is over.

    Each slice begins where the one before ended, by the engine's clock, so that no death falls between two.
    """

    def __init__(self, engine: Engine, deployment: str) -> None:
        self._engine = engine
        self._deployment = deployment
        self._since_ns = 0
        self._round: asyncio.Task[Sequence[Found] | None] | None = None

    async def now(self) -> Sequence[Found] | None:
        """The deployment's containers, whose later deaths `next` tells; None: the engine does not say."""
        try:
            if not self._since_ns:
                self._since_ns = await self._engine.call("The engine's clock was not read", _clock)
            return await containers_of(self._engine, self._deployment)
        except OrchestratorError:
            return None

    async def next(self) -> Sequence[Found] | None:
        """The same after the next death, or a slice later.

        All who ask at the same time share one round.  Who is cancelled leaves it to the others; a round
        that nobody awaits ends with its slice.
        """
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._next(), name=f"watch {self._deployment}")
        return await asyncio.shield(self._round)

    async def _next(self) -> Sequence[Found] | None:
        try:
            await self._engine.call("No event came", self._first_death, within_s=2 * SLICE_S + 1)
        except (Unreachable, ShardError):
            pass  # the slice is over, or the engine is away: the list tells
        listed = await self.now()
        if listed is None:
            await asyncio.sleep(AWAY_S)
        return listed

    def _first_death(self, client: docker.DockerClient) -> None:
        """Blocks for one slice at most.

        The limit is on our side: an engine that hangs holds nobody up.
        """
        wanted = {
            "type": ["container"],
            "event": ["die", "destroy"],
            "label": [f"{DEPLOYMENT_LABEL}={self._deployment}"],
        }
        since = f"{self._since_ns // 10**9}.{self._since_ns % 10**9:09d}"
        answer = client.api.get(
            f"{client.api.base_url}/v{client.api.api_version}/events",
            params={"filters": json.dumps(wanted), "since": since},
            stream=True,
            timeout=SLICE_S,
        )
        with answer:
            for line in answer.iter_lines(chunk_size=1):
                event = json.loads(line) if line else {}
                if int(event.get("timeNano", 0)) > self._since_ns:
                    self._since_ns = int(event["timeNano"])
                    # The engine's list lags behind its events; this waits until it has caught up.
                    client.api.inspect_container(str(event["Actor"]["ID"]))
                    return


def _clock(client: docker.DockerClient) -> int:
    return nanoseconds(str(client.api.info()["SystemTime"]))
