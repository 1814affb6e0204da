"""A conductor's scheduler and how it measures shards, as the settings say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from orchestrator.calibration import calibrate
from orchestrator.conductor import Calibrator
from orchestrator.core.cost import Costs
from orchestrator.core.hot_prompts import HotPrompts, HotRules
from orchestrator.core.scheduling import Scheduler
from orchestrator.core.ticket import ShardView
from orchestrator.deployment.policy import policy_of
from orchestrator.settings import Settings
from orchestrator.shards.client import ShardClient

HOT_FROM_DECODE_SHARDS = 2
"""With one decode shard there is nothing to keep a burst apart from, and little that sharing saves."""


def scheduler_of(settings: Settings) -> Scheduler:
    """A conductor's."""
    routing = settings.routing
    enough = settings.shards.decode.shards >= HOT_FROM_DECODE_SHARDS
    hot = routing.hot_prompts == "on" or (routing.hot_prompts == "auto" and enough)
    rules = HotRules(share_of_decode=routing.hot_decode_share, record_ttl_s=settings.arena.record_ttl_s)
    return Scheduler(policy_of(settings), hot=HotPrompts(rules) if hot else None)


@asynccontextmanager
async def calibrating(settings: Settings, key: bytes) -> AsyncIterator[Calibrator | None]:
    """Measures shards straight, for as long as the block lasts; None where the settings forbid it."""
    if not settings.routing.calibrate:
        yield None
        return
    client = ShardClient(key=key)

    async def measured(view: ShardView) -> Costs | None:
        return await calibrate(view, client)

    try:
        yield measured
    finally:
        await client.aclose()
