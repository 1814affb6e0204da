"""The gateway's workers as child processes: started, watched, each started again when it crashes.

Whoever owns the listening sockets hands them down, so the ports are ours before anything starts, and
a client that comes while a worker restarts is served by another one, or waits instead of being refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import structlog

from orchestrator.deployment.gateway import Sockets, last_words, listened_at
from orchestrator.deployment.shares import CLOSED, Shares
from orchestrator.embedded.redis import end_with_owner
from orchestrator.errors import ConfigError

log = structlog.get_logger(__name__)

STOP_LIMIT_S = 10.0
"""For answers that are under way when the gateway is asked to stop."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
LOOK_S = 0.05
HEALTHY_AFTER_S = 10.0
"""A worker that ran this long starts again at once."""
OUTLIVE = signal.SIGUSR1
"""Tells a worker that its parent ends or has ended: no new connections, but answers are finished."""
CLOSED_LIMIT_S = 5.0
"""For workers to give the port back, so that the next parent can have it."""
WORKER = (sys.executable, "-m", "orchestrator.commands.worker")


@dataclass(frozen=True, slots=True)
class Place:
    """What one worker is told beside the settings: its number and what it shares with the others."""

    worker: int = 0
    workers: int = 1
    folder: str = ""
    """Of what the workers tell each other."""
    fd: int = -1
    """The listening socket."""
    admin_fd: int | None = None

    @property
    def shared(self) -> Path | None:
        """The folder; None for a worker that is alone."""
        return Path(self.folder) if self.folder else None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


class GatewayWorkers:
    """`count` processes of `command`, each with its `Place` as last argument, kept running.

    Without a `log_file` they write where we do.
    """

    def __init__(
        self,
        sockets: Sockets,
        env: Mapping[str, str],
        folder: Path,
        *,
        count: int = 1,
        log_file: Path | None = None,
        outlive_s: float | None = None,
        command: Sequence[str] = WORKER,
    ) -> None:
        """With `outlive_s` workers finish their answers within it when this process ends, however it does."""
        self._sockets = sockets
        self._outlive_s = outlive_s
        self._leaving = False
        self._env = env
        self._folder = folder
        self._log_file = log_file
        self._command = command
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._count = count
        self.restarts = 0
        """Of all workers together."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that live, by worker number."""
        living = sorted((number, one) for number, one in self._processes.items() if one.returncode is None)
        return tuple(process.pid for _, process in living)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Started inside, drained and gone outside.

        The task ends only when a worker refuses to start, with ConfigError and its own sentence.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True)
        shares = Shares(self._folder, self._count)
        watch = asyncio.create_task(self._keep_all(shares), name="gateway process")
        try:
            yield watch
        finally:
            # First our own copy of the sockets: nobody new may queue on a port without a reader.
            address = self._sockets.clients.getsockname()[:2]
            self._sockets.close()
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            if self._leaving:
                await self._left(address)
            else:
                await asyncio.gather(*map(_stop, self._processes.values()))
            shares.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def leave(self) -> None:
        """At the end workers are left to finish what they answer, in place of being stopped.

        This process must then end by `os._exit`: asyncio kills the children that it still knows.
        """
        self._leaving = self._outlive_s is not None

    async def _left(self, address: tuple[str, int]) -> None:
        """Returns once nobody listens; the first process of a container stays for as long as answers take."""
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(OUTLIVE)
        ended = [asyncio.create_task(process.wait()) for process in self._processes.values()]
        limit_s = (self._outlive_s or 0.0) if os.getpid() == 1 else 0.0
        done_s = asyncio.get_running_loop().time() + max(limit_s, CLOSED_LIMIT_S)
        while asyncio.get_running_loop().time() < done_s:
            _, pending = await asyncio.wait(ended, timeout=LOOK_S)
            if not pending or (not limit_s and not await asyncio.to_thread(listened_at, *address)):
                break

    def reload(self) -> None:
        """Every worker reads keys and certificates again; one that is starting does so once it serves."""
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(signal.SIGHUP)

    async def _keep_all(self, shares: Shares) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self._count):
                    group.create_task(self._keep(number, shares))
        except ExceptionGroup as refusals:
            raise refusals.exceptions[0] from None

    async def _keep(self, number: int, shares: Shares) -> None:
        pause_s = FIRST_PAUSE_S
        clock = asyncio.get_running_loop().time
        started_before = False
        while True:
            started_s = clock()
            process = await self._start(number)
            code = await process.wait()
            shares.put(number, CLOSED)
            if code == ConfigError.exit_code and not started_before:
                raise ConfigError(last_words(self._log_file) if self._log_file else "")
            if clock() - started_s > HEALTHY_AFTER_S:
                pause_s = FIRST_PAUSE_S
            started_before = True
            self.restarts += 1
            log.warning(
                "gateway_relaunched", worker=number, exit_code=code, pause_s=pause_s, restarts=self.restarts
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _start(self, number: int) -> asyncio.subprocess.Process:
        descriptors = self._sockets.descriptors()
        fd, admin_fd = (*descriptors, None)[:2]
        assert fd is not None
        place = Place(number, self._count, str(self._folder), fd, admin_fd)
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(self._log_file.open("ab")) if self._log_file else None
            self._processes[number] = process = await asyncio.create_subprocess_exec(
                *self._command,
                place.to_json(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(self._env),
                pass_fds=descriptors,
                # Ctrl-C in the terminal is for the parent, which stops its children in order.
                start_new_session=True,
                preexec_fn=_prepared(end_with_owner(os.getpid(), self._when_we_end())),
            )
        return process

    def _when_we_end(self) -> signal.Signals:
        return signal.SIGTERM if self._outlive_s is None else OUTLIVE


def _prepared(end_with_owner: Callable[[], None]) -> Callable[[], None]:
    """Runs in the child before exec: SIGHUP waits until the worker can reload."""

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        end_with_owner()

    return prepare


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
    except TimeoutError:
        log.warning("gateway_killed", after_s=STOP_LIMIT_S)
        process.kill()
        await process.wait()
