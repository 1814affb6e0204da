"""The first process of a container: TGI's launcher, which decides how all ends, and a sidecar beside it.

launcher ends            -> sidecar and whatever is left are ended, its code or signal is ours
SIGTERM, SIGINT, SIGHUP  -> to the launcher, which finishes its requests; the sidecar stays until it ended
sidecar ends or hangs    -> started again after a pause; the launcher never notices
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tgi_patches.entrypoint import processes
from tgi_patches.sidecar import log
from tgi_patches.sidecar.heartbeat import last_beat

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HELD_UP_LOOKS = 4
"""So many looks later than we meant to look: it was not only the sidecar that stood still."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds."""

    look_every_s: float = 0.5
    start_s: float = 30.0
    """For a sidecar's first beat."""
    beat_s: float = 10.0
    """Between two beats: a sidecar that is silent for longer is replaced."""
    pause_s: float = 0.5
    """Before a sidecar is started again; doubles each time."""
    longest_pause_s: float = 30.0
    settled_s: float = 60.0
    """One that ran for so long starts with the shortest pause again."""
    stop_s: float = 5.0
    """For the sidecar to end, and then for whatever the launcher left behind."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program and its whole environment."""

    arguments: Sequence[str]
    env: Mapping[str, str]

    def start(self) -> int:
        return processes.started(self.arguments, self.env)


class SidecarKeeper:
    """Keeps one sidecar running; `look` is called again and again and never waits."""

    def __init__(
        self,
        command: Command,
        beat_path: Path,
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pid = 0
        """0 while none runs."""
        self._command = command
        self._beat_path = beat_path
        self._patience = patience
        self._clock = clock
        self._start_at_s = clock()
        self._started_s = 0.0
        self._pause_s = patience.pause_s
        self._beat = 0
        self._silent_at_s = 0.0
        self._looked_s = clock()

    def look(self) -> None:
        """Start it if it is time; kill it if it has been silent for too long."""
        now_s = self._clock()
        if not self.pid:
            if now_s >= self._start_at_s:
                self._start(now_s)
        elif self._hangs(now_s):
            log.event("sidecar_hangs", pid=self.pid)
            processes.send(self.pid, signal.SIGKILL)
            self._silent_at_s = now_s + self._patience.beat_s
        self._looked_s = now_s

    def ended(self, status: int) -> None:
        """It has ended by itself, or because it hung."""
        now_s = self._clock()
        if now_s - self._started_s >= self._patience.settled_s:
            self._pause_s = self._patience.pause_s
        log.event("sidecar_ended", pid=self.pid, status=status, again_in_s=self._pause_s)
        self.pid = 0
        self._start_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._patience.longest_pause_s)

    def _start(self, now_s: float) -> None:
        self.pid = self._command.start()
        self._started_s = now_s
        self._beat = last_beat(self._beat_path)
        self._silent_at_s = now_s + self._patience.start_s

    def _hangs(self, now_s: float) -> bool:
        beat, another_s = last_beat(self._beat_path), now_s + self._patience.beat_s
        if beat != self._beat:
            self._beat, self._silent_at_s = beat, another_s
        elif now_s - self._looked_s > _HELD_UP_LOOKS * self._patience.look_every_s:
            # We were held up ourselves, in a paused container for instance: so was the sidecar.
            self._silent_at_s = max(self._silent_at_s, another_s)
        return now_s >= self._silent_at_s


def supervise(launcher: Command, sidecar: Command, beat_path: Path, patience: Patience) -> int:
    """Runs both until the launcher ends; its wait status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [*FORWARDED, signal.SIGCHLD])
    processes.adopt_orphans()
    keeper = SidecarKeeper(sidecar, beat_path, patience)
    keeper.look()
    status = _until_ended(launcher.start(), keeper, patience.look_every_s)
    log.event("launcher_ended", status=status)
    if keeper.pid:
        _stop([keeper.pid], patience.stop_s)
    _stop(None, patience.stop_s)
    return status


def _until_ended(launcher: int, keeper: SidecarKeeper, look_every_s: float) -> int:
    """The launcher's wait status."""
    while True:
        received = signal.sigtimedwait([*FORWARDED, signal.SIGCHLD], look_every_s)
        if received is not None and received.si_signo in FORWARDED:
            processes.send(launcher, received.si_signo)
        statuses = processes.ended()
        if keeper.pid in statuses:
            keeper.ended(statuses[keeper.pid])
        if launcher in statuses:
            return statuses[launcher]
        keeper.look()


def _stop(pids: Sequence[int] | None, grace_s: float) -> None:
    """End these children, or all there are, the orphans of a crashed launcher among them; none is left."""
    asked: set[int] = set()
    deadline_s = time.monotonic() + grace_s
    while left := [pid for pid in processes.children() if pids is None or pid in pids]:
        late = time.monotonic() >= deadline_s
        for pid in left:
            if late or pid not in asked:
                processes.send(pid, signal.SIGKILL if late else signal.SIGTERM)
        asked.update(left)
        signal.sigtimedwait([signal.SIGCHLD], 0.05)
        processes.ended()
