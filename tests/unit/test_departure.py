"""A client that leaves is noticed without a task that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from orchestrator.api.stepping import Departure
from tests.loops import on_both_loops

DISCONNECT = {"type": "http.disconnect"}
REQUEST = {"type": "http.request", "body": b"", "more_body": False}


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
