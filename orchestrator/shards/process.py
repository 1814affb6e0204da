"""Shards as processes of this machine, pinned to given cores, one log file each."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from orchestrator.config import API_KEYS_VARIABLE
from orchestrator.errors import ConfigError, ShardError
from orchestrator.shards.launcher import Exit, Running
from tgi_patches.contract import PARENT_VARIABLE, ShardSpec

log = structlog.get_logger()

SHARD_COMMAND = (sys.executable, "-m", "orchestrator.embedded.shard")
SHARD_PORTS = range(20_000, 32_000)
TAIL_BYTES = 64 * 1024
"""Read from the end of a log to find its last lines."""


@dataclass(slots=True, eq=False)
class _Child:
    """One started process and the task that waits for it."""

    running: Running
    process: asyncio.subprocess.Process
    port: int
    exit: asyncio.Task[Exit]


LOG_LIMIT_BYTES = 16 * 1024 * 1024
ROTATE_EVERY_S = 30.0


class ProcessLauncher:
    """See `Launcher`.  Shards end with this process: each one asks the kernel for that itself."""

    def __init__(
        self,
        state_dir: Path,
        *,
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = SHARD_COMMAND,
        log_limit_bytes: int = LOG_LIMIT_BYTES,
        rotate_every_s: float = ROTATE_EVERY_S,
    ) -> None:
        """Logs go to `<state_dir>/<shard>.log`, and to `.log.1` beyond the limit.

        `env` is for every shard, on top of this process's own environment.
        """
        self._state_dir = state_dir
        self._env = dict(env or {})
        self._command = tuple(command)
        self._log_limit_bytes = log_limit_bytes
        self._rotate_every_s = rotate_every_s
        self._children: dict[str, _Child] = {}
        self._launching: set[str] = set()

    def log_path(self, shard: str) -> Path:
        return self._state_dir / f"{shard}.log"

    async def launch(self, spec: ShardSpec) -> Running:
        if spec.shard in self._launching or self._alive(spec.shard):
            raise ShardError(f"Shard {spec.shard} is already running.")
        self._launching.add(spec.shard)
        try:
            return await self._start(spec)
        finally:
            self._launching.discard(spec.shard)

    async def running(self) -> Mapping[str, Running]:
        return {shard: child.running for shard, child in self._children.items() if self._alive(shard)}

    async def wait(self, shard: str) -> Exit:
        child = self._children.get(shard)
        return Exit(shard, 0) if child is None else await asyncio.shield(child.exit)

    async def stop(self, shard: str, grace_s: float) -> None:
        child = self._children.get(shard)
        if child is None:
            return
        _signal(child.process, signal.SIGTERM)
        done, _ = await asyncio.wait([child.exit], timeout=grace_s)
        if not done:
            log.warning("shard_killed", shard=shard, pid=child.process.pid, grace_s=grace_s)
            _signal(child.process, signal.SIGKILL)
            await asyncio.wait([child.exit])

    async def logs(self, shard: str, lines: int) -> list[str]:
        return await asyncio.to_thread(_last_lines, self.log_path(shard), lines, 0)

    async def close(self, grace_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            for shard in list(self._children):
                group.create_task(self.stop(shard, grace_s))

    # --- one process ----------------------------------------------------------------------------

    def _alive(self, shard: str) -> bool:
        child = self._children.get(shard)
        return child is not None and not child.exit.done()

    async def _start(self, spec: ShardSpec) -> Running:
        port = spec.port or free_port(spec.host, {child.port for child in self._children.values()})
        spec = dataclasses.replace(spec, port=port)
        path = self.log_path(spec.shard)
        try:
            await asyncio.to_thread(_prepare_log, path, self._log_limit_bytes)
            with path.open("ab") as log_file:
                # Now, not later: parent and child share the position.
                log_start = log_file.tell()
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    env=shard_environment(spec) | self._env,
                    # A terminal's Ctrl-C goes to its foreground group: the orchestrator drains shards first.
                    process_group=0,
                )
        except FileNotFoundError as error:
            raise ConfigError(f"The shard cannot be started: {error.filename} does not exist.") from None
        except OSError as error:
            raise ShardError(f"Shard {spec.shard} did not start: {error}.") from None
        running = running_of(spec, process.pid)
        exit_task = asyncio.create_task(self._ended(spec.shard, process, log_start), name=spec.shard)
        self._children[spec.shard] = _Child(running, process, port, exit_task)
        return running

    async def _ended(self, shard: str, process: asyncio.subprocess.Process, log_start: int) -> Exit:
        """Waits for the end, and meanwhile keeps the log within its limit."""
        path = self.log_path(shard)
        while True:
            try:
                async with asyncio.timeout(self._rotate_every_s):
                    code = await process.wait()
                    break
            except TimeoutError:
                if await asyncio.to_thread(rotate, path, self._log_limit_bytes):
                    log_start = 0
        last = await asyncio.to_thread(_last_lines, path, 1, log_start)
        return Exit(shard, code, last[0] if last else "")


def running_of(spec: ShardSpec, pid: int | None = None) -> Running:
    """Where a shard of this order, with its port in it, answers."""
    host = in_url(spec.host)
    return Running(
        spec.shard,
        f"http://{host}:{spec.port}",
        pid,
        sidecar_url=f"http://{host}:{spec.sidecar_port}" if spec.sidecar_port else "",
        pull_host=spec.pull_host,
        order=spec,
    )


def shard_environment(spec: ShardSpec) -> dict[str, str]:
    """Of a shard's process: this one's own, the order, and our pid, so that it ends with us."""
    threads = len(spec.cpus) or len(os.sched_getaffinity(0))
    own = {"OMP_NUM_THREADS": str(threads), PARENT_VARIABLE: str(os.getpid())}
    # Clients' keys are the gateway's concern.
    kept = {name: value for name, value in os.environ.items() if name != API_KEYS_VARIABLE}
    return {**kept, **own, **spec.to_env()}


def free_port(host: str, taken: set[int]) -> int:
    """A port nobody listens on; never one that another shard was given.

    Below the range from which Linux serves outgoing connections: until the shard listens, one of
    those could take it.
    """
    return free_ports(host, taken, 1)


def free_ports(host: str, taken: set[int], count: int) -> int:
    """The first of so many in a row, none of which anybody listens on."""
    for port in random.sample(SHARD_PORTS, len(SHARD_PORTS)):
        if not any(one in taken or not _is_free(host, one) for one in range(port, port + count)):
            return port
    raise ShardError(f"No free port was found on {host}.")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def in_url(host: str) -> str:
    """A host as an URL writes it."""
    return f"[{host}]" if ":" in host else host


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """To the shard's whole group: it may have children of its own."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass  # it exited a moment ago


def _prepare_log(path: Path, limit_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rotate(path, limit_bytes)


def rotate(path: Path, limit_bytes: int) -> bool:
    """Move a log over the limit aside: True.  Copied and cut, because its process holds the file open."""
    if not path.exists() or path.stat().st_size <= limit_bytes:
        return False
    shutil.copyfile(path, path.with_suffix(".log.1"))
    os.truncate(path, 0)
    return True


def _last_lines(path: Path, lines: int, start: int) -> list[str]:
    """The last non-empty lines at or after byte `start`."""
    if lines < 1 or not path.exists():
        return []
    with path.open("rb") as log_file:
        size = log_file.seek(0, os.SEEK_END)
        log_file.seek(max(start, size - TAIL_BYTES) if start <= size else 0)
        text = log_file.read().decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
