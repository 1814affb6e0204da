"""The own HTTP client where the other side breaks, is late, or faster than who reads."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.shards.http import (
    CannotConnect,
    ConnectionLost,
    Origin,
    Pool,
    connection,
    message,
)
from tests.integration.raw_shard import Line, answers, chunked, raw_shard, says
from tests.integration.shard_http import (
    HOST,
    READ_BYTES,
    SOON_S,
    begin,
    full_backlog,
    get,
    in_pieces,
    stuck,
    until,
    whole,
)
from tests.loops import on_both_loops

# --- connections that break -------------------------------------------------------------------------


@on_both_loops
async def test_a_connection_that_ended_while_idle_leaves_the_pool() -> None:
    end = asyncio.Event()

    async def talk(line: Line) -> None:
        await line.request()
        await line.say(says(b"one"))
        await end.wait()

    async with raw_shard(talk, answers(says(b"two"))) as shard:
        pool = Pool()
        await whole(pool, shard.origin)
        assert pool.connections == 1
        end.set()
        await shard.all_ended()
        await until(lambda: pool.connections == 0)
        assert await whole(pool, shard.origin) == (200, b"two")
        await pool.aclose()


async def _once(line: Line) -> None:
    """Answer one request, close upon the next one."""
    await line.request()
    await line.say(says(b"one"))
    await line.request()


async def _once_then_reset(line: Line) -> None:
    await _once(line)
    line.reset()


async def _never(line: Line) -> None:
    await line.request()


async def _half(line: Line) -> None:
    await line.request()
    await line.say(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("talk", [_once, _once_then_reset])
@on_both_loops
async def test_a_stale_connection_is_replaced_once(talk: Callable[[Line], Any]) -> None:
    async with raw_shard(talk, answers(says(b"two"))) as shard:
        pool = Pool()
        await whole(pool, shard.origin)
        post = message("POST", shard.origin, "/generate", b"{}")
        assert await whole(pool, shard.origin, post) == (200, b"two")
        assert [len(asked) for asked in shard.asked] == [2, 1]
        assert shard.asked[1] == [post]
        assert pool.connections == 1
        await pool.aclose()


@on_both_loops
async def test_a_second_break_is_told() -> None:
    async with raw_shard(_once, _never) as shard:
        pool = Pool()
        await whole(pool, shard.origin)
        with pytest.raises(ConnectionLost):
            await whole(pool, shard.origin)
        assert [len(asked) for asked in shard.asked] == [2, 1]
        assert pool.connections == 0


@on_both_loops
async def test_a_fresh_connection_that_breaks_is_not_replaced() -> None:
    async with raw_shard(_never) as shard:
        pool = Pool()
        with pytest.raises(ConnectionLost):
            await whole(pool, shard.origin)
        assert [len(asked) for asked in shard.asked] == [1]
        assert pool.connections == 0


@on_both_loops
async def test_what_broke_after_its_first_byte_is_not_asked_again() -> None:
    async def talk(line: Line) -> None:
        await line.request()
        await line.say(says(b"one"))
        await _half(line)

    async with raw_shard(talk) as shard:
        pool = Pool()
        await whole(pool, shard.origin)
        with pytest.raises(ConnectionLost):
            await whole(pool, shard.origin)
        assert [len(asked) for asked in shard.asked] == [2]
        assert pool.connections == 0


@on_both_loops
async def test_a_stale_connection_that_is_silent_is_not_asked_again() -> None:
    async with raw_shard(answers(says(b"one"))) as shard:
        pool = Pool()
        await whole(pool, shard.origin)
        with pytest.raises(TimeoutError):
            await begin(pool, shard, within_s=0.02)
        assert len(shard.lines) == 1
        assert pool.connections == 0


@on_both_loops
async def test_what_arrived_is_read_before_the_break_is_told() -> None:
    async def talk(line: Line) -> None:
        await line.request()
        await line.say(chunked(b"abc")[:-5])

    async with raw_shard(talk) as shard:
        pool = Pool()
        got = await begin(pool, shard)
        await until(lambda: got.closed)
        assert await got.piece() == b"abc"
        with pytest.raises(ConnectionLost):
            await got.piece()
        with pytest.raises(ConnectionLost):
            await got.rest()
        pool.release(shard.origin, got)
        assert pool.connections == 0


# --- deadlines --------------------------------------------------------------------------------------


@on_both_loops
async def test_a_connection_that_does_not_come_is_given_up() -> None:
    with full_backlog() as origin:
        pool = Pool(limit=1)
        for _ in range(2):  # the first one left no trace
            with pytest.raises(CannotConnect) as given:
                await pool.send(origin, get(origin), connect_s=0.05, within_s=SOON_S)
            assert given.value.late
        assert pool.connections == 0


@on_both_loops
async def test_nobody_listens() -> None:
    with socket.create_server((HOST, 0)) as listening:
        origin = Origin(*listening.getsockname())
    with pytest.raises(CannotConnect) as given:
        await Pool().send(origin, get(origin), connect_s=SOON_S, within_s=SOON_S)
    assert not given.value.late


@pytest.mark.parametrize("text", [b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-"])
@on_both_loops
async def test_a_head_that_does_not_come_is_given_up(text: bytes) -> None:
    async with raw_shard(answers(text)) as shard:
        pool = Pool()
        with pytest.raises(TimeoutError):
            await begin(pool, shard, within_s=0.02)
        assert pool.connections == 0
        await shard.all_ended()


@on_both_loops
async def test_a_body_that_does_not_go_on_is_given_up() -> None:
    async with raw_shard(answers(chunked(b"abc")[:-5])) as shard:
        pool = Pool()
        got = await begin(pool, shard)
        got.expect(0.02)
        assert await got.piece() == b"abc"
        with pytest.raises(TimeoutError):
            await got.piece()
        pool.release(shard.origin, got)
        assert pool.connections == 0
        await shard.all_ended()


@on_both_loops
async def test_the_time_that_nobody_waited_does_not_count() -> None:
    go_on = asyncio.Event()

    async def talk(line: Line) -> None:
        await line.request()
        await line.say(chunked(b"abc")[:-5])
        await go_on.wait()
        await line.say(b"1\r\nd\r\n0\r\n\r\n")
        await line.left()

    async with raw_shard(talk) as shard:
        pool = Pool()
        got = await begin(pool, shard, within_s=0.3)
        await asyncio.sleep(0.35)
        assert await got.piece() == b"abc"
        await asyncio.sleep(0.35)
        go_on.set()
        assert await in_pieces(got) == b"d"
        pool.release(shard.origin, got)
        await asyncio.sleep(0.35)  # nor does an idle connection have a deadline
        assert pool.connections == 1
        await pool.aclose()


# --- a slow reader ----------------------------------------------------------------------------------

BODY = bytes(range(256)) * 4 * 1024 * 6
"""6 MiB: more than the kernel's buffers of both sides hold."""


@pytest.mark.parametrize(
    "text", [says(BODY), chunked(*[BODY[at : at + 50_021] for at in range(0, len(BODY), 50_021)])]
)
@on_both_loops
async def test_who_does_not_read_bounds_what_is_held_and_loses_nothing(text: bytes) -> None:
    async with raw_shard(answers(text, says(b"next"))) as shard:
        pool = Pool()
        got = await begin(pool, shard)
        await stuck(shard.lines[0])
        held = got.take()
        assert 0 < len(held) <= connection.HIGH_WATER_BYTES + READ_BYTES
        digest = hashlib.sha256(held)
        got.expect(SOON_S)
        while piece := await got.piece():
            digest.update(piece)
        assert digest.digest() == hashlib.sha256(BODY).digest()
        pool.release(shard.origin, got)
        assert await whole(pool, shard.origin) == (200, b"next")
        await pool.aclose()


@on_both_loops
async def test_a_deadline_holds_after_a_pause_too() -> None:
    async with raw_shard(answers(says(BODY)[:-1])) as shard:
        pool = Pool()
        got = await begin(pool, shard)
        await stuck(shard.lines[0])
        got.expect(0.1)
        with pytest.raises(TimeoutError):
            await in_pieces(got)
        pool.release(shard.origin, got)


@on_both_loops
async def test_an_answer_that_ended_with_a_pause_leaves_a_connection_that_is_read() -> None:
    end = asyncio.Event()

    async def talk(line: Line) -> None:
        for _ in range(2):
            await line.request()
            # The last read of the socket holds the byte too much and the end.
            await line.say(says(b"x" * connection.HIGH_WATER_BYTES))
        await end.wait()

    async with raw_shard(talk) as shard:
        pool = Pool()
        for _ in range(2):
            got = await begin(pool, shard)
            await until(lambda each=got: each.complete)  # type: ignore[misc]
            pool.release(shard.origin, got)
            assert got.take() == b""
        assert len(shard.lines) == 1
        end.set()
        await until(lambda: pool.connections == 0)


@on_both_loops
async def test_a_sink_gets_what_one_read_brought_at_once_and_all_of_it() -> None:
    texts = [chunked(b"ab", b"cd", b"ef")[:-5], b"2\r\ngh\r\n" * 2, b"0\r\n\r\n"]
    go_on = asyncio.Semaphore(0)

    async def talk(line: Line) -> None:
        await line.request()
        for text in texts:
            await go_on.acquire()
            await line.say(text)
        await line.left()

    async with raw_shard(talk) as shard:
        pool, pieces = Pool(), list[bytes]()
        go_on.release()
        got = await begin(pool, shard)
        got.push_into(pieces.append)
        pieces.append(got.take())
        go_on.release()
        await until(lambda: len(pieces) == 2)
        go_on.release()
        assert await got.news()
        assert pieces == [b"abcdef", b"ghgh"]
        pool.release(shard.origin, got)
        assert pool.connections == 1
        await pool.aclose()


@pytest.mark.parametrize("rest", [b"", b"0\r\n\r\n", b"nohex\r\n"])
@on_both_loops
async def test_what_a_sink_raises_ends_the_exchange_even_one_that_is_complete(rest: bytes) -> None:
    go_on = asyncio.Event()

    async def talk(line: Line) -> None:
        await line.request()
        await line.say(chunked()[:-5])
        await go_on.wait()
        await line.say(b"2\r\nab\r\n" + rest)
        await line.left()

    def refuse(piece: bytes) -> None:
        raise LookupError(piece)

    async with raw_shard(talk) as shard:
        pool = Pool()
        got = await begin(pool, shard)
        got.push_into(refuse)
        got.expect(SOON_S)
        go_on.set()
        with pytest.raises(LookupError, match="ab"):
            await got.news()
        pool.release(shard.origin, got)
        assert pool.connections == (1 if rest.startswith(b"0") else 0)
        await pool.aclose()
