"""GPUs of one host as they are known: memory, slices, links between them, cores near them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum

from orchestrator.errors import ConfigError

SEPARATION_CAPABILITY = (8, 0)
"""Compute capability from which on flash attention reads a cached prefix: Ampere."""

CDI_KIND = "nvidia.com/gpu="
"""Of a GPU's name as the Container Device Interface has it; what follows is an index or a UUID."""


class LinkKind(StrEnum):
    """The way between two GPUs, the nearest kind first."""

    NVSWITCH = "nvswitch"
    NVLINK = "nvlink"
    PCIE = "pcie"
    """One PCIe switch or several, without the host bridge."""
    HOST_BRIDGE = "host_bridge"
    NUMA = "numa"
    """Across host bridges of one NUMA node."""
    SYSTEM = "system"
    """Across NUMA nodes, or not known."""


NEAREST_FIRST = tuple(LinkKind)
FAST = frozenset({LinkKind.NVLINK, LinkKind.NVSWITCH})


@dataclass(frozen=True, slots=True)
class Link:
    kind: LinkKind
    lanes: int = 0
    """How many NVLinks lead from one to the other, or from each to the switch; 0 for other kinds."""

    @property
    def nearness(self) -> tuple[int, int]:
        """The greater, the nearer."""
        return -NEAREST_FIRST.index(self.kind), self.lanes


@dataclass(frozen=True, slots=True)
class MigSlice:
    """A part of a GPU with memory and SMs of its own."""

    uuid: str
    profile: str
    memory_bytes: int
    sm_count: int


@dataclass(frozen=True, slots=True)
class Gpu:
    uuid: str
    index: int
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    sm_count: int
    """0: not known."""
    numa_node: int | None = None
    bus_id: str = ""
    mig_mode: bool = False
    """Split: only its slices can be used, of which there may be none yet."""
    mig: tuple[MigSlice, ...] = ()

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


@dataclass(frozen=True, slots=True)
class Device:
    """What a shard's rank can have: a whole GPU, or one slice of it."""

    gpu: Gpu
    slice: MigSlice | None = None

    @property
    def uuid(self) -> str:
        return self.slice.uuid if self.slice else self.gpu.uuid

    @property
    def memory_bytes(self) -> int:
        return self.slice.memory_bytes if self.slice else self.gpu.memory_bytes

    def __str__(self) -> str:
        if self.slice is None:
            return str(self.gpu)
        return f"slice {self.slice.uuid} ({self.slice.profile}) of {self.gpu}"


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What `doctor` measured between two GPUs' containers; without GPUs it is the host's own."""

    transport: str
    gb_per_s: float
    between: tuple[str, str] | None = None
    """UUIDs, in either order."""


@dataclass(frozen=True, slots=True)
class Topology:
    """ConfigError for GPUs that contradict each other."""

    gpus: tuple[Gpu, ...]
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    """By two UUIDs, the GPU with the lower index first."""
    numa_cpus: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    driver: str = ""
    bandwidths: tuple[Bandwidth, ...] = ()

    def __post_init__(self) -> None:
        _each_once("UUID", [d.uuid for g in self.gpus for d in (Device(g), *_slices(g))])
        _each_once("index", [str(gpu.index) for gpu in self.gpus])
        for gpu in self.gpus:
            if self.numa_cpus and gpu.numa_node is not None and gpu.numa_node not in self.numa_cpus:
                raise ConfigError(f"{gpu} is at NUMA node {gpu.numa_node}, whose cores are not given.")
            if gpu.mig and not gpu.mig_mode:
                raise ConfigError(f"{gpu} has MIG slices although its MIG mode is off.")

    @property
    def uuids_by_index(self) -> dict[str, str]:
        """Other people's containers name GPUs by their index."""
        return {str(gpu.index): gpu.uuid for gpu in self.gpus}

    def link(self, a: Gpu, b: Gpu) -> Link:
        """Between two different GPUs; what is not told follows from their NUMA nodes."""
        first, second = sorted((a, b), key=lambda gpu: gpu.index)
        known = self.links.get((first.uuid, second.uuid))
        return known or untold_link(a, b)

    def islands(self) -> tuple[tuple[Gpu, ...], ...]:
        """GPUs that reach each other over NVLink alone; one without NVLink is an island of its own."""
        islands: list[list[Gpu]] = []
        for gpu in self.gpus:
            near = [island for island in islands if any(self.link(gpu, one).kind in FAST for one in island)]
            islands = [island for island in islands if island not in near]
            islands.append([*itertools.chain(*near), gpu])
        ordered = [tuple(sorted(island, key=lambda gpu: gpu.index)) for island in islands]
        return tuple(sorted(ordered, key=lambda island: island[0].index))

    def devices(self) -> tuple[Device, ...]:
        """Everything that a rank can have: whole GPUs, and the slices of those that are split."""
        whole = [Device(gpu) for gpu in self.gpus if not gpu.mig_mode]
        return (*whole, *itertools.chain.from_iterable(map(_slices, self.gpus)))

    def find(self, name: str) -> Device:
        """By UUID, MIG UUID, index (`0`, slice `0:1`) or CDI name; ConfigError names the nearest one."""
        known = self._names()
        wanted = name.strip().removeprefix(CDI_KIND)
        if wanted in known:
            return known[wanted]
        if not self.gpus:
            raise ConfigError(f"There is no GPU {name!r}: this host has none that NVML knows.")
        if near := get_close_matches(wanted, known, n=1):
            raise ConfigError(f"There is no GPU {name!r}; the nearest one is {near[0]!r}, {known[near[0]]}.")
        every = ", ".join(f"{gpu.index} {gpu.uuid}" for gpu in self.gpus)
        raise ConfigError(f"There is no GPU {name!r}; there are {every}.")

    def bandwidth(self, transport: str, a: Gpu, b: Gpu) -> float | None:
        """GB/s: of this pair if it was measured, else the host's own, else None."""
        pair = {a.uuid, b.uuid}
        of = [one for one in self.bandwidths if one.transport == transport]
        exact = [one.gb_per_s for one in of if one.between and set(one.between) == pair]
        whole = [one.gb_per_s for one in of if one.between is None]
        return next(iter(exact + whole), None)

    def _names(self) -> dict[str, Device]:
        names: dict[str, Device] = {}
        for gpu in self.gpus:
            names |= {gpu.uuid: Device(gpu), str(gpu.index): Device(gpu)}
            for at, device in enumerate(_slices(gpu)):
                names |= {device.uuid: device, f"{gpu.index}:{at}": device}
        return names


def separation_problem(gpu: Gpu) -> str | None:
    """Why no prefill or decode shard may run on it, in a sentence."""
    if gpu.compute_capability >= SEPARATION_CAPABILITY:
        return None
    major, minor = gpu.compute_capability
    return (
        f"{gpu} has compute capability {major}.{minor}: prefill and decode cannot be separated on it, "
        "because flash attention over a cached prefix needs 8.0 (Ampere) or newer."
    )


def untold_link(a: Gpu, b: Gpu) -> Link:
    """What can be said without being told: one NUMA node, or not."""
    together = a.numa_node is not None and a.numa_node == b.numa_node
    return Link(LinkKind.NUMA if together else LinkKind.SYSTEM)


def every_pair(gpus: Sequence[Gpu], links: Mapping[tuple[str, str], Link]) -> dict[tuple[str, str], Link]:
    """`links` with those that were not told."""
    pairs = itertools.combinations(sorted(gpus, key=lambda gpu: gpu.index), 2)
    return {(a.uuid, b.uuid): links.get((a.uuid, b.uuid)) or untold_link(a, b) for a, b in pairs}


def _slices(gpu: Gpu) -> tuple[Device, ...]:
    return tuple(Device(gpu, part) for part in gpu.mig)


def _each_once(what: str, values: Iterable[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ConfigError(f"Two GPUs have the {what} {value}.")
        seen.add(value)
