"""What doctor says of engines and GPUs, from the answers of such engines.

Docker 20.10's are recorded, shortened; the others are written after the shape that their API documents.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.topology import Gpu, MigSlice, Topology
from orchestrator.deployment.doctor.asked import held
from orchestrator.deployment.doctor.engine import engine_finding, reload_finding, runtime_finding
from orchestrator.deployment.doctor.finding import Report, State, failed, ok, skipped, warning
from orchestrator.deployment.doctor.gpus import (
    Inside,
    driver_finding,
    inside_finding,
    listed,
    named_finding,
)
from orchestrator.shards.docker.engine import EngineFacts, facts_of

ENGINES = Path(__file__).parent / "engines"
A, B = "GPU-f15ae561-21b1-6003-c768-861fc285203b", "GPU-bf507abe-ec25-2053-5435-1c82511a3ae8"
SLICE = "MIG-bb0a8a1e-4a0a-5c6a-9c0e-3a1f3d2b6c7d"


def engine(name: str) -> EngineFacts:
    raw = json.loads((ENGINES / f"{name}.json").read_text())
    return facts_of(raw["info"], raw["version"])


def gpu(uuid: str, index: int = 0, capability: tuple[int, int] = (9, 0)) -> Gpu:
    return Gpu(uuid, index, "NVIDIA H100 80GB HBM3", 80 << 30, capability, 132)


def host(*gpus: Gpu, driver: str = "550.144.03") -> Topology:
    return Topology(gpus, driver=driver)


# --- the engine ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["docker_28_nvidia", "docker_20_cgroup_v1"])
def test_engines_of_docker_are_usable(name: str) -> None:
    found = engine_finding(engine(name), "unix:///var/run/docker.sock")
    assert found.state is State.OK


def test_an_engine_tells_its_version_api_and_cgroups() -> None:
    found = engine_finding(engine("docker_28_nvidia"), "unix:///var/run/docker.sock")
    assert found.told == "Docker 28.1.1 answers (API 1.49, cgroup v2 by systemd)."
    assert (found.figures["cpus"], found.figures["memory_bytes"]) == (96, 1081936244736)


@pytest.mark.parametrize(("name", "word"), [("podman", "Podman"), ("docker_27_rootless", "rootless")])
def test_what_shards_cannot_be_launched_on_is_refused_in_a_sentence(name: str, word: str) -> None:
    found = engine_finding(engine(name), "unix:///run/user/1000/docker.sock")
    assert found.state is State.FAILED
    assert word in found.told
    assert "launcher: process" in found.do
    assert found.figures["host"] == "unix:///run/user/1000/docker.sock"


def test_an_old_engine_is_refused() -> None:
    found = engine_finding(replace(engine("docker_20_cgroup_v1"), version="18.09.1", api=(1, 39)), "")
    assert (found.state, "18.09.1 is too old" in found.told) == (State.FAILED, True)


@pytest.mark.parametrize(
    ("runtimes", "devices", "gpus", "state"),
    [
        (("nvidia", "runc"), (), 2, State.OK),
        (("runc",), ("nvidia.com/gpu=0", "nvidia.com/gpu=all"), 2, State.OK),
        (("runc",), ("vendor.com/net=eth1",), 2, State.WARNING),
        (("runc",), (), 2, State.WARNING),
        (("runc",), (), 0, State.SKIPPED),
    ],
)
def test_gpus_are_handed_on_by_the_runtime_or_by_cdi(
    runtimes: tuple[str, ...], devices: tuple[str, ...], gpus: int, state: State
) -> None:
    facts = replace(engine("docker_28_nvidia"), runtimes=runtimes, devices=devices)
    assert runtime_finding(facts, gpus).state is state


def test_an_engine_with_systemds_cgroups_loses_gpus_with_a_daemon_reload() -> None:
    found = reload_finding(engine("docker_28_nvidia"), gpus=8, char_links=False)
    assert found.state is State.WARNING
    assert "cgroup v2 managed by systemd" in found.told
    assert "create-dev-char-symlinks" in found.do
    assert "native.cgroupdriver=cgroupfs" in found.do


def test_the_loss_is_not_expected_where_its_cause_is_missing() -> None:
    facts = engine("docker_28_nvidia")
    by_cdi = replace(facts, runtimes=("runc",), devices=("nvidia.com/gpu=0",))
    assert reload_finding(facts, gpus=0, char_links=None).state is State.SKIPPED
    assert reload_finding(facts, gpus=8, char_links=True).state is State.OK
    assert reload_finding(by_cdi, gpus=8, char_links=False).state is State.OK
    assert reload_finding(engine("docker_20_cgroup_v1"), gpus=8, char_links=False).state is State.OK


def test_where_the_links_cannot_be_seen_the_loss_has_to_be_expected() -> None:
    assert reload_finding(engine("docker_28_nvidia"), gpus=8, char_links=None).state is State.WARNING


# --- the GPUs -----------------------------------------------------------------------------------


def test_a_machine_without_driver_is_no_failure() -> None:
    assert driver_finding(None).state is State.SKIPPED
    assert driver_finding(host()).state is State.SKIPPED


@pytest.mark.parametrize(
    ("driver", "state"),
    [
        ("470.256.02", State.FAILED),
        ("535.216.01", State.WARNING),
        ("550.144.03", State.OK),
        ("", State.OK),
    ],
)
def test_a_driver_is_as_new_as_the_image_needs(driver: str, state: State) -> None:
    assert driver_finding(host(gpu(A), driver=driver)).state is state


def test_a_gpu_before_ampere_is_for_mixed_shards_only() -> None:
    found = driver_finding(host(gpu(A), gpu(B, 1, (7, 5))))
    assert found.state is State.WARNING
    assert "7.5" in found.told
    assert "mixed" in found.do


def test_nvml_that_fails_is_a_failure_in_its_own_words() -> None:
    found = driver_finding(None, "NVML does not start: Driver/library version mismatch.")
    assert (found.state, found.told) == (
        State.FAILED,
        "NVML does not start: Driver/library version mismatch.",
    )


def test_gpus_that_the_settings_name_must_be_there_once() -> None:
    topology = host(gpu(A), gpu(B, 1))
    assert named_finding(topology, []).state is State.SKIPPED
    assert named_finding(topology, [A, B]).state is State.OK
    assert named_finding(topology, [A, A]).state is State.WARNING
    missing = named_finding(topology, [A, B[:-1] + "9"])
    assert missing.state is State.FAILED
    assert B in missing.told  # the nearest one
    assert named_finding(None, [A]).state is State.FAILED


LIST_A = f"GPU 0: NVIDIA A10 (UUID: {A})\n"
LIST_SLICE = f"{LIST_A}  MIG 1g.10gb     Device  0: (UUID: {SLICE})\n"


def test_the_list_of_a_container_is_read_by_uuid() -> None:
    assert listed(LIST_A + f"GPU 1: Tesla T4 (UUID: {B})\n") == [A, B]
    assert listed(LIST_SLICE) == [SLICE]
    assert listed("No devices were found\n") == []


def test_a_container_must_see_its_gpu_and_no_other() -> None:
    both = LIST_A + f"GPU 1: Tesla T4 (UUID: {B})\n"
    alone = inside_finding({A: Inside(LIST_A, 0), SLICE: Inside(LIST_SLICE, 0)})
    assert alone.state is State.OK
    assert alone.figures["seen"] == {A: [A], SLICE: [SLICE]}
    for wrong in (Inside(both, 0), Inside("", 0), Inside(LIST_A.replace(A, B), 0)):
        assert inside_finding({A: wrong}).state is State.FAILED


def test_a_container_that_has_lost_its_gpu_is_told_with_its_last_words() -> None:
    lost = inside_finding({A: Inside("Failed to initialize NVML: Unknown Error\n", 255)})
    assert lost.state is State.FAILED
    assert "Failed to initialize NVML: Unknown Error." in lost.told
    assert inside_finding({A: Inside("could not select device driver", -1)}).state is State.FAILED


def test_gpus_of_other_containers_are_left_alone() -> None:
    split = Gpu(B, 1, "H100", 80 << 30, (9, 0), 132, mig_mode=True, mig=(MigSlice(SLICE, "1g", 1, 1),))
    topology = host(gpu(A), split)
    assert held(topology, []) == set()
    assert held(topology, [{"DeviceIDs": [A]}]) == {A}
    assert held(topology, [{"DeviceIDs": ["1:0"]}]) == {B}
    assert held(topology, [{"DeviceIDs": ["vendor.com/net=eth1"], "Driver": "cdi"}]) == set()
    assert held(topology, [{"Count": -1, "DeviceIDs": None}]) == {A, B}


# --- the report ---------------------------------------------------------------------------------


def test_the_exit_code_says_what_kind_of_report_it_is() -> None:
    good = [ok("a", "Good."), warning("b", "Well.", "Look."), skipped("c", "Not here.")]
    bad = [*good, failed("d", "Bad.", "Mend it.")]
    assert Report("x", good).exit_code == 0
    assert Report("x", bad).exit_code == 1
    assert Report("x", bad, unreachable=True).exit_code == 3
    assert Report("x", bad, unreachable=True, unreadable=True).exit_code == 2


def test_a_report_as_json_has_every_finding_and_their_numbers() -> None:
    told = Report("x", [ok("a", "Good.", size_bytes=3), failed("d", "Bad.", "Mend it.")]).to_dict()
    assert json.loads(json.dumps(told)) == {
        "deployment": "x",
        "findings": [
            {"name": "a", "state": "ok", "told": "Good.", "do": "", "figures": {"size_bytes": 3}},
            {"name": "d", "state": "failed", "told": "Bad.", "do": "Mend it.", "figures": {}},
        ],
        "summary": {"ok": 1, "warning": 0, "failed": 1, "skipped": 0, "exit_code": 1},
    }
