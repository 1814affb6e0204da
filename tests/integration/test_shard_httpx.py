"""httpx over the own pool: its API, its exceptions, its habit of closing early."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from orchestrator.shards.http import Origin, Pool, PooledTransport
from tests.integration.raw_shard import HOST, Line, RawShard, Talk, answers, chunked, raw_shard, says
from tests.loops import on_both_loops


@asynccontextmanager
async def client_of(
    *talks: Talk, pool: Pool | None = None, timeout: httpx.Timeout | float = 5.0
) -> AsyncIterator[tuple[httpx.AsyncClient, RawShard]]:
    async with raw_shard(*talks) as shard:
        transport = PooledTransport(pool)
        base = f"http://{shard.origin}"
        async with httpx.AsyncClient(transport=transport, base_url=base, timeout=timeout) as client:
            yield client, shard


async def _echo(line: Line) -> None:
    while True:
        await line.say(says(await line.request(), b"content-type: text/plain"))


@on_both_loops
async def test_two_hundred_requests_use_one_connection() -> None:
    pool = Pool()
    async with client_of(_echo, pool=pool) as (client, shard):
        for number in range(200):
            answer = await client.get(f"/{number}", params={"a": "b c"})
            assert answer.text.startswith(f"GET /{number}?a=b+c HTTP/1.1\r\n")
        assert (len(shard.lines), pool.connections) == (1, 1)
    assert pool.connections == 0


@on_both_loops
async def test_a_post_carries_its_body_and_headers_and_no_second_framing() -> None:
    async with client_of(_echo) as (client, shard):
        answer = await client.post("/x", json={"a": 1}, headers={"x-request-id": "r1"})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain")
        head, body = shard.asked[0][0].split(b"\r\n\r\n")
        names = [line.split(b":")[0] for line in head.split(b"\r\n")[1:]]
        assert sorted(names) == sorted(set(names))
        assert {b"host", b"content-length", b"x-request-id", b"content-type"} <= set(names)
        assert b"transfer-encoding" not in names
        assert body == b'{"a":1}'


@on_both_loops
async def test_a_body_that_is_made_on_the_way_is_sent_with_its_length() -> None:
    async def made() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b"cd"

    async with client_of(_echo) as (client, shard):
        await client.post("/x", content=made())
        assert shard.asked[0][0].endswith(b"content-length: 4\r\n\r\nabcd")


@on_both_loops
async def test_a_stream_is_read_line_by_line() -> None:
    text = chunked(b"one\ntw", b"o\nthr", b"ee\n")
    async with client_of(answers(text, says(b"next"), size=3)) as (client, shard):
        async with client.stream("GET", "/x") as answer:
            assert [line async for line in answer.aiter_lines()] == ["one", "two", "three"]
        assert (await client.get("/x")).content == b"next"
        assert len(shard.lines) == 1


@on_both_loops
async def test_a_stream_that_is_left_early_closes_its_connection() -> None:
    pool = Pool()
    async with client_of(answers(chunked(b"one")[:-5]), _echo, pool=pool) as (client, shard):
        async with client.stream("GET", "/x") as answer:
            async for piece in answer.aiter_raw():
                assert piece == b"one"
                break
        assert pool.connections == 0
        await shard.all_ended()
        assert (await client.get("/y")).text.startswith("GET /y")


@on_both_loops
async def test_a_header_may_hold_any_byte() -> None:
    async with client_of(answers(says(b"ok", b"x-odd: \xe9\xff"))) as (client, _):
        answer = await client.get("/x")
        assert (answer.headers.raw[-1], answer.content) == ((b"x-odd", b"\xe9\xff"), b"ok")


@on_both_loops
async def test_timeouts_are_httpx_s() -> None:
    with socket.create_server((HOST, 0), backlog=0) as listening:
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(listening.getsockname())
        url = f"http://{HOST}:{listening.getsockname()[1]}"
        async with httpx.AsyncClient(
            transport=PooledTransport(), timeout=httpx.Timeout(5, connect=0.02)
        ) as client:
            with pytest.raises(httpx.ConnectTimeout):
                await client.get(url)
        for each in waiting:
            each.close()
    for text in (b"", chunked(b"one")[:-5]):
        async with client_of(answers(text), timeout=httpx.Timeout(5, read=0.02)) as (client, shard):
            with pytest.raises(httpx.ReadTimeout):
                await client.get("/x")
            await shard.all_ended()


@on_both_loops
async def test_failures_are_httpx_s() -> None:
    async def half(line: Line) -> None:
        await line.request()
        await line.say(chunked(b"one")[:-5])

    async def silent(line: Line) -> None:
        await line.request()

    for talk, error in [
        (half, httpx.ReadError),
        (silent, httpx.ReadError),
        (answers(b"SSH-2.0\r\n"), httpx.RemoteProtocolError),
    ]:
        async with client_of(talk) as (client, _):
            with pytest.raises(error):
                await client.get("/x")
    with socket.create_server((HOST, 0)) as listening:
        origin = Origin(*listening.getsockname())
    async with httpx.AsyncClient(transport=PooledTransport(Pool(limit=1))) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://{origin}")
        with pytest.raises(httpx.UnsupportedProtocol):
            await client.get(f"https://{origin}")
        with pytest.raises(httpx.UnsupportedProtocol):
            await client.head(f"http://{origin}")
    async with client_of(_echo, pool=Pool(limit=1)) as (client, _), client.stream("GET", "/x"):
        with pytest.raises(httpx.PoolTimeout):
            await client.get("/y")


@on_both_loops
async def test_who_is_cancelled_leaves_no_connection() -> None:
    pool = Pool()
    async with client_of(answers(b""), answers(chunked(b"one")[:-5]), pool=pool) as (client, shard):
        for number in (1, 2):
            task = asyncio.create_task(client.get("/x"))
            async with asyncio.timeout(5):
                while [len(each) for each in shard.asked] != [1] * number:  # noqa: ASYNC110 - in the kernel
                    await asyncio.sleep(0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert pool.connections == 0
        await shard.all_ended()


@on_both_loops
async def test_no_socket_is_left_to_the_collector() -> None:
    """An open one would warn when it is collected, and a warning is an error here."""
    async with client_of(_echo) as (client, _):
        await asyncio.gather(*[client.get("/x") for _ in range(5)])
    del client
    gc.collect()
