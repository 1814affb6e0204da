"""What every launcher does, whatever its shards are."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.order import ShardOrder
from orchestrator.errors import ShardError
from orchestrator.shards.docker.engine import Engine
from orchestrator.shards.docker.launcher import DockerLauncher
from orchestrator.shards.launcher import FakeLauncher, Launcher
from orchestrator.shards.process import ProcessLauncher, running_of
from orchestrator.shards.static import StaticLauncher
from tests.integration.launcher.tiny_image import tiny_image
from tgi_patches.contract import Role

COMMAND = (sys.executable, str(Path(__file__).with_name("tiny_shard.py")))
KEPT = "http://10.0.0.1:3001"


def spec(shard: str = "d0", image: str = "") -> ShardOrder:
    return ShardOrder("test", shard, Role.DECODE, "run", "name", image=image)


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    with tiny_image() as name:
        yield name


@pytest.fixture(
    params=["fake", "process", "static", pytest.param("docker", marks=pytest.mark.docker)],
)
async def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Launcher]:
    """`d0` is launched by each; the static one also knows `p0`, which somebody else keeps."""
    if request.param == "docker":
        request.getfixturevalue("image")
        async with in_containers() as containers:
            yield containers
        return
    processes = ProcessLauncher(tmp_path, command=COMMAND)
    made: dict[str, Launcher] = {
        "fake": FakeLauncher(),
        "process": processes,
        "static": StaticLauncher({"p0": KEPT}, processes),
    }
    yield made[request.param]
    await processes.close(grace_s=2)


@asynccontextmanager
async def in_containers() -> AsyncIterator[Launcher]:
    async def may_act() -> None:
        """Nobody else leads."""

    engine = await Engine.connect()
    deployment = f"test-{uuid.uuid4().hex[:8]}"
    launcher = DockerLauncher(
        engine, deployment, network="", secrets={}, mounts=(), log_bytes=10**6, may_act=may_act
    )
    try:
        yield launcher
    finally:
        await launcher.close(grace_s=2)
        await engine.aclose()


@pytest.fixture
def order(request: pytest.FixtureRequest, launcher: Launcher) -> ShardOrder:
    """Of `d0`, as the launcher needs it."""
    image = request.getfixturevalue("image") if isinstance(launcher, DockerLauncher) else ""
    return spec(image=image)


async def launched_here(launcher: Launcher) -> list[str]:
    return [shard for shard, running in (await launcher.running()).items() if not running.observed]


async def test_a_shard_is_launched_once_and_is_listed_while_it_runs(
    launcher: Launcher, order: ShardOrder
) -> None:
    assert await launched_here(launcher) == []
    running = await launcher.launch(order)
    assert (await launcher.running())["d0"] == running
    with pytest.raises(ShardError, match="already running"):
        await launcher.launch(order)
    await launcher.stop("d0", grace_s=5)
    assert await launched_here(launcher) == []


async def test_whoever_waits_hears_of_the_end_and_may_stop_waiting_before(
    launcher: Launcher, order: ShardOrder
) -> None:
    await launcher.launch(order)
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


async def test_a_shard_that_was_stopped_can_be_launched_again_and_is_waited_for_anew(
    launcher: Launcher, order: ShardOrder
) -> None:
    for _ in range(2):
        await launcher.launch(order)
        waiting = asyncio.create_task(launcher.wait("d0"))
        await asyncio.sleep(0)
        assert not waiting.done()
        await launcher.stop("d0", grace_s=5)
        ended = await asyncio.wait_for(waiting, 20)
        assert ended == await launcher.wait("d0")
        assert ended.code != 0


async def test_closing_ends_all_that_was_launched(launcher: Launcher, order: ShardOrder) -> None:
    for shard in ("d0", "d1"):
        await launcher.launch(replace(order, shard=shard))
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
