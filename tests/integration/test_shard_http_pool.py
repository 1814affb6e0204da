"""The own HTTP client's connections and what it sends."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.shards.http import (
    ConnectionLost,
    Origin,
    Pool,
    PoolFull,
    message,
)
from tests.integration.raw_shard import Line, answers, chunked, raw_shard, says
from tests.integration.shard_http import (
    SOON_S,
    begin,
    full_backlog,
    get,
    in_pieces,
    until,
    whole,
)
from tests.loops import on_both_loops

# --- the pool ---------------------------------------------------------------------------------------


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
        await until(lambda: sum(map(len, shard.asked)) == 3)
        await pool.aclose()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in ended] == [ConnectionLost, ConnectionLost]
        assert pool.connections == 0
        assert sum(map(len, shard.asked)) == 3  # nor was it sent again
        await shard.all_ended()


# --- what is sent -----------------------------------------------------------------------------------

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
