"""`down`: stop a deployment that runs on this machine."""

from __future__ import annotations

import typer

from orchestrator.commands.common import folder_of, running_state
from orchestrator.deployment.start import clean_up
from orchestrator.deployment.state import stop
from orchestrator.errors import OrchestratorError


def stop_deployment(deployment: str, *, timeout_s: float) -> None:
    """Ask it to stop in order and wait; its own process removes what it made.

    One that was killed is not there to do so: what it left is removed here.
    """
    folder = folder_of(deployment)
    if folder.running() is None and folder.path.exists():
        with folder.locked():
            if clean_up(folder):
                typer.echo(f"{deployment!r} had been killed: what it left behind is removed.", err=True)
                return
    state = running_state(deployment)
    typer.echo(f"Stopping {deployment!r} at {state.url}.", err=True)
    if not stop(state, timeout_s):
        raise OrchestratorError(
            f"Process {state.pid} still runs after {timeout_s:g} s: try again, or end it with SIGKILL."
        )
    typer.echo(f"Stopped {deployment!r}: nothing of it is left running.", err=True)
