"""A deployment in the foreground: served until a signal ends it, whole or without its shards."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import typer

from orchestrator.commands.common import INTERRUPTED
from orchestrator.config import Loaded
from orchestrator.deployment.hangup import on_hangup
from orchestrator.deployment.logging import Echo, json_log
from orchestrator.deployment.progress import Progress
from orchestrator.deployment.start import Ending, Order, Running, deployed, ordered
from orchestrator.deployment.state import State

Announce = Callable[[State], None]


def run(loaded: Loaded, progress: Progress, announce: Announce) -> None:
    """Returns when it has been stopped; `announce` hears once that it is ready."""
    with ordered(loaded, progress) as order, json_log(order.folder.log_of("conductor")) as echo:
        code = asyncio.run(_served(order, progress, announce, echo))
    if code:
        raise typer.Exit(code)


async def _served(order: Order, progress: Progress, announce: Announce, echo: Echo) -> int:
    """The exit code; does not return where shards and answers go on without this process."""
    end = await _until_stopped(order, progress, announce, echo)
    if end.left is not None:
        # Here and now: whatever else ends a loop and an interpreter would end the workers that still answer.
        progress.close()
        sys.stdout.flush()
        os._exit(end.code)
    return end.code


@dataclass(frozen=True, slots=True)
class End:
    """How `up` ends."""

    code: int
    left: Running | None = None
    """What goes on without it: shards in containers, and gateway workers with answers under way."""


async def _until_stopped(order: Order, progress: Progress, announce: Announce, echo: Echo) -> End:
    """Serve until SIGINT or SIGTERM.  The first one stops everything in order, later ones change nothing.

    Shards in containers are left by SIGTERM, for the next `up`.  SIGHUP makes the gateway read keys and
    certificates again.

    Warnings are for the terminal only in between: errors of a start have a sentence of their own.
    """
    ready, asked = asyncio.Event(), asyncio.Event()
    ending = Ending(removes=order.plan.containers is None)
    deployments: list[Running] = []

    async def serve() -> None:
        async with deployed(order, progress, ending) as running:
            announce(running.state)
            ready.set()
            echo.on = True
            deployments.append(running)
            await running.broken()

    def stop(*, removes: bool = True) -> None:
        if not asked.is_set():
            asked.set()
            ending.removes = removes
            echo.on = False
            progress.step("Stopping")
            serving.cancel()

    def reload() -> None:
        for each in deployments:
            each.workers.reload()

    serving = asyncio.create_task(serve(), name="deployment")
    leave = partial(stop, removes=order.plan.containers is None)
    on_hangup(reload, leave)
    for number, handle in ((signal.SIGINT, stop), (signal.SIGTERM, leave)):
        asyncio.get_running_loop().add_signal_handler(number, handle)
    try:
        await serving
    except asyncio.CancelledError:
        if not asked.is_set():
            raise
    code = 0 if ready.is_set() else INTERRUPTED
    if asked.is_set() and ending.leaves and deployments:
        progress.done("Stopped: the shards go on serving; `up` takes them over, `down` removes them")
        return End(code, deployments[0])
    if asked.is_set():
        progress.done("Stopped: nothing is left running")
    return End(code)
