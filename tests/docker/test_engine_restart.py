"""A launcher while its engine is away and comes back.  The engine is the test's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import docker
import pytest

from orchestrator.core.order import ShardOrder
from orchestrator.errors import ShardError, Unreachable
from orchestrator.shards.docker.engine import Engine
from orchestrator.shards.docker.launcher import DockerLauncher
from tgi_patches.contract import Role

from .own_engine import OwnEngine, close_lost_sockets, own_engine, tiny_root

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180)]

NAME = "tgi-orchestrator-tiny"
SCRIPT = "trap 'exit 7' TERM; echo up; while :; do sleep 0.1; done"


@pytest.fixture
def restarted() -> Iterator[OwnEngine]:
    with own_engine() as engine:
        client = docker.DockerClient(base_url=engine.host, version="auto")
        entrypoint = json.dumps(["/bin/sh", "-c", SCRIPT])
        changes = [f"ENTRYPOINT {entrypoint}", "LABEL tgi-orchestrator.tgi=3.3.7", "USER 10001:10001"]
        client.api.import_image_from_data(tiny_root(), repository=NAME, tag="1", changes=changes)
        client.close()
        yield engine


async def may_act() -> None:
    """Nobody else leads."""


# The SDK leaves a socket that could not connect to the garbage collector.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"
)
async def test_an_engine_that_is_restarted_tells_then_how_its_shards_ended(restarted: OwnEngine) -> None:
    engine = await Engine.connect(restarted.host)
    launcher = DockerLauncher(
        engine, "test", network="host", secrets={}, mounts=(), log_bytes=10**6, may_act=may_act
    )
    order = ShardOrder(
        "test", "d0", Role.DECODE, "m", "name", image=f"{NAME}:1", port=20_001, sidecar_port=20_002
    )
    running = await launcher.launch(order)
    assert running.url == "http://127.0.0.1:20001"
    waiting = asyncio.create_task(launcher.wait("d0"))
    await asyncio.sleep(0.1)

    await asyncio.to_thread(restarted.stop)
    with pytest.raises(Unreachable):
        await launcher.running()
    with pytest.raises(ShardError, match="does not answer"):
        await launcher.launch(order)
    assert await launcher.logs("d0", 5) == []
    stopping = asyncio.create_task(launcher.stop("d0", grace_s=1))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert not stopping.done()

    await asyncio.to_thread(restarted.start)
    close_lost_sockets()
    ended = await asyncio.wait_for(waiting, 60)
    await asyncio.wait_for(stopping, 60)
    assert ended.code == 7
    assert await launcher.running() == {}
    assert await launcher.logs("d0", 5) == ["up"]
    await launcher.launch(order)
    assert list(await launcher.running()) == ["d0"]
    await launcher.close(grace_s=5)
    await engine.aclose()
    close_lost_sockets()
