"""`up`: start a deployment in the foreground or in the background, and say what to do with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable

import typer

from orchestrator.commands.banner import banner, facts
from orchestrator.commands.common import INTERRUPTED
from orchestrator.commands.detached import start_in_background
from orchestrator.config import Loaded
from orchestrator.deployment.hangup import on_hangup
from orchestrator.deployment.logging import Echo, json_log
from orchestrator.deployment.progress import Progress, Reports, for_terminal
from orchestrator.deployment.start import Order, deployed, ordered
from orchestrator.deployment.state import State
from orchestrator.errors import OrchestratorError

Announce = Callable[[State], None]


def start(loaded: Loaded, *, detach: bool, as_json: bool, report_fd: int | None) -> None:
    """Returns when the deployment has been stopped, or with `detach` once it is ready."""
    if report_fd is not None:
        _start_for_parent(loaded, Reports(os.fdopen(report_fd, "w")))
        return
    progress = for_terminal()

    def announce(state: State) -> None:
        progress.close()
        typer.echo(json.dumps(facts(state)) if as_json else banner(state, detached=detach))

    try:
        if detach:
            announce(start_in_background(loaded, progress))
        else:
            _run(loaded, progress, announce)
    finally:
        progress.close()


def _start_for_parent(loaded: Loaded, reports: Reports) -> None:
    """The background half of `--detach`: what happens is told to the process that waits."""

    def announce(state: State) -> None:
        reports.report(ready=state.url)
        reports.close()

    try:
        _run(loaded, reports, announce)
    except OrchestratorError as error:
        reports.report(error=str(error), code=error.exit_code)
        raise


def _run(loaded: Loaded, progress: Progress, announce: Announce) -> None:
    with ordered(loaded, progress) as order, json_log(order.folder.log_of("conductor")) as echo:
        code = asyncio.run(_until_stopped(order, progress, announce, echo))
    if code:
        raise typer.Exit(code)


async def _until_stopped(order: Order, progress: Progress, announce: Announce, echo: Echo) -> int:
    """Serve until SIGINT or SIGTERM.  The first one stops everything in order, later ones change nothing.

    SIGHUP makes the gateway read keys and certificates again.

    Warnings are for the terminal only in between: errors of a start have a sentence of their own.
    """
    ready, asked = asyncio.Event(), asyncio.Event()
    reloads: list[Callable[[], None]] = []

    async def serve() -> None:
        async with deployed(order, progress) as running:
            announce(running.state)
            ready.set()
            echo.on = True
            reloads.append(running.reload)
            await running.broken()

    def stop() -> None:
        if not asked.is_set():
            asked.set()
            echo.on = False
            progress.step("Stopping")
            serving.cancel()

    def reload() -> None:
        for each in reloads:
            each()

    serving = asyncio.create_task(serve(), name="deployment")
    on_hangup(reload, stop)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await serving
    except asyncio.CancelledError:
        if not asked.is_set():
            raise
    if asked.is_set():
        progress.done("Stopped: nothing is left running")
    return 0 if ready.is_set() else INTERRUPTED
