"""`down`: stop a deployment that runs on this machine, and remove what it left."""

from __future__ import annotations

import asyncio

import typer

from orchestrator.commands.common import folder_of, running_state
from orchestrator.config import Loaded
from orchestrator.deployment.launching import removed
from orchestrator.deployment.start import clean_up
from orchestrator.deployment.state import DOCKER, State, StateFolder, stop
from orchestrator.errors import OrchestratorError, Unreachable


def stop_deployment(loaded: Loaded, *, timeout_s: float) -> None:
    """Ask it to stop in order and wait; its own process removes what it made.

    One that was killed, or that left its shards to the next `up`, is not there to do so: what it left
    is removed here.
    """
    deployment = loaded.settings.deployment
    folder = folder_of(deployment)
    if folder.running() is None and _cleared(loaded, folder):
        return
    state = running_state(deployment)
    typer.echo(f"Stopping {deployment!r} at {state.url}.", err=True)
    if not stop(state, timeout_s):
        raise OrchestratorError(
            f"Process {state.pid} still runs after {timeout_s:g} s: try again, or end it with SIGKILL."
        )
    if state.in_containers:
        _remove(state.docker_host, deployment)  # nothing, unless it could not
    typer.echo(f"Stopped {deployment!r}: nothing of it is left running.", err=True)


def _cleared(loaded: Loaded, folder: StateFolder) -> bool:
    """Remove what a deployment without its process left; False where there was nothing."""
    settings, left, found = loaded.settings, None, False
    if folder.path.exists():
        with folder.locked():
            left = folder.read()
            engine = _engine_of(loaded, left)
            if engine is not None:
                found = _remove(engine, settings.deployment)
            found = clean_up(folder) or found
    elif settings.launcher == DOCKER:
        found = _remove(settings.docker.host, settings.deployment)
    if found:
        typer.echo(f"{settings.deployment!r} was not running: what it left behind is removed.", err=True)
    return found


def _engine_of(loaded: Loaded, left: State | None) -> str | None:
    """The engine to ask for containers; None where there can be none."""
    if left is not None and left.in_containers:
        return left.docker_host
    return loaded.settings.docker.host if loaded.settings.launcher == DOCKER else None


def _remove(docker_host: str, deployment: str) -> bool:
    """Everything with the deployment's label; True where there was something."""
    try:
        names = asyncio.run(removed(docker_host, deployment))
    except Unreachable as error:
        raise Unreachable(f"The containers of {deployment!r} are not removed: {error}") from None
    for name in names:
        typer.echo(f"Removed {name}.", err=True)
    return bool(names)
