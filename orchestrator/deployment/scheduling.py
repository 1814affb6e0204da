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
from orchestrator.deployment.policy import hot_prompts_on, policy_of
from orchestrator.settings import Settings
from orchestrator.shards.client import ShardClient


def scheduler_of(settings: Settings) -> Scheduler:
    """A conductor's."""
    share = settings.routing.hot_decode_share
    rules = HotRules(share_of_decode=share, record_ttl_s=settings.arena.record_ttl_s)
    return Scheduler(policy_of(settings), hot=HotPrompts(rules) if hot_prompts_on(settings) else None)


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
