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


def stop_deployment(loaded: Loaded, *, timeout_s: float, force: bool) -> None:
    """Ask it to stop in order and wait; its own process removes what it made.

    One that was killed, or that left its shards to the next `up`, is not there to do so: what it left
    is removed here; with `force` also what another state folder's `up` launched under its name.
    """
    deployment = loaded.settings.deployment
    folder = folder_of(deployment)
    if folder.running() is None and _cleared(loaded, folder, force=force):
        return
    state = running_state(deployment)
    typer.echo(f"Stopping {deployment!r} at {state.url}.", err=True)
    if not stop(state, timeout_s):
        raise OrchestratorError(
            f"Process {state.pid} still runs after {timeout_s:g} s: try again, or end it with SIGKILL."
        )
    if state.in_containers:
        _remove(state.docker_host, deployment, folder.owner())  # nothing, unless it could not
    typer.echo(f"Stopped {deployment!r}: nothing of it is left running.", err=True)


def _cleared(loaded: Loaded, folder: StateFolder, *, force: bool) -> bool:
    """Remove what a deployment without its process left; False where there was nothing."""
    deployment, found = loaded.settings.deployment, False
    if folder.path.exists():
        with folder.locked():
            engine = _engine_of(loaded, folder.read(), force=force)
            if engine is not None:
                found = _remove(engine, deployment, "" if force else folder.owner())
            found = clean_up(folder) or found
    elif force:
        found = _remove(loaded.settings.docker.host, deployment, "")
    if found:
        typer.echo(f"{deployment!r} was not running: what it left behind is removed.", err=True)
    return found


def _engine_of(loaded: Loaded, left: State | None, *, force: bool) -> str | None:
    """The engine to ask for containers; None where there can be none."""
    if left is not None and left.in_containers:
        return left.docker_host
    return loaded.settings.docker.host if force or loaded.settings.launcher == DOCKER else None


def _remove(docker_host: str, deployment: str, owner: str) -> bool:
    """Everything with the deployment's label and of that owner; True where there was something."""
    try:
        names = asyncio.run(removed(docker_host, deployment, owner))
    except Unreachable as error:
        raise Unreachable(f"The containers of {deployment!r} are not removed: {error}") from None
    for name in names:
        typer.echo(f"Removed {name}.", err=True)
    return bool(names)
