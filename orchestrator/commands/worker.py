"""One gateway process: a worker of `up` or of `serve`, or `serve` itself where one is enough.

A parent starts it as `python -m orchestrator.commands.worker PLACE`, with the settings in the environment.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import ssl
import sys
from contextlib import ExitStack
from functools import partial
from math import ceil

import structlog
import uvicorn
import uvloop

from orchestrator.access import Access
from orchestrator.access import tls as certificate
from orchestrator.admission import GatewaySettings
from orchestrator.api.app import create_app
from orchestrator.api.connection import ClientConnection
from orchestrator.commands.accepting import Turns, WorkerServer
from orchestrator.config import Loaded, load_settings
from orchestrator.deployment.gateway import BACKLOG, Sockets
from orchestrator.deployment.hangup import on_hangup
from orchestrator.deployment.key import key_env
from orchestrator.deployment.logging import log_json_to, log_server_errors
from orchestrator.deployment.policy import policy_of
from orchestrator.deployment.shares import Shares
from orchestrator.deployment.workers import OUTLIVE, Place
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.metrics import Metrics
from orchestrator.queues import GatewayQueue
from orchestrator.settings import Settings
from orchestrator.shards.client import Deadlines, ShardClient
from tgi_patches.contract import ContractError, Limits
from tgi_patches.key import key_from

log = structlog.get_logger(__name__)

DRAIN_S = 8
"""For answers under way after SIGTERM; below the limit after which a parent kills the process."""
GC_THRESHOLD = 20_000
"""New objects that call for the youngest generation's collection; Python's own is 700."""
IDLE_CONNECTION_S = 75
"""A client's connection that asks nothing; longer than the pools of common clients keep theirs."""


def run_worker(loaded: Loaded, sockets: Sockets, place: Place) -> None:
    """Serve until SIGTERM or SIGINT.  ConfigError for keys, certificates or ports that cannot be used."""
    log_json_to(sys.stderr)
    if place.workers > 1:
        structlog.contextvars.bind_contextvars(worker=place.worker)
    log_server_errors()
    allow_many_connections()
    key = key_from(key_env(loaded, os.environ))
    with ExitStack() as stack:
        context = certificate.context_of(loaded.settings.gateway)
        access = Access.open(loaded.settings.gateway, os.environ, place.shared, place.worker)
        stack.callback(access.close)
        sockets.listen()
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        runner.run(_serve(loaded.settings, sockets, place, key, access, context))


def allow_many_connections() -> None:
    """As many descriptors as this user may have: each request needs two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(
    settings: Settings,
    sockets: Sockets,
    place: Place,
    key: bytes,
    access: Access,
    context: ssl.SSLContext | None,
) -> None:
    assert settings.redis.url is not None
    queue = GatewayQueue(
        settings.redis.url,
        settings.deployment,
        f"gateway-{os.getpid()}",
        queue_size=settings.limits.queue_size,
        policy=policy_of(settings),
    )
    gateway = settings.gateway
    deadlines = Deadlines(
        connect_s=gateway.connect_timeout_s,
        first_event_s=gateway.first_event_timeout_s,
        idle_s=gateway.idle_timeout_s,
    )
    folder = place.shared
    metrics = Metrics(queue.shards, lambda: queue.mode, folder, place.worker)
    spare_the_collector()
    app = create_app(
        gateway_settings(settings, sockets),
        queue=queue,
        shards=ShardClient(deadlines, key=key),
        access=access,
        metrics=metrics,
    )
    shares = Shares(folder, place.workers) if folder and place.workers > 1 else None
    server = WorkerServer(
        config_of(app, context, gateway.body_timeout_s), sockets.all(), Turns(shares, place.worker)
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, server.interrupt)

    def reload() -> None:
        access.reload()
        if context is not None:
            certificate.reload(context)

    outlived = False

    def outlive() -> None:
        """Our parent ends: its folder with it, while answers under way have as long as any request."""
        nonlocal outlived
        outlived = True
        server.config.timeout_graceful_shutdown = ceil(settings.limits.request_timeout_s)
        saving.cancel()
        server.stop()

    async with asyncio.TaskGroup() as group:
        saving = group.create_task(metrics.keep_saving())
        on_hangup(reload, server.stop if place.fd < 0 else None)
        asyncio.get_running_loop().add_signal_handler(OUTLIVE, outlive)
        await server.serve()
        saving.cancel()
    if not outlived:
        metrics.close()


def spare_the_collector() -> None:
    """What is loaded by now stays, and a request makes few cycles: look for them less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])


def config_of(app: object, context: ssl.SSLContext | None, head_timeout_s: float = 30.0) -> uvicorn.Config:
    """What uvicorn is told: its quickest parser, our limits, no log of its own."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=partial(ClientConnection, head_timeout_s=head_timeout_s),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here asks for the client's address
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_CONNECTION_S,
        timeout_graceful_shutdown=DRAIN_S,
        lifespan="on",
    )
    config.load()
    config.ssl = context
    return config


def gateway_settings(settings: Settings, sockets: Sockets) -> GatewaySettings:
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
        body_timeout_s=settings.gateway.body_timeout_s,
        max_open_requests=limits.queue_size + limits.max_concurrent_requests,
        admin_port=sockets.admin.getsockname()[1] if sockets.admin else None,
    )


def main() -> None:
    """One sentence and an exit code for our own errors, as the command line does."""
    place = Place.from_json(sys.argv[1])
    try:
        run_worker(load_settings(None, {}, os.environ), Sockets.of(place.fd, place.admin_fd), place)
    except (OrchestratorError, ContractError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code if isinstance(error, OrchestratorError) else ConfigError.exit_code)


if __name__ == "__main__":
    main()
