"""Topologies as YAML: read, written, and every fault in a sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.topology import Bandwidth, Gpu, Link, LinkKind, MigSlice, Topology, every_pair
from orchestrator.errors import ConfigError
from orchestrator.topology.file import as_yaml, read_topology, topology_of

FOLDER = Path(__file__).parent / "topologies"


def gpu(index: int, **more: Any) -> dict[str, Any]:
    told = {"uuid": f"GPU-{index}", "index": index, "name": "NVIDIA A10", "memory_bytes": 24146608128}
    return {**told, "compute_capability": "8.6", "sm_count": 72, **more}


def test_the_switched_machine_has_every_pair() -> None:
    topology = read_topology(FOLDER / "a100-sxm4-80gb-x8.yaml")
    assert len(topology.links) == 28
    assert set(topology.links.values()) == {Link(LinkKind.NVSWITCH, 12)}
    assert topology.driver == "550.54.15"
    assert topology.numa_cpus[1] == (*range(64, 128), *range(192, 256))
    assert topology.gpus[7] == Gpu(
        uuid="GPU-a1000000-0000-4000-8000-000000000007",
        index=7,
        name="NVIDIA A100-SXM4-80GB",
        memory_bytes=80 * 2**30,
        compute_capability=(8, 0),
        sm_count=108,
        numa_node=1,
        bus_id="00000000:BD:00.0",
    )


def test_slices_make_a_gpu_split() -> None:
    split = read_topology(FOLDER / "mixed.yaml").gpus[1]
    assert split.mig_mode
    assert split.mig[2] == MigSlice("MIG-31000000-0000-5000-8000-00000000000c", "1g.5gb", 5100273664, 14)


def test_a_capability_may_be_a_number_and_minus_one_is_no_node() -> None:
    topology = topology_of({"version": 1, "gpus": [gpu(0, compute_capability=9.0, numa_node=-1)]})
    assert topology.gpus[0].compute_capability == (9, 0)
    assert topology.gpus[0].numa_node is None


def test_gpus_may_stand_in_any_order() -> None:
    topology = topology_of(
        {
            "version": 1,
            "gpus": [gpu(1), gpu(0)],
            "links": [{"between": [1, 0], "kind": "nvlink", "lanes": 4}],
        }
    )
    assert [one.index for one in topology.gpus] == [0, 1]
    assert topology.links == {("GPU-0", "GPU-1"): Link(LinkKind.NVLINK, 4)}


LINK = {"between": [0, 1], "kind": "pcie"}


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"gpu": []}, "there is no key 'gpu'; the nearest one is 'gpus'."),
        (
            {"gpus": [gpu(0, sm_counts=1)]},
            "there is no key 'gpus.0.sm_counts'; the nearest one is 'sm_count'.",
        ),
        ({"gpus": [gpu(0, uid="x")]}, "there is no key 'gpus.0.uid'; the nearest one is 'uuid'."),
        (
            {"links": [{**LINK, "bandwidth": 3}]},
            "there is no key 'links.0.bandwidth'; there are between, kind, lanes.",
        ),
        (
            {"gpus": [gpu(0, mig=[{"uuid": "MIG-0", "profil": "1g.5gb", "memory_bytes": 1}])]},
            "there is no key 'gpus.0.mig.0.profil'; the nearest one is 'profile' (1 more).",
        ),
        ({"version": 2}, "version is 2: input should be 1."),
        ({"gpus": [{"index": 0}]}, "gpus.0.uuid is missing (3 more)."),
        (
            {"gpus": [gpu(0, memory_bytes="80GB")]},
            "gpus.0.memory_bytes is '80GB': input should be a valid integer.",
        ),
        ({"gpus": [gpu(0, memory_bytes=0)]}, "gpus.0.memory_bytes is 0: input should be greater than 0."),
        ({"gpus": [gpu(0, compute_capability=8)]}, "gpus.0.compute_capability is 8: must look like 8.0."),
        ({"numa": {0: "0-"}}, "numa.0 is '0-': must look like 0-15,32-47."),
        ({"numa": {0: "0-3,3"}}, "numa.0 is '0-3,3': must name each core once."),
        ({"numa": {0: "7-3"}}, "numa.0 is '7-3': must name each core once."),
        ({"gpus": [gpu(0), gpu(0)]}, "Two GPUs have the UUID GPU-0."),
        (
            {"numa": {0: "0-3"}, "gpus": [gpu(0, numa_node=1)]},
            "GPU 0 (NVIDIA A10) is at NUMA node 1, whose cores are not given.",
        ),
        ({"links": [{"between": [0, 2], "kind": "pcie"}]}, "links.0.between names GPU 2; there are 0, 1."),
        ({"links": [{"between": [0, 0], "kind": "pcie"}]}, "links.0.between names GPU 0 twice."),
        ({"links": [LINK, LINK]}, "links.1.between: the link between GPUs 0 and 1 is told already."),
        (
            {"links": [{"between": [0, 1], "kind": "nvlink"}]},
            "links.0: nvlink needs the number of its lanes.",
        ),
        ({"links": [{**LINK, "lanes": 2}]}, "links.0: pcie has no lanes."),
        (
            {"links": [{**LINK, "kind": "pci"}]},
            (
                "links.0.kind is 'pci': input should be 'nvswitch', 'nvlink', 'pcie', 'host_bridge', "
                "'numa' or 'system'."
            ),
        ),
        (
            {"bandwidths": [{"transport": "arena", "gb_per_s": 0}]},
            "bandwidths.0.gb_per_s is 0: input should be greater than 0.",
        ),
        (
            {"bandwidths": [{"transport": "arena", "gb_per_s": 9, "between": [0, 5]}]},
            "bandwidths.0.between names GPU 5; there are 0, 1.",
        ),
    ],
)
def test_a_fault_is_told_in_a_sentence(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        topology_of({"version": 1, "gpus": [gpu(0), gpu(1)], **more})
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gpus: [", "is not YAML"),
        ("- 1", "a topology has keys and values"),
        ("version: 1\ngpus: []\nlink: []", "there is no key 'link'; the nearest one is 'links'."),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_topology(path)
    assert str(path) in str(caught.value)
    assert sentence in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The topology file .*none\.yaml cannot be read"):
        read_topology(tmp_path / "none.yaml")


def test_measurements_are_written_and_read_back() -> None:
    topology = read_topology(FOLDER / "a10-pcie-x4.yaml")
    pair = topology.gpus[0].uuid, topology.gpus[2].uuid
    measured = dataclasses.replace(
        topology, bandwidths=(Bandwidth("arena", 8.25), Bandwidth("pull", 1.5, pair))
    )
    assert topology_of(yaml.safe_load(as_yaml(measured))) == measured


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    count = draw(st.integers(0, 4))
    nodes = draw(st.sampled_from([{}, {0: (0, 1, 2)}, {0: (0, 2, 3), 1: (1, 8)}]))
    gpus = []
    for index in range(count):
        parts = draw(st.integers(0, 2))
        mig = tuple(MigSlice(f"MIG-{index}-{n}", "1g.5gb", 5 << 30, 14) for n in range(parts))
        node = draw(st.sampled_from([None, *nodes]))
        mode = bool(mig) or draw(st.booleans())
        gpus.append(Gpu(f"GPU-{index}", 2 * index, "A100", 40 << 30, (8, 0), 108, node, "", mode, mig))
    kinds = st.sampled_from([Link(LinkKind.NVLINK, 4), Link(LinkKind.NVSWITCH, 12), Link(LinkKind.PCIE)])
    told = {pair: draw(kinds) for pair in every_pair(gpus, {}) if draw(st.booleans())}
    return Topology(tuple(gpus), every_pair(gpus, told), nodes, draw(st.sampled_from(["", "550.54.15"])))


@given(topologies())
def test_every_topology_survives_being_written(topology: Topology) -> None:
    assert topology_of(yaml.safe_load(as_yaml(topology))) == topology
