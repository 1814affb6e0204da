"""The client for Redis' protocol against servers that do as they are told."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import hiredis
import pytest

from orchestrator.errors import ConfigError, Unreachable
from orchestrator.queues.address import Address
from orchestrator.queues.resp import Refused, RespClient, Say

Answer = Callable[[int, list[str]], bytes | None]
"""Connection's number and command -> what is written, None to close."""

OK = b"+OK\r\n"


def echo(_: int, command: list[str]) -> bytes:
    return f"+{command[-1]}\r\n".encode()


class Scripted:
    """Listens on a unix socket, or on TCP; `heard` has the commands of each connection."""

    def __init__(self, answer: Answer, piece_bytes: int = 1 << 20) -> None:
        self.heard: list[list[list[str]]] = []
        self.url = ""
        self._came = asyncio.Event()
        self._answer = answer
        self._piece_bytes = piece_bytes

    async def has_heard(self, commands: int) -> None:
        while sum(map(len, self.heard)) < commands:
            self._came.clear()
            await self._came.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, parser = len(self.heard), hiredis.Reader(encoding="utf-8")
        self.heard.append([])
        try:
            while data := await reader.read(65536):
                parser.feed(data)
                while (command := parser.gets()) is not False:
                    self.heard[number].append(command)
                    self._came.set()
                    reply = self._answer(number, command)
                    if reply is None:
                        return
                    for start in range(0, len(reply), self._piece_bytes):
                        writer.write(reply[start : start + self._piece_bytes])
                        await asyncio.sleep(0)
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def scripted(path: Path, answer: Answer, **options: Any) -> AsyncIterator[Scripted]:
    made = Scripted(answer, **options)
    server = await asyncio.start_unix_server(made.serve, path / "redis.sock")
    made.url = f"unix://{path}/redis.sock"
    try:
        yield made
    finally:
        server.close()
        await server.wait_closed()


class Bed:
    """Servers and clients of one test."""

    def __init__(self, stack: AsyncExitStack, path: Path) -> None:
        self._stack = stack
        self._path = path

    async def server(self, answer: Answer, **options: Any) -> Scripted:
        return await self._stack.enter_async_context(scripted(self._path, answer, **options))

    def client(self, url: str, *, deadline_s: float = 5.0, **options: Any) -> RespClient:
        client = RespClient(url, deadline_s=deadline_s, **options)
        self._stack.push_async_callback(client.aclose)
        return client


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    async with AsyncExitStack() as stack, asyncio.timeout(20):
        yield Bed(stack, tmp_path)


async def told(replies: list[asyncio.Future[Any]]) -> list[Any]:
    return await asyncio.gather(*replies, return_exceptions=True)


# --- replies ------------------------------------------------------------------------------------


async def test_replies_may_come_one_byte_at_a_time(bed: Bed) -> None:
    nested = b"*3\r\n$4\r\n\xc3\xa4\xc3\xb6\r\n*2\r\n:-7\r\n*1\r\n$0\r\n\r\n$-1\r\n"
    replies = {"nested": nested, "nil": b"*-1\r\n", "empty": b"*0\r\n", "text": b"+PONG\r\n"}
    server = await bed.server(lambda _, command: replies[command[0]], piece_bytes=1)
    client = bed.client(server.url)
    assert await client.all([(name,) for name in replies]) == [["äö", [-7, [""]], None], None, [], "PONG"]


async def test_an_error_is_the_reply_of_its_call_only(bed: Bed) -> None:
    answers = {"a": b"+1\r\n", "b": b"-WRONGTYPE Not a list.\r\n", "c": b":3\r\n"}
    server = await bed.server(lambda _, command: answers[command[0]])
    client = bed.client(server.url)
    first, second, third = await told([client.send(name) for name in "abc"])
    assert (first, third) == ("1", 3)
    assert isinstance(second, Refused)
    assert second.reply == "WRONGTYPE Not a list."
    assert str(second) == "Redis refused a command: WRONGTYPE Not a list."
    assert server.heard == [[[name] for name in "abc"]]  # nothing was tried again


async def test_commands_are_packed_by_their_bytes(bed: Bed) -> None:
    server = await bed.server(echo)
    command = ("SET", "a\r\nb", "", "ä", 12)
    await bed.client(server.url).send(*command)
    assert server.heard == [[["SET", "a\r\nb", "", "ä", "12"]]]


async def test_what_is_sent_in_one_turn_of_the_loop_leaves_in_one_write(bed: Bed) -> None:
    client = bed.client((await bed.server(echo)).url)
    await client.open()
    connection = client._connection
    assert connection is not None
    transport, writes = connection._transport, list[bytes]()

    class Noting:
        def write(self, data: bytes) -> None:
            writes.append(data)
            transport.write(data)  # type: ignore[union-attr]

        def abort(self) -> None:
            transport.abort()  # type: ignore[union-attr]

    connection._transport = Noting()  # type: ignore[assignment]
    for _ in range(2):
        assert await client.all([("ECHO", n) for n in range(16)]) == [str(n) for n in range(16)]
    assert [data.count(b"ECHO") for data in writes] == [16, 16]


async def test_a_waiter_that_leaves_does_not_shift_the_replies_of_others(bed: Bed) -> None:
    server = await bed.server(echo)
    client = bed.client(server.url)
    replies = [client.send("ECHO", name) for name in "abcd"]
    replies[0].cancel()
    await asyncio.sleep(0)
    replies[2].cancel()
    assert (await replies[1], await replies[3]) == ("b", "d")
    assert [command[1] for command in server.heard[0]] == list("abcd")  # sent all the same


# --- connections that break ---------------------------------------------------------------------


async def test_calls_that_a_broken_connection_left_come_first_and_in_order_on_the_next(bed: Bed) -> None:
    def answer(number: int, command: list[str]) -> bytes | None:
        return None if (number, command[1]) == (0, "b") else echo(number, command)

    server = await bed.server(answer)
    client = bed.client(server.url)
    replies = [client.send("ECHO", name) for name in "abc"]
    assert await replies[0] == "a"
    replies.append(client.send("ECHO", "d"))  # the connection may break before or after this one leaves
    assert await told(replies) == list("abcd")
    assert [command[1] for command in server.heard[1]] == list("bcd")


async def test_a_call_that_was_made_as_the_connection_broke_follows_those_that_it_left(bed: Bed) -> None:
    server = await bed.server(lambda number, command: b"" if number == 0 else echo(number, command))
    client = bed.client(server.url)
    replies = [client.send("ECHO", name) for name in "abc"]
    await server.has_heard(3)
    replies.append(client.send("ECHO", "d"))
    assert client._connection is not None
    client._connection.end("cut")
    assert await told(replies) == list("abcd")
    assert [command[1] for command in server.heard[1]] == list("abcd")


async def test_a_server_that_went_between_two_batches_costs_no_attempt(bed: Bed) -> None:
    def answer(number: int, command: list[str]) -> bytes | None:
        return None if command[0] == "QUIT" else echo(number, command)

    server = await bed.server(answer)
    client = bed.client(server.url)
    assert await client.send("ECHO", "a") == "a"
    with pytest.raises(Unreachable, match="closed the connection"):
        await client.send("QUIT", attempts=1)
    assert await client.send("ECHO", "b", attempts=1) == "b"
    assert len(server.heard) == 2


async def test_a_call_is_tried_twice_and_one_that_may_not_be_repeated_once(bed: Bed) -> None:
    server = await bed.server(lambda *_: None)
    client = bed.client(server.url)
    once, twice = await told([client.send("XREADGROUP", attempts=1), client.send("EVALSHA")])
    for error in (once, twice):
        assert isinstance(error, Unreachable)
        assert str(error) == "Redis does not answer: it closed the connection."
    # The first connection closed at its first command; the second one was given the second.
    assert [one[0][0] for one in server.heard] == ["XREADGROUP", "EVALSHA"]


async def test_a_server_that_never_answers_is_given_up_after_two_deadlines(bed: Bed) -> None:
    server = await bed.server(lambda *_: b"")
    client = bed.client(server.url, deadline_s=0.05)
    begin_s = asyncio.get_running_loop().time()
    errors = await told([client.send("PING"), client.send("PING")])
    assert [str(error) for error in errors] == ["Redis does not answer: no answer within 0.05 s."] * 2
    assert asyncio.get_running_loop().time() - begin_s >= 0.1
    assert len(server.heard) == 2


async def test_half_a_reply_is_no_answer(bed: Bed) -> None:
    server = await bed.server(lambda *_: b"*2\r\n:1\r\n")
    with pytest.raises(Unreachable, match="no answer within"):
        await bed.client(server.url, deadline_s=0.05).send("KEYS")


async def test_the_oldest_call_has_the_deadline_however_many_follow(bed: Bed) -> None:
    """Calls that go on coming do not put it off."""
    server = await bed.server(lambda *_: b"")
    client = bed.client(server.url, deadline_s=0.1)
    oldest = client.send("PING", attempts=1)

    async def more() -> None:
        while True:
            client.send("PING")
            await asyncio.sleep(0.01)

    task = asyncio.create_task(more())
    with pytest.raises(Unreachable):
        await oldest
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_reply_that_nobody_asked_for_ends_the_connection(bed: Bed) -> None:
    server = await bed.server(lambda number, _: b"+1\r\n+2\r\n" if number == 0 else b"+3\r\n")
    client = bed.client(server.url)
    assert await client.send("A") == "1"
    assert await client.send("B") == "3"
    assert len(server.heard) == 2


async def test_a_server_that_turns_clients_away_before_they_ask_is_quoted(bed: Bed, tmp_path: Path) -> None:
    async def turn_away(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"-ERR max number of clients reached\r\n")
        writer.close()

    async with await asyncio.start_unix_server(turn_away, tmp_path / "full.sock"):
        for _ in range(20):
            with pytest.raises(Unreachable, match="max number of clients reached"):
                await bed.client(f"unix://{tmp_path}/full.sock").send("PING")


async def test_what_is_no_reply_ends_the_connection(bed: Bed) -> None:
    server = await bed.server(lambda *_: b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(Unreachable, match=r"what came is no reply \(.*\)\.$"):
        await bed.client(server.url).send("PING")


async def test_no_server_is_a_sentence_that_says_where(bed: Bed, tmp_path: Path) -> None:
    with pytest.raises(Unreachable) as caught:
        await bed.client(f"unix://{tmp_path}/none.sock").send("PING")
    where = f"{tmp_path}/none.sock"
    assert str(caught.value) == f"Redis does not answer: {where}: No such file or directory."
    with pytest.raises(Unreachable, match="Redis does not answer"):
        await bed.client(f"unix://{tmp_path}/none.sock").open()


async def test_a_server_that_comes_back_is_found_again(bed: Bed, tmp_path: Path) -> None:
    client = bed.client(f"unix://{tmp_path}/redis.sock")
    with pytest.raises(Unreachable):
        await client.send("ECHO", "a")
    async with scripted(tmp_path, echo):
        assert await client.send("ECHO", "b") == "b"
        await client.aclose()


# --- what comes first ---------------------------------------------------------------------------


async def test_password_name_and_database_come_first_on_every_connection(bed: Bed) -> None:
    def answer(number: int, command: list[str]) -> bytes | None:
        return None if (number, command[0]) == (0, "GET") else OK

    server = await bed.server(answer)
    address = server.url.replace("unix://", "unix://me:p%40ss@") + "?db=3&client_name=orch"
    await bed.client(address).send("GET", "k")
    hello = [["AUTH", "me", "p@ss"], ["CLIENT", "SETNAME", "orch"], ["SELECT", "3"]]
    assert server.heard == [[*hello, ["GET", "k"]]] * 2


async def test_a_refused_password_is_one_sentence_and_nothing_else_is_sent(bed: Bed) -> None:
    refusal = b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
    server = await bed.server(lambda *_: refusal)
    client = bed.client(server.url.replace("unix://", "unix://:secret@"))
    for asked in (client.open, lambda: client.send("GET", "k")):
        with pytest.raises(Unreachable) as caught:
            await asked()
        assert str(caught.value) == (
            "Redis refuses this client: WRONGPASS invalid username-password pair or user is disabled."
        )
    assert {command[0] for heard in server.heard for command in heard} == {"AUTH"}


async def test_a_greeting_goes_before_the_calls_that_wait_for_the_connection(bed: Bed) -> None:
    async def greet(say: Say) -> None:
        assert await say([("SCRIPT", "x"), ("SCRIPT", "y")]) == ["x", "y"]

    server = await bed.server(echo)
    client = bed.client(server.url, greet=greet)
    replies = [client.send("ECHO", "a")]
    await asyncio.sleep(0)
    replies.append(client.send("ECHO", "b"))
    assert await told(replies) == ["a", "b"]
    assert [command[1] for command in server.heard[0]] == ["x", "y", "a", "b"]


async def test_what_a_greeting_raises_is_told(bed: Bed) -> None:
    async def greet(_: Say) -> None:
        raise ConfigError("Another version lives here.")

    client = bed.client((await bed.server(echo)).url, greet=greet)
    with pytest.raises(ConfigError, match="Another version"):
        await client.open()
    with pytest.raises(Unreachable, match="Another version lives here"):
        await client.send("ECHO", "a")


async def test_a_server_that_closes_while_it_is_greeted_is_tried_again(bed: Bed) -> None:
    async def greet(say: Say) -> None:
        await say([("HELLO", "x")])

    server = await bed.server(lambda number, command: None if number == 0 else echo(number, command))
    assert await bed.client(server.url, greet=greet).send("ECHO", "a") == "a"
    assert len(server.heard) == 2


async def test_a_connection_that_breaks_as_its_greeting_is_answered_is_not_used(bed: Bed) -> None:
    """The unasked second reply comes before the greeting's end is noticed."""

    async def greet(say: Say) -> None:
        await say([("HELLO", "x")])

    server = await bed.server(lambda number, command: echo(number, command) * (2 if number == 0 else 1))
    assert await bed.client(server.url, greet=greet).send("ECHO", "a") == "a"
    assert server.heard == [[["HELLO", "x"]], [["HELLO", "x"], ["ECHO", "a"]]]


async def test_a_server_that_hangs_up_before_the_greeting_is_noticed_at_once(
    bed: Bed, tmp_path: Path
) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def greet(say: Say) -> None:
        await asyncio.sleep(0.02)
        await say([("HELLO", "x")])

    async with await asyncio.start_unix_server(hang_up, tmp_path / "redis.sock"):
        client = bed.client(f"unix://{tmp_path}/redis.sock", deadline_s=60.0, greet=greet)
        with pytest.raises(Unreachable, match="it closed the connection"):
            await client.send("PING")


async def test_scripts_that_were_forgotten_are_loaded_again_and_no_call_overtakes_another(bed: Bed) -> None:
    async def greet(say: Say) -> None:
        await say([("LOAD", "all")])

    def answer(number: int, command: list[str]) -> bytes:
        forgot = number == 0 and command == ["EVALSHA", "b"]
        return b"-NOSCRIPT No matching script.\r\n" if forgot else echo(number, command)

    server = await bed.server(answer)
    client = bed.client(server.url, greet=greet)
    assert await client.all([("EVALSHA", name) for name in "abc"]) == list("abc")
    assert [command[1] for command in server.heard[1]] == ["all", "b", "c"]


async def test_a_redis_that_always_forgets_is_given_up(bed: Bed) -> None:
    server = await bed.server(lambda *_: b"-NOSCRIPT No matching script.\r\n")
    with pytest.raises(Unreachable, match="forgot the scripts"):
        await bed.client(server.url).send("EVALSHA", "a")
    assert len(server.heard) == 2


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["queued", "connecting", "greeting", "waiting"])
async def test_closing_fails_what_is_not_answered_and_what_comes_later(bed: Bed, when: str) -> None:
    async def greet(say: Say) -> None:
        await say([("HELLO", "x")])

    server = await bed.server(lambda *_: b"")
    client = bed.client(server.url, deadline_s=60.0, greet=greet if when == "greeting" else None)
    if when == "queued":
        await client.open()
    reply = client.send("PING")
    if when == "connecting":
        await asyncio.sleep(0)
    if when in ("greeting", "waiting"):
        await server.has_heard(1)
    await client.aclose()
    for future in (reply, client.send("PING")):
        with pytest.raises(Unreachable, match="The queue is closed"):
            await future
    await client.aclose()  # twice is once


# --- addresses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["http://host", "redis://host/0?nonsense=1", "redis://host:port", "rediss://h?ssl_ca_certs=/none"]
)
def test_a_url_that_cannot_be_used_is_one_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match="The Redis URL cannot be used: "):
        Address.of(url)


def test_an_address_is_what_redis_py_makes_of_the_url_and_hides_the_password() -> None:
    plain = Address.of("redis://:secret@10.0.0.1/2")
    assert (plain.host, plain.port, plain.tls) == ("10.0.0.1", 6379, None)
    assert plain.hello == (("AUTH", "secret"), ("SELECT", 2))
    assert "secret" not in repr(plain) + str(plain)
    assert Address.of("redis://me@h").hello == (("AUTH", "me", ""),)
    assert Address.of("unix:///run/redis.sock").path == "/run/redis.sock"
    assert Address.of("rediss://h:1").tls is not None


async def test_tcp_is_spoken_too(bed: Bed) -> None:
    made = Scripted(echo)
    async with await asyncio.start_server(made.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = bed.client(f"redis://127.0.0.1:{port}")
        assert await client.send("ECHO", "a") == "a"
        await client.aclose()
    with pytest.raises(Unreachable, match=f"127.0.0.1:{port}"):
        await bed.client(f"redis://127.0.0.1:{port}").send("ECHO", "b")


@pytest.fixture
def pair(tmp_path: Path) -> ssl.SSLContext:
    """A server's, with a certificate for localhost that nobody else knows: `cert.pem`."""
    make = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    files = "-addext subjectAltName=DNS:localhost -keyout key.pem -out cert.pem"
    subprocess.run(["openssl", *make.split(), *files.split()], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    return context


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")
async def test_tls_is_spoken_with_a_server_whose_certificate_is_known(
    bed: Bed, pair: ssl.SSLContext, tmp_path: Path
) -> None:
    made = Scripted(echo)
    async with await asyncio.start_server(made.serve, "localhost", 0, ssl=pair) as server:
        url = f"rediss://localhost:{server.sockets[0].getsockname()[1]}"
        client = bed.client(f"{url}?ssl_ca_certs={tmp_path}/cert.pem")
        assert await client.send("ECHO", "a") == "a"
        await client.aclose()
        with pytest.raises(Unreachable, match="certificate verify failed"):
            await bed.client(url).send("ECHO", "a")
