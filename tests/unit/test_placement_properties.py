"""Placement on machines that nobody thought of, against a search that tries every assignment."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orchestrator.core.placement import GpuClaim, GpuWish, Placement, fallback, place
from orchestrator.core.topology import Device, Gpu, Link, LinkKind, MigSlice, Topology, every_pair
from orchestrator.errors import ConfigError
from tgi_patches.contract import Role

Assignment = dict[str, tuple[Device, ...]]
LINKS = [Link(LinkKind.NVLINK, 4), Link(LinkKind.PCIE), Link(LinkKind.SYSTEM)]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    gpus = []
    for index in range(draw(st.sampled_from([5, 4, 3, 5, 4, 2, 1]))):
        parts = draw(st.sampled_from([0, 0, 0, 0, 2]))
        mig = tuple(MigSlice(f"MIG-{index}-{n}", "3g.5gb", 5, 42) for n in range(parts))
        capability = draw(st.sampled_from([(8, 0), (8, 0), (8, 0), (8, 0), (7, 5)]))
        memory, node = draw(st.sampled_from([20, 20, 10])), draw(st.sampled_from([0, 1]))
        gpus.append(Gpu(f"GPU-{index}", index, "A100", memory, capability, 108, node, "", bool(mig), mig))
    told = {pair: draw(st.sampled_from(LINKS)) for pair in every_pair(gpus, {})}
    return Topology(tuple(gpus), told, {0: (0, 1, 2, 3, 4), 1: (5, 6)})


@st.composite
def wishes(draw: st.DrawFn, topology: Topology) -> list[GpuWish]:
    made = []
    names = [device.uuid for device in topology.devices()]
    for at in range(draw(st.sampled_from([2, 1, 2, 3, 4]))):
        role = draw(st.sampled_from(list(Role)))
        tp, needed = draw(st.sampled_from([1, 1, 1, 2, 2, 3])), draw(st.sampled_from([0, 0, 4, 8, 15]))
        percent = draw(st.sampled_from([0, 0, 0, 30, 50, 70]))
        fraction = draw(st.sampled_from([0.3, 0.5, 0.7])) if percent else 0.0
        needed = needed // 3 if percent else needed
        chosen: list[str] = []
        if len(names) >= tp and draw(st.integers(0, 9)) == 9:
            chosen = draw(st.lists(st.sampled_from(names), min_size=tp, max_size=tp, unique=True))
        made.append(GpuWish(f"{role}-{at}", role, tp, tuple(chosen), percent, fraction, needed))
    return made


@st.composite
def claims(draw: st.DrawFn, topology: Topology) -> list[GpuClaim]:
    made = []
    for device in topology.devices():
        kind = draw(st.sampled_from(["", "", "", "", "", "", "", "whole", "share"]))
        if kind:
            whole = kind == "whole"
            made.append(GpuClaim(device.uuid, "other", 0 if whole else 40, 0.0 if whole else 0.4))
    return made


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[GpuWish], Topology, list[GpuClaim]]:
    topology = draw(topologies())
    return draw(wishes(topology)), topology, draw(claims(topology))


def suits(wish: GpuWish, device: Device) -> bool:
    """The rules about one device, written down a second time."""
    if wish.role is not Role.MIXED and device.gpu.compute_capability < (8, 0):
        return False
    if wish.tp > 1 and device.uuid.startswith("MIG-"):
        return False
    return wish.needed_bytes <= device.memory_bytes * (wish.memory_fraction if wish.mps_percent else 1)


def peaceful(assignment: Assignment, asked: Sequence[GpuWish], held: Sequence[GpuClaim]) -> bool:
    """Nobody has what another one has, but for shares that add up."""
    users: dict[str, list[tuple[int, float]]] = {}
    for claim in held:
        users.setdefault(claim.gpu, []).append((claim.mps_percent, claim.memory_fraction))
    for wish in asked:
        for device in assignment.get(wish.shard, ()):
            users.setdefault(device.uuid, []).append((wish.mps_percent, wish.memory_fraction))
    return all(
        len(shares) == 1
        or (
            all(percent for percent, _ in shares)
            and sum(percent for percent, _ in shares) <= 100
            and sum(fraction for _, fraction in shares) <= 1.000001
        )
        for shares in users.values()
    )


def every_assignment(
    asked: Sequence[GpuWish], topology: Topology, held: Sequence[GpuClaim]
) -> Iterator[Assignment]:
    """Without any cleverness."""
    if not asked:
        yield {}
        return
    wish, rest = asked[0], asked[1:]
    whole = [device for device in topology.devices() if suits(wish, device)]
    for group in itertools.combinations(whole, wish.tp):
        if wish.gpus and {device.uuid for device in group} != set(wish.gpus):
            continue
        for others in every_assignment(rest, topology, held):
            assignment = {wish.shard: group, **others}
            if peaceful(assignment, asked, held):
                yield assignment


def effective(asked: Sequence[GpuWish], topology: Topology) -> Sequence[GpuWish]:
    instead = fallback(asked, topology)
    return instead.wishes if instead else asked


def assigned(placement: Placement, topology: Topology) -> Assignment:
    return {shard: tuple(map(topology.find, names)) for shard, names in placement.gpus.items()}


@settings(deadline=None)
@given(cases())
def test_it_refuses_exactly_what_no_search_can_place(
    case: tuple[list[GpuWish], Topology, list[GpuClaim]],
) -> None:
    asked, topology, held = case
    wanted = effective(asked, topology)
    possible = next(every_assignment(wanted, topology, held), None)
    if possible is None:
        with pytest.raises(ConfigError) as caught:
            place(asked, topology, held)
        assert str(caught.value).endswith(".")
        return
    placement = place(asked, topology, held)
    found = assigned(placement, topology)
    assert [placed.shard for placed in placement.shards] == [wish.shard for wish in wanted]
    assert peaceful(found, wanted, held)
    for wish in wanted:
        assert len(set(found[wish.shard])) == wish.tp
        assert all(suits(wish, device) for device in found[wish.shard])
        assert not wish.gpus or placement.gpus[wish.shard] == wish.gpus
    assert place(asked, topology, held) == placement


@settings(deadline=None)
@given(cases())
def test_a_group_is_inside_an_island_whenever_one_has_room(
    case: tuple[list[GpuWish], Topology, list[GpuClaim]],
) -> None:
    asked, topology, held = case
    try:
        placement = place(asked, topology, held)
    except ConfigError:
        assume(False)
    found, wanted = assigned(placement, topology), effective(asked, topology)
    used = {device for group in found.values() for device in group}
    claimed = {claim.gpu for claim in held}
    for wish in wanted:
        if wish.tp == 1 or wish.gpus:
            continue
        group = set(found[wish.shard])
        free = {d for d in topology.devices() if d in group or not (d in used or d.uuid in claimed)}
        islands = [[d for d in free if d.gpu in island and suits(wish, d)] for island in topology.islands()]
        inside = any(group <= set(members) for members in islands)
        assert inside or all(len(members) < wish.tp for members in islands)


@settings(deadline=None)
@given(cases())
def test_cores_are_those_of_the_nodes_and_nobody_elses(
    case: tuple[list[GpuWish], Topology, list[GpuClaim]],
) -> None:
    asked, topology, held = case
    try:
        placement = place(asked, topology, held)
    except ConfigError:
        assume(False)
    found = assigned(placement, topology)
    for shard, cpus in placement.cpus.items():
        nodes = {device.gpu.numa_node for device in found[shard]}
        assert set(cpus) <= {
            cpu for node, all_of in topology.numa_cpus.items() if node in nodes for cpu in all_of
        }
        assert {node for node, all_of in topology.numa_cpus.items() if set(all_of) & set(cpus)} == nodes
    for node, all_of in topology.numa_cpus.items():
        here = [shard for shard, group in found.items() if node in {d.gpu.numa_node for d in group}]
        parts = [set(placement.cpus[shard]) & set(all_of) for shard in here]
        if here and len(here) <= len(all_of):
            assert sorted(cpu for part in parts for cpu in part) == sorted(all_of)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
