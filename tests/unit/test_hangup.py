"""SIGHUP: a reload, unless it says that the terminal has gone."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PATIENCE_S = 20.0
WAITS = """
import asyncio, os, signal, sys
from orchestrator.deployment.hangup import on_hangup
from orchestrator.deployment.logging import log_json_to

log_json_to(sys.stderr)

async def main():
    stopped = asyncio.Event()
    on_hangup(lambda: print("reloaded", flush=True), stopped.set)
    print("ready", flush=True)
    await stopped.wait()
    print("stopped", flush=True)

for argument in sys.argv[1:]:
    if argument == "nohup":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    elif argument == "blocked":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        os.kill(os.getpid(), signal.SIGHUP)
    else:
        os.open(argument, os.O_RDWR)  # the first terminal that a session leader opens is its own
asyncio.run(main())
"""


@asynccontextmanager
async def waiting(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WAITS, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await said(process) == "ready"
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def test_without_a_terminal_it_always_reloads() -> None:
    async with waiting() as process:
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            assert await said(process) == "reloaded"


async def test_one_that_came_before_the_handler_is_heard() -> None:
    async with waiting("blocked") as process:
        assert await said(process) == "reloaded"


async def test_with_its_terminal_it_reloads_and_ends_when_that_closes() -> None:
    ours, theirs = pty.openpty()
    async with waiting(os.ttyname(theirs)) as process:
        os.close(theirs)
        process.send_signal(signal.SIGHUP)
        assert await said(process) == "reloaded"
        os.close(ours)
        assert await said(process) == "stopped"


async def test_under_nohup_it_outlives_its_terminal() -> None:
    ours, theirs = pty.openpty()
    async with waiting("nohup", os.ttyname(theirs)) as process:
        for descriptor in (theirs, ours):
            os.close(descriptor)
        assert await said(process) == "reloaded"
