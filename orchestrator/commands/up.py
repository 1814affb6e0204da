"""`up`: start a deployment in the foreground or in the background, and say what to do with it."""

from __future__ import annotations

import json
import os

import typer

from orchestrator.commands.banner import banner, facts
from orchestrator.commands.detached import start_in_background
from orchestrator.config import Loaded
from orchestrator.deployment.progress import Reports, for_terminal
from orchestrator.deployment.state import State
from orchestrator.errors import OrchestratorError


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
            # Not before: whoever only waits for the background needs none of what it imports.
            from orchestrator.commands.foreground import run

            run(loaded, progress, announce)
    finally:
        progress.close()


def _start_for_parent(loaded: Loaded, reports: Reports) -> None:
    """The background half of `--detach`: what happens is told to the process that waits."""

    def announce(state: State) -> None:
        reports.report(ready=state.url)
        reports.close()

    from orchestrator.commands.foreground import run

    try:
        run(loaded, reports, announce)
    except OrchestratorError as error:
        reports.report(error=str(error), code=error.exit_code)
        raise
