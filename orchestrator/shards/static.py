"""Shards that somebody else started, by URL; everything else is left to another launcher."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from orchestrator.errors import ShardError
from orchestrator.shards.launcher import Exit, Launcher, Running
from tgi_patches.contract import ShardSpec


class StaticLauncher:
    """See `Launcher`.  What stands in `urls` (by shard name) is only observed; `rest` has all others."""

    def __init__(
        self, urls: Mapping[str, str], rest: Launcher, sidecars: Mapping[str, str] | None = None
    ) -> None:
        """`sidecars`: their URLs, by name of the shard, where they are processes of their own."""
        self._rest = rest
        beside = sidecars or {}
        self._observed = {
            shard: Running(shard, url, observed=True, sidecar_url=beside.get(shard, ""))
            for shard, url in urls.items()
        }

    async def launch(self, spec: ShardSpec) -> Running:
        if spec.shard in self._observed:
            raise ShardError(f"Shard {spec.shard} is already running.")
        return await self._rest.launch(spec)

    async def running(self) -> Mapping[str, Running]:
        return {**await self._rest.running(), **self._observed}

    async def wait(self, shard: str) -> Exit:
        if shard in self._observed:
            await asyncio.Event().wait()  # until cancelled: nobody here sees its process
        return await self._rest.wait(shard)

    async def stop(self, shard: str, grace_s: float) -> None:
        await self._rest.stop(shard, grace_s)  # which knows none of those that are only observed

    async def logs(self, shard: str, lines: int) -> list[str]:
        return await self._rest.logs(shard, lines)

    async def close(self, grace_s: float) -> None:
        await self._rest.close(grace_s)
