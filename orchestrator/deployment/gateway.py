"""The gateway as a child process of `up`: started, watched, started again when it crashes.

`up` owns the listening socket and hands it down, so the port is ours before anything starts and a
client that comes while the gateway restarts waits instead of being refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import structlog

from orchestrator.embedded.redis import end_with_owner
from orchestrator.errors import ConfigError

log = structlog.get_logger(__name__)

STOP_LIMIT_S = 10.0
"""For answers that are under way when the gateway is asked to stop."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
HEALTHY_AFTER_S = 10.0
"""A gateway that ran this long starts again at once."""
BACKLOG = 1024
SERVE = (sys.executable, "-m", "orchestrator.cli", "serve", "--fd")


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address; ConfigError when somebody listens there already.

    The gateway process makes it listen, so that nobody waits for a gateway that is not there yet.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio: TCP_NODELAY
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(_cannot_listen(host, port, error)) from None
    return listener


def listen(listener: socket.socket) -> None:
    """ConfigError when another process was bound to the same port and was quicker."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise ConfigError(_cannot_listen(host, port, error)) from None


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    return f"The gateway cannot listen on {host}:{port}: {error.strerror}."


def url_of(listener: socket.socket) -> str:
    """The URL under which a client of this machine reaches it."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


class GatewayProcess:
    """`command` with the descriptor of the listening socket as its last argument, kept running."""

    def __init__(
        self,
        listener: socket.socket,
        env: Mapping[str, str],
        log_file: Path,
        command: Sequence[str] = SERVE,
    ) -> None:
        self._listener = listener
        self._env = env
        self._log_file = log_file
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Of the present process; None before the first one."""
        return self._process.pid if self._process else None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Started inside, drained and gone outside.

        The task ends only when the gateway refuses to start, with ConfigError and its own sentence.
        """
        watch = asyncio.create_task(self._keep_running(), name="gateway process")
        try:
            yield watch
        finally:
            # First our own copy of the socket: nobody new may queue on a port without a reader.
            self._listener.close()
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await self._stop()

    async def _keep_running(self) -> None:
        pause_s = FIRST_PAUSE_S
        clock = asyncio.get_running_loop().time
        while True:
            started_s = clock()
            await self._start()
            assert self._process is not None
            code = await self._process.wait()
            if code == ConfigError.exit_code and not self.restarts:
                raise ConfigError(last_words(self._log_file))
            if clock() - started_s > HEALTHY_AFTER_S:
                pause_s = FIRST_PAUSE_S
            self.restarts += 1
            log.warning("gateway_relaunched", exit_code=code, pause_s=pause_s, restarts=self.restarts)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _start(self) -> None:
        fd = self._listener.fileno()
        with self._log_file.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(fd),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(self._env),
                pass_fds=(fd,),
                # Ctrl-C in the terminal is for `up`, which stops its children in order.
                start_new_session=True,
                preexec_fn=end_with_owner(os.getpid()),
            )

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
        except TimeoutError:
            log.warning("gateway_killed", after_s=STOP_LIMIT_S)
            process.kill()
            await process.wait()


def last_words(log_file: Path) -> str:
    """The last line of a process's log: the sentence with which it refused to start."""
    lines = log_file.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"A process ended without a word; its log is {log_file}."
