"""What can be wrong with keys, token, certificate and address, found before anything starts."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.access.gate import Access
from orchestrator.access.tls import server_context
from orchestrator.settings import GatewaySection


def check_access(gateway: GatewaySection, env: Mapping[str, str]) -> None:
    """ConfigError in one sentence, as every worker would raise it."""
    Access.open(gateway, env).close()
    if gateway.tls_cert is not None and gateway.tls_key is not None:
        server_context(gateway.tls_cert, gateway.tls_key)
