"""Coroutines without a task: they must not notice that there is none."""

from __future__ import annotations

import asyncio
import gc

import pytest

from orchestrator.api.stepping import begun
from tests.loops import on_both_loops


def test_work_that_never_pauses_is_done_at_once() -> None:
    steps: list[int] = []

    async def work() -> None:
        steps.append(1)

    assert begun(work()) is None
    assert steps == [1]


def test_what_work_raises_before_its_first_pause_is_raised_at_once() -> None:
    async def work() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        begun(work())


@on_both_loops
async def test_the_rest_goes_through_every_kind_of_pause() -> None:
    event, steps = asyncio.Event(), list[str]()

    async def work() -> None:
        await event.wait()
        steps.append("event")
        await asyncio.sleep(0)
        steps.append("turn")
        await asyncio.sleep(0.001)
        steps.append("timer")
        assert await asyncio.ensure_future(asyncio.sleep(0, "told")) == "told"
        async with asyncio.timeout(1):
            await asyncio.sleep(0)
        steps.append("task")

    rest = begun(work())
    assert rest is not None
    await asyncio.sleep(0)
    assert steps == []
    event.set()
    await rest
    assert steps == ["event", "turn", "timer", "task"]


@on_both_loops
async def test_what_it_waits_for_may_be_there_before_it_is_awaited() -> None:
    future = asyncio.get_running_loop().create_future()
    told: list[int] = []

    async def work() -> None:
        told.append(await future)

    rest = begun(work())
    future.set_result(7)
    await asyncio.sleep(0)
    assert rest is not None
    await rest
    assert told == [7]


@on_both_loops
async def test_what_the_future_raises_reaches_the_work_and_then_who_awaits() -> None:
    future = asyncio.get_running_loop().create_future()
    seen: list[str] = []

    async def work() -> None:
        try:
            await future
        except LookupError as error:
            seen.append(str(error))
            await asyncio.sleep(0)
            raise ValueError from error

    rest = begun(work())
    future.set_exception(LookupError("there"))
    assert rest is not None
    with pytest.raises(ValueError):
        await rest
    assert seen == ["there"]


@on_both_loops
async def test_cancelling_who_awaits_cancels_the_work_where_it_stands() -> None:
    event, steps = asyncio.Event(), list[str]()

    async def work() -> None:
        try:
            await event.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            steps.append("cleaned up")
            raise

    async def awaiting() -> None:
        rest = begun(work())
        assert rest is not None
        await rest

    task = asyncio.create_task(awaiting())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["cleaned up"]
    assert event._waiters == type(event._waiters)()  # type: ignore[attr-defined]


@on_both_loops
async def test_work_that_survives_its_cancellation_goes_on() -> None:
    first, second = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await first.wait()
        except asyncio.CancelledError:
            await second.wait()

    async def awaiting() -> str:
        rest = begun(work())
        assert rest is not None
        await rest
        return "went on"

    task = asyncio.create_task(awaiting())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    second.set()
    assert await task == "went on"


@on_both_loops
async def test_a_deadline_around_the_rest_ends_it() -> None:
    rest = begun(_wait(asyncio.Event()))
    assert rest is not None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await rest


@on_both_loops
async def test_a_rest_that_nobody_awaits_cleans_up_and_warns_of_nothing() -> None:
    event = asyncio.Event()
    rest = begun(_wait(event))
    del rest
    gc.collect()
    assert not event._waiters  # type: ignore[attr-defined]
    event.set()
    await asyncio.sleep(0)


@on_both_loops
async def test_a_rest_is_awaited_once() -> None:
    event = asyncio.Event()
    rest = begun(_wait(event))
    event.set()
    assert rest is not None
    await rest
    with pytest.raises(RuntimeError, match="already awaited"):
        await rest


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
