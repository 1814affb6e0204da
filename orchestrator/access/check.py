"""What can be wrong with keys, token, certificate and address, found before anything starts."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.access.gate import Access
from orchestrator.access.tls import context_of
from orchestrator.settings import GatewaySection


def check_access(gateway: GatewaySection, env: Mapping[str, str]) -> None:
    """ConfigError in one sentence, as every worker would raise it."""
    Access.open(gateway, env).close()
    context_of(gateway)
