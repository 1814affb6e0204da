"""A process of the bench on a core of its own, spoken to in lines of JSON over its pipes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from orchestrator.bench.gateway import proc
from orchestrator.errors import OrchestratorError

START_LIMIT_S = 30.0
STOP_LIMIT_S = 5.0
_LINE_LIMIT_BYTES = 1 << 20


class ChildFailed(OrchestratorError):
    """A process of the bench ended, or does not answer: no figure would mean anything."""


class Child:
    """A running process.  It answers lines on stdin with lines on stdout; what it logs is dropped."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def hear(self, limit_s: float) -> dict[str, Any]:
        """Its next line.  Raises ChildFailed when it ends or says nothing for so long."""
        assert self._process.stdout is not None, "started with pipes"
        try:
            async with asyncio.timeout(limit_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise ChildFailed(f"The {self._name} said nothing for {limit_s:g} s.") from None
        if not line:
            raise ChildFailed(f"The {self._name} ended early.")
        said: dict[str, Any] = json.loads(line)
        return said

    async def ask(self, question: str, limit_s: float) -> dict[str, Any]:
        """One line there, one line back."""
        assert self._process.stdin is not None, "started with pipes"
        self._process.stdin.write(f"{question}\n".encode())
        return await self.hear(limit_s)

    async def stop(self) -> None:
        """Asked first."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_LIMIT_S):
                    await self._process.wait()
                return


@asynccontextmanager
async def child(name: str, module: str, arguments: Sequence[str], core: int) -> AsyncIterator[Child]:
    """`python -m orchestrator.bench.scheduler.MODULE` once it said its first line; gone afterwards."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"orchestrator.bench.scheduler.{module}",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=_LINE_LIMIT_BYTES,
        start_new_session=True,
        preexec_fn=proc.child_of(os.getpid(), core),
    )
    one = Child(name, process)
    try:
        await one.hear(START_LIMIT_S)
        yield one
    finally:
        await one.stop()
