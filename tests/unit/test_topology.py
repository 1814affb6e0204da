"""Islands, names and links of known machines."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from orchestrator.core.topology import Bandwidth, Gpu, Link, LinkKind, MigSlice, Topology, separation_problem
from orchestrator.errors import ConfigError
from orchestrator.topology.file import read_topology

FOLDER = Path(__file__).parent / "topologies"
DGX = read_topology(FOLDER / "a100-sxm4-80gb-x8.yaml")
A10 = read_topology(FOLDER / "a10-pcie-x4.yaml")
BRIDGED = read_topology(FOLDER / "a100-pcie-bridged-x4.yaml")
MIXED = read_topology(FOLDER / "mixed.yaml")


def indices(islands: tuple[tuple[Gpu, ...], ...]) -> list[list[int]]:
    return [[gpu.index for gpu in island] for island in islands]


def test_a_switch_makes_one_island_bridges_make_pairs_and_pcie_none() -> None:
    assert indices(DGX.islands()) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert indices(BRIDGED.islands()) == [[0, 2], [1, 3]]
    assert indices(A10.islands()) == [[0], [1], [2], [3]]


def test_a_chain_of_nvlinks_is_one_island() -> None:
    gpus = tuple(Gpu(f"GPU-{n}", n, "A100", 1, (8, 0), 108) for n in range(4))
    chain = {("GPU-0", "GPU-3"): Link(LinkKind.NVLINK, 2), ("GPU-1", "GPU-3"): Link(LinkKind.NVLINK, 2)}
    assert indices(Topology(gpus, chain).islands()) == [[0, 1, 3], [2]]


def test_links_are_the_same_both_ways() -> None:
    a, b = BRIDGED.gpus[0], BRIDGED.gpus[2]
    assert BRIDGED.link(a, b) == BRIDGED.link(b, a) == Link(LinkKind.NVLINK, 12)


def test_what_is_not_told_of_two_gpus_follows_from_their_numa_nodes() -> None:
    zero, one, two, three = BRIDGED.gpus
    assert BRIDGED.link(zero, one).kind is LinkKind.HOST_BRIDGE
    assert BRIDGED.link(two, three).kind is LinkKind.NUMA
    assert BRIDGED.link(one, two).kind is LinkKind.SYSTEM


def test_more_lanes_are_nearer_and_every_nvlink_is_nearer_than_pcie() -> None:
    ordered = [
        Link(LinkKind.NVSWITCH, 12),
        Link(LinkKind.NVLINK, 4),
        Link(LinkKind.NVLINK, 2),
        Link(LinkKind.PCIE),
        Link(LinkKind.HOST_BRIDGE),
        Link(LinkKind.NUMA),
        Link(LinkKind.SYSTEM),
    ]
    turned = ordered[::-1]
    assert sorted(turned, key=lambda link: link.nearness, reverse=True) == ordered


@pytest.mark.parametrize(
    ("name", "uuid"),
    [
        ("GPU-31000000-0000-4000-8000-000000000002", "GPU-31000000-0000-4000-8000-000000000002"),
        ("2", "GPU-31000000-0000-4000-8000-000000000002"),
        ("nvidia.com/gpu=2", "GPU-31000000-0000-4000-8000-000000000002"),
        (
            "nvidia.com/gpu=GPU-31000000-0000-4000-8000-000000000002",
            "GPU-31000000-0000-4000-8000-000000000002",
        ),
        ("MIG-31000000-0000-5000-8000-00000000000b", "MIG-31000000-0000-5000-8000-00000000000b"),
        ("1:1", "MIG-31000000-0000-5000-8000-00000000000b"),
        ("nvidia.com/gpu=1:1", "MIG-31000000-0000-5000-8000-00000000000b"),
    ],
)
def test_a_gpu_has_many_names(name: str, uuid: str) -> None:
    assert MIXED.find(name).uuid == uuid


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        MIXED.find("GPU-31000000-0000-4000-8000-00000000000Z")
    assert str(caught.value) == (
        "There is no GPU 'GPU-31000000-0000-4000-8000-00000000000Z'; the nearest one is "
        "'GPU-31000000-0000-4000-8000-000000000002', GPU 2 (Tesla T4)."
    )


def test_a_name_that_is_near_to_nothing_gets_all() -> None:
    with pytest.raises(ConfigError, match=r"no GPU 'all'; there are 0 GPU-a101.*, 3 GPU-a101.*003\.$"):
        A10.find("all")


def test_on_a_host_without_gpus_no_name_is_known() -> None:
    with pytest.raises(ConfigError, match=r"There is no GPU '0': this host has none"):
        Topology(()).find("0")


def test_only_a_gpu_that_is_not_split_can_be_had_whole() -> None:
    assert [device.uuid[:4] for device in MIXED.devices()] == ["GPU-", "GPU-", "MIG-", "MIG-", "MIG-"]


def test_below_ampere_separation_is_refused_in_a_sentence() -> None:
    assert separation_problem(MIXED.gpus[0]) is None
    assert separation_problem(MIXED.gpus[2]) == (
        "GPU 2 (Tesla T4) has compute capability 7.5: prefill and decode cannot be separated on it, because "
        "flash attention over a cached prefix needs 8.0 (Ampere) or newer."
    )


def test_a_measured_pair_goes_before_the_host_as_a_whole() -> None:
    a, b, c, _ = A10.gpus
    measured = (Bandwidth("arena", 8.5), Bandwidth("arena", 11.0, (b.uuid, a.uuid)), Bandwidth("pull", 1.2))
    topology = dataclasses.replace(A10, bandwidths=measured)
    assert topology.bandwidth("arena", a, b) == 11.0
    assert topology.bandwidth("arena", a, c) == 8.5
    assert topology.bandwidth("nccl", a, b) is None


def test_gpus_that_contradict_each_other_are_refused() -> None:
    gpu = DGX.gpus[0]
    for gpus, text in (
        ((gpu, dataclasses.replace(gpu, index=1)), f"Two GPUs have the UUID {gpu.uuid}"),
        ((gpu, dataclasses.replace(gpu, uuid="GPU-other")), "Two GPUs have the index 0"),
        ((dataclasses.replace(gpu, mig=(MigSlice("MIG-1", "1g.5gb", 1, 1),)),), "its MIG mode is off"),
    ):
        with pytest.raises(ConfigError, match=text):
            Topology(gpus)
    with pytest.raises(ConfigError, match="NUMA node 0, whose cores are not given"):
        Topology((gpu,), numa_cpus={1: (0,)})
