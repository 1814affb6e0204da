"""The Docker launcher on a real engine, with containers that behave like shards.

TGI_ORCHESTRATOR_TEST_BASE_IMAGE names an image with Python 3.11, from which theirs is built.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from orchestrator.core.order import ShardOrder
from orchestrator.errors import ConfigError, ShardError
from orchestrator.queues import Deposed
from orchestrator.shards.docker.container import Bind
from orchestrator.shards.docker.engine import Engine
from orchestrator.shards.docker.launcher import DockerLauncher
from orchestrator.shards.docker.names import DEPLOYMENT_LABEL, container_name, network_name, volume_name
from orchestrator.shards.probe import http_probe
from tests.integration.launcher.tiny_image import tiny_image
from tgi_patches.contract import Role

from .engine import containers_of, docker, inspected, left_of, remove_all

pytestmark = [pytest.mark.docker, pytest.mark.timeout(120)]

KEY = b"0123456789abcdef-the-key-of-this-test"
MIB = 2**20
WAIT_S = 30

Make = Callable[..., Awaitable[DockerLauncher]]


@pytest.fixture(scope="module")
def image(engine_host: str) -> Iterator[str]:
    with tiny_image() as name:
        yield name


@pytest.fixture
async def engine(engine_host: str) -> AsyncIterator[Engine]:
    opened = await Engine.connect(engine_host)
    yield opened
    await opened.aclose()


@pytest.fixture
def another() -> Iterator[str]:
    """A second deployment's name."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    remove_all(name)


async def may_act() -> None:
    """Nobody else leads."""


def launcher_of(engine: Engine, deployment: str, **more: Any) -> DockerLauncher:
    told: dict[str, Any] = {
        "network": "",
        "secrets": {"key": KEY},
        "mounts": (),
        "log_bytes": MIB,
        "may_act": may_act,
    }
    return DockerLauncher(engine, deployment, **told | more)


@pytest.fixture
def launcher(engine: Engine, unique: str) -> DockerLauncher:
    return launcher_of(engine, unique)


@pytest.fixture
def order(image: str, unique: str) -> ShardOrder:
    return ShardOrder(unique, "d0", Role.DECODE, "run", "name", image=image)


async def says(launcher: DockerLauncher, shard: str, line: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if line in await launcher.logs(shard, 50):
                return
            await asyncio.sleep(0.05)


async def ended(launcher: DockerLauncher, shard: str = "d0") -> Any:
    return await asyncio.wait_for(launcher.wait(shard), WAIT_S)


# --- from start to end --------------------------------------------------------------------------


async def test_a_shard_answers_where_it_was_launched_and_nothing_is_left_of_it(
    launcher: DockerLauncher, order: ShardOrder, unique: str
) -> None:
    running = await launcher.launch(order)
    await says(launcher, "d0", "serving")
    async with httpx.AsyncClient(trust_env=False) as client:
        status = await http_probe(client)(running.url)
    assert (status.deployment, status.shard, status.role) == (unique, "d0", Role.DECODE)
    assert await launcher.running() == {"d0": running}
    assert running.order == order
    assert set(left_of(unique)) == {f"tgio-{unique}-d0", f"tgio-{unique}-arenas", f"tgio-{unique}"}
    await launcher.close(grace_s=5)
    assert left_of(unique) == []
    assert (await launcher.wait("d0")).code == 143
    assert await launcher.logs("d0", 5) == ["serving"]


async def test_a_killed_shard_is_told_and_makes_way_for_the_next(
    launcher: DockerLauncher, order: ShardOrder
) -> None:
    first = await launcher.launch(order)
    waiting = asyncio.create_task(launcher.wait("d0"))
    await says(launcher, "d0", "serving")
    docker("kill", "--signal=KILL", container_name(order.deployment, "d0"))
    told = await asyncio.wait_for(waiting, WAIT_S)
    assert (told.code, told.last_line) == (137, "serving")
    assert await launcher.running() == {}
    assert (await launcher.launch(order)).shard == first.shard
    assert list(await launcher.running()) == ["d0"]


async def test_bad_input_is_told_by_its_last_line(launcher: DockerLauncher, order: ShardOrder) -> None:
    await launcher.launch(replace(order, model="bad"))
    told = await ended(launcher)
    assert told.bad_input
    assert told.last_line == "The folder /x holds no model."
    assert await launcher.logs("d0", 2) == ["loading", "The folder /x holds no model."]


async def test_a_shard_that_does_not_listen_is_killed_after_the_grace(
    launcher: DockerLauncher, order: ShardOrder
) -> None:
    await launcher.launch(replace(order, model="stubborn"))
    await says(launcher, "d0", "serving")
    await launcher.stop("d0", grace_s=0.3)
    assert (await launcher.wait("d0")).code == 137
    assert await launcher.running() == {}


async def test_a_container_that_somebody_removes_has_ended(
    launcher: DockerLauncher, order: ShardOrder
) -> None:
    await launcher.launch(order)
    waiting = asyncio.create_task(launcher.wait("d0"))
    await says(launcher, "d0", "serving")
    docker("rm", "--force", container_name(order.deployment, "d0"))
    assert (await asyncio.wait_for(waiting, WAIT_S)).code == 137


# --- whose containers ---------------------------------------------------------------------------


async def test_whoever_comes_next_finds_the_shards_with_their_orders(
    engine: Engine, launcher: DockerLauncher, order: ShardOrder
) -> None:
    order = replace(order, env={"A": "b"}, sidecar_port=3001, cpus=(0,), shm_bytes=32 * MIB)
    running = await launcher.launch(order)
    heir = launcher_of(engine, order.deployment)
    assert await heir.running() == {"d0": running}
    assert running.sidecar_url == running.url.replace(":3000", ":3001")
    with pytest.raises(ShardError, match="already running"):
        await heir.launch(order)
    await heir.roll_back(grace_s=1)
    assert list(await launcher.running()) == ["d0"], "it takes back what it launched itself"
    waiting = asyncio.create_task(heir.wait("d0"))
    await launcher.stop("d0", grace_s=5)
    # Whether it saw the exit or only that it was gone depends on who asked the engine first.
    assert (await asyncio.wait_for(waiting, WAIT_S)).code in (137, 143)


async def test_two_deployments_stand_side_by_side(
    engine: Engine, launcher: DockerLauncher, order: ShardOrder, another: str
) -> None:
    other = launcher_of(engine, another)
    mine, theirs = await asyncio.gather(
        launcher.launch(order), other.launch(replace(order, deployment=another))
    )
    assert mine.url != theirs.url or mine.order != theirs.order
    await launcher.close(grace_s=2)
    assert left_of(order.deployment) == []
    assert await other.running() == {"d0": theirs}


async def test_a_name_that_somebody_else_took_is_refused(launcher: DockerLauncher, order: ShardOrder) -> None:
    name = container_name(order.deployment, "d0")
    docker("create", "--name", name, order.image, "true")
    try:
        with pytest.raises(ConfigError, match=f"A container {name} exists that was not launched for"):
            await launcher.launch(order)
        assert inspected(name)["State"]["Status"] == "created"
    finally:
        docker("rm", "--force", name)


async def test_containers_with_our_label_and_no_order_of_ours_are_told_and_left_alone(
    launcher: DockerLauncher, order: ShardOrder
) -> None:
    label = f"--label={DEPLOYMENT_LABEL}={order.deployment}"
    later = ("--label=tgi-orchestrator.shard=d9", '--label=tgi-orchestrator.spec={"version": 2}')
    strangers = tuple(f"{kind}-of-{order.deployment}" for kind in ("later", "plain"))
    for name, labels in zip(strangers, (later, ()), strict=True):
        docker("run", "--detach", label, *labels, "--name", name, order.image, "sleep", "60")
    await launcher.launch(order)
    assert list(await launcher.running()) == ["d0"]
    assert launcher.strangers == strangers
    await launcher.stop("d9", grace_s=1)
    await launcher.close(grace_s=2)
    assert sorted(left_of(order.deployment)) == sorted(strangers)
    assert {inspected(name)["State"]["Status"] for name in strangers} == {"running"}


async def test_who_does_not_lead_changes_nothing(engine: Engine, order: ShardOrder) -> None:
    async def deposed() -> None:
        raise Deposed("Another conductor leads.")

    former = launcher_of(engine, order.deployment, may_act=deposed)
    with pytest.raises(Deposed):
        await former.launch(order)
    assert left_of(order.deployment) == []
    leading = launcher_of(engine, order.deployment)
    await leading.launch(order)
    with pytest.raises(Deposed):
        await former.stop("d0", grace_s=1)
    assert list(await leading.running()) == ["d0"]


async def test_who_stops_leading_after_it_created_a_container_does_not_start_it(
    engine: Engine, order: ShardOrder
) -> None:
    calls = 0

    async def twice_and_a_half() -> None:
        nonlocal calls
        calls += 1
        if calls > 3:  # the volume, the network and the container may be made
            raise Deposed("Another conductor leads.")

    with pytest.raises(Deposed):
        await launcher_of(engine, order.deployment, may_act=twice_and_a_half).launch(order)
    assert set(left_of(order.deployment)) == {volume_name(order.deployment), f"tgio-{order.deployment}"}


# --- secrets ------------------------------------------------------------------------------------


async def test_secrets_are_files_of_the_shards_user_and_nowhere_else(
    launcher: DockerLauncher, order: ShardOrder
) -> None:
    await launcher.launch(order)
    await says(launcher, "d0", "serving")
    name = container_name(order.deployment, "d0")
    path = "/run/tgi-orchestrator/key"
    assert docker("exec", name, "cat", path) == KEY.decode()
    assert docker("exec", name, "stat", "-c", "%a %u %g", path, "/run/tgi-orchestrator").split("\n")[:2] == [
        "400 10001 10001",
        "500 10001 10001",
    ]
    assert f"ORCHESTRATOR_DEPLOYMENT_KEY_FILE={path}" in inspected(name)["Config"]["Env"]
    told = docker("inspect", name, order.image, volume_name(order.deployment)) + docker("logs", name)
    assert KEY.decode() not in told
    changed = docker("exec", "--user=10002", name, "sh", "-c", f"cat {path} 2>&1 || true")
    assert "Permission denied" in changed


# --- limits -------------------------------------------------------------------------------------


async def test_a_shard_that_takes_too_much_memory_is_told_with_its_limit(
    launcher: DockerLauncher, order: ShardOrder
) -> None:
    await launcher.launch(replace(order, model="hungry", memory_bytes=64 * MIB))
    told = await ended(launcher)
    assert told.code == 137
    assert "The kernel killed it for memory: its limit is 64 MiB" in told.last_line


async def test_the_pages_of_the_arena_count_against_the_limit_of_who_fills_it(
    launcher: DockerLauncher, order: ShardOrder
) -> None:
    fills = replace(order, model="fills", arena_bytes=96 * MIB)
    await launcher.launch(replace(fills, memory_bytes=64 * MIB))
    assert "its limit is 64 MiB" in (await ended(launcher)).last_line
    # The pages of the first one are still charged to what it was: the file is made anew by the second.
    await launcher.launch(replace(fills, shard="d1", memory_bytes=(96 + 64) * MIB))
    await says(launcher, "d1", "filled")
    used = docker("exec", container_name(order.deployment, "d1"), "stat", "-c", "%s", "/arenas/d1")
    assert int(used) == 96 * MIB


async def test_no_right_is_given_that_is_not_needed(launcher: DockerLauncher, order: ShardOrder) -> None:
    await launcher.launch(order)
    name = container_name(order.deployment, "d0")
    told = inspected(name)
    assert told["HostConfig"]["PortBindings"] in (None, {})
    assert told["HostConfig"]["RestartPolicy"]["Name"] == "no"
    status = docker("exec", name, "cat", "/proc/1/status")
    assert "CapEff:\t0000000000000000\n" in status
    assert "NoNewPrivs:\t1\n" in status
    assert docker("exec", name, "stat", "-c", "%a %u %g", "/arenas").strip() == "2770 10001 10001"


async def test_the_arenas_grow_only_while_nobody_uses_them(engine: Engine, order: ShardOrder) -> None:
    small = launcher_of(engine, order.deployment, arena_bytes=16 * MIB)
    large = launcher_of(engine, order.deployment, arena_bytes=32 * MIB)
    await small.launch(order)
    size = ("exec", container_name(order.deployment, "d0"), "df", "-B1", "--output=size", "/arenas")
    assert docker(*size).split()[-1] == str(16 * MIB)
    with pytest.raises(ConfigError, match=r"has 16 MiB and 32 are needed"):
        await large.launch(replace(order, shard="d1"))
    await small.stop("d0", grace_s=2)
    await large.launch(order)
    assert docker(*size).split()[-1] == str(32 * MIB)


async def test_a_volume_or_network_that_is_not_ours_is_refused_and_stays(
    launcher: DockerLauncher, order: ShardOrder, unique: str
) -> None:
    volume, network = volume_name(unique), network_name(unique)
    docker("volume", "create", volume)
    try:
        with pytest.raises(ConfigError, match=f"A volume {volume} exists and is not ours"):
            await launcher.launch(order)
        await launcher.close(grace_s=1)
        assert inspected(volume)["Name"] == volume
    finally:
        docker("volume", "rm", volume)
    docker("network", "create", network)
    try:
        with pytest.raises(ConfigError, match=f"A network {network} exists and is not ours"):
            await launcher.launch(order)
        await launcher.close(grace_s=1)
        assert inspected(network)["Name"] == network
    finally:
        docker("network", "rm", network)


# --- what cannot be launched --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "mounts", "sentence"),
    [
        ({"image": "no-such-image:1"}, (), "has no image no-such-image:1: build or pull it first"),
        ({"cpus": (4095,)}, (), "CPU cores that this host does not have (requested 4095"),
        ({"memory_bytes": MIB}, (), "has a memory limit below the"),
        ({}, (Bind("/no/such/folder", "/data"),), "is to get the folder /no/such/folder, which"),
    ],
)
async def test_what_can_never_start_is_one_sentence_and_no_container(
    engine: Engine, order: ShardOrder, changes: dict[str, Any], mounts: tuple[Bind, ...], sentence: str
) -> None:
    launcher = launcher_of(engine, order.deployment, mounts=mounts)
    with pytest.raises(ConfigError) as caught:
        await launcher.launch(replace(order, **changes))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert containers_of(order.deployment) == []
    await launcher.close(grace_s=1)
    assert left_of(order.deployment) == []


async def test_a_network_that_is_not_there_is_refused(engine: Engine, order: ShardOrder) -> None:
    launcher = launcher_of(engine, order.deployment, network="no-such-network")
    with pytest.raises(ConfigError, match="in the network no-such-network, which this engine does not have"):
        await launcher.launch(order)


async def test_a_gpu_where_the_engine_gives_none_is_refused_and_the_container_removed(
    launcher: DockerLauncher, order: ShardOrder, image: str, unique: str
) -> None:
    if "nvidia" in docker("info", "--format", "{{json .Runtimes}}"):
        pytest.skip("This engine gives GPUs to containers.")
    tgi = f"tgi-orchestrator-tiny-tgi:{uuid.uuid4().hex[:8]}"
    with labelled(image, tgi):
        with pytest.raises(ConfigError, match="install NVIDIA's container toolkit"):
            await launcher.launch(replace(order, image=tgi, gpus=("GPU-1",), sidecar_port=3001))
        assert containers_of(unique) == []
        taken = f"holder-{unique}"
        host = {"DeviceRequests": [{"DeviceIDs": ["GPU-1"], "Capabilities": [["gpu"]]}]}
        with (
            created(taken, {"Image": image, "Cmd": ["true"], "HostConfig": host}),
            pytest.raises(ConfigError, match=f"The GPU GPU-1 is taken by the container {taken}"),
        ):
            await launcher.launch(replace(order, image=tgi, gpus=("GPU-1",), sidecar_port=3001))
        await launcher.close(grace_s=1)
        assert left_of(unique) == []


@contextlib.contextmanager
def labelled(image: str, name: str) -> Iterator[None]:
    """The same image as one of TGI's."""
    client = _client()
    built = client.containers.create(image, "true")
    built.commit(*name.split(":"), changes="LABEL tgi-orchestrator.tgi=3.3.7")
    built.remove()
    try:
        yield
    finally:
        client.images.remove(name, force=True)
        client.close()


@contextlib.contextmanager
def created(name: str, body: dict[str, Any]) -> Iterator[None]:
    """A container that somebody else is about to start."""
    client = _client()
    client.api.create_container_from_config(body, name)
    try:
        yield
    finally:
        client.api.remove_container(name, force=True)
        client.close()


def _client() -> Any:
    import docker as sdk

    return sdk.DockerClient.from_env(version="auto")


async def test_the_label_holds_the_whole_order(launcher: DockerLauncher, order: ShardOrder) -> None:
    order = replace(order, memory_bytes=128 * MIB, tgi_env={"X": "1"})
    await launcher.launch(order)
    label = inspected(container_name(order.deployment, "d0"))["Config"]["Labels"]["tgi-orchestrator.spec"]
    told = json.loads(label)
    assert (told["version"], told["image"], told["memory_bytes"]) == (1, order.image, 128 * MIB)
