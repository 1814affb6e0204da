"""NVML in memory, fed from a Topology: its functions over the real library's constants and errors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pynvml

from orchestrator.core.topology import Device, Gpu, LinkKind, Topology

CORES = {(7, 5): 64, (8, 0): 64, (8, 6): 128, (9, 0): 128}
"""CUDA cores per SM, from the whitepapers of Turing, Ampere and Hopper."""
LANES = {(8, 0): 12, (8, 6): 4, (9, 0): 18, (7, 5): 0}
"""NVLinks that such a GPU has; asked for a further one, NVML refuses."""
SWITCH_BUS = "00000000:C1:00.0"
LEVELS = {
    LinkKind.PCIE: pynvml.NVML_TOPOLOGY_SINGLE,
    LinkKind.HOST_BRIDGE: pynvml.NVML_TOPOLOGY_HOSTBRIDGE,
    LinkKind.NUMA: pynvml.NVML_TOPOLOGY_NODE,
}


@dataclass
class NvmlStandIn:
    """Everything that is not defined here is pynvml's own."""

    topology: Topology
    fails: dict[str, int] = field(default_factory=dict)
    """By function name: the error code that it answers with."""
    open: int = 0

    def __getattribute__(self, name: str) -> Any:
        fails: dict[str, int] = object.__getattribute__(self, "__dict__").get("fails", {})
        if name in fails:
            return partial(refuse, fails[name])
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml"):
            raise AssertionError(f"{name} is not in the stand-in")
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return self.topology.driver

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.topology.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:  # noqa: N802
        assert self.open == 1
        return Device(self.topology.gpus[index])

    def nvmlDeviceGetUUID(self, handle: Device) -> str:  # noqa: N802
        return handle.uuid

    def nvmlDeviceGetName(self, handle: Device) -> str:  # noqa: N802
        return handle.gpu.name if handle.slice is None else f"{handle.gpu.name} MIG {handle.slice.profile}"

    def nvmlDeviceGetMemoryInfo(self, handle: Device) -> Any:  # noqa: N802
        return SimpleNamespace(total=handle.memory_bytes, free=0, used=handle.memory_bytes)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Device) -> tuple[int, int]:  # noqa: N802
        return handle.gpu.compute_capability

    def nvmlDeviceGetNumGpuCores(self, handle: Device) -> int:  # noqa: N802
        return handle.gpu.sm_count * CORES[handle.gpu.compute_capability]

    def nvmlDeviceGetPciInfo(self, handle: Device) -> Any:  # noqa: N802
        return pci_at(handle.gpu.bus_id)

    def nvmlDeviceGetMemoryAffinity(self, handle: Device, words: int, scope: int) -> Any:  # noqa: N802
        assert scope == pynvml.NVML_AFFINITY_SCOPE_NODE
        return mask([] if handle.gpu.numa_node is None else [handle.gpu.numa_node], words)

    def nvmlDeviceGetCpuAffinity(self, handle: Device, words: int) -> Any:  # noqa: N802
        node = handle.gpu.numa_node
        return mask([] if node is None else self.topology.numa_cpus[node], words)

    def nvmlDeviceGetMigMode(self, handle: Device) -> list[int]:  # noqa: N802
        if handle.gpu.compute_capability < (8, 0):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        on = pynvml.NVML_DEVICE_MIG_ENABLE if handle.gpu.mig_mode else pynvml.NVML_DEVICE_MIG_DISABLE
        return [on, on]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Device) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Device, index: int) -> Device:  # noqa: N802
        if index >= len(handle.gpu.mig):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return Device(handle.gpu, handle.gpu.mig[index])

    def nvmlDeviceGetAttributes(self, handle: Device) -> Any:  # noqa: N802
        """As the driver: only of slices."""
        if handle.slice is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        attributes = pynvml.c_nvmlDeviceAttributes()
        attributes.multiprocessorCount = handle.slice.sm_count
        attributes.memorySizeMB = handle.slice.memory_bytes >> 20
        attributes.gpuInstanceSliceCount = int(handle.slice.profile.partition("g")[0])
        return attributes

    def nvmlDeviceGetNvLinkState(self, handle: Device, lane: int) -> int:  # noqa: N802
        return int(self._end(handle.gpu, lane) is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Device, lane: int) -> int:  # noqa: N802
        switch = self._end(handle.gpu, lane) == SWITCH_BUS
        return int(pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if switch else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Device, lane: int) -> Any:  # noqa: N802
        end = self._end(handle.gpu, lane)
        assert end is not None
        return pci_at(end)

    def nvmlDeviceGetTopologyCommonAncestor(self, a: Device, b: Device) -> int:  # noqa: N802
        return LEVELS.get(self.topology.link(a.gpu, b.gpu).kind, pynvml.NVML_TOPOLOGY_SYSTEM)

    def _end(self, gpu: Gpu, lane: int) -> str | None:
        """Bus id at the other end of a lane; None where it is down."""
        if lane >= LANES[gpu.compute_capability]:
            raise pynvml.NVMLError(
                pynvml.NVML_ERROR_NOT_SUPPORTED if lane == 0 else pynvml.NVML_ERROR_INVALID_ARGUMENT
            )
        others = [(other, self.topology.link(gpu, other)) for other in self.topology.gpus if other != gpu]
        if switched := [link for _, link in others if link.kind is LinkKind.NVSWITCH]:
            return SWITCH_BUS if lane < switched[0].lanes else None
        ends = itertools.chain.from_iterable([other.bus_id] * link.lanes for other, link in others)
        return next(itertools.islice(ends, lane, None), None)


def refuse(code: int, *_: object) -> None:
    raise pynvml.NVMLError(code)


def pci_at(bus_id: str) -> Any:
    pci = pynvml.nvmlPciInfo_t()
    pci.busId = bus_id
    return pci


def mask(numbers: Sequence[int], words: int) -> list[int]:
    """A bit set in 64-bit words, as NVML fills it."""
    filled = [0] * words
    for number in numbers:
        filled[number // 64] |= 1 << (number % 64)
    return filled
