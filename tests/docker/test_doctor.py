"""Doctor on a real engine: transports between real containers, what it leaves, what it will not pass.

What a fault of the host would do is done on purpose: two volumes in place of one, no tmpfs at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import docker
import pytest

from orchestrator.deployment.doctor.finding import State
from orchestrator.deployment.doctor.lab import DOCTOR_LABEL, KEY_FILE, Lab, Sandbox, new_token
from orchestrator.deployment.doctor.transports import QUICK, Ground, Proved, judge, measured, prove
from orchestrator.shards.docker.engine import Engine
from orchestrator.shards.docker.names import labels, network_name, volume_name

from .cli import DockerLine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

TMPFS = {"type": "tmpfs", "device": "tmpfs", "o": "size=256m,uid=10001,gid=10001,mode=2770"}
SLEEP = ["python", "-c", "import time; time.sleep(600)"]


@pytest.fixture
def client(engine_host: str) -> Iterator[docker.DockerClient]:
    """An SDK of the test's own."""
    with contextlib.closing(docker.DockerClient(base_url=engine_host)) as made:
        yield made


@contextlib.asynccontextmanager
async def lab_of(host: str) -> AsyncIterator[tuple[Engine, Lab]]:
    engine = await Engine.connect(host)
    try:
        async with Lab(engine, new_token()) as lab:
            yield engine, lab
    finally:
        await engine.aclose()


def left(client: docker.DockerClient, token: str = "") -> list[str]:
    """Names of everything that carries doctor's label, of one measurement or any."""
    filters: dict[str, Any] = {"label": f"{DOCTOR_LABEL}={token}" if token else DOCTOR_LABEL}
    found = [*client.containers.list(all=True, filters=filters), *client.networks.list(filters=filters)]
    return [str(one.name) for one in (*found, *client.volumes.list(filters=filters))]


def told(line: DockerLine, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and findings by name."""
    done = line.run("doctor", "--quick", "--json", *arguments, limit_s=200)
    assert done.stdout, done.stderr
    return done.returncode, {one["name"]: one for one in json.loads(done.stdout)["findings"]}


def test_arena_and_pull_are_proved_between_containers_and_written_down(
    docker_cli: DockerLine, client: docker.DockerClient
) -> None:
    code, found = told(docker_cli)
    assert code == 0, [one for one in found.values() if one["state"] == "failed"]
    assert found["transport arena"]["state"] in ("ok", "warning")  # a warning: slower than it should be
    assert found["transport pull"]["state"] == found["transport gloo"]["state"] == "ok"
    assert found["transport arena"]["figures"]["gb_s"] > 0
    assert found["arenas"]["told"].startswith("Containers see a tmpfs of 10001:10001 2770 at /arenas")
    traffic = found["transport pull"]["figures"]
    assert traffic["received_bytes"]["lo"] < traffic["moved_bytes"] <= traffic["received_bytes"]["eth0"]
    kept = json.loads(docker_cli.state_file.with_name("bandwidths.json").read_text())
    assert set(kept["transports"]) == {"arena", "pull", "gloo"}
    assert kept["engine"] == client.info()["ID"]
    assert left(client) == []


def test_the_deployments_own_volume_and_network_are_used_and_left_as_they_were(
    docker_cli: DockerLine, client: docker.DockerClient, cpu_image: str, unique: str
) -> None:
    volume = volume_name(unique)
    client.volumes.create(volume, driver="local", driver_opts=TMPFS, labels=labels(unique))
    network = client.networks.create(network_name(unique), driver="bridge", labels=labels(unique))
    network.reload()
    subnet = ip_network(network.attrs["IPAM"]["Config"][0]["Subnet"])
    holder = client.containers.run(
        cpu_image,
        SLEEP[1:],
        entrypoint=SLEEP[:1],
        detach=True,
        labels=labels(unique),
        volumes={volume: {"bind": "/arenas", "mode": "rw"}},
    )
    assert holder.exec_run(["mkdir", "/arenas/somebody"]).exit_code == 0
    code, found = told(docker_cli)
    assert code == 0
    assert found["arenas"]["figures"]["existing"] is True
    assert all(ip_address(host) in subnet for host in found["transport pull"]["figures"]["hosts"].values())
    listing = sorted(holder.exec_run(["ls", "/arenas"]).output.decode().split())
    assert listing == ["arena-id", "somebody"]
    assert [one.name for one in client.volumes.list(filters={"name": volume})] == [volume]
    network.reload()
    assert network.containers == []


def test_a_volume_that_is_no_tmpfs_is_failed(
    docker_cli: DockerLine, client: docker.DockerClient, unique: str
) -> None:
    volume = volume_name(unique)
    client.volumes.create(volume, driver="local", labels=labels(unique))
    code, found = told(docker_cli)
    assert code == 1
    assert found["arenas"]["state"] == "failed"
    assert "in place of a tmpfs" in found["arenas"]["told"]
    assert volume in found["arenas"]["do"]
    assert left(client) == []


def test_a_tmpfs_that_shards_cannot_write_is_failed_on_every_way_that_needs_it(
    docker_cli: DockerLine, client: docker.DockerClient, unique: str
) -> None:
    options = {"type": "tmpfs", "device": "tmpfs", "o": "size=256m,uid=0,gid=0,mode=755"}
    client.volumes.create(volume_name(unique), driver="local", driver_opts=options, labels=labels(unique))
    code, found = told(docker_cli)
    assert code == 1
    assert found["arenas"]["state"] == found["transport arena"]["state"] == "failed"
    assert found["transport arena"]["do"]


async def test_two_tmpfs_in_place_of_one_are_failed_and_not_passed_as_a_pull(
    engine_host: str, cpu_image: str
) -> None:
    async with lab_of(engine_host) as (_, lab):
        network = await lab.network()
        volumes = await lab.volume(1 << 28, "one"), await lab.volume(1 << 28, "other")
        facts = await measured(lab, Ground(cpu_image, False, network, ""), QUICK, network, volumes)
    proved = Proved()
    judge(facts, proved, host_network=False, no_gpus="none here")
    states = {finding.name: finding.state for finding in proved.findings}
    assert states["transport arena"] is State.FAILED
    assert states["transport pull"] is State.OK
    assert "arena" not in proved.measured


async def test_the_key_of_a_measurement_is_in_no_inspect(engine_host: str, cpu_image: str) -> None:
    key = "5ecret-of-this-measurement-5ecret"
    async with lab_of(engine_host) as (engine, lab):
        sandbox = Sandbox(cpu_image, (*SLEEP[:2], f"print(open('{KEY_FILE}').read())"), key=key.encode())
        ended = await lab.ended("key", sandbox, 30)
        inspected = await engine.call("Look", lambda client: client.api.inspect_container(lab.name("key")))
    assert (ended.code, ended.output.strip()) == (0, key)
    assert key not in json.dumps(inspected)
    assert inspected["HostConfig"]["CapDrop"] == ["ALL"]
    assert inspected["HostConfig"]["Privileged"] is False


async def test_a_gpu_is_asked_for_by_its_uuid_alone(engine_host: str, cpu_image: str) -> None:
    """As sent to the engine: on a machine without GPUs it then refuses to start."""
    uuid = "GPU-f15ae561-21b1-6003-c768-861fc285203b"
    async with lab_of(engine_host) as (engine, lab):
        with contextlib.suppress(Exception):
            await lab.start("gpu", Sandbox(cpu_image, ("nvidia-smi", "-L"), gpus=[uuid]))
        sent = await engine.call("Look", lambda client: client.api.inspect_container(lab.name("gpu")))
    (request,) = sent["HostConfig"]["DeviceRequests"]
    assert request["DeviceIDs"] == [uuid]
    assert request["Count"] == 0
    assert request["Capabilities"] == [["gpu", "compute", "utility"]]


def test_ctrl_c_leaves_nothing_behind(docker_cli: DockerLine, client: docker.DockerClient) -> None:
    process = docker_cli.popen("doctor")
    ends_s = time.monotonic() + 60
    while not any(name.endswith("-a") for name in left(client)):
        assert time.monotonic() < ends_s, "no container came up"
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert left(client) == []


async def test_what_a_killed_doctor_left_is_removed_by_the_next_one(
    engine_host: str, client: docker.DockerClient
) -> None:
    old, young = f"{int(time.time()) - 7200:x}-abcdef", new_token()
    for token in (old, young):
        client.volumes.create(f"tgio-doctor-{token}-arenas", labels={DOCTOR_LABEL: token})
        client.networks.create(f"tgio-doctor-{token}-net", labels={DOCTOR_LABEL: token})
    try:
        async with lab_of(engine_host):
            assert left(client, old) == []
            assert len(left(client, young)) == 2
    finally:
        for token in (old, young):
            for one in client.networks.list(filters={"label": f"{DOCTOR_LABEL}={token}"}):
                one.remove()
            for volume in client.volumes.list(filters={"label": f"{DOCTOR_LABEL}={token}"}):
                volume.remove()


def test_an_image_that_is_not_there_is_told_with_the_command_that_builds_it(
    docker_cli: DockerLine, client: docker.DockerClient
) -> None:
    code, found = told(docker_cli, "--image", "tgi-orchestrator-cpu:none")
    assert code == 1
    assert "--target cpu -t tgi-orchestrator-cpu:none ." in found["image tgi-orchestrator-cpu:none"]["do"]
    assert {one["state"] for name, one in found.items() if name.startswith("transport")} == {"skipped"}


def test_a_network_that_is_not_there_is_told(docker_cli: DockerLine, client: docker.DockerClient) -> None:
    docker_cli.env["ORCHESTRATOR_DOCKER__NETWORK"] = "nowhere"
    code, found = told(docker_cli)
    assert code == 1
    assert found["network"]["state"] == "failed"
    assert "docker network create nowhere" in found["network"]["do"]


def test_on_the_hosts_own_network_a_pull_is_proved_over_its_loopback(docker_cli: DockerLine) -> None:
    docker_cli.env["ORCHESTRATOR_DOCKER__NETWORK"] = "host"
    code, found = told(docker_cli)
    assert code == 0, [one for one in found.values() if one["state"] == "failed"]
    assert "loopback" in found["transport pull"]["told"]


def test_an_image_without_torch_proves_what_needs_none(
    docker_cli: DockerLine, orchestrator_image: str
) -> None:
    code, found = told(docker_cli, "--image", orchestrator_image)
    assert code == 1, "it is no image of shards"
    assert found[f"image {orchestrator_image}"]["state"] == "failed"
    assert found["transport pull"]["state"] == "ok"
    assert found["transport gloo"]["state"] == "skipped"
    assert "no torch" in found["transport gloo"]["told"]


async def test_a_measurement_that_cannot_be_made_is_a_finding_and_leaves_nothing(
    engine_host: str, client: docker.DockerClient
) -> None:
    """Such as with an image that does not have our program."""
    engine = await Engine.connect(engine_host)
    image, token = f"tgio-doctor-empty:{new_token()}", new_token()
    await asyncio.to_thread(_empty_image, client, image)
    try:
        proved = await prove(engine, token, Ground(image, False, "", ""), QUICK)
    finally:
        await asyncio.to_thread(client.images.remove, image)
        await engine.aclose()
    assert proved.findings[0].state is State.FAILED
    assert proved.measured == {}
    assert left(client, token) == []


def _empty_image(client: docker.DockerClient, image: str) -> None:
    name, _, tag = image.partition(":")
    client.api.import_image_from_data(
        Path("/dev/null").read_bytes() or b"\0" * 10240, repository=name, tag=tag
    )
