"""Which shard gets which GPUs and cores of a host; what cannot be placed is refused with what could be.

Named GPUs first, then the largest groups, so that these find an NVLink island; a shard never has a GPU
that another one has, unless both have shares of it (NVIDIA's MPS) that add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.gpu_groups import Group, best_group, neighbourhood
from orchestrator.core.gpu_refusals import cannot_place
from orchestrator.core.gpu_room import (
    Fitting,
    GpuClaim,
    GpuWish,
    Kind,
    Rooms,
    after,
    compositions,
    rooms_of,
    state_of,
    taken,
)
from orchestrator.core.named_gpus import named_group
from orchestrator.core.topology import CDI_KIND, Topology, separation_problem
from tgi_patches.contract import Role

__all__ = ["GpuClaim", "GpuWish", "MixedInstead", "PlacedShard", "Placement", "fallback", "place"]

_TURN = (Role.PREFILL, Role.MIXED, Role.DECODE)


@dataclass(frozen=True, slots=True)
class PlacedShard:
    shard: str
    role: Role
    gpus: tuple[str, ...]
    """UUIDs and MIG UUIDs, one per rank; a CDI name where it was asked for by that."""
    cpus: tuple[int, ...] = ()
    """Cores at the NUMA nodes of its GPUs; empty where these are not known."""


@dataclass(frozen=True, slots=True)
class Placement:
    shards: tuple[PlacedShard, ...]
    """In the order of the wishes."""
    mixed_because: str = ""
    """A sentence for the user where mixed shards stand in place of prefill and decode shards."""

    @property
    def gpus(self) -> Mapping[str, tuple[str, ...]]:
        return {placed.shard: placed.gpus for placed in self.shards}

    @property
    def cpus(self) -> Mapping[str, tuple[int, ...]]:
        return {placed.shard: placed.cpus for placed in self.shards}


@dataclass(frozen=True, slots=True)
class MixedInstead:
    """What is launched on a host that cannot separate: other shards than those asked for."""

    wishes: tuple[GpuWish, ...]
    """All with the role mixed."""
    because: str


def place(wishes: Sequence[GpuWish], topology: Topology, claims: Sequence[GpuClaim] = ()) -> Placement:
    """Where `fallback` has an answer, that is placed and `mixed_because` says why.

    The same arguments give the same placement.  ConfigError names what is wrong with a named GPU, or why
    there is no room and the nearest that has.
    """
    if instead := fallback(wishes, topology):
        return Placement(_placed(instead.wishes, topology, claims), instead.because)
    return Placement(_placed(wishes, topology, claims))


def fallback(wishes: Sequence[GpuWish], topology: Topology) -> MixedInstead | None:
    """Mixed shards for a host on which one prefill and one decode shard never fit; None where they may.

    That is: one GPU in all, a model that needs every GPU (`tp`), or GPUs too old to separate.  What others
    have taken of the host does not count here; it is a reason to refuse, and passes.  Asked before shards
    are planned, it tells their roles: a mixed shard has other limits and no arena.
    """
    phases = [wish for wish in wishes if wish.separated]
    if {wish.role for wish in phases} != {Role.PREFILL, Role.DECODE} or not topology.gpus:
        return None
    names = [name for wish in phases for name in wish.gpus]
    if any(wish.mps_percent for wish in phases) or len(set(names)) < len(names):
        return None
    because = _why_mixed(phases, topology)
    return MixedInstead(_mixed(wishes, phases, topology), because) if because else None


def _why_mixed(phases: Sequence[GpuWish], topology: Topology) -> str:
    ranks = {
        role: min(wish.tp for wish in phases if wish.role is role) for role in (Role.PREFILL, Role.DECODE)
    }
    pair = tuple(GpuWish("", role, tp) for role, tp in sorted(ranks.items(), key=lambda item: -item[1]))
    if Fitting(pair).fits(state_of(room.kind for room in rooms_of(topology))):
        return ""
    devices = topology.devices()
    able = [device for device in devices if separation_problem(device.gpu) is None]
    most = max(wish.tp for wish in phases)
    usable = [device for device in able or devices if most == 1 or device.slice is None]
    if most > len(usable):
        return ""  # mixed does not fit either
    if not able:
        return f"{separation_problem(devices[0].gpu)} The model is served mixed."
    if len(devices) == 1:
        return f"This host has one GPU, {devices[0]}, and prefill and decode need one each: served mixed."
    if len(able) == 1:
        return f"Only {able[0]} is new enough to separate prefill and decode: the model is served mixed."
    if most == len(usable):
        return f"The model needs all {most} GPUs of this host (tp {most}): it is served mixed."
    return ""


def _mixed(wishes: Sequence[GpuWish], phases: Sequence[GpuWish], topology: Topology) -> tuple[GpuWish, ...]:
    """Mixed shards as large as the largest that was asked for, and no more of them."""
    kept = tuple(wish for wish in wishes if not wish.separated)
    ranks = max(wish.tp for wish in phases)
    able = [device for device in topology.devices() if ranks == 1 or device.slice is None]
    able = [device for device in able if separation_problem(device.gpu) is None] or able
    count = min(len(phases), len(able) // ranks) - len(kept)
    named = next((wish.gpus for wish in phases if len(wish.gpus) == ranks), ())
    one = GpuWish(
        shard="",
        role=Role.MIXED,
        tp=ranks,
        needed_bytes=max(wish.needed_bytes for wish in phases if wish.tp == ranks),
    )
    made = [replace(one, shard=f"mixed-{len(kept) + at}") for at in range(max(count, 0 if kept else 1))]
    if made:
        made[0] = replace(made[0], gpus=named)
    return (*kept, *made)


def _placed(
    wishes: Sequence[GpuWish], topology: Topology, claims: Sequence[GpuClaim]
) -> tuple[PlacedShard, ...]:
    rooms = rooms_of(topology, claims)
    chosen: dict[str, Group] = {}
    for wish in wishes:
        if wish.gpus:
            chosen[wish.shard] = named_group(wish, rooms, topology)
            rooms = taken(rooms, wish, (device.uuid for device in chosen[wish.shard]))
    waiting = sorted((wish for wish in wishes if not wish.gpus), key=_largest_first)
    chosen |= _chosen(waiting, rooms, topology, [(w, chosen[w.shard]) for w in wishes if w.gpus])
    cores = _cores([chosen[wish.shard] for wish in wishes], topology)
    return tuple(
        PlacedShard(wish.shard, wish.role, _asked_by(wish, chosen[wish.shard]), cpus)
        for wish, cpus in zip(wishes, cores, strict=True)
    )


def _largest_first(wish: GpuWish) -> tuple[bool, int, int]:
    """Whole GPUs before shares of them, large groups before small ones, prefill before decode."""
    return wish.mps_percent > 0, -wish.tp, _TURN.index(wish.role)


def _chosen(
    waiting: Sequence[GpuWish], rooms: Rooms, topology: Topology, placed: list[tuple[GpuWish, Group]]
) -> dict[str, Group]:
    """Each gets the best group that leaves room for all that come after it."""
    fitting = Fitting(tuple(waiting))
    if not fitting.fits(state_of(room.kind for room in rooms)):
        raise cannot_place(waiting, rooms, topology)
    for at, wish in enumerate(waiting):
        state = state_of(room.kind for room in rooms)
        ways: list[Mapping[Kind, int]] = [
            used for used in compositions(wish, state) if fitting.fits(after(state, wish, used), at + 1)
        ]
        group = best_group(wish, rooms, ways, neighbourhood(wish, topology, placed, waiting[at + 1 :]))
        rooms = taken(rooms, wish, (device.uuid for device in group))
        placed = [*placed, (wish, group)]
    return {wish.shard: group for wish, group in placed}


def _asked_by(wish: GpuWish, group: Group) -> tuple[str, ...]:
    """What the engine is asked for: it knows no index, and CDI only by its name."""
    if not wish.gpus:
        return tuple(device.uuid for device in group)
    pairs = zip(wish.gpus, group, strict=True)
    return tuple(name if name.startswith(CDI_KIND) else device.uuid for name, device in pairs)


def _cores(groups: Sequence[Group], topology: Topology) -> list[tuple[int, ...]]:
    """Of each group: an even part of the cores at each NUMA node where it has GPUs."""
    everywhere = tuple(topology.numa_cpus)
    nodes = [
        sorted({device.gpu.numa_node for device in group if device.gpu.numa_node is not None}) or everywhere
        for group in groups
    ]
    cores: list[list[int]] = [[] for _ in groups]
    for node, cpus in topology.numa_cpus.items():
        sharing = [at for at, mine in enumerate(nodes) if node in mine]
        for turn, at in enumerate(sharing):
            cores[at].extend(_part(cpus, turn, len(sharing)))
    return [tuple(part) for part in cores]


def _part(cpus: Sequence[int], turn: int, parts: int) -> Sequence[int]:
    """One of so many runs that differ by at most one core; with too few of them cores are shared."""
    if len(cpus) < parts:
        return cpus[turn % len(cpus) :][:1]
    return cpus[turn * len(cpus) // parts : (turn + 1) * len(cpus) // parts]
