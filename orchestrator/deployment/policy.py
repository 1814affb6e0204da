"""What the settings say of routing, as conductor and gateways take it."""

from __future__ import annotations

from orchestrator.core.decision import Policy
from orchestrator.core.ticket import Choice
from orchestrator.settings import Settings

HOT_FROM_DECODE_SHARDS = 2
"""With one decode shard there is nothing to keep a burst apart from, and little that sharing saves."""


def hot_prompts_on(settings: Settings) -> bool:
    """Whether prompts may become hot and share prefills."""
    wanted, decodes = settings.routing.hot_prompts, settings.shards.decode.shards
    return wanted == "on" or (wanted == "auto" and decodes >= HOT_FROM_DECODE_SHARDS)


def policy_of(settings: Settings) -> Policy:
    """What a request is served by, and the objectives."""
    slo, choice = settings.slo, settings.routing.choice
    return Policy(
        choice=None if choice == "auto" else Choice(choice),
        ttft_s=None if slo.ttft_ms is None else slo.ttft_ms / 1000,
        tpot_s=None if slo.tpot_ms is None else slo.tpot_ms / 1000,
    )
