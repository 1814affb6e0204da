"""`logs`: the last lines of a shard's log, and what comes after them."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from pathlib import Path

import typer

from orchestrator.commands.common import folder_of
from orchestrator.errors import ConfigError

POLL_S = 0.2


def show_log(deployment: str, name: str, *, lines: int, follow: bool) -> None:
    """Print the log; with `follow` until interrupted."""
    path = _log_file(deployment, name)
    with path.open("rb") as log:
        for line in collections.deque(log, maxlen=lines):
            typer.echo(line.decode(errors="replace"), nl=False)
        read_to = log.tell()
    if follow:
        for text in _later(path, read_to):
            typer.echo(text, nl=False)


def _log_file(deployment: str, name: str) -> Path:
    logs = folder_of(deployment).logs
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
