from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from orchestrator.errors import Unreachable
from orchestrator.queues.calls import Call
from orchestrator.queues.link import OrderedWriter, ScriptRunner, answered
from orchestrator.queues.scripts import Script


@pytest.mark.parametrize(
    "error", [RedisConnectionError("refused"), RedisTimeoutError("slow"), OSError("no route"), TimeoutError()]
)
async def test_a_failed_call_is_tried_once_more_and_then_translated(error: Exception) -> None:
    calls = 0

    async def fails(times: int) -> str:
        nonlocal calls
        calls += 1
        if calls <= times:
            raise error
        return "reply"

    assert await answered(1.0, lambda: fails(1)) == "reply"
    calls = 0
    with pytest.raises(Unreachable, match="Redis does not answer"):
        await answered(1.0, lambda: fails(2))
    assert calls == 2


async def test_a_call_without_an_answer_ends_at_its_deadline() -> None:
    with pytest.raises(Unreachable, match=r"no answer within 0\.01 s"):
        await answered(0.01, lambda: asyncio.sleep(60))


async def test_an_answer_that_is_an_error_is_not_tried_again() -> None:
    calls = 0

    async def refuses() -> str:
        nonlocal calls
        calls += 1
        raise ResponseError("WRONGTYPE")

    with pytest.raises(ResponseError):
        await answered(1.0, refuses)
    assert calls == 1


async def test_a_cancellation_that_the_client_library_swallows_is_not_lost() -> None:
    started = asyncio.Event()

    async def swallows() -> str:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
        return "reply"

    async def for_ever() -> None:
        while True:
            await answered(60.0, swallows)

    task = asyncio.create_task(for_ever())
    await started.wait()
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=10)
    assert done == {task}
    assert task.cancelled()


class SlowRunner:
    """Notes every batch and answers it when told."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.go = asyncio.Semaphore(0)
        self.started = asyncio.Event()

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        self.batches.append([str(call.args[0]) for call in calls])
        self.started.set()
        await self.go.acquire()
        return [
            Unreachable("refused") if call.args[0] == "bad" else f"reply {call.args[0]}" for call in calls
        ]


def call(name: str) -> Call:
    return Call(Script(""), (), (name,))


async def test_calls_made_while_a_batch_travels_are_the_next_batch_in_order() -> None:
    runner = SlowRunner()
    writer = OrderedWriter(cast(ScriptRunner, runner))
    task = asyncio.create_task(writer.run())
    first = writer.send(call("a"))
    await runner.started.wait()
    rest = [writer.send(call(name)) for name in ("b", "bad", "c")]
    rest[2].cancel()  # nobody waits for it: it is sent all the same
    runner.go.release()
    assert await first == "reply a"
    runner.go.release()
    assert await rest[0] == "reply b"
    with pytest.raises(Unreachable, match="refused"):
        await rest[1]
    assert runner.batches == [["a"], ["b", "bad", "c"]]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_writer_that_ends_fails_what_is_left_and_what_comes_later() -> None:
    runner = SlowRunner()
    writer = OrderedWriter(cast(ScriptRunner, runner))
    task = asyncio.create_task(writer.run())
    travelling = writer.send(call("a"))
    await runner.started.wait()
    queued = writer.send(call("b"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for future in (travelling, queued, writer.send(call("c"))):
        with pytest.raises(Unreachable, match="closed"):
            await future
