"""A loop whose cancellation was swallowed on the way still ends."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from orchestrator.queues.link import unless_cancelled


async def test_a_loop_ends_although_a_call_swallowed_its_cancellation() -> None:
    started = asyncio.Event()

    async def loop() -> None:
        while True:
            unless_cancelled()
            with contextlib.suppress(asyncio.CancelledError):  # as a foreign wait_for may do
                started.set()
                await asyncio.sleep(60)

    task = asyncio.create_task(loop())
    await started.wait()
    task.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_task_that_nobody_cancelled_goes_on() -> None:
    unless_cancelled()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.sleep(1)
    unless_cancelled()  # a deadline of its own is no cancellation
