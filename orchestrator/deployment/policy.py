"""What the settings say of routing, as conductor and gateways take it."""

from __future__ import annotations

from orchestrator.core.routing import Policy
from orchestrator.core.ticket import Choice
from orchestrator.settings import Settings


def policy_of(settings: Settings) -> Policy:
    """What a request is served by, and the objectives."""
    slo, choice = settings.slo, settings.routing.choice
    return Policy(
        choice=None if choice == "auto" else Choice(choice),
        ttft_s=None if slo.ttft_ms is None else slo.ttft_ms / 1000,
        tpot_s=None if slo.tpot_ms is None else slo.tpot_ms / 1000,
    )
