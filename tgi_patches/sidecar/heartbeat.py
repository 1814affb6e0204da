"""A file beside the arena that a living sidecar touches every second.

The entrypoint's supervision reads it: a sidecar whose event loop stands still is replaced.  Only whether
its time changes counts, so that a clock that jumps harms nobody.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path

BEAT_EVERY_S = 1.0


def heartbeat_path(directory: Path, deployment: str, shard: str) -> Path:
    """Beside the arenas of the same shard."""
    return directory / deployment / f"{shard}.sidecar"


def begin(path: Path, facts: Mapping[str, int]) -> None:
    """Say who lives: its pid, epoch and ports, for whoever looks.  Raises OSError."""
    new = path.with_suffix(".sidecar-new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(dict(facts), file)
    new.replace(path)


async def beating(path: Path, every_s: float = BEAT_EVERY_S) -> None:
    """Ends only by being cancelled; OSError where the file cannot be touched."""
    while True:
        os.utime(path)
        await asyncio.sleep(every_s)


def last_beat(path: Path) -> int:
    """A number that is another one after every beat; 0 without a file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
