"""What every launcher does, whatever its shards are."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import ShardError
from orchestrator.shards.launcher import FakeLauncher, Launcher
from orchestrator.shards.process import ProcessLauncher, running_of
from orchestrator.shards.static import StaticLauncher
from tgi_patches.contract import Role, ShardSpec

COMMAND = (sys.executable, str(Path(__file__).with_name("tiny_shard.py")))
KEPT = "http://10.0.0.1:3001"


def spec(shard: str = "d0") -> ShardSpec:
    return ShardSpec("test", shard, Role.DECODE, "run", "name")


@pytest.fixture(params=["fake", "process", "static"])
async def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Launcher]:
    """`d0` is launched by each; the static one also knows `p0`, which somebody else keeps."""
    processes = ProcessLauncher(tmp_path, command=COMMAND)
    made: dict[str, Launcher] = {
        "fake": FakeLauncher(),
        "process": processes,
        "static": StaticLauncher({"p0": KEPT}, processes),
    }
    yield made[request.param]
    await processes.close(grace_s=2)


async def launched_here(launcher: Launcher) -> list[str]:
    return [shard for shard, running in (await launcher.running()).items() if not running.observed]


async def test_a_shard_is_launched_once_and_is_listed_while_it_runs(launcher: Launcher) -> None:
    assert await launched_here(launcher) == []
    running = await launcher.launch(spec())
    assert (await launcher.running())["d0"] == running
    with pytest.raises(ShardError, match="already running"):
        await launcher.launch(spec())
    await launcher.stop("d0", grace_s=5)
    assert await launched_here(launcher) == []


async def test_whoever_waits_hears_of_the_end_and_may_stop_waiting_before(launcher: Launcher) -> None:
    await launcher.launch(spec())
    impatient, patient = (asyncio.create_task(launcher.wait("d0")) for _ in range(2))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.wait([impatient])
    assert await launched_here(launcher) == ["d0"]
    await launcher.stop("d0", grace_s=5)
    assert (await asyncio.wait_for(patient, 20)).shard == "d0"


async def test_what_was_never_launched_can_be_waited_for_and_stopped(launcher: Launcher) -> None:
    await launcher.stop("unknown", grace_s=1)
    assert (await launcher.wait("unknown")).code == 0
    assert await launcher.logs("unknown", 5) == []


async def test_closing_ends_all_that_was_launched(launcher: Launcher) -> None:
    for shard in ("d0", "d1"):
        await launcher.launch(spec(shard))
    await launcher.close(grace_s=5)
    assert await launched_here(launcher) == []


async def test_what_somebody_else_keeps_is_listed_and_left_alone() -> None:
    launcher = StaticLauncher({"p0": KEPT}, FakeLauncher())
    ended = asyncio.create_task(launcher.wait("p0"))
    await launcher.stop("p0", grace_s=0)
    await launcher.close(grace_s=0)
    assert (await launcher.running())["p0"].url == KEPT
    with pytest.raises(ShardError, match="already running"):
        await launcher.launch(spec("p0"))
    assert await launcher.logs("p0", 5) == []
    await asyncio.sleep(0)
    assert not ended.done()
    ended.cancel()
    await asyncio.wait([ended])


@pytest.mark.parametrize(
    ("listen", "host"),
    [
        ("", ""),
        ("0.0.0.0:3101", ""),
        ("[::]:3101", ""),
        ("10.0.0.1:3101", "10.0.0.1"),
        ("[fd::1]:0", "[fd::1]"),
    ],
)
def test_where_others_pull_from_is_the_address_that_a_shard_listens_on(listen: str, host: str) -> None:
    order = replace(spec(), pull_listen=listen)
    assert order.pull_host == running_of(order).pull_host == host


def test_a_sidecar_of_its_own_port_is_told() -> None:
    order = replace(spec(), host="::1", port=20_001, sidecar_port=20_002)
    assert running_of(order).sidecar_url == "http://[::1]:20002"
    assert running_of(replace(order, sidecar_port=0)).sidecar_url == ""
