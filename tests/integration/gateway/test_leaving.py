"""A client that leaves, in every state of its request: both legs stop, one word to the queue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from orchestrator.admission import GatewaySettings
from orchestrator.api.incoming import Caller
from orchestrator.api.jobs import generate_stream
from orchestrator.core.shard import ShardState
from orchestrator.core.ticket import Outcome
from orchestrator.metrics import Metrics
from orchestrator.pipeline import Pipeline
from orchestrator.run import Job
from orchestrator.shards.client import ShardClient
from orchestrator.shards.fake import Part

GENERATE = {"inputs": "Hello", "parameters": {"max_new_tokens": 20, "details": True}}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
REQUESTS = {
    "generate": ("/generate", GENERATE),
    "generate_stream": ("/generate_stream", GENERATE),
    "chat": ("/v1/chat/completions", CHAT),
    "chat_stream": ("/v1/chat/completions", CHAT | {"stream": True}),
}
PATIENCE_S = 10.0


async def connected(house: Any, kind: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client on a bare socket, its request sent."""
    path, body = REQUESTS[kind]
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(*house.address())
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


async def reached(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), PATIENCE_S)


async def one_cancelled_completion(house: Any) -> None:
    await one_ended(house, Outcome.CANCELLED)


async def one_ended(house: Any, outcome: Outcome) -> None:
    await house.settled()
    await house.quiet()
    assert [completion.outcome for completion in house.queue.completed] == [outcome]
    assert house.queue.cancelled == []
    assert house.reserved == (0, 0, 0)


@pytest.mark.parametrize("kind", REQUESTS)
async def test_while_queued(house: Any, kind: str) -> None:
    for shard in ("prefill-0", "decode-1"):
        house.queue.set_state(shard, ShardState.SUSPECT)
    _, writer = await connected(house, kind)
    await reached(house.queue.submitted)
    assert house.queue.waiting == 1
    await leave(writer)
    await house.settled()
    assert house.queue.cancelled == [house.queue.tickets[0].handle]
    assert house.queue.completed == []
    assert house.queue.granted == []
    assert house.queue.waiting == 0


@pytest.mark.parametrize("kind", REQUESTS)
async def test_while_prefilling(house: Any, kind: str) -> None:
    gate = house.prefill.hold(Part.PUT, 0)
    _, writer = await connected(house, kind)
    await reached(gate.reached)
    await leave(writer)
    await reached(house.prefill.left)
    await one_cancelled_completion(house)
    assert house.decode.generations() == []


@pytest.mark.parametrize("kind", REQUESTS)
async def test_while_relaying(house: Any, kind: str) -> None:
    gate = house.prefill.hold_path("/kv/wait/")
    _, writer = await connected(house, kind)
    await reached(gate.reached)
    await leave(writer)
    await reached(house.prefill.left)
    await one_cancelled_completion(house)
    assert house.decode.generations() == []


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("token", [0, 3])
async def test_while_decoding(house: Any, kind: str, token: int) -> None:
    gate = house.decode.hold(Part.GET, token)
    _, writer = await connected(house, kind)
    await reached(gate.reached)
    await leave(writer)
    await reached(house.decode.left)
    await one_cancelled_completion(house)


async def test_after_reading_part_of_the_stream(house: Any) -> None:
    gate = house.decode.hold(Part.GET, 3)
    reader, writer = await connected(house, "generate_stream")
    await asyncio.wait_for(reader.readuntil(b'"index":3'), PATIENCE_S)
    await reached(gate.reached)
    await leave(writer)
    await reached(house.decode.left)
    await one_cancelled_completion(house)
    assert house.queue.completed[0].generated_tokens == 3


async def test_while_served_mixed(house: Any) -> None:
    gate = house.decode.hold(Part.PLAIN, 2)
    house.queue.set_shards([house.decode.view()])
    _, writer = await connected(house, "generate_stream")
    await reached(gate.reached)
    await leave(writer)
    await reached(house.decode.left)
    await one_cancelled_completion(house)


async def test_while_its_prompt_is_counted_nothing_was_asked_of_the_queue(house: Any) -> None:
    gate = house.prefill.hold_path("/tokenize")
    house.queue.set_shards([house.prefill.view()])
    content = json.dumps({"inputs": "word " * 450}).encode()
    _, writer = await asyncio.open_connection(*house.address())
    writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
    await reached(gate.reached)
    await leave(writer)
    await reached(house.prefill.left)
    assert house.queue.tickets == []
    assert house.queue.cancelled == []


async def test_client_that_stays_is_not_cancelled(house: Any) -> None:
    reader, writer = await connected(house, "generate_stream")
    answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), PATIENCE_S)
    assert answer.count(b"data:") == 5
    await leave(writer)
    await house.settled()
    assert [completion.outcome for completion in house.queue.completed] == [Outcome.DONE]


async def test_two_requests_on_one_connection(house: Any) -> None:
    reader, writer = await connected(house, "chat")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    assert head.startswith(b"HTTP/1.1 200")
    path, body = REQUESTS["generate"]
    content = json.dumps(body).encode()
    writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(content)))
    writer.write(content)
    rest = await asyncio.wait_for(reader.readuntil(b"generated_text"), PATIENCE_S)
    assert b"HTTP/1.1 200" in rest
    await leave(writer)
    await house.settled()
    await house.settled()
    assert [completion.outcome for completion in house.queue.completed] == [Outcome.DONE] * 2


async def test_client_that_stops_reading_is_given_up_at_the_deadline(house_of: Any) -> None:
    async with house_of(request_timeout_s=0.5) as house:
        house.prefill.tokens = house.decode.tokens = ("x",) + ("y" * 1_000_000,) * 100
        _, writer = await connected(house, "generate_stream")
        await one_ended(house, Outcome.FAILED)
        assert house.decode.left.is_set()
        assert house.queue.completed[0].generated_tokens < 101
        await leave(writer)


class NoOut:
    """A client that is not looking."""

    started = False

    async def whole(self, body: bytes, headers: Mapping[str, str], passed: Any = ()) -> None:
        self.started = True

    async def start(self, headers: Mapping[str, str]) -> None:
        self.started = True

    async def send(self, piece: bytes) -> None:
        """Nobody reads."""

    def push(self, piece: bytes) -> None:
        """Nobody reads."""

    async def finish(self) -> None:
        """Nobody reads."""


@pytest.fixture
async def pipeline(house: Any) -> AsyncIterator[Pipeline]:
    """A second gateway before the same shards, without HTTP."""
    client = ShardClient()
    settings = GatewaySettings(house.decode.limits)
    yield Pipeline(settings, house.queue, client, Metrics(house.queue.shards))
    await client.aclose()


def a_stream() -> Job:
    return generate_stream(json.dumps(GENERATE).encode(), Caller("r"))


async def test_word_to_the_queue_is_out_before_a_cancellation_arrives(house: Any, pipeline: Pipeline) -> None:
    gate = house.decode.hold(Part.GET, 2)
    serving = asyncio.create_task(pipeline.serve(a_stream(), NoOut()))
    await reached(gate.reached)
    serving.cancel()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    await one_cancelled_completion(house)
    assert pipeline.open == {}


async def test_queue_that_does_not_listen_holds_nobody(house: Any, pipeline: Pipeline) -> None:
    never = asyncio.get_running_loop().create_future()
    house.queue.complete = lambda _: never
    await asyncio.wait_for(pipeline.serve(a_stream(), NoOut()), PATIENCE_S)
    assert pipeline.open == {}
