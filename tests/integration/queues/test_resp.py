"""The client for Redis' protocol against a real Redis."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop

from orchestrator.embedded.redis import EmbeddedRedis
from orchestrator.errors import Unreachable
from orchestrator.queues.resp import Refused, RespClient

World = Any
Until = Any


@pytest.fixture
async def client(world: World) -> AsyncIterator[RespClient]:
    made = RespClient(world.server.url, deadline_s=5.0)
    yield made
    await made.aclose()


async def test_many_senders_get_their_own_replies_in_the_order_in_which_they_sent(
    world: World, client: RespClient
) -> None:
    """Every reply of INCR names the place of its call among all."""
    places: list[int] = []

    async def sender() -> None:
        for _ in range(20):
            reply = client.send("INCR", "count")
            reply.add_done_callback(lambda reply: places.append(reply.result()))
            await asyncio.sleep(0)
        await reply

    await asyncio.gather(*(sender() for _ in range(50)))
    assert places == list(range(1, 1001))


async def test_a_large_reply_comes_whole(client: RespClient) -> None:
    text = "0123456789abcdef" * (1 << 19)
    assert await client.send("SET", "large", text) == "OK"
    got, short = await client.all([("GET", "large"), ("STRLEN", "large")])
    assert short == 8 << 20
    assert got == text


async def test_what_is_not_utf_8_is_still_a_reply(world: World, client: RespClient) -> None:
    await world.redis.set("bytes", b"a\xff")
    assert await client.send("GET", "bytes") == "a\ufffd"


async def test_an_error_of_redis_keeps_its_words(client: RespClient) -> None:
    with pytest.raises(Refused) as caught:
        await client.send("EVALSHA", "x")
    assert caught.value.reply == "ERR wrong number of arguments for 'evalsha' command"


async def test_a_blocked_read_waits_less_than_its_deadline_and_wakes_at_once(
    world: World, client: RespClient
) -> None:
    assert await client.send("XREAD", "BLOCK", 10, "STREAMS", "s", "$") is None
    reading = client.send("XREAD", "BLOCK", 4000, "STREAMS", "s", "0-0")
    await asyncio.sleep(0.02)
    entry = await world.redis.xadd("s", {"b": "x"})
    assert await reading == [["s", [[entry, ["b", "x"]]]]]


async def test_a_password_that_is_wrong_is_a_sentence_and_the_right_one_works(
    world: World, client: RespClient
) -> None:
    await client.send("ACL", "SETUSER", "me", "on", ">right", "~*", "+@all")
    for password, works in (("wrong", False), ("right", True)):
        other = RespClient(world.server.url.replace("unix://", f"unix://me:{password}@"), deadline_s=5.0)
        if works:
            assert await other.send("ACL", "WHOAMI") == "me"
        else:
            with pytest.raises(Unreachable, match=r"^Redis refuses this client: WRONGPASS [^\n]*\.$"):
                await other.send("PING")
        await other.aclose()


async def test_the_database_of_the_url_is_used_again_after_the_connection_was_cut(
    world: World, client: RespClient
) -> None:
    other = RespClient(world.server.url + "?db=5", deadline_s=5.0)
    connection = await other.send("CLIENT", "ID")
    await client.send("CLIENT", "KILL", "ID", connection)
    assert await other.send("SET", "k", "v") == "OK"
    assert (await client.send("GET", "k"), await other.send("GET", "k")) == (None, "v")
    await other.aclose()


async def test_calls_on_their_way_when_the_connection_is_cut_are_made_again_in_order(
    world: World, client: RespClient
) -> None:
    connection = await client.send("CLIENT", "ID")
    blocked = client.send("BLPOP", "nothing", 0)
    pushes = [client.send("RPUSH", "list", n) for n in range(5)]
    await asyncio.sleep(0.02)  # Redis has read them, and blocks on the first one
    assert await world.redis.client_kill_filter(_id=connection) == 1
    pushes += [client.send("RPUSH", "list", n) for n in range(5, 8)]
    await world.redis.rpush("nothing", "x")
    assert await blocked == ["nothing", "x"]
    assert [await push for push in pushes] == list(range(1, 9))
    assert await client.send("LRANGE", "list", 0, -1) == [str(n) for n in range(8)]


def test_the_loop_of_the_workers_runs_it_too(tmp_path: Path) -> None:
    async def scenario() -> list[Any]:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(EmbeddedRedis(tmp_path))
            client = RespClient(server.url, deadline_s=5.0)
            stack.push_async_callback(client.aclose)
            assert await client.send("PING") == "PONG"
            with pytest.raises(Unreachable, match="Redis does not answer"):
                await client.send("SHUTDOWN", "NOSAVE", attempts=1)
            await server.wait()
            with pytest.raises(Unreachable, match="Redis does not answer"):
                await client.send("PING")
            again = await stack.enter_async_context(EmbeddedRedis(tmp_path))
            assert again.url == server.url
            return await client.all([("RPUSH", "list", n) for n in range(3)])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(scenario()) == [1, 2, 3]


def test_a_loop_that_was_busy_reads_what_came_before_it_gives_redis_up(tmp_path: Path) -> None:
    """The reply comes, and the deadline passes, while another socket's callback keeps the loop."""

    async def scenario() -> Any:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(EmbeddedRedis(tmp_path))
            client = RespClient(server.url, deadline_s=0.2)
            stack.push_async_callback(client.aclose)
            ours, theirs = (stack.enter_context(one) for one in socket.socketpair())
            loop = asyncio.get_running_loop()
            loop.add_reader(ours, lambda: (ours.recv(1), time.sleep(0.5)))
            stack.callback(loop.remove_reader, ours)
            await client.open()
            reply = client.send("BLPOP", "nothing", "0.1", attempts=1)
            await asyncio.sleep(0.02)
            theirs.send(b"!")
            return await reply

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(scenario()) is None
