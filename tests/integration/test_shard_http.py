"""The own HTTP client on real sockets: what is an answer, and what is none."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.shards.http import (
    ConnectionLost,
    Malformed,
    Pool,
    connection,
)
from tests.integration.raw_shard import Line, answers, chunked, raw_shard, says
from tests.integration.shard_http import (
    SOON_S,
    begin,
    in_pieces,
    whole,
)
from tests.loops import on_both_loops

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"


# --- framings ---------------------------------------------------------------------------------------

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


# --- what is no answer ------------------------------------------------------------------------------


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
