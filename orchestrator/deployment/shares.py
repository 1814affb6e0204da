"""How many connections each worker holds, in a file that all of them map.

Whoever has more than another leaves a waiting connection to that one: woken together, the kernel
would give nearly all of a burst to whoever is quickest.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

CLOSED = -1
"""In place of a count: this worker takes nothing now."""
_CELL_BYTES = 8


class Shares:
    """The counts of `workers`; a worker writes its own only, their parent those of the dead."""

    def __init__(self, folder: Path, workers: int) -> None:
        """Makes the file, where it is not there yet, with every worker closed."""
        size = _CELL_BYTES * workers
        descriptor = os.open(folder / "connections", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fresh = os.fstat(descriptor).st_size != size
            os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._counts = memoryview(self._map).cast("q")
        if fresh:
            for worker in range(workers):
                self._counts[worker] = CLOSED

    def put(self, worker: int, connections: int) -> None:
        self._counts[worker] = connections

    def turn_of(self, worker: int) -> bool:
        """True when no worker that takes connections has clearly fewer than this one.

        Exactly even while there are few; of many, an eighth more is no reason to wait.
        """
        mine = self._counts[worker]
        enough = mine - mine // 8
        return not any(CLOSED < count < enough for count in self._counts)

    def close(self) -> None:
        self._counts.release()
        self._map.close()
