"""Which door a request comes to, by method and path.  Pure.

As in TGI's router a key opens what generates and `/tokenize`; information, health and documentation are
free.  A path that is not known here needs a key, so that a new route is never open by accident.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

from orchestrator.errors import GatewayError


class NotFound(GatewayError):
    """What is not answered at this address."""

    status = 404
    error_type = "not_found"


class Door(Enum):
    KEY = "key"
    """An API key, where there are any."""
    FREE = "free"
    HEALTH = "health"
    """Free, at both addresses."""
    ADMIN = "admin"
    """Administration and metrics: a token or an address of their own."""


_FREE = frozenset({"/info", "/v1/models", "/docs", "/redoc", "/api-doc/openapi.json"})
_HEALTH = frozenset({"/health", "/ping"})
_READING = ("GET", "HEAD")
_ADMIN = frozenset({"/metrics", "/admin"})


@lru_cache(maxsize=64)
def door(method: str, path: str) -> Door:
    if path in _HEALTH or (path == "/" and method in _READING):
        return Door.HEALTH
    if path in _ADMIN or path.startswith("/admin/"):
        return Door.ADMIN
    if path in _FREE or path.startswith("/docs/"):
        return Door.FREE
    return Door.KEY
