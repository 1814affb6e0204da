"""Asks NVIDIA's NVML for the GPUs of this host.  It blocks: callers give it a thread and a deadline."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from orchestrator.core.topology import Gpu, Link, LinkKind, MigSlice, Topology, every_pair
from orchestrator.errors import Unreachable

T = TypeVar("T")

WORD_BITS = 64
CPU_WORDS = 64
"""Room for 4096 cores."""
NODE_WORDS = 16
NO_BITS: tuple[int, ...] = ()

CORES_PER_SM = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
"""CUDA cores of one SM by compute capability; 128 everywhere else.  NVML counts cores and no SMs."""


def discover(nvml: Any = None) -> Topology | None:
    """The GPUs that NVML knows; None without its library or a driver; Unreachable when it fails.

    `nvml` is the module `pynvml` or something with its functions, constants and errors.
    """
    library = nvml or _library()
    if library is None:
        return None
    try:
        library.nvmlInit()
    except (library.NVMLError_LibraryNotFound, library.NVMLError_DriverNotLoaded):
        return None
    except library.NVMLError as error:
        raise _unreachable("NVML does not start", error) from None
    try:
        return _Asked(library).topology()
    except library.NVMLError as error:
        raise _unreachable("NVML does not describe the GPUs", error) from None
    finally:
        _shut_down(library)


def _library() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _shut_down(library: Any) -> None:
    """A failure at the end changes nothing that was found before."""
    try:
        library.nvmlShutdown()
    except library.NVMLError:
        pass


def _unreachable(what: str, error: Exception) -> Unreachable:
    reason = str(error).rstrip(".")
    return Unreachable(
        f"{what}: it says {reason!r}. See whether nvidia-smi works, or describe the GPUs in docker.topology."
    )


@dataclass(frozen=True, slots=True)
class _Found:
    gpu: Gpu
    handle: Any
    cpus: tuple[int, ...]
    lanes: Mapping[str, int]
    """NVLinks by the bus id at the other end; those that lead to a switch under `SWITCH`."""


SWITCH = ""


@dataclass(frozen=True, slots=True)
class _Asked:
    """One conversation with an NVML that has been started."""

    nvml: Any

    def topology(self) -> Topology:
        count = self.nvml.nvmlDeviceGetCount()
        found = tuple(self._found(index) for index in range(count))
        gpus = tuple(one.gpu for one in found)
        pairs = itertools.combinations(found, 2)
        told = {(a.gpu.uuid, b.gpu.uuid): link for a, b in pairs if (link := self._link(a, b))}
        driver = str(self.nvml.nvmlSystemGetDriverVersion())
        return Topology(gpus, every_pair(gpus, told), _cpus_by_node(found), driver)

    def _found(self, index: int) -> _Found:
        try:
            handle = self.nvml.nvmlDeviceGetHandleByIndex(index)
            return _Found(self._gpu(index, handle), handle, self._cpus(handle), self._lanes(handle))
        except self.nvml.NVMLError as error:
            raise _unreachable(f"GPU {index} cannot be asked", error) from None

    def _gpu(self, index: int, handle: Any) -> Gpu:
        major, minor = self.nvml.nvmlDeviceGetCudaComputeCapability(handle)
        mig_mode = self._mig_mode(handle)
        return Gpu(
            uuid=str(self.nvml.nvmlDeviceGetUUID(handle)),
            index=index,
            name=str(self.nvml.nvmlDeviceGetName(handle)),
            memory_bytes=int(self.nvml.nvmlDeviceGetMemoryInfo(handle).total),
            compute_capability=(major, minor),
            sm_count=self._sm_count(handle, (major, minor)),
            numa_node=self._numa_node(handle),
            bus_id=self._bus_id(self.nvml.nvmlDeviceGetPciInfo(handle)),
            mig_mode=mig_mode,
            mig=tuple(self._slices(handle)) if mig_mode else (),
        )

    def _if_told(self, ask: Callable[[], T], otherwise: T) -> T:
        """What this GPU, driver or container does not tell stays unknown; everything else is an error."""
        try:
            return ask()
        except (
            self.nvml.NVMLError_NotSupported,
            self.nvml.NVMLError_FunctionNotFound,
            self.nvml.NVMLError_InvalidArgument,
            self.nvml.NVMLError_NoPermission,
            self.nvml.NVMLError_NotFound,
        ):
            return otherwise

    def _sm_count(self, handle: Any, capability: tuple[int, int]) -> int:
        cores = self._if_told(lambda: int(self.nvml.nvmlDeviceGetNumGpuCores(handle)), 0)
        return cores // CORES_PER_SM.get(capability, 128)

    def _numa_node(self, handle: Any) -> int | None:
        """The one node whose memory is nearest; None where there are several, as in many virtual machines."""
        scope = self.nvml.NVML_AFFINITY_SCOPE_NODE
        ask = self.nvml.nvmlDeviceGetMemoryAffinity
        nodes = self._if_told(lambda: _bits(ask(handle, NODE_WORDS, scope)), NO_BITS)
        return nodes[0] if len(nodes) == 1 else None

    def _cpus(self, handle: Any) -> tuple[int, ...]:
        return self._if_told(lambda: _bits(self.nvml.nvmlDeviceGetCpuAffinity(handle, CPU_WORDS)), NO_BITS)

    def _bus_id(self, pci: Any) -> str:
        text = pci.busId
        return (text.decode() if isinstance(text, bytes) else str(text)).upper()

    # --- MIG ----------------------------------------------------------------------------------------

    def _mig_mode(self, handle: Any) -> bool:
        """As it is now, not as it is after the next reset."""
        modes = self._if_told(lambda: self.nvml.nvmlDeviceGetMigMode(handle), None)
        return modes is not None and modes[0] == self.nvml.NVML_DEVICE_MIG_ENABLE

    def _slices(self, handle: Any) -> Iterator[MigSlice]:
        for at in range(self.nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                part = self.nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, at)
            except (self.nvml.NVMLError_NotFound, self.nvml.NVMLError_InvalidArgument):
                continue
            yield self._slice(part)

    def _slice(self, part: Any) -> MigSlice:
        attributes = self.nvml.nvmlDeviceGetAttributes(part)
        memory_bytes = int(attributes.memorySizeMB) << 20
        named = re.search(r"MIG (\S+)$", str(self.nvml.nvmlDeviceGetName(part)))
        made_up = f"{attributes.gpuInstanceSliceCount}g.{round(memory_bytes / 2**30)}gb"
        profile = named[1] if named else made_up
        uuid = str(self.nvml.nvmlDeviceGetUUID(part))
        return MigSlice(uuid, profile, memory_bytes, int(attributes.multiprocessorCount))

    # --- links --------------------------------------------------------------------------------------

    def _lanes(self, handle: Any) -> Mapping[str, int]:
        """Past its last NVLink a GPU says that it has none, and so does a GPU without any."""
        ends = (
            self._if_told(partial(self._other_end, handle, lane), None)
            for lane in range(self.nvml.NVML_NVLINK_MAX_LINKS)
        )
        return Counter(end for end in ends if end is not None)

    def _other_end(self, handle: Any, lane: int) -> str | None:
        """SWITCH, or the bus id of what this NVLink leads to; None where it is down."""
        if not self.nvml.nvmlDeviceGetNvLinkState(handle, lane):
            return None
        kind = self._if_told(lambda: self.nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, lane), None)
        if kind == self.nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return SWITCH
        return self._bus_id(self.nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, lane))

    def _link(self, a: _Found, b: _Found) -> Link | None:
        if direct := a.lanes.get(b.gpu.bus_id, 0):
            return Link(LinkKind.NVLINK, direct)
        if switched := min(a.lanes.get(SWITCH, 0), b.lanes.get(SWITCH, 0)):
            return Link(LinkKind.NVSWITCH, switched)
        ask = self.nvml.nvmlDeviceGetTopologyCommonAncestor
        return self._if_told(lambda: self._pci_link(ask(a.handle, b.handle)), None)

    def _pci_link(self, level: int) -> Link:
        nvml = self.nvml
        kinds = {
            nvml.NVML_TOPOLOGY_INTERNAL: LinkKind.PCIE,
            nvml.NVML_TOPOLOGY_SINGLE: LinkKind.PCIE,
            nvml.NVML_TOPOLOGY_MULTIPLE: LinkKind.PCIE,
            nvml.NVML_TOPOLOGY_HOSTBRIDGE: LinkKind.HOST_BRIDGE,
            nvml.NVML_TOPOLOGY_NODE: LinkKind.NUMA,
        }
        return Link(kinds.get(level, LinkKind.SYSTEM))


def _cpus_by_node(found: Sequence[_Found]) -> dict[int, tuple[int, ...]]:
    """Of the nodes that have GPUs; none at all where the cores of one of them are not told."""
    cpus: dict[int, set[int]] = {}
    for one in found:
        if one.gpu.numa_node is not None:
            cpus.setdefault(one.gpu.numa_node, set()).update(one.cpus)
    if not all(cpus.values()):
        return {}
    return {node: tuple(sorted(cpus[node])) for node in sorted(cpus)}


def _bits(words: Sequence[int]) -> tuple[int, ...]:
    """The numbers of the bits that are set."""
    return tuple(
        at * WORD_BITS + bit for at, word in enumerate(words) for bit in range(WORD_BITS) if word >> bit & 1
    )
