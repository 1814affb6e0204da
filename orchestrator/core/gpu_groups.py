"""Which GPUs are best for a shard: together in an NVLink island, and near those of the other phase."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core.gpu_room import GpuWish, Kind, Room, Rooms
from orchestrator.core.topology import Device, Gpu, Topology, separation_problem
from tgi_patches.contract import Role

Group = tuple[Device, ...]
Zone = tuple[str, ...]
"""UUIDs of GPUs that are near each other."""
SAME_GPU = (1, 0)
"""Nearer than any link."""


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """What the groups that one wish could have are compared by."""

    topology: Topology
    zone: Mapping[str, Zone]
    """By UUID of a GPU."""
    island: Mapping[str, int]
    place: Mapping[str, int]
    """By UUID of a device, in the list of all: breaks the last tie."""
    others: tuple[Gpu, ...]
    """That the other phase has already."""
    load: Mapping[Zone, int]
    """By zone: GPUs that this phase has already."""
    company: int
    """GPUs of the other phase that should find room beside this shard's."""


def neighbourhood(
    wish: GpuWish, topology: Topology, placed: Sequence[tuple[GpuWish, Group]], waiting: Sequence[GpuWish]
) -> Neighbourhood:
    """`placed` have their GPUs, `waiting` come after `wish`."""
    islands = topology.islands()
    zone = _zones(islands)
    other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(wish.role)
    everyone = [wish, *waiting, *(one for one, _ in placed)]
    ranks = sum(one.tp for one in everyone if one.role is other)
    return Neighbourhood(
        topology=topology,
        zone=zone,
        island={gpu.uuid: at for at, members in enumerate(islands) for gpu in members},
        place={device.uuid: at for at, device in enumerate(topology.devices())},
        others=tuple(device.gpu for one, group in placed if one.role is other for device in group),
        load=Counter(zone[d.gpu.uuid] for one, group in placed if one.role is wish.role for d in group),
        company=math.ceil(ranks / sum(one.role is wish.role for one in everyone)),
    )


def _zones(islands: Sequence[Sequence[Gpu]]) -> dict[str, Zone]:
    """An NVLink island, or its part at one NUMA node; GPUs without NVLink stand with those of their node."""
    alone = [members[0] for members in islands if len(members) == 1]
    zones: dict[str, Zone] = {}
    for members in islands:
        for gpu in members:
            whole = alone if len(members) == 1 else members
            close = [one for one in whole if one.numa_node == gpu.numa_node]
            chosen = close if len(close) > 1 or whole is alone else whole
            zones[gpu.uuid] = tuple(one.uuid for one in chosen)
    return zones


def best_group(
    wish: GpuWish, rooms: Rooms, ways: Iterable[Mapping[Kind, int]], around: Neighbourhood
) -> Group:
    """Of the groups with one of these `ways` of kinds, of which there is at least one."""
    kinds = {room.device.uuid: room.kind for room in rooms}
    usable = [room for room in rooms if kinds[room.device.uuid].takes(wish)]
    groups = {group for way in ways for group in _grown(wish, usable, kinds, way, around)}
    free = Counter(around.zone[room.device.gpu.uuid] for room in usable if not room.holders)
    shared = {room.device.uuid for room in rooms if room.holders}

    def order(group: Group) -> tuple[object, ...]:
        return _merits(group, around, free, shared), [-around.place[device.uuid] for device in group]

    return max(groups, key=order)


def _grown(
    wish: GpuWish,
    usable: Sequence[Room],
    kinds: Mapping[str, Kind],
    way: Mapping[Kind, int],
    around: Neighbourhood,
) -> Iterator[Group]:
    """From each possible first GPU on, the nearest next one of the kinds that are still wanted."""
    for seed in usable:
        left, group, room = Counter(way), list[Device](), seed
        while len(group) < wish.tp and left[kinds[room.device.uuid]] > 0:
            group.append(room.device)
            left[kinds[room.device.uuid]] -= 1
            possible = [one for one in usable if left[kinds[one.device.uuid]] > 0 and one.device not in group]
            room = max(possible, key=lambda one: _attraction(one, group, around), default=room)
        if len(group) == wish.tp:
            yield tuple(sorted(group, key=lambda device: around.place[device.uuid]))


def _attraction(room: Room, group: Sequence[Device], around: Neighbourhood) -> tuple[object, ...]:
    """How well one more GPU goes with those of a group."""
    gpu, first = room.device.gpu, group[0].gpu
    return (
        around.island[gpu.uuid] == around.island[first.uuid],
        gpu.name == first.name,
        min(_near(gpu, device.gpu, around) for device in group),
        gpu.numa_node == first.numa_node,
        bool(room.holders),
        max((_near(gpu, other, around) for other in around.others), default=SAME_GPU),
        room.device.memory_bytes,
        -around.place[room.device.uuid],
    )


def _merits(
    group: Group, around: Neighbourhood, free: Mapping[Zone, int], shared: set[str]
) -> tuple[object, ...]:
    """The greater, the better; what comes first counts most."""
    gpus = [device.gpu for device in group]
    zone = around.zone[gpus[0].uuid]
    inside = sum(around.zone[gpu.uuid] == zone for gpu in gpus)
    left = free.get(zone, 0) - inside
    return (
        -sum(device.slice is not None for device in group),
        len({around.island[gpu.uuid] for gpu in gpus}) == 1,
        len({gpu.name for gpu in gpus}) == 1,
        min((_near(a, b, around) for a in gpus for b in gpus if a is not b), default=SAME_GPU),
        -len({gpu.numa_node for gpu in gpus}),
        sum(separation_problem(gpu) is None for gpu in gpus),
        sum(device.uuid in shared for device in group),
        max((_near(gpu, other, around) for gpu in gpus for other in around.others), default=SAME_GPU),
        max((gpu.numa_node == other.numa_node for gpu in gpus for other in around.others), default=True),
        -around.load.get(zone, 0) if around.others else 0,
        left >= around.company,
        -left,
        sum(device.memory_bytes for device in group),
    )


def _near(a: Gpu, b: Gpu, around: Neighbourhood) -> tuple[int, int]:
    return SAME_GPU if a is b else around.topology.link(a, b).nearness
