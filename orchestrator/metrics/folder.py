"""The workers' snapshots: a file for each, replaced in one step, read by whichever worker is asked.

Beside each snapshot stands a lock that its worker holds: the kernel drops it with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from orchestrator.errors import ConfigError

log = structlog.get_logger(__name__)

TAKE_LIMIT_S = 2.0
"""For the predecessor's lock; a scrape looks at it for a moment, too."""
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a worker has last told."""

    tally: bytes
    lives: bool


class SnapshotFolder:
    """Our own snapshot, and those of the other workers that share the folder."""

    def __init__(self, folder: Path, worker: int) -> None:
        """ConfigError when a living process has the same number, or the folder cannot be used."""
        self._folder = folder
        self._own = folder / f"worker-{worker}.json"
        self._writing = threading.Lock()
        self._written = (0, b"")
        self._failed = False
        try:
            self._lock = (folder / f"worker-{worker}.lock").open("ab")
        except OSError as error:
            raise ConfigError(f"The folder {folder} cannot be used: {error.strerror}.") from None
        self._take_lock(worker)

    def inherited(self) -> bytes | None:
        """What the last worker of our number left; None for the first one."""
        return _read(self._own)

    def write(self, number: int, tally: bytes) -> None:
        """Replace our snapshot, from any thread: one with a lower `number` never replaces a later one."""
        with self._writing:
            last_number, last = self._written
            if number <= last_number:
                return
            self._written = (number, tally)
            if tally == last and not self._failed:
                return
            self._replace(tally)

    def siblings(self) -> Iterator[Snapshot]:
        """Snapshots of all other workers, also of those that have ended."""
        for path in sorted(self._folder.glob("worker-*.json")):
            if path != self._own and (tally := _read(path)) is not None:
                yield Snapshot(tally, _held(path.with_suffix(".lock")))

    def close(self) -> None:
        """Our number is free for the next one."""
        self._lock.close()

    def _take_lock(self, worker: int) -> None:
        deadline_s = time.monotonic() + TAKE_LIMIT_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    self._lock.close()
                    raise ConfigError(f"Worker {worker} of {self._folder} runs already.") from None
            time.sleep(POLL_S)

    def _replace(self, tally: bytes) -> None:
        fresh = self._own.with_suffix(".new")
        try:
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(tally)
            fresh.replace(self._own)
        except OSError as error:
            if not self._failed:
                log.warning("metrics_not_saved", folder=str(self._folder), error=error.strerror)
            self._failed = True
        else:
            self._failed = False


def _read(path: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return None


def _held(lock: Path) -> bool:
    """Whether a living process holds it."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
