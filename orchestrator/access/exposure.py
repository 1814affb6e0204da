"""Who can reach a gateway, and whether that is meant."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.config import API_KEYS_VARIABLE
from orchestrator.errors import ConfigError
from orchestrator.settings import GatewaySection
from tgi_patches.key import is_loopback

__all__ = ["check_exposure", "is_loopback"]


def check_exposure(gateway: GatewaySection, env: Mapping[str, str]) -> None:
    """ConfigError for a gateway that other machines reach and that nobody said should be open."""
    keys = gateway.keys_file is not None or bool(env.get(API_KEYS_VARIABLE, ""))
    if keys and gateway.allow_anonymous:
        raise ConfigError(
            "gateway.allow_anonymous serves without API keys, and there are some "
            f"(gateway.keys_file, {API_KEYS_VARIABLE}): leave one out."
        )
    admin = gateway.admin_listen
    if (
        admin
        and not (keys or gateway.allow_anonymous or gateway.admin_token_file)
        and not is_loopback(gateway.admin_host)
    ):
        raise ConfigError(
            f"gateway.admin_listen is {admin}, which other machines reach, and nothing is asked for there: "
            "name a token in gateway.admin_token_file, or API keys in gateway.keys_file."
        )
    if not (keys or gateway.allow_anonymous or is_loopback(gateway.host)):
        raise ConfigError(
            f"gateway.listen is {gateway.listen}, which other machines reach, and there are no API keys: "
            "name them in gateway.keys_file, or set gateway.allow_anonymous."
        )
