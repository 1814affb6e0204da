"""Redis stands still, or comes back empty, under load: nobody hangs, and the books are right again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tgi_patches.contract import GetTag, PutTag

from .site import LONG, REQUEST_TIMEOUT_S, TOKENS, Ended, Site, outcomes, site, until
from .test_kills import gauges_are_back

TOGETHER = 8
"""For each gateway."""
HELD = 2
"""Streams of each gateway that run from before the trouble until after it."""


async def stopped(made: Site, _: AsyncExitStack, seconds: float) -> None:
    """Redis stands still, and goes on with everything that it knew and all that was sent meanwhile."""
    os.kill(made.server.pid, signal.SIGSTOP)
    try:
        await trouble(made, seconds)
    finally:
        os.kill(made.server.pid, signal.SIGCONT)


async def killed(made: Site, stack: AsyncExitStack, seconds: float) -> None:
    """Redis dies and another one starts with nothing in it."""
    os.kill(made.server.pid, signal.SIGKILL)
    await made.server.wait()
    await trouble(made, seconds)
    await made.start_redis(stack)


async def trouble(made: Site, seconds: float) -> None:
    """Meanwhile each gateway says that it is degraded, and still serves."""
    end_s = time.monotonic() + seconds
    for gateway in range(2):
        await until(lambda gateway=gateway: degraded(made, gateway), "a gateway that says it is degraded")
    before = len(made.ended)
    await until(lambda: len(made.ended) > before + 2 * TOGETHER, "answers without Redis")
    await asyncio.sleep(max(0.0, end_s - time.monotonic()))


async def degraded(made: Site, gateway: int) -> bool:
    said = (await made.status(gateway))["degraded"]
    return said is not None and "last shard table" in said


@asynccontextmanager
async def held(made: Site) -> AsyncIterator[list[asyncio.Task[Ended]]]:
    """Streams that stand still in the middle of their answers."""
    tasks = [asyncio.create_task(made.ask(gateway, LONG)) for gateway in range(2) for _ in range(HELD)]
    await until(lambda: made.shards[1].holding == 2 * HELD, "streams under way")
    yield tasks


@pytest.mark.parametrize(
    ("happens", "seconds"),
    [
        (stopped, 3.0),
        (killed, 2.0),
        pytest.param(stopped, 10.0, marks=pytest.mark.slow),
        pytest.param(killed, 10.0, marks=pytest.mark.slow),
    ],
)
async def test_every_request_is_answered_and_the_books_are_right_afterwards(
    tmp_path: Path, happens: Callable[[Site, AsyncExitStack, float], object], seconds: float
) -> None:
    async with site(tmp_path) as (made, stack):
        async with held(made) as streams:
            one = await made.reserved()
            async with made.loaded(TOGETHER) as ended:
                await until(lambda: len(ended) > 4 * TOGETHER, "a part of the load")
                await happens(made, stack, seconds)
                for gateway in range(2):
                    await until(lambda gateway=gateway: made.serves(gateway), "a gateway that is well again")
                before = len(ended)
                await until(lambda: len(ended) > before + 4 * TOGETHER, "a part of the load")
            assert set(outcomes(ended)) == {("done", TOKENS, "")}
            assert max(one.took_s for one in ended) < REQUEST_TIMEOUT_S + 2
            assert made.most_legs(PutTag) == made.most_legs(GetTag) == 1

            # What is reserved is what runs: the streams that began before, and nothing else.
            async def as_before() -> bool:
                return await made.reserved() == one

            await until(as_before, "the reservations of what still runs")
            made.shards[1].let_go.set()
            assert outcomes(await asyncio.gather(*streams)) == {("done", LONG, ""): 2 * HELD}
        await gauges_are_back(made, [0, 1])
