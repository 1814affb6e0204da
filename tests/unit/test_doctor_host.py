"""What doctor says of memory, arenas, disk, ports, Redis, images and the hub."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import load_settings
from orchestrator.deployment.doctor import gather
from orchestrator.deployment.doctor.finding import State
from orchestrator.deployment.doctor.host import (
    HubFacts,
    arenas_finding,
    disk_finding,
    hub_finding,
    image_finding,
    memory_finding,
    own_redis_finding,
    port_finding,
    redis_finding,
    shm_finding,
)
from orchestrator.deployment.doctor.machine import host_findings
from orchestrator.deployment.state import State as Running
from orchestrator.deployment.state import StateFolder, started_ticks

GIB = 2**30
MIB = 2**20
LABELS = {"tgi-orchestrator.engine": "embedded", "org.opencontainers.image.version": "0.1.0"}
TGI = {"tgi-orchestrator.tgi": "3.3.7", "org.opencontainers.image.version": "0.1.0"}


@pytest.mark.parametrize(
    ("needed", "free", "state"),
    [
        (1, 8, State.OK),
        (6.4, 8, State.OK),
        (6.5, 8, State.WARNING),
        (8, 8, State.WARNING),
        (9, 8, State.FAILED),
    ],
)
def test_arenas_must_fit_into_free_memory(needed: float, free: float, state: State) -> None:
    assert memory_finding(int(needed * GIB), int(free * GIB)).state is state


def test_arenas_that_are_there_need_no_memory_more() -> None:
    assert memory_finding(9 * GIB, GIB, runs=True).state is State.OK


def seen(**changes: Any) -> dict[str, Any]:
    arenas = {
        "there": True,
        "kind": "tmpfs",
        "uid": 10001,
        "gid": 10001,
        "mode": "2770",
        "writable": True,
        "fault": None,
        "size_bytes": 64 * MIB,
        "free_bytes": 64 * MIB,
    }
    return {"arenas": arenas | changes}


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, State.OK),
        ({"there": False, "fault": "No such file or directory"}, State.FAILED),
        ({"kind": "ext4"}, State.FAILED),
        ({"kind": ""}, State.FAILED),
        ({"mode": "1777", "fault": "The arena directory /arenas is writable by everyone."}, State.FAILED),
        ({"uid": 0, "gid": 0, "mode": "755", "writable": False}, State.FAILED),
        ({"uid": 0, "mode": "2770"}, State.WARNING),
        ({"mode": "770"}, State.WARNING),
    ],
)
def test_the_arenas_are_a_tmpfs_of_the_shards_own(changes: Mapping[str, Any], state: State) -> None:
    found = arenas_finding(seen(**changes), "tgio-x-arenas", existing=True)
    assert found.state is state
    assert state is State.OK or "tgio-x-arenas" in found.do


@pytest.mark.parametrize(
    ("ranks", "wanted", "state"),
    [(1, 0, State.OK), (2, 0, State.OK), (2, 64 * MIB, State.WARNING), (2, GIB, State.OK)],
)
def test_ranks_need_more_shared_memory_than_the_default(ranks: int, wanted: int, state: State) -> None:
    assert shm_finding(64 * MIB, ranks, wanted).state is state


@pytest.mark.parametrize(
    ("free", "state"),
    [(None, State.SKIPPED), (GIB // 2, State.FAILED), (5 * GIB, State.WARNING), (50 * GIB, State.OK)],
)
def test_images_need_disk(free: int | None, state: State) -> None:
    assert disk_finding("/var/lib/docker", free).state is state


def test_a_port_is_free_taken_or_ours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        fault = gather.listen_fault(address)
        found = port_finding("gateway.listen", address, fault, ours=False)
        assert (fault, found.state) == ("address already in use", State.FAILED)
        assert "gateway.listen" in found.do
        assert port_finding("gateway.listen", address, fault, ours=True).state is State.OK
    assert gather.listen_fault("127.0.0.1:0") == ""
    assert port_finding("gateway.listen", "127.0.0.1:0", "", ours=False).state is State.OK


async def test_what_a_running_deployment_holds_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    """Its port is taken and its arenas fill the memory, both by itself."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with socket.create_server(("127.0.0.1", 0)) as gateway:
        address = f"127.0.0.1:{gateway.getsockname()[1]}"
        flags = {"model.id": str(tiny_model), "gateway.listen": address, "arena.bytes": 1 << 50}
        loaded = load_settings(None, flags, {})

        async def states() -> dict[str, State]:
            found = await host_findings(loaded, None, lambda _: None)
            return {one.name: one.state for one in found}

        before = await states()
        assert before["port gateway.listen"] is before["memory"] is State.FAILED
        folder = StateFolder.of("default", os.environ)
        folder.create()
        ticks = started_ticks(os.getpid())
        assert ticks is not None
        url = f"http://{address}"
        folder.write(Running("default", os.getpid(), ticks, url, "unix:///none", "m", "float32", "/x", ()))
        during = await states()
    assert during["port gateway.listen"] is during["memory"] is State.OK


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("6.0.16", State.FAILED),
        ("6.2", State.OK),
        ("6.2.7", State.OK),
        ("7.0.15", State.OK),
        ("", State.FAILED),
    ],
)
def test_redis_is_of_a_version_that_has_what_queues_need(version: str, state: State) -> None:
    assert redis_finding("redis://r:6379", version, "").state is state
    assert own_redis_finding("/usr/bin/redis-server", version, "").state is state


def test_a_redis_that_does_not_answer_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    version, fault = gather.redis_facts(f"redis://:geheim@127.0.0.1:{port}")
    found = redis_finding("redis://***@127.0.0.1", version, fault)
    assert found.state is State.FAILED
    assert "refused" in found.told
    assert "geheim" not in found.told


@pytest.mark.parametrize(
    ("labels", "wanted", "state"),
    [
        (LABELS, True, State.OK),
        (TGI, True, State.OK),
        (LABELS | {"org.opencontainers.image.version": "unknown"}, True, State.OK),
        (LABELS | {"org.opencontainers.image.version": "0.0.9"}, True, State.WARNING),
        ({}, True, State.FAILED),
        (None, True, State.FAILED),
        (None, False, State.WARNING),
    ],
)
def test_an_image_is_there_ours_and_of_this_version(
    labels: Mapping[str, str] | None, wanted: bool, state: State
) -> None:
    assert image_finding("tgi-orchestrator-cpu:0.1.0", labels, "0.1.0", wanted=wanted).state is state


def test_a_missing_image_is_told_with_the_command_that_builds_it() -> None:
    cpu = image_finding("tgi-orchestrator-cpu:0.1.0", None, "0.1.0", wanted=True)
    tgi = image_finding("tgi-orchestrator-shard:3.3.7", None, "0.1.0", wanted=True)
    assert "docker build -f compose/Dockerfile --target cpu -t tgi-orchestrator-cpu:0.1.0 ." in cpu.do
    assert "docker build -f tgi_patches/Dockerfile -t tgi-orchestrator-shard:3.3.7 ." in tgi.do


HUB = HubFacts("https://hub", "org/m", local=False, cached=False, answers=True, offline=False)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, State.OK),
        ({"answers": False}, State.FAILED),
        ({"answers": False, "cached": True}, State.WARNING),
        ({"answers": False, "packaged": True}, State.WARNING),
        ({"answers": False, "local": True}, State.OK),
        ({"offline": True}, State.FAILED),
        ({"offline": True, "cached": True}, State.WARNING),
        ({"token_fault": "The token file t is empty."}, State.FAILED),
        ({"token_open": True, "token_file": "t"}, State.WARNING),
    ],
)
def test_the_hub_is_needed_for_a_model_that_is_not_here(changes: Mapping[str, Any], state: State) -> None:
    assert hub_finding(replace(HUB, **changes)).state is state


def test_a_token_is_private_and_never_told(tmp_path: Path) -> None:
    token = tmp_path / "token"
    assert gather.token_facts(token) == (
        f"The token file {token} cannot be read: No such file or directory.",
        False,
    )
    token.write_text("hf_secret\n")
    token.chmod(0o644)
    assert gather.token_facts(token) == ("", True)
    token.chmod(0o600)
    assert gather.token_facts(token) == ("", False)
    token.write_text("\n")
    assert gather.token_facts(token) == (f"The token file {token} is empty.", False)


def test_a_model_is_found_where_it_lies_without_asking_anybody(tmp_path: Path) -> None:
    flags = {"model.id": "org/m", "model.cache": tmp_path / "shared"}
    settings = load_settings(None, flags, {}).settings
    env = {"HF_HOME": str(tmp_path / "home")}
    assert gather.model_folder(settings, env) is None
    for number, cache in enumerate((tmp_path / "shared", tmp_path / "home" / "hub")):
        folder = cache / "models--org--m" / "snapshots" / f"commit-{number}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        os.utime(folder, (number, number))
    newest = tmp_path / "home" / "hub" / "models--org--m" / "snapshots" / "commit-1"
    assert gather.model_folder(settings, env) == newest
    pinned = load_settings(None, flags | {"model.revision": "commit-0"}, {}).settings
    found = gather.model_folder(pinned, env)
    assert found is not None
    assert found.name == "commit-0"


def test_the_driver_leaves_links_in_dev_char(tmp_path: Path) -> None:
    assert gather.char_links(tmp_path / "none") is None
    (tmp_path / "1:3").touch()
    assert gather.char_links(tmp_path) is False
    (tmp_path / "195:0").touch()
    assert gather.char_links(tmp_path) is True


def test_free_memory_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24684092 kB\nMemFree:  1 kB\nMemAvailable:    2048 kB\n")
    assert gather.available_bytes(meminfo) == 2 * MIB
