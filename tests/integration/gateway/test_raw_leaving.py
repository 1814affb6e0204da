"""Clients that stop reading, or leave where a request is neither here nor there: nothing is kept for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from orchestrator.core.ticket import Outcome, ShardView
from orchestrator.shards.fake import Part

from .raw import (
    END,
    PATIENCE_S,
    REQUESTS,
    FloodingShard,
    OpenHouse,
    head_of,
    line_to,
    open_house,
    request_of,
    socket_that_accepts_nobody,
    until,
)

HELD_LIMIT_BYTES = 640 * 1024
"""For a client that does not read: uvicorn's buffer, and a read of the shard's socket here and there."""


@pytest.fixture
async def house() -> AsyncIterator[OpenHouse]:
    async with open_house() as built:
        yield built


def served_mixed_by(house: OpenHouse, shard: FloodingShard) -> None:
    view: ShardView = replace(house.decode.view(), shard="flood-0", url=shard.url)
    house.queue.set_shards([view])


async def nothing_left(house: OpenHouse, *outcomes: Outcome) -> None:
    """`outcomes` of all requests that were granted, in the order in which they ended."""
    await until(lambda: len(house.queue.completed) >= len(outcomes) and house.nothing_open())
    await house.quiet()
    assert [completion.outcome for completion in house.queue.completed] == list(outcomes)
    assert house.reserved == (0, 0, 0)
    assert house.queue.waiting == 0
    assert house.pool.connections <= 2
    await until(lambda: not house.server.server_state.connections)


# --- slow readers -------------------------------------------------------------------------------


async def test_a_client_that_does_not_read_stops_its_shard_and_nobody_else(house: OpenHouse) -> None:
    flood = FloodingShard(events=2000, size=16_000)
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, house.client_bytes() + house.shard_bytes())
            await asyncio.sleep(0)

    async with flood.listening():
        served_mixed_by(house, flood)
        watching = asyncio.create_task(watch())
        line = await line_to(house, receive_bytes=65_536)
        await line.send(request_of("generate_stream"))
        await until(house.paused)
        # What it does not read fills the kernel's buffers, then the gateway's, and then the shard stands.
        written = -1
        while written != flood.written:
            written = flood.written
            other = await line_to(house)
            await other.send(head_of("/health", method="GET"))
            assert (await other.answer()).status == 200
            await other.leave()
        assert house.paused()
        assert not flood.stopped.is_set()
        assert flood.written < 2000 * 16_000

        expected = b"".join(map(flood.event, range(1, 2001)))
        answer = await line.answer()
        watching.cancel()
        assert answer.body == expected
        assert most <= HELD_LIMIT_BYTES
        await line.leave()
    await nothing_left(house, Outcome.DONE)


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_leaving_in_the_middle_of_a_blocked_write(house: OpenHouse, reset: bool) -> None:
    flood = FloodingShard(events=2000, size=16_000)
    async with flood.listening():
        served_mixed_by(house, flood)
        line = await line_to(house, receive_bytes=65_536)
        await line.send(request_of("generate_stream"))
        await until(house.paused)
        await line.leave(reset=reset)
        await nothing_left(house, Outcome.CANCELLED)
        await asyncio.wait_for(flood.stopped.wait(), PATIENCE_S)
    assert 0 < house.queue.completed[0].generated_tokens < 2000


# --- states -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["generate", "chat_stream"])
async def test_leaving_while_granted_and_its_shard_does_not_accept(house: OpenHouse, kind: str) -> None:
    url, sockets = socket_that_accepts_nobody()
    with contextlib.ExitStack() as stack:
        for one in sockets:
            stack.callback(one.close)
        house.prefill.url = url
        house.queue.set_shards([house.prefill.view(), house.decode.view()])
        line = await line_to(house)
        await line.send(request_of(kind))
        await until(lambda: house.pool._connecting == 1)
        await line.leave()
        await nothing_left(house, Outcome.CANCELLED)
    assert house.decode.seen == []


async def test_leaving_while_its_head_or_its_body_is_coming(house: OpenHouse) -> None:
    whole = request_of("generate")
    head, _, body = whole.partition(END)
    chunks = head_of("/generate", "transfer-encoding: chunked")
    begun = [whole[:7], head[:-3], head + END, head + END + body[:-1], chunks, chunks + b"5\r\n{", whole[:-1]]
    for reset in (False, True):
        for piece in begun:
            line = await line_to(house)
            await line.send(piece)
            await until(lambda: len(house.server.server_state.connections) == 1)
            await asyncio.sleep(0)
            await line.leave(reset=reset)
            await until(lambda: not house.server.server_state.connections)
    await until(lambda: not house.server.server_state.tasks)
    assert house.queue.tickets == []
    assert house.prefill.seen == []
    await nothing_left(house)


async def test_leaving_as_soon_as_all_is_sent(house: OpenHouse) -> None:
    """The request and the news that nobody waits for it arrive together."""
    for kind in REQUESTS:
        line = await line_to(house)
        line.writer.write(request_of(kind))
        line.writer.close()
        await line.writer.wait_closed()
        await until(lambda: not house.server.server_state.tasks and not house.server.server_state.connections)
    await until(house.nothing_open)
    await house.quiet()
    assert Outcome.FAILED not in {completion.outcome for completion in house.queue.completed}
    assert house.reserved == (0, 0, 0)
    assert house.queue.waiting == 0


async def test_leaving_with_another_request_behind_it(house: OpenHouse) -> None:
    """The second one was never begun; the first one ends as any other that is left."""
    gate = house.decode.hold(Part.GET, 2)
    line = await line_to(house)
    await line.send(request_of("generate") + request_of("chat"))
    await asyncio.wait_for(gate.reached.wait(), PATIENCE_S)
    await line.leave()
    await nothing_left(house, Outcome.CANCELLED)
    assert house.decode.left.is_set()
    assert len(house.queue.tickets) == 1


async def test_many_that_leave_anywhere_leave_nothing_behind(house: OpenHouse) -> None:
    """64 clients at a time, each gone after another byte of its answer."""
    before = len(asyncio.all_tasks())
    answer = await whole_answer(house)
    held = set()

    async def visit(number: int) -> None:
        line = await line_to(house)
        await line.send(request_of("generate_stream", f"x-request-id: {number:04}"))
        if size := number * len(answer) // 256:
            await asyncio.wait_for(line.reader.readexactly(size), PATIENCE_S)
        await line.leave(reset=number % 3 == 0)

    for first in range(0, 256, 64):
        async with asyncio.TaskGroup() as group:
            for number in range(first, first + 64):
                group.create_task(visit(number))
        await until(lambda: house.nothing_open() and not house.server.server_state.connections)
        await house.quiet()
        held.add(house.pool.connections)
    assert house.reserved == (0, 0, 0)
    assert house.queue.waiting == 0
    assert max(held) <= 2 * 64
    ended = house.queue.completed + house.queue.cancelled
    assert len(ended) == len(house.queue.tickets) <= 257
    # The shards' connections have no tasks, clients' are gone.
    await until(lambda: len(asyncio.all_tasks()) <= before)


async def whole_answer(house: OpenHouse) -> bytes:
    line = await line_to(house)
    await line.send(request_of("generate_stream", "x-request-id: 0000"))
    answer = await line.until(b"\r\n0\r\n\r\n")
    await line.leave()
    await until(house.nothing_open)
    return answer
