"""Real processes under the launcher and under the supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.core.shard import Rules
from orchestrator.errors import ConfigError, ShardError
from orchestrator.shards.launcher import Exit, FakeLauncher, Launcher
from orchestrator.shards.probe import http_probe
from orchestrator.shards.process import ProcessLauncher
from orchestrator.shards.supervisor import Pace, Supervisor
from tgi_patches.contract import Role, ShardSpec

COMMAND = (sys.executable, str(Path(__file__).with_name("tiny_shard.py")))


def spec(model: str = "run", shard: str = "d0", **changes: Any) -> ShardSpec:
    return ShardSpec("test", shard, Role.DECODE, model, "name", **changes)


@pytest.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[ProcessLauncher]:
    made = ProcessLauncher(tmp_path / "state", command=COMMAND, rotate_every_s=0.05)
    yield made
    await made.close(grace_s=0.5)
    assert await made.running() == {}


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while True:
            met = condition()
            if await met if asyncio.iscoroutine(met) else met:
                return
            await asyncio.sleep(0.01)


async def says(launcher: Launcher, shard: str, line: str) -> None:
    async def said() -> bool:
        return line in await launcher.logs(shard, 50)

    await until(said)


def alive(pid: int) -> bool:
    """True for a process that runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_shard_gets_its_port_its_threads_and_a_group_of_its_own(launcher: ProcessLauncher) -> None:
    running = await launcher.launch(spec("environment", cpus=(0, 1)))
    port = httpx.URL(running.url).port
    await says(launcher, "d0", f"threads=2 group=own session=shared port={port}")
    await says(launcher, "d0", "serving")
    assert await launcher.running() == {"d0": running}
    assert running.pid is not None
    assert alive(running.pid)


async def test_two_shards_never_share_a_port(launcher: ProcessLauncher) -> None:
    urls = [(await launcher.launch(spec(shard=f"s{n}"))).url for n in range(4)]
    assert len(set(urls)) == 4


async def test_a_given_port_is_used(launcher: ProcessLauncher) -> None:
    first = await launcher.launch(spec())
    port = httpx.URL(first.url).port
    assert port is not None
    await launcher.stop("d0", grace_s=5)
    assert (await launcher.launch(spec(port=port))).url == first.url


async def test_an_exit_is_noticed_with_its_code_and_last_line(launcher: ProcessLauncher) -> None:
    await launcher.launch(spec("crash"))
    ended = await asyncio.wait_for(launcher.wait("d0"), 20)
    assert ended == Exit("d0", 3, "crash of d0")
    assert not ended.bad_input
    assert await launcher.running() == {}


async def test_a_killed_shard_ends_with_the_signal(launcher: ProcessLauncher) -> None:
    running = await launcher.launch(spec())
    assert running.pid is not None
    waiting = asyncio.create_task(launcher.wait("d0"))
    await says(launcher, "d0", "serving")
    os.kill(running.pid, signal.SIGKILL)
    ended = await asyncio.wait_for(waiting, 20)
    assert (ended.code, str(ended)) == (-9, "signal 9")


async def test_bad_input_is_told_by_the_last_line_of_this_launch(launcher: ProcessLauncher) -> None:
    await launcher.launch(spec("crash"))
    await launcher.wait("d0")
    await launcher.launch(spec("bad"))
    ended = await asyncio.wait_for(launcher.wait("d0"), 20)
    assert ended.bad_input
    assert ended.last_line == "The folder /x holds no model."
    assert await launcher.logs("d0", 3) == ["crash of d0", "loading", "The folder /x holds no model."]


async def test_an_exit_without_a_word_does_not_borrow_the_line_of_an_earlier_launch(tmp_path: Path) -> None:
    silent = ProcessLauncher(tmp_path, command=(sys.executable, "-c", "import sys; sys.exit(2)"))
    silent.log_path("d0").write_text("a line of long ago\n")
    await silent.launch(spec())
    assert await silent.wait("d0") == Exit("d0", 2, "")


async def test_stopping_asks_first_and_forces_after_the_grace(launcher: ProcessLauncher) -> None:
    await launcher.launch(spec(shard="polite"))
    stubborn = await launcher.launch(spec("stubborn", shard="stubborn"))
    for shard in ("polite", "stubborn"):
        await says(launcher, shard, "serving")
    await launcher.stop("polite", grace_s=20)
    assert (await launcher.wait("polite")).code == -signal.SIGTERM
    await launcher.stop("stubborn", grace_s=0.2)
    assert (await launcher.wait("stubborn")).code == -signal.SIGKILL
    assert stubborn.pid is not None
    assert not alive(stubborn.pid)


async def test_stopping_takes_the_shards_children_along(launcher: ProcessLauncher) -> None:
    await launcher.launch(spec("parent"))
    await says(launcher, "d0", "serving")
    (line,) = [one for one in await launcher.logs("d0", 9) if one.startswith("child ")]
    child = int(line.removeprefix("child "))
    assert alive(child)
    await launcher.stop("d0", grace_s=20)
    await until(lambda: not alive(child))


async def test_stopping_what_does_not_run_is_nothing(launcher: ProcessLauncher) -> None:
    await launcher.stop("unknown", grace_s=1)
    await launcher.launch(spec("crash"))
    await launcher.wait("d0")
    await launcher.stop("d0", grace_s=1)
    assert await launcher.logs("unknown", 5) == []


async def test_a_shard_is_launched_once(launcher: ProcessLauncher) -> None:
    await launcher.launch(spec())
    with pytest.raises(ShardError, match="already running"):
        await launcher.launch(spec())


async def test_a_command_that_does_not_exist_is_bad_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-program"):
        await ProcessLauncher(tmp_path, command=("no-such-program",)).launch(spec())


async def test_a_log_over_its_limit_is_moved_aside_while_the_shard_runs(tmp_path: Path) -> None:
    launcher = ProcessLauncher(tmp_path, command=COMMAND, log_limit_bytes=5000, rotate_every_s=0.05)
    try:
        await launcher.launch(spec("chatty"))
        await until(lambda: (tmp_path / "d0.log.1").exists())
        moved = (tmp_path / "d0.log.1").stat().st_size
        assert moved > 5000
        assert moved < 1_000_000
        await until(lambda: launcher.log_path("d0").stat().st_size > 0)
        assert (await launcher.logs("d0", 1))[0].startswith("x")
    finally:
        await launcher.close(grace_s=0.2)


# --- under the supervisor -----------------------------------------------------------------------

RULES = Rules(backoff_first_s=0.01, backoff_most_s=0.1)
PACE = Pace(poll_s=0.05, probe_deadline_s=2.0, grace_s=2.0)


async def test_a_crashed_process_is_dead_at_once_and_comes_back_with_a_fresh_epoch(
    launcher: ProcessLauncher,
) -> None:
    async with httpx.AsyncClient() as client:
        supervisor = Supervisor(launcher, [spec()], http_probe(client), rules=RULES, pace=PACE)
        task = asyncio.create_task(supervisor.run())
        await asyncio.wait_for(supervisor.states.ready.wait(), 30)
        (first,) = supervisor.watched()
        with pytest.raises(httpx.HTTPError):
            await client.get(f"{first.url}/crash")
        await until(lambda: not supervisor.states.ready.is_set())
        await asyncio.wait_for(supervisor.states.ready.wait(), 30)
        (second,) = supervisor.watched()
        assert second.epoch > first.epoch
        assert supervisor.states.gone == {("d0", first.epoch)}
        assert (second.failures, supervisor.states.problems) == (1, {})
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_crash_loop_backs_off_and_says_what_the_log_says(launcher: ProcessLauncher) -> None:
    async with httpx.AsyncClient() as client:
        supervisor = Supervisor(launcher, [spec("crash")], http_probe(client), rules=RULES, pace=PACE)
        task = asyncio.create_task(supervisor.run())
        await until(lambda: "3 times in a row (exit code 3)" in supervisor.states.problems.get("d0", ""))
        assert "the next start is in 0.04 s" in supervisor.states.problems["d0"]
        assert "crash of d0" in supervisor.states.problems["d0"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_bad_input_is_never_launched_again(launcher: ProcessLauncher) -> None:
    async with httpx.AsyncClient() as client:
        supervisor = Supervisor(launcher, [spec("bad")], http_probe(client), rules=RULES, pace=PACE)
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(supervisor.run(), 30)
        error = caught.value.exceptions[0]
        assert isinstance(error, ConfigError)
        assert str(error) == "Shard d0 cannot start: The folder /x holds no model."
    assert await launcher.logs("d0", 9) == ["loading", "The folder /x holds no model."]


async def test_a_supervisor_that_comes_back_finds_its_shards_instead_of_launching_them(
    launcher: ProcessLauncher,
) -> None:
    async with httpx.AsyncClient() as client:
        epochs = []
        for _ in range(2):
            supervisor = Supervisor(launcher, [spec()], http_probe(client), rules=RULES, pace=PACE)
            task = asyncio.create_task(supervisor.run())
            await asyncio.wait_for(supervisor.states.ready.wait(), 30)
            epochs.append(supervisor.watched()[0].epoch)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert epochs[0] == epochs[1]


async def test_processes_are_rolled_to_another_limit_and_another_count(launcher: ProcessLauncher) -> None:
    pace = replace(PACE, proof_s=0.1)
    async with httpx.AsyncClient() as client:
        supervisor = Supervisor(launcher, [spec()], http_probe(client), rules=RULES, pace=pace)
        task = asyncio.create_task(supervisor.run())
        await asyncio.wait_for(supervisor.states.ready.wait(), 30)
        (old,) = (await launcher.running()).values()
        changed = [spec(shard=f"d{n}", max_concurrent_requests=9) for n in range(2)]
        supervisor.want(changed, "first")
        await until(lambda: supervisor.roll.over)
        assert supervisor.roll.state == "done", supervisor.roll.problem
        running = await launcher.running()
        assert sorted(running) == ["d1", "decode-0"]
        orders = [one.order for one in running.values()]
        assert all(order is not None and order.max_concurrent_requests == 9 for order in orders)
        assert all(order is not None and order.port for order in orders), "as it was launched"
        assert old.pid is not None
        assert not alive(old.pid)
        supervisor.want([spec("bad", max_concurrent_requests=10)], "second")
        await until(lambda: supervisor.roll.id == "second" and supervisor.roll.over)
        assert supervisor.roll.problem == (
            "Shard d0 did not get ready: it ended (exit code 2): The folder /x holds no model."
        )
        assert sorted(await launcher.running()) == ["d1", "decode-0"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_two_shards_of_one_name_are_bad_configuration() -> None:
    with pytest.raises(ConfigError, match="same name"):
        Supervisor(FakeLauncher(), [spec(), spec()], http_probe(httpx.AsyncClient()))


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"null", b'{"protocol": 99}', b"\xff"])
async def test_a_status_that_is_none_counts_as_no_answer(body: bytes) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    async with httpx.AsyncClient(transport=transport) as client:
        with pytest.raises(ShardError, match="gives no status"):
            await http_probe(client)("http://s")
