"""What NVML tells becomes the same topology as its YAML; over a stand-in, no GPU has answered these yet."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pynvml
import pytest

from orchestrator.core.topology import Link, LinkKind
from orchestrator.errors import Unreachable
from orchestrator.topology.file import read_topology
from orchestrator.topology.nvml import discover
from tests.unit.nvml_stand_in import NvmlStandIn

FOLDER = Path(__file__).parent / "topologies"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
DGX = read_topology(FOLDER / "a100-sxm4-80gb-x8.yaml")
A10 = read_topology(FOLDER / "a10-pcie-x4.yaml")
MIXED = read_topology(FOLDER / "mixed.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_nvml_and_yaml_tell_the_same_topology(name: str) -> None:
    told = read_topology(FOLDER / f"{name}.yaml")
    nvml = NvmlStandIn(told)
    assert discover(nvml) == told
    assert nvml.open == 0


def test_there_are_all_five_topologies() -> None:
    assert NAMES == ["a10-pcie-x4", "a100-pcie-bridged-x4", "a100-sxm4-80gb-x8", "h200-x1", "mixed"]


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_without_a_library_or_a_driver_there_is_no_topology(code: int) -> None:
    assert discover(NvmlStandIn(DGX, {"nvmlInit": code})) is None


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has NVIDIA's driver")
def test_the_real_library_on_a_machine_without_a_driver_tells_none() -> None:
    assert discover() is None


def test_without_the_python_package_there_is_no_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert discover() is None


def test_an_nvml_that_does_not_start_is_named() -> None:
    nvml = NvmlStandIn(DGX, {"nvmlInit": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})
    with pytest.raises(Unreachable, match=r"NVML does not start: .*version mismatch.*docker\.topology\.$"):
        discover(nvml)


def test_a_lost_gpu_is_named_and_nvml_is_shut_down() -> None:
    nvml = NvmlStandIn(DGX, {"nvmlDeviceGetUUID": pynvml.NVML_ERROR_GPU_IS_LOST})
    with pytest.raises(Unreachable, match="GPU 0 cannot be asked: it says 'GPU is lost'"):
        discover(nvml)
    assert nvml.open == 0


@pytest.mark.parametrize("at", ["nvmlDeviceGetNvLinkState", "nvmlDeviceGetTopologyCommonAncestor"])
def test_an_error_that_is_not_about_a_missing_feature_is_never_swallowed(at: str) -> None:
    with pytest.raises(Unreachable, match="Unknown Error"):
        discover(NvmlStandIn(A10, {at: pynvml.NVML_ERROR_UNKNOWN}))


def test_an_error_at_the_end_changes_nothing() -> None:
    assert discover(NvmlStandIn(A10, {"nvmlShutdown": pynvml.NVML_ERROR_UNKNOWN})) == A10


def test_a_virtual_machine_that_tells_neither_links_nor_affinity_has_unknown_ones() -> None:
    silent = (
        "nvmlDeviceGetMemoryAffinity",
        "nvmlDeviceGetCpuAffinity",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetNumGpuCores",
    )
    found = discover(NvmlStandIn(DGX, dict.fromkeys(silent, pynvml.NVML_ERROR_NOT_SUPPORTED)))
    assert found is not None
    assert found.numa_cpus == {}
    assert [(gpu.numa_node, gpu.sm_count) for gpu in found.gpus] == [(None, 0)] * 8
    assert set(found.links.values()) == {Link(LinkKind.SYSTEM)}
    assert len(found.links) == 28


def test_an_old_driver_that_does_not_tell_the_kind_of_the_other_end_still_tells_bridges() -> None:
    bridged = read_topology(FOLDER / "a100-pcie-bridged-x4.yaml")
    nvml = NvmlStandIn(bridged, {"nvmlDeviceGetNvLinkRemoteDeviceType": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
    assert discover(nvml) == bridged


def test_a_split_gpu_without_slices_is_still_split() -> None:
    empty = dataclasses.replace(MIXED.gpus[1], mig=())
    told = dataclasses.replace(MIXED, gpus=(MIXED.gpus[0], empty, MIXED.gpus[2]))
    found = discover(NvmlStandIn(told))
    assert found == told
    assert [device.gpu.index for device in found.devices()] == [0, 2]


def test_a_driver_without_gpus_is_a_topology_without_gpus() -> None:
    found = discover(NvmlStandIn(dataclasses.replace(DGX, gpus=(), links={}, numa_cpus={})))
    assert found is not None
    assert found.gpus == ()
