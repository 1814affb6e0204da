"""Coroutines without a task: they must not notice that there is none."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from orchestrator.api.stepping import Departure, begun
from tests.loops import on_both_loops

DISCONNECT = {"type": "http.disconnect"}
REQUEST = {"type": "http.request", "body": b"", "more_body": False}


# --- begun --------------------------------------------------------------------------------------


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


# --- departure ----------------------------------------------------------------------------------


class Server:
    """ASGI's receive as uvicorn has it: an event, then what happened."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.gone = False
        self.calls = 0

    async def receive(self) -> dict[str, Any]:
        self.calls += 1
        if not self.gone:
            await self.event.wait()
            self.event.clear()
        return DISCONNECT if self.gone else REQUEST

    def leave(self) -> None:
        self.gone = True
        self.event.set()


class Left:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


@on_both_loops
async def test_a_client_that_leaves_is_noticed_once() -> None:
    server, left = Server(), Left()
    departure = Departure(server.receive, left)
    assert left.times == 0
    server.leave()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (left.times, server.calls) == (1, 1)
    departure.close()
    await asyncio.sleep(0)
    assert left.times == 1


@on_both_loops
async def test_a_client_that_has_left_already_is_noticed_at_once() -> None:
    server, left = Server(), Left()
    server.leave()
    Departure(server.receive, left).close()
    assert left.times == 1


@on_both_loops
async def test_other_messages_are_passed_over() -> None:
    server, left = Server(), Left()
    departure = Departure(server.receive, left)
    for calls in (2, 3):
        server.event.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (left.times, server.calls) == (0, calls)
    server.leave()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert left.times == 1
    departure.close()


@on_both_loops
async def test_messages_that_need_no_wait_are_passed_over_at_once() -> None:
    messages = [REQUEST, REQUEST, DISCONNECT]
    left = Left()

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    Departure(receive, left).close()
    assert (left.times, messages) == (1, [])


@on_both_loops
async def test_receive_may_pause_for_a_turn_and_for_a_future_several_times() -> None:
    left, steps = Left(), list[str]()
    future = asyncio.get_running_loop().create_future()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        steps.append("turn")
        assert await future == 7
        steps.append("future")
        await asyncio.sleep(0.001)
        steps.append("timer")
        await asyncio.sleep(0)
        return DISCONNECT

    departure = Departure(receive, left)
    await _until(lambda: steps == ["turn"])
    future.set_result(7)
    await _until(lambda: left.times == 1)
    assert steps == ["turn", "future", "timer"]
    departure.close()


@on_both_loops
async def test_receive_may_be_any_awaitable() -> None:
    future = asyncio.get_running_loop().create_future()
    left = Left()

    def receive() -> Awaitable[Any]:
        return future

    departure = Departure(receive, left)
    future.set_result(DISCONNECT)
    await _until(lambda: left.times == 1)
    departure.close()


@on_both_loops
async def test_closing_while_receive_waits_frees_it_and_says_nothing() -> None:
    server, left, steps = Server(), Left(), list[str]()

    async def receive() -> dict[str, Any]:
        try:
            return await server.receive()
        finally:
            steps.append("freed")

    departure = Departure(receive, left)
    departure.close()
    assert steps == ["freed"]
    assert not server.event._waiters  # type: ignore[attr-defined]
    server.leave()
    await asyncio.sleep(0.001)
    assert left.times == 0
    departure.close()


@on_both_loops
async def test_closing_between_the_news_and_its_turn_says_nothing() -> None:
    server, left = Server(), Left()
    departure = Departure(server.receive, left)
    server.leave()  # the callback is on its way
    departure.close()
    await asyncio.sleep(0.001)
    assert left.times == 0


@on_both_loops
async def test_closing_while_receive_pauses_for_a_turn_says_nothing() -> None:
    left = Left()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return DISCONNECT

    Departure(receive, left).close()
    await asyncio.sleep(0.001)
    assert left.times == 0


@on_both_loops
async def test_who_is_told_may_close() -> None:
    server, told = Server(), list[int]()
    departures: list[Departure] = []

    def left() -> None:
        departures[0].close()
        told.append(1)

    departures.append(Departure(server.receive, left))
    server.leave()
    await asyncio.sleep(0.001)
    assert told == [1]


@on_both_loops
async def test_what_receive_raises_at_once_is_the_caller_s() -> None:
    async def receive() -> dict[str, Any]:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        Departure(receive, Left())


@on_both_loops
async def test_what_receive_raises_later_is_told_to_the_loop_and_no_departure() -> None:
    future, left = asyncio.get_running_loop().create_future(), Left()
    loop, told = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))

    async def receive() -> dict[str, Any]:
        await future
        return DISCONNECT

    departure = Departure(receive, left)
    future.set_exception(ConnectionError())
    await asyncio.sleep(0.001)
    assert [type(error) for error in told] == [ConnectionError]
    assert left.times == 0
    departure.close()


@on_both_loops
async def test_the_task_that_serves_ends_when_its_client_leaves() -> None:
    server = Server()

    async def serve() -> None:
        task = asyncio.current_task()
        assert task is not None
        departure = Departure(server.receive, lambda: task.cancel() and None)
        try:
            await asyncio.sleep(60)
        finally:
            departure.close()

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    server.leave()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - turns of the loop are what it is about
            await asyncio.sleep(0)
