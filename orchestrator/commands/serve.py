"""`serve`: a gateway alone: one process, or a parent that keeps several of them on one port.

Nothing of the gateway is imported until a process serves: the parent stays small.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import typer

from orchestrator.access import check_access
from orchestrator.config import Loaded
from orchestrator.deployment.environment import child_env
from orchestrator.deployment.gateway import Sockets
from orchestrator.deployment.hangup import on_hangup
from orchestrator.deployment.logging import log_json_to
from orchestrator.deployment.workers import GatewayWorkers, Place
from orchestrator.errors import ConfigError


def run_gateway(loaded: Loaded, *, fd: int | None) -> None:
    """Serve until SIGTERM or SIGINT.  ConfigError without a Redis URL or for a port that is taken."""
    settings = loaded.settings
    if settings.redis.url is None:
        raise ConfigError("A gateway alone needs the Redis of its deployment: name it with --redis.")
    log_json_to(sys.stderr)
    check_access(settings.gateway, os.environ)
    with closing(Sockets.bound(settings.gateway, fd)) as sockets:
        if settings.gateway.workers > 1:
            sockets.listen()
            asyncio.run(_parent(loaded, sockets))
            return
        from orchestrator.commands.worker import run_worker

        run_worker(loaded, sockets, Place())


async def _parent(loaded: Loaded, sockets: Sockets) -> None:
    """Returns when it was told to stop and all workers are gone."""
    with tempfile.TemporaryDirectory(prefix="tgi-orchestrator-serve-") as folder:
        workers = GatewayWorkers(
            sockets,
            child_env(loaded, os.environ, {}),
            Path(folder) / "workers",
            count=loaded.settings.gateway.workers,
        )
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        on_hangup(workers.reload, stopped.set)
        async with workers.running() as watch:
            asked = asyncio.create_task(stopped.wait())
            await asyncio.wait((asked, watch), return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            if watch.done():
                _refused(watch)


def _refused(watch: asyncio.Task[None]) -> None:
    try:
        watch.result()
    except ConfigError:
        # The worker has said why, where we would say it too.
        raise typer.Exit(ConfigError.exit_code) from None
