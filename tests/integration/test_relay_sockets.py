"""A shard's stream through the relay to a client that blocks now and then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import orjson
import pytest

from orchestrator.core.passage import Passage
from orchestrator.core.redress import Dialect
from orchestrator.shards.http import Connection, ConnectionLost, Pool, connection, message
from orchestrator.shards.relay import Relay
from tests.integration.raw_shard import Line, RawShard, Talk, raw_shard
from tests.loops import on_both_loops

SOON_S = 5.0
READ_BYTES = 256 * 1024
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
ERROR = b'data:{"error":"no","error_type":"generation"}\n\n'


def event(number: int, text: str = "x", *, last: bool = False) -> bytes:
    token = {"id": number, "text": text, "logprob": 0.0, "special": False}
    end = {"generated_text": text if last else None, "details": None}
    return b"data:" + orjson.dumps({"index": number, "token": token} | end) + b"\n\n"


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text)


EVENTS = [event(number) for number in range(5)] + [event(5, last=True)]


class Client:
    """Takes what it gets until it is told to block; then each piece waits for `free`."""

    def __init__(self, *blocks: int, always: bool = False) -> None:
        self.got: list[bytes] = []
        self.blocked = asyncio.Event()
        self._blocks = set(blocks)
        self._always = always
        self._pushed = 0
        self._free = asyncio.Event()

    def push(self, piece: bytes) -> Awaitable[None] | None:
        assert not self.blocked.is_set(), "nothing is pushed while the client has not taken the last"
        self._pushed += 1
        if not self._always and self._pushed not in self._blocks:
            self.got.append(piece)
            return None
        self.blocked.set()
        return self._take(piece)

    async def _take(self, piece: bytes) -> None:
        await self._free.wait()
        self._free.clear()
        self.got.append(piece)
        self.blocked.clear()

    def free(self) -> None:
        self._free.set()

    @property
    def text(self) -> bytes:
        return b"".join(self.got)


@dataclass(slots=True)
class Relayed:
    shard: RawShard
    pool: Pool
    got: Connection
    passage: Passage
    task: asyncio.Task[None]


@asynccontextmanager
async def relayed(
    talk: Talk, client: Client, idle_s: float = SOON_S, unread: bytes = b""
) -> AsyncIterator[Relayed]:
    async with raw_shard(talk) as shard:
        pool, passage = Pool(), Passage(Dialect.TGI)
        sent = message("POST", shard.origin, "/generate_stream", b"{}")
        got = await pool.send(shard.origin, sent, connect_s=SOON_S, within_s=SOON_S)
        task = asyncio.create_task(Relay(got, passage, client.push, idle_s).run(unread))
        try:
            async with asyncio.timeout(2 * SOON_S):
                yield Relayed(shard, pool, got, passage, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            pool.release(shard.origin, got)
            await pool.aclose()


def tells(
    *texts: bytes, then: Callable[[Line], Awaitable[None]] | None = None, size: int | None = None
) -> Talk:
    async def talk(line: Line) -> None:
        await line.request()
        for text in (HEAD, *texts):
            await line.say(text, size)
        await (then or Line.left)(line)

    return talk


@pytest.mark.parametrize("size", [1, 50, None])
@on_both_loops
async def test_a_willing_client_gets_everything_and_the_connection_serves_again(size: int | None) -> None:
    client = Client()
    async with relayed(tells(*map(chunk, EVENTS), END, size=size), client) as relay:
        await relay.task
        assert client.text == b"".join(EVENTS)
        assert (relay.passage.tokens, relay.passage.ended) == (6, True)
        relay.pool.release(relay.shard.origin, relay.got)
        assert relay.pool.connections == 1


@on_both_loops
async def test_what_was_read_before_comes_first() -> None:
    client = Client()
    before, rest = event(98) + event(99)[:10], event(99)[10:]
    async with relayed(tells(chunk(rest), *map(chunk, EVENTS), END), client, unread=before) as relay:
        await relay.task
        assert client.text == event(98) + event(99) + b"".join(EVENTS)


@pytest.mark.parametrize("size", [7, None])
@on_both_loops
async def test_a_client_that_blocks_at_every_piece_gets_everything_in_order(size: int | None) -> None:
    client = Client(always=True)
    async with relayed(tells(*map(chunk, EVENTS), END, size=size), client) as relay:
        while not relay.task.done():
            if client.blocked.is_set():
                client.free()
            await asyncio.sleep(0)
        await relay.task
        assert client.text == b"".join(EVENTS)
        assert relay.got.complete


@on_both_loops
async def test_the_shard_is_not_read_while_the_client_is_blocked() -> None:
    many = [event(number, "x" * 2000) for number in range(4000)]
    client = Client(1)
    held: list[bytes] = []

    async def talk(line: Line) -> None:
        await line.request()
        await line.say(HEAD + b"".join(map(chunk, many)) + chunk(event(5, last=True)) + END)
        await line.left()

    async with relayed(talk, client, idle_s=0.3) as relay:
        await client.blocked.wait()
        writer = relay.shard.lines[0].writer
        await asyncio.sleep(0.4)  # longer than a shard may be silent: the client's time is not the shard's
        assert writer.transport.get_write_buffer_size() > 0
        before = relay.passage.tokens
        assert before * len(many[0]) <= READ_BYTES + connection.HIGH_WATER_BYTES
        await asyncio.sleep(0.02)
        assert relay.passage.tokens == before
        client.free()
        await relay.task
        held.extend(client.got)
        assert b"".join(held) == b"".join(many) + event(5, last=True)


@on_both_loops
async def test_a_blocked_client_whose_read_brought_several_chunks_does_not_cost_the_shard_its_deadline() -> (
    None
):
    client = Client(1)
    go_on = asyncio.Event()

    async def then(line: Line) -> None:
        await go_on.wait()
        await line.say(chunk(EVENTS[-1]) + END)
        await line.left()

    # One write, one read: the first chunk blocks the client, the others wait behind it.
    async with relayed(tells(b"".join(map(chunk, EVENTS[:-1])), then=then), client, idle_s=0.3) as relay:
        await client.blocked.wait()
        await asyncio.sleep(0.4)
        client.free()
        go_on.set()
        await relay.task
        assert client.text == b"".join(EVENTS)


@pytest.mark.parametrize("reset", [False, True])
@on_both_loops
async def test_a_shard_that_dies_while_the_client_is_blocked(reset: bool) -> None:
    client = Client(1)

    async def then(line: Line) -> None:
        await client.blocked.wait()
        await line.say(b"".join(map(chunk, EVENTS[2:4])))
        if not reset:
            return
        await asyncio.sleep(0.01)
        line.reset()

    async with relayed(tells(b"".join(map(chunk, EVENTS[:2])), then=then), client) as relay:
        await relay.shard.all_ended()
        await asyncio.sleep(0.01)
        assert not relay.task.done()
        client.free()
        with pytest.raises(ConnectionLost):
            await relay.task
        # A reset may take what the kernel still held with it; what had been read is delivered.
        delivered = [b"".join(EVENTS[:count]) for count in ((2, 4) if reset else (4,))]
        assert client.text in delivered
        assert not relay.passage.ended


@on_both_loops
async def test_an_error_event_while_the_client_is_blocked() -> None:
    client = Client(1)
    texts = chunk(EVENTS[0]) + chunk(EVENTS[1]) + chunk(EVENTS[2] + ERROR + EVENTS[3]) + chunk(EVENTS[4])
    async with relayed(tells(texts, END), client) as relay:
        await client.blocked.wait()
        await asyncio.sleep(0.01)
        assert not relay.task.done()
        client.free()
        await relay.task
        assert client.text == b"".join(EVENTS[:3])
        assert relay.passage.error_data == ERROR[5:-2]


@on_both_loops
async def test_an_error_event_ends_the_relay_though_the_shard_does_not_end_its_stream() -> None:
    client = Client()
    async with relayed(tells(chunk(EVENTS[0]), chunk(ERROR)), client) as relay:
        await relay.task
        assert client.text == EVENTS[0]
        relay.pool.release(relay.shard.origin, relay.got)
        assert relay.pool.connections == 0


@pytest.mark.parametrize("blocks", [(), (1,)])
@on_both_loops
async def test_an_event_that_cannot_be_read_follows_all_that_could(blocks: tuple[int, ...]) -> None:
    client = Client(*blocks)
    texts = chunk(EVENTS[0]) + chunk(EVENTS[1] + b"data:{\n\n" + EVENTS[3]) + END
    async with relayed(tells(texts), client) as relay:
        while not relay.task.done():
            client.free()
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match=r"unexpected|EOF|JSON"):
            await relay.task
        assert client.text == b"".join(EVENTS[:2])


@on_both_loops
async def test_what_was_read_before_and_cannot_be_read_follows_all_that_could() -> None:
    client = Client(1)
    async with relayed(tells(END), client, unread=EVENTS[0] + b"data:{\n\n" + EVENTS[1]) as relay:
        await client.blocked.wait()
        client.free()
        with pytest.raises(ValueError, match=r"unexpected|EOF|JSON"):
            await relay.task
        assert client.text == EVENTS[0]


@on_both_loops
async def test_a_silent_shard_is_given_up_though_it_sends_comments() -> None:
    client = Client()

    async def then(line: Line) -> None:
        while True:
            await line.say(chunk(b":\n\n"))
            await asyncio.sleep(0.01)

    async with relayed(tells(chunk(EVENTS[0]), then=then), client, idle_s=0.1) as relay:
        with pytest.raises(TimeoutError):
            await relay.task
        assert client.text == EVENTS[0]


@on_both_loops
async def test_a_shard_that_is_silent_from_the_start_is_given_up() -> None:
    client = Client()
    async with relayed(tells(), client, idle_s=0.02) as relay:
        with pytest.raises(TimeoutError):
            await relay.task
        assert client.got == []


@on_both_loops
async def test_what_pushing_raises_ends_the_relay() -> None:
    client = Client()

    def push(_: bytes) -> Awaitable[None] | None:
        raise LookupError

    client.push = push  # type: ignore[method-assign]
    async with relayed(tells(*map(chunk, EVENTS), END), client) as relay:
        with pytest.raises(LookupError):
            await relay.task


@on_both_loops
async def test_who_is_cancelled_while_the_client_is_blocked_closes_the_shard_s_connection() -> None:
    client = Client(1)
    async with relayed(tells(*map(chunk, EVENTS[:3])), client) as relay:
        await client.blocked.wait()
        relay.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await relay.task
        relay.pool.release(relay.shard.origin, relay.got)
        await relay.shard.all_ended()
        assert relay.pool.connections == 0


@on_both_loops
async def test_a_connection_whose_last_read_blocked_the_client_serves_again() -> None:
    client = Client(1)
    end = asyncio.Event()

    async def then(line: Line) -> None:
        await end.wait()

    async with relayed(tells(b"".join(map(chunk, EVENTS)) + END, then=then), client) as relay:
        await client.blocked.wait()
        client.free()
        await relay.task
        relay.pool.release(relay.shard.origin, relay.got)
        assert relay.pool.connections == 1
        end.set()
        while relay.pool.connections:  # noqa: ASYNC110 - what is waited for is in the kernel
            await asyncio.sleep(0.001)
