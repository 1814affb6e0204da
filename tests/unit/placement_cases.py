"""Known machines, and wishes for shards in few words."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.placement import GpuClaim, GpuWish, Placement, place
from orchestrator.core.topology import Topology
from orchestrator.errors import ConfigError
from orchestrator.topology.file import read_topology
from tgi_patches.contract import Role

FOLDER = Path(__file__).parent / "topologies"
DGX = read_topology(FOLDER / "a100-sxm4-80gb-x8.yaml")
A10 = read_topology(FOLDER / "a10-pcie-x4.yaml")
BRIDGED = read_topology(FOLDER / "a100-pcie-bridged-x4.yaml")
H200 = read_topology(FOLDER / "h200-x1.yaml")
MIXED = read_topology(FOLDER / "mixed.yaml")
GIB = 1 << 30


def prefill(count: int, tp: int = 1, needed_bytes: int = 0) -> list[GpuWish]:
    return [GpuWish(f"prefill-{n}", Role.PREFILL, tp, needed_bytes=needed_bytes) for n in range(count)]


def decode(count: int, tp: int = 1, needed_bytes: int = 0) -> list[GpuWish]:
    return [GpuWish(f"decode-{n}", Role.DECODE, tp, needed_bytes=needed_bytes) for n in range(count)]


def share(shard: str, role: Role, percent: int, fraction: float, *gpus: str) -> GpuWish:
    return GpuWish(shard, role, gpus=gpus, mps_percent=percent, memory_fraction=fraction)


def indices(placement: Placement, topology: Topology) -> dict[str, list[int]]:
    return {
        shard: [topology.find(name).gpu.index for name in names] for shard, names in placement.gpus.items()
    }


def refusal(wishes: list[GpuWish], topology: Topology, claims: tuple[GpuClaim, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        place(wishes, topology, claims)
    return str(caught.value)


def named(shard: str, *gpus: str, tp: int = 1, needed_bytes: int = 0) -> GpuWish:
    role = Role(shard.partition("-")[0])
    return GpuWish(shard, role, tp, gpus, needed_bytes=needed_bytes)
