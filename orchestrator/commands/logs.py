"""`logs`: the last lines of a shard's log, and what comes after them."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from pathlib import Path

import typer

from orchestrator.commands.common import folder_of
from orchestrator.config import Loaded
from orchestrator.deployment.state import State
from orchestrator.errors import ConfigError

POLL_S = 0.2


def show_log(loaded: Loaded, name: str, *, lines: int, follow: bool) -> None:
    """Print the log; with `follow` until interrupted."""
    folder = folder_of(loaded.settings.deployment)
    state = folder.read()
    if state is not None and state.in_containers and not folder.log_of(name).exists():
        for text in _of_container(state, name, lines, follow=follow):
            typer.echo(text, nl=False)
        return
    path = _log_file(loaded.settings.deployment, folder.logs, name)
    with path.open("rb") as log:
        for line in collections.deque(log, maxlen=lines):
            typer.echo(line.decode(errors="replace"), nl=False)
        read_to = log.tell()
    if follow:
        for text in _later(path, read_to):
            typer.echo(text, nl=False)


def _of_container(state: State, shard: str, lines: int, *, follow: bool) -> Iterator[str]:
    from orchestrator.shards.docker.logs import container_log

    for piece in container_log(state.docker_host, state.deployment, shard, lines, follow=follow):
        yield piece.decode(errors="replace")


def _log_file(deployment: str, logs: Path, name: str) -> Path:
    known = sorted(path.stem for path in logs.glob("*.log"))
    if name not in known:
        choice = f"there are {', '.join(known)}" if known else f"{deployment!r} never ran here"
        raise ConfigError(f"There is no log of {name!r}: {choice}.")
    return logs / f"{name}.log"


def _later(path: Path, at: int) -> Iterator[str]:
    """What comes after byte `at`; a log that was begun anew is read from its start."""
    while True:
        if path.exists():
            size = path.stat().st_size
            at = 0 if size < at else at
            if size > at:
                with path.open("rb") as log:
                    log.seek(at)
                    fresh = log.read()
                at += len(fresh)
                yield fresh.decode(errors="replace")
        time.sleep(POLL_S)
