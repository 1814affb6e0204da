"""Starts the mock shards and the gateways, each on its core, and leaves nothing behind.

mock -> Redis and conductor, where a gateway needs them -> gateways, at the same time -> measured ->
all stopped.  Every process ends with this one, however this one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from orchestrator.bench.gateway import proc
from orchestrator.bench.gateway.control import READY
from orchestrator.bench.gateway.load import LoadFailed
from orchestrator.bench.gateway.subjects import KINDS, Around, Kind
from orchestrator.deployment.logging import json_log
from orchestrator.embedded.redis import EmbeddedRedis

START_LIMIT_S = 30.0
STOP_LIMIT_S = 3.0
POLL_S = 0.02
_MODULE = "orchestrator.bench.gateway"


@dataclass(frozen=True, slots=True)
class Subject:
    """A gateway that answers."""

    kind: Kind
    port: int
    pids: tuple[int, ...]
    """The gateway's own processes, whose CPU time is its cost."""
    beside: Mapping[str, int] = field(default_factory=dict)
    """Processes that work for it and are reported apart."""

    def cpu_s(self) -> float:
        return proc.cpu_s(self.pids)

    def rss_bytes(self) -> int:
        return proc.rss_bytes(self.pids)


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that runs."""

    subjects: tuple[Subject, ...]
    prefill_port: int
    decode_port: int
    failed: Mapping[str, str]
    """Gateways that did not start, with the reason."""


@asynccontextmanager
async def bench(names: Sequence[str], gateway_core: int, load_core: int) -> AsyncIterator[Bench]:
    """Raises LoadFailed when mock, Redis or conductor does not come up."""
    async with AsyncExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="tgi-orchestrator-bench-"))
        stack.enter_context(json_log(Path(scratch) / "bench.log"))
        start = _Starter(stack, Path(scratch))
        prefill_port, decode_port, *ports = free_ports(2 + 2 * len(names))
        command = [sys.executable, "-m", f"{_MODULE}.mock", str(prefill_port), str(decode_port)]
        mock = await start.process("mock", command, load_core)
        await mock.until(partial(_healthy, decode_port))
        redis_url, beside = "", {}
        if any(KINDS[name].needs_redis for name in names):
            redis = await stack.enter_async_context(EmbeddedRedis())
            os.sched_setaffinity(redis.pid, {load_core})
            redis_url = redis.url
            command = [
                sys.executable,
                "-m",
                f"{_MODULE}.control",
                redis_url,
                str(prefill_port),
                str(decode_port),
            ]
            conductor = await start.process("conductor", command, load_core)
            await conductor.until(partial(_says, conductor, READY))
            beside = {"redis": redis.pid, "conductor": conductor.pid}
        starting: list[tuple[Kind, int, _Started]] = []
        for name, port, spare in zip(names, ports[::2], ports[1::2], strict=True):
            kind, folder = KINDS[name], Path(scratch) / name
            folder.mkdir()
            url = redis_url if kind.needs_redis else ""
            around = Around(port, prefill_port, decode_port, folder, spare, url)
            started = await start.process(name, kind.command(around), gateway_core)
            starting.append((kind, port, started))
        subjects: list[Subject] = []
        failed: dict[str, str] = {}
        for kind, port, started in starting:
            try:
                await started.until(partial(_healthy, port))
            except LoadFailed as failure:
                failed[kind.name] = str(failure)
            else:
                helpers = beside if kind.needs_redis else {}
                subjects.append(Subject(kind, port, proc.tree(started.pid), helpers))
        yield Bench(tuple(subjects), prefill_port, decode_port, failed)


class _Started:
    """A process of ours and its log."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def until(self, ready: Callable[[], Awaitable[bool]]) -> None:
        """Raises LoadFailed when it ends or takes longer than START_LIMIT_S."""
        try:
            async with asyncio.timeout(START_LIMIT_S):
                while not await ready():
                    if self._process.returncode is not None:
                        raise LoadFailed(f"{self.name} did not start{self._last_words()}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise LoadFailed(
                f"{self.name} was not ready within {START_LIMIT_S:g} s{self._last_words()}"
            ) from None

    async def stop(self) -> None:
        """The whole process group, asked first."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            try:
                async with asyncio.timeout(STOP_LIMIT_S):
                    await self._process.wait()
            except TimeoutError:
                continue

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else "."


class _Starter:
    """Starts processes that the stack stops."""

    def __init__(self, stack: AsyncExitStack, scratch: Path) -> None:
        self._stack = stack
        self._scratch = scratch

    async def process(self, name: str, command: Sequence[str], core: int) -> _Started:
        log = self._scratch / f"{name}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C in the terminal is for the bench, which stops its children in order.
                start_new_session=True,
                preexec_fn=proc.child_of(os.getpid(), core),
            )
        started = _Started(name, process, log)
        self._stack.push_async_callback(started.stop)
        return started


async def _says(process: _Started, line: str) -> bool:
    return line in process.log.read_text(errors="replace").splitlines()


async def _healthy(port: int) -> bool:
    """`GET /health` is answered with 200."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(START_LIMIT_S):
            return (await reader.readline()).split()[1:2] == [b"200"]
    except OSError:
        return False
    finally:
        writer.close()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in taken]
