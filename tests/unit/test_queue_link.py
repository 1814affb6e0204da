"""Scripts reach Redis in the order in which they are sent, loaded first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import hiredis
import pytest

from orchestrator.errors import ConfigError, Unreachable
from orchestrator.queues import ConductorQueue
from orchestrator.queues.calls import Call, Timings
from orchestrator.queues.link import ScriptRunner
from orchestrator.queues.scripts import ALL, ENTER, SCHEMA_VERSION, Keys, Script

SCRIPT = Script("return ARGV[1]")
VERSION = f"+{SCHEMA_VERSION}\r\n".encode()


def call(name: str) -> Call:
    return Call(SCRIPT, ("key",), (name,))


class Server:
    """Loads what it is told to; `reply` answers the scripts, None closes."""

    def __init__(self) -> None:
        self.scripts: list[list[str]] = []
        """What each connection ran, by its last argument."""
        self.loaded: list[int] = []
        self.entered = VERSION
        self.reply: Callable[[int, str], bytes | None] = lambda _, name: f"+reply {name}\r\n".encode()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, parser = len(self.scripts), hiredis.Reader(encoding="utf-8")
        self.scripts.append([])
        self.loaded.append(0)
        while data := await reader.read(65536):
            parser.feed(data)
            while (command := parser.gets()) is not False:
                answer = self._answer(number, command)
                if answer is None:
                    writer.close()
                    return
                writer.write(answer)
        writer.close()

    def _answer(self, number: int, command: list[str]) -> bytes | None:
        if command[0] == "SCRIPT":
            self.loaded[number] += 1
            return b"+sha\r\n"
        if command[1] == ENTER.sha:
            return self.entered
        assert command[:4] == ["EVALSHA", SCRIPT.sha, "1", "key"]
        self.scripts[number].append(command[4])
        return self.reply(number, command[4])


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    made = Server()
    listener = await asyncio.start_unix_server(made.serve, tmp_path / "redis.sock")
    yield made
    listener.close()
    await listener.wait_closed()


@pytest.fixture
async def runner(server: Server, tmp_path: Path) -> AsyncIterator[ScriptRunner]:
    async with AsyncExitStack() as stack, asyncio.timeout(20):
        made = ScriptRunner(f"unix://{tmp_path}/redis.sock", Keys("test"), Timings(deadline_s=5.0))
        stack.push_async_callback(made.aclose)
        yield made


async def test_calls_do_not_wait_for_each_other_and_keep_their_order(
    runner: ScriptRunner, server: Server
) -> None:
    """Nothing is answered before the last one has come."""
    server.reply = lambda _, name: b"+1\r\n+2\r\n+3\r\n+4\r\n" if name == "d" else b""
    await runner.start()
    replies = [runner.send(call("a"))]
    await asyncio.sleep(0.01)
    replies += [runner.send(call(name)) for name in "bc"]
    replies[2].cancel()  # nobody waits for it: it is sent all the same
    await asyncio.sleep(0.01)
    assert await runner.run([call("d")]) == ["4"]
    assert [await replies[0], await replies[1]] == ["1", "2"]
    assert server.scripts == [list("abcd")]
    assert server.loaded == [len(ALL)]


async def test_a_withdrawal_never_overtakes_what_it_races_with(runner: ScriptRunner, server: Server) -> None:
    """Each connection takes one more call than the last and then breaks: the rest follow in order."""
    taken: list[str] = []

    def reply(number: int, name: str) -> bytes | None:
        if len(server.scripts[number]) > 2:
            return None
        taken.append(name)
        return b"+ok\r\n"

    server.reply = reply
    names = [f"{step}{n}" for n in range(2) for step in ("submit", "complete")]
    assert await runner.run([call(name) for name in names]) == ["ok"] * 4
    assert taken == names


async def test_what_tells_all_that_is_held_is_built_anew_and_never_repeated_behind_later_calls(
    runner: ScriptRunner, server: Server
) -> None:
    """The first connection takes a heartbeat and a ticket, and breaks before it answers."""
    held = ["first"]
    server.reply = lambda number, name: (None if name == "ticket" else b"") if number == 0 else b"+ok\r\n"
    await runner.start()
    told = asyncio.create_task(runner.tell(lambda: call(f"holds {' '.join(held)}")))
    await asyncio.sleep(0)  # it is sent
    held.append("second")
    ticket = runner.send(call("ticket"))
    assert (await ticket, await told) == ("ok", "ok")
    assert server.scripts == [["holds first", "ticket"], ["ticket", "holds first second"]]


async def test_every_new_connection_loads_the_scripts_before_it_runs_one(
    runner: ScriptRunner, server: Server
) -> None:
    server.reply = lambda number, _: None if number == 0 else b"+ok\r\n"
    assert await runner.run([call("a")]) == ["ok"]
    assert server.loaded == [len(ALL)] * 2


async def test_a_refused_script_is_an_error_of_its_call(runner: ScriptRunner, server: Server) -> None:
    server.reply = lambda _, name: b"-ERR broken\r\n" if name == "bad" else b"+ok\r\n"
    good, bad, other = [runner.send(call(name)) for name in ("good", "bad", "other")]
    with pytest.raises(Unreachable, match="Redis refused a command: ERR broken"):
        await bad
    assert (await good, await other) == ("ok", "ok")
    with pytest.raises(Unreachable, match="ERR broken"):
        await runner.run([call("good"), call("bad")])


async def test_a_schema_that_changed_while_redis_was_away_fails_calls_with_a_sentence(
    runner: ScriptRunner, server: Server
) -> None:
    await runner.start()
    server.entered, server.reply = b"+99\r\n", lambda *_: None
    with pytest.raises(Unreachable, match="schema 99"):
        await runner.send(call("a"))


async def test_a_redis_that_is_too_old_is_told_and_one_that_still_loads_is_waited_for(
    runner: ScriptRunner, server: Server
) -> None:
    server.entered = b"-ERR unknown command\r\n"
    with pytest.raises(ConfigError, match=r"must be 6\.2 or later, cannot be used: ERR unknown command\.$"):
        await runner.start()
    server.entered = b"-LOADING Redis is loading the dataset in memory\r\n"
    with pytest.raises(Unreachable, match="LOADING"):
        await runner.start()
    server.entered = VERSION
    await runner.start()


async def test_a_read_whose_answer_was_lost_is_not_repeated(tmp_path: Path) -> None:
    """What it was given stands under the conductor's name: it must be claimed, not skipped."""
    heard: list[str] = []

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append((await reader.read(65536)).decode())
        writer.close()

    async with await asyncio.start_unix_server(hang_up, tmp_path / "redis.sock"):
        queue = ConductorQueue(f"unix://{tmp_path}/redis.sock", "test", "c")
        with pytest.raises(Unreachable, match="closed the connection"):
            await queue.read(block=True)
        await queue.aclose()
    assert [text.count("XREADGROUP") for text in heard] == [1]
