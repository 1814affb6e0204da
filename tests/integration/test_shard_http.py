"""The own HTTP client on real sockets: every byte of the other side is scripted."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from orchestrator.shards.http import (
    CannotConnect,
    Connection,
    ConnectionLost,
    Malformed,
    Origin,
    Pool,
    PoolFull,
    connection,
    message,
)
from tests.integration.raw_shard import HOST, Line, RawShard, answers, chunked, raw_shard, says
from tests.loops import on_both_loops

SOON_S = 5.0
READ_BYTES = 256 * 1024
"""The most that either loop reads from a socket at once."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"


def get(origin: Origin, target: str = "/x") -> bytes:
    return message("GET", origin, target, b"")


async def begin(pool: Pool, shard: RawShard, within_s: float = SOON_S) -> Connection:
    return await pool.send(shard.origin, get(shard.origin), connect_s=SOON_S, within_s=within_s)


async def whole(pool: Pool, origin: Origin, sent: bytes | None = None) -> tuple[int, bytes]:
    got = await pool.send(origin, sent or get(origin), connect_s=SOON_S, within_s=SOON_S, whole=True)
    body = got.take()
    pool.release(origin, got)
    return got.status, body


async def in_pieces(got: Connection) -> bytes:
    body = b""
    while piece := await got.piece():
        body += piece
    return body


# --- framings -----------------------------------------------------------------------------------

FRAMINGS: dict[str, tuple[bytes, int, bytes]] = {
    "length": (says(b"hello"), 200, b"hello"),
    "empty": (says(b""), 200, b""),
    "chunks": (chunked(b"h", b"el" * 40, b"lo"), 200, b"h" + b"el" * 40 + b"lo"),
    "no chunk": (chunked(), 200, b""),
    "extensions": (chunked(b"hello", b"!", extension=b";name=value"), 200, b"hello!"),
    "trailers": (chunked(b"hello", trailer=b"x-late: 1\r\nx-later: 2\r\n"), 200, b"hello"),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    "304 with a length": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", 304, b""),
    "continue": (CONTINUE + says(b"hello"), 200, b"hello"),
    "continue twice, hints": (CONTINUE * 2 + HINTS + chunked(b"hello"), 200, b"hello"),
    "refusal": (b"HTTP/1.1 429 Too Many\r\nContent-Length: 2\r\nRetry-After: 7\r\n\r\n{}", 429, b"{}"),
}


@pytest.mark.parametrize("framing", FRAMINGS)
@on_both_loops
async def test_every_framing_in_bytes_and_at_once_on_one_connection(framing: str) -> None:
    text, status, body = FRAMINGS[framing]
    async with raw_shard(answers(text, text)) as shard:
        pool = Pool()
        assert await whole(pool, shard.origin) == (status, body)
        got = await begin(pool, shard)
        assert (got.status, await in_pieces(got)) == (status, body)
        pool.release(shard.origin, got)
        assert len(shard.lines) == 1
        await pool.aclose()
    async with raw_shard(answers(text, text, size=1)) as shard:
        assert await whole(pool, shard.origin) == (status, body)
        got = await begin(pool, shard)
        assert (got.status, await got.rest()) == (status, body)
        pool.release(shard.origin, got)
        assert (len(shard.lines), pool.connections) == (1, 1)
        await pool.aclose()


@on_both_loops
async def test_headers_are_the_final_answer_s_and_no_trailer_s() -> None:
    text = HINTS + chunked(b"a", trailer=b"x-late: 1\r\n")
    text = text.replace(b"200 OK\r\n", b"200 OK\r\nX-Odd: \xe9\r\n")
    async with raw_shard(answers(text, says(b""))) as shard:
        pool = Pool()
        got = await begin(pool, shard)
        assert await in_pieces(got) == b"a"
        first = got.headers
        assert first == {b"x-odd": b"\xe9", b"transfer-encoding": b"chunked"}
        pool.release(shard.origin, got)
        assert (await begin(pool, shard)).headers == {b"content-length": b"0"}
        assert b"x-odd" in first
        await pool.aclose()


@on_both_loops
async def test_the_end_of_the_connection_ends_a_body_without_length() -> None:
    async def talk(line: Line) -> None:
        await line.request()
        await line.say(b"HTTP/1.1 200 OK\r\n\r\nhel", 1)
        await line.say(b"lo")

    async with raw_shard(talk) as shard:
        pool = Pool()
        assert await whole(pool, shard.origin) == (200, b"hello")
        got = await begin(pool, shard)
        assert await in_pieces(got) == b"hello"
        pool.release(shard.origin, got)
        assert (len(shard.lines), pool.connections) == (2, 0)


@on_both_loops
async def test_a_body_without_length_that_breaks_is_not_complete() -> None:
    gone = asyncio.Event()

    async def talk(line: Line) -> None:
        await line.request()
        await line.say(b"HTTP/1.1 200 OK\r\n\r\nhel")
        await gone.wait()
        line.reset()

    async with raw_shard(talk) as shard:
        pool = Pool()
        got = await begin(pool, shard)
        got.expect(SOON_S)
        assert await got.piece() == b"hel"
        gone.set()
        with pytest.raises(ConnectionLost):
            await got.piece()
        pool.release(shard.origin, got)
        assert pool.connections == 0


@on_both_loops
async def test_a_body_without_length_that_we_close_is_not_complete() -> None:
    async def talk(line: Line) -> None:
        await line.request()
        await line.say(b"HTTP/1.1 200 OK\r\n\r\nhel")
        await line.left()

    async with raw_shard(talk) as shard:
        pool = Pool()
        got = await begin(pool, shard)
        got.expect(SOON_S)
        assert await got.piece() == b"hel"
        waiting = asyncio.create_task(got.piece())
        await asyncio.sleep(0)
        await pool.aclose()
        with pytest.raises(ConnectionLost):
            await waiting


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nconnection: close", b"HTTP/1.0 200 OK"])
@on_both_loops
async def test_a_connection_that_shall_not_be_kept_is_closed(head: bytes) -> None:
    async with raw_shard(answers(head + b"\r\ncontent-length: 2\r\n\r\nab")) as shard:
        pool = Pool()
        assert await whole(pool, shard.origin) == (200, b"ab")
        assert pool.connections == 0
        await shard.all_ended()


# --- what is no answer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnothex\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    ],
)
@on_both_loops
async def test_what_is_no_http_ends_the_exchange_and_the_connection(text: bytes) -> None:
    async with raw_shard(answers(text)) as shard:
        pool = Pool()
        with pytest.raises(Malformed):
            await whole(pool, shard.origin)
        assert pool.connections == 0
        await shard.all_ended()


@on_both_loops
async def test_bytes_after_an_answer_close_the_connection_and_are_nobody_s() -> None:
    async with raw_shard(answers(says(b"one") + says(b"two")), answers(says(b"three"))) as shard:
        pool = Pool()
        assert await whole(pool, shard.origin) == (200, b"one")
        assert pool.connections == 0
        assert await whole(pool, shard.origin) == (200, b"three")
        await pool.aclose()


@on_both_loops
async def test_bytes_on_an_idle_connection_close_it() -> None:
    speak = asyncio.Event()

    async def talk(line: Line) -> None:
        await line.request()
        await line.say(says(b"one"))
        await speak.wait()
        await line.say(says(b"stray"))
        await line.left()

    async with raw_shard(talk, answers(says(b"two"))) as shard:
        pool = Pool()
        assert await whole(pool, shard.origin) == (200, b"one")
        speak.set()
        await shard.all_ended()
        assert pool.connections == 0
        assert await whole(pool, shard.origin) == (200, b"two")
        await pool.aclose()


@on_both_loops
async def test_a_head_is_bounded_also_one_in_many_parts() -> None:
    async def talk(line: Line) -> None:
        await line.request()
        while True:
            await line.say(CONTINUE * 100)

    async def one(line: Line) -> None:
        await line.request()
        await line.say(b"HTTP/1.1 200 OK\r\nx-long: ")
        while True:
            await line.say(b"y" * 1000)

    async with raw_shard(talk, one) as shard:
        pool = Pool()
        for _ in range(2):
            with pytest.raises(Malformed, match="head of more than"):
                await begin(pool, shard)
        assert pool.connections == 0


@pytest.mark.parametrize("text", [says(b"x" * 2001), chunked(*[b"x" * 100] * 21)])
def test_a_whole_answer_is_bounded(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WHOLE_LIMIT_BYTES", 2000)

    async def run() -> None:
        async with raw_shard(answers(text)) as shard:
            pool = Pool()
            with pytest.raises(Malformed, match="more than 2000 bytes"):
                await whole(pool, shard.origin)
            assert pool.connections == 0
            got = await begin(pool, shard)
            assert len(await in_pieces(got)) > 2000  # what is read piece by piece is not held
            await pool.aclose()

    asyncio.run(run())


# --- connections that break ---------------------------------------------------------------------


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
        await _until(lambda: pool.connections == 0)
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
        await _until(lambda: got.closed)
        assert await got.piece() == b"abc"
        with pytest.raises(ConnectionLost):
            await got.piece()
        with pytest.raises(ConnectionLost):
            await got.rest()
        pool.release(shard.origin, got)
        assert pool.connections == 0


# --- deadlines ----------------------------------------------------------------------------------


@contextmanager
def full_backlog() -> Iterator[Origin]:
    """A socket that listens and takes nobody any more."""
    with socket.create_server((HOST, 0), backlog=0) as listening:
        address = listening.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        yield Origin(*address)
        for each in waiting:
            each.close()


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


@pytest.mark.parametrize("text", [b"", CONTINUE, b"HTTP/1.1 200 OK\r\ncontent-"])
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


# --- a slow reader ------------------------------------------------------------------------------

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
        await _stuck(shard.lines[0])
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
        await _stuck(shard.lines[0])
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
            await _until(lambda each=got: each.complete)  # type: ignore[misc]
            pool.release(shard.origin, got)
            assert got.take() == b""
        assert len(shard.lines) == 1
        end.set()
        await _until(lambda: pool.connections == 0)


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
        await _until(lambda: len(pieces) == 2)
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


# --- the pool -----------------------------------------------------------------------------------


async def _echo(line: Line) -> None:
    """Answers with the target, for ever; a target that begins with /hold waits for ever."""
    while True:
        target = (await line.request()).split()[1]
        if target.startswith(b"/hold"):
            await line.left()
            return
        await line.say(says(target))


@on_both_loops
async def test_the_latest_used_connection_is_used_next() -> None:
    async with raw_shard(_echo) as shard:
        pool = Pool()
        three = [await begin(pool, shard) for _ in range(3)]
        for each in three:
            await in_pieces(each)
        for each in (three[0], three[2], three[1]):
            pool.release(shard.origin, each)
        assert await begin(pool, shard) is three[1]
        assert await begin(pool, shard) is three[2]
        assert await begin(pool, shard) is three[0]
        assert len(shard.lines) == 3
        await pool.aclose()
        assert pool.connections == 0
        await shard.all_ended()


@on_both_loops
async def test_connections_that_waited_too_long_are_closed_and_replaced() -> None:
    async with raw_shard(_echo) as shard:
        pool = Pool(keep_idle_s=0.01)
        two = [await begin(pool, shard) for _ in range(2)]
        for each in two:
            await in_pieces(each)
            pool.release(shard.origin, each)
        await asyncio.sleep(0.03)
        assert await begin(pool, shard) not in two
        assert pool.connections == 1
        await pool.aclose()


@on_both_loops
async def test_what_a_peak_left_behind_is_closed_though_others_are_in_use() -> None:
    async with raw_shard(_echo) as shard:
        pool = Pool(keep_idle_s=0.05)
        for each in [await begin(pool, shard) for _ in range(4)]:
            await in_pieces(each)
            pool.release(shard.origin, each)
        async with asyncio.timeout(SOON_S):
            while pool.connections > 1:
                await whole(pool, shard.origin)
                await asyncio.sleep(0.01)
        assert len(shard.lines) <= 5
        await pool.aclose()


@on_both_loops
async def test_at_the_limit_an_idle_connection_gives_way_and_a_busy_one_does_not() -> None:
    async with raw_shard(_echo) as one, raw_shard(_echo) as other:
        pool = Pool(limit=2)
        await whole(pool, one.origin)
        busy = [await begin(pool, other), await begin(pool, other)]
        assert pool.connections == 2
        with pytest.raises(PoolFull):
            await begin(pool, one)
        assert await in_pieces(busy[0]) == b"/x"
        pool.release(other.origin, busy[0])
        assert await whole(pool, one.origin) == (200, b"/x")
        assert pool.connections == 2
        await pool.aclose()


@on_both_loops
async def test_the_limit_counts_those_that_are_still_connecting() -> None:
    async with raw_shard(_echo) as shard:
        pool = Pool(limit=3)
        sent = [asyncio.create_task(begin(pool, shard)) for _ in range(5)]
        ended = await asyncio.gather(*sent, return_exceptions=True)
        assert sum(isinstance(each, PoolFull) for each in ended) == 2
        assert pool.connections == 3
        await pool.aclose()


@on_both_loops
async def test_who_is_cancelled_while_it_connects_leaves_nothing() -> None:
    with full_backlog() as origin:
        pool = Pool(limit=1)
        for _ in range(2):
            task = asyncio.create_task(pool.send(origin, get(origin), connect_s=SOON_S, within_s=SOON_S))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert pool.connections == 0


@pytest.mark.parametrize("turns", range(12))
@on_both_loops
async def test_who_is_cancelled_at_any_turn_leaves_no_connection(turns: int) -> None:
    """Connecting, connected, asked: wherever the turn falls, the other side sees the end."""
    async with raw_shard(_echo) as shard:
        pool = Pool(limit=1)
        task = asyncio.create_task(
            pool.send(shard.origin, get(shard.origin, "/hold"), connect_s=SOON_S, within_s=SOON_S)
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.connections == 0
        await asyncio.sleep(0.01)
        await shard.all_ended()
        assert await whole(pool, shard.origin) == (200, b"/x")
        await pool.aclose()


@on_both_loops
async def test_who_is_cancelled_while_it_reads_leaves_a_connection_that_release_closes() -> None:
    async with raw_shard(answers(chunked(b"abc")[:-5])) as shard:
        pool = Pool()
        got = await begin(pool, shard)
        for wait in (got.piece, got.rest, got.news):
            got.take()
            task = asyncio.create_task(wait())
            await asyncio.sleep(0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        pool.release(shard.origin, got)
        assert pool.connections == 0
        await shard.all_ended()


@on_both_loops
async def test_closing_the_pool_ends_what_is_under_way() -> None:
    async with raw_shard(_echo) as shard:
        pool = Pool()
        await whole(pool, shard.origin)
        hold = get(shard.origin, "/hold")
        tasks = [
            asyncio.create_task(pool.send(shard.origin, hold, connect_s=SOON_S, within_s=SOON_S))
            for _ in range(2)
        ]
        await _until(lambda: sum(map(len, shard.asked)) == 3)
        await pool.aclose()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in ended] == [ConnectionLost, ConnectionLost]
        assert pool.connections == 0
        assert sum(map(len, shard.asked)) == 3  # nor was it sent again
        await shard.all_ended()


# --- what is sent -------------------------------------------------------------------------------

ORIGIN = Origin("shard", 8080)


def test_a_request_as_it_travels() -> None:
    sent = message("POST", ORIGIN, "/generate", b"{}", (("x-request-id", "a"),))
    head = b"POST /generate HTTP/1.1\r\nhost: shard:8080\r\nx-request-id: a\r\ncontent-length: 2\r\n\r\n"
    assert sent == head + b"{}"
    assert (
        message("POST", ORIGIN, "/", b"")
        == b"POST / HTTP/1.1\r\nhost: shard:8080\r\ncontent-length: 0\r\n\r\n"
    )
    assert message("GET", Origin("::1", 80), "/", b"") == b"GET / HTTP/1.1\r\nhost: [::1]:80\r\n\r\n"


@pytest.mark.parametrize("end", ["\r\n", "\n", "\r", "\r\nhost: other\r\n\r\n", "\n\r"])
def test_no_line_end_passes_into_a_head(end: str) -> None:
    for target, headers in [
        (f"/x{end}a", ()),
        ("/x", (("x-request-id", f"a{end}b"),)),
        ("/x", (("x-request-id", f"a{end}"),)),
        ("/x", ((f"a{end}b", "c"),)),
    ]:
        with pytest.raises(ValueError, match=r"line end|space"):
            message("GET", ORIGIN, target, b"", headers)


@pytest.mark.parametrize("target", ["/x HTTP/1.1", "/a b"])
def test_no_second_request_line_hides_in_a_target(target: str) -> None:
    with pytest.raises(ValueError, match="space"):
        message("GET", ORIGIN, target, b"")


def test_what_latin_1_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="latin-1"):
        message("GET", ORIGIN, "/x", b"", (("x-request-id", "日本"),))


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://10.0.0.1:8080", ("10.0.0.1", 8080)),
        ("http://shard", ("shard", 80)),
        ("http://[::1]:8080/", ("::1", 8080)),
    ],
)
def test_origins(url: str, origin: tuple[str, int]) -> None:
    assert Origin.of(url) == origin


@pytest.mark.parametrize("url", ["https://a:1", "a:1", "http://", "http://a:99999", "unix:/x"])
def test_no_origins(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Origin.of(url)


# --- waiting ------------------------------------------------------------------------------------


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not true():  # noqa: ASYNC110 - what is waited for is in the kernel
            await asyncio.sleep(0.001)


async def _stuck(line: Line) -> None:
    """The shard cannot send any more: this side does not read."""
    await _until(lambda: len(line.asked) > 0)
    sent, still = -1, 0
    while still < 10:
        now = line.writer.transport.get_write_buffer_size()
        still = still + 1 if now == sent and now > 0 else 0
        sent = now
        await asyncio.sleep(0.005)
