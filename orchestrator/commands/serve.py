"""`serve`: one gateway process, on its own address or on a socket that `up` handed down."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import uvicorn

from orchestrator.admission import GatewaySettings
from orchestrator.api.app import create_app
from orchestrator.config import Loaded
from orchestrator.deployment.gateway import BACKLOG, bound_socket, listen
from orchestrator.deployment.key import key_env
from orchestrator.deployment.logging import log_json_to
from orchestrator.errors import ConfigError
from orchestrator.queues import GatewayQueue
from orchestrator.settings import Settings
from orchestrator.shards.client import Deadlines, ShardClient
from tgi_patches.contract import Limits
from tgi_patches.key import key_from

DRAIN_S = 8
"""For answers under way after SIGTERM; below the limit after which `up` kills the process."""


def run_gateway(loaded: Loaded, *, fd: int | None) -> None:
    """Serve until SIGTERM or SIGINT.  ConfigError without a Redis URL or for a port that is taken."""
    settings = loaded.settings
    if settings.redis.url is None:
        raise ConfigError("A gateway alone needs the Redis of its deployment: name it with --redis.")
    log_json_to(sys.stderr)
    key = key_from(key_env(loaded, os.environ))
    listener = socket.socket(fileno=fd) if fd is not None else bound_socket(*_address(settings))
    listen(listener)
    asyncio.run(_serve(settings, settings.redis.url, listener, key))


def _address(settings: Settings) -> tuple[str, int]:
    return settings.gateway.host, settings.gateway.port


async def _serve(settings: Settings, redis_url: str, listener: socket.socket, key: bytes) -> None:
    queue = GatewayQueue(
        redis_url,
        settings.deployment,
        f"gateway-{os.getpid()}",
        queue_size=settings.limits.queue_size,
    )
    deadlines = Deadlines(
        connect_s=settings.gateway.connect_timeout_s, idle_s=settings.gateway.idle_timeout_s
    )
    shards = ShardClient(deadlines, key=key)
    app = create_app(gateway_settings(settings), queue=queue, shards=shards)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=DRAIN_S,
        lifespan="on",
    )
    await uvicorn.Server(config).serve(sockets=[listener])


def gateway_settings(settings: Settings) -> GatewaySettings:
    """The part of a deployment's settings that its gateways need."""
    limits = settings.limits
    return GatewaySettings(
        limits=Limits(
            max_input_tokens=limits.max_input_tokens,
            max_total_tokens=limits.max_total_tokens,
            max_concurrent_requests=limits.max_concurrent_requests,
            payload_bytes=limits.payload_bytes,
        ),
        request_timeout_s=limits.request_timeout_s,
        wait_timeout_s=settings.gateway.wait_timeout_s,
        keep_alive_s=settings.gateway.keep_alive_s,
        max_open_requests=limits.queue_size + limits.max_concurrent_requests,
    )
