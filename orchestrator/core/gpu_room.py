"""What is free on each GPU, and whether wishes fit into it at all.

Fitting looks at kinds of GPUs and not at GPUs: two of the same memory, age and free share are the same
to it.  That makes an exhaustive search cheap, so what is refused cannot be placed in any way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.core.topology import Device, Topology, separation_problem
from orchestrator.errors import ConfigError
from tgi_patches.contract import Role

ALL_GPUS = "all"
"""In a claim: every GPU of the host."""

WHOLE_PERCENT = 100
ROUNDING = 1e-6
"""Fractions are written in decimals: three thirds may be a little over 1."""


@dataclass(frozen=True, slots=True)
class GpuWish:
    """What one shard asks for."""

    shard: str
    role: Role
    tp: int = 1
    gpus: tuple[str, ...] = ()
    """Names of its own choice, one per rank; empty leaves the choice to placement."""
    mps_percent: int = 0
    """Share of each GPU's threads; 0 for GPUs of its own."""
    memory_fraction: float = 0.0
    """Share of each GPU's memory; 0 for all of it."""
    needed_bytes: int = 0
    """Memory that each GPU, or this share of it, must have; 0 where it is not known."""

    @property
    def separated(self) -> bool:
        return self.role is not Role.MIXED


@dataclass(frozen=True, slots=True)
class GpuClaim:
    """Somebody has a GPU already: another deployment, or a container that is not ours."""

    gpu: str
    """By any of its names, or `all`."""
    holder: str
    mps_percent: int = 0
    """0: the whole GPU."""
    memory_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a GPU, or a share of it."""

    text: str
    percent: int = 0
    fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class Kind:
    """All that fitting needs to know of a room."""

    sliced: bool
    memory_bytes: int
    separates: bool
    shared: bool
    percent: int
    """Free."""
    fraction: float
    """Free, rounded."""

    def takes(self, wish: GpuWish) -> bool:
        if (wish.separated and not self.separates) or (wish.tp > 1 and self.sliced):
            return False
        if wish.needed_bytes > self.memory_bytes * (wish.memory_fraction or 1.0):
            return False
        return self.has_share(wish.mps_percent, wish.memory_fraction)

    def has_share(self, percent: int, fraction: float) -> bool:
        if percent == 0:
            return not self.shared
        return percent <= self.percent and fraction <= self.fraction + ROUNDING

    def less(self, wish: GpuWish) -> Kind:
        """What is left of it."""
        if wish.mps_percent == 0:
            return replace(self, shared=True, percent=0, fraction=0.0)
        left = round(max(0.0, self.fraction - wish.memory_fraction), 6)
        return replace(self, shared=True, percent=self.percent - wish.mps_percent, fraction=left)


@dataclass(frozen=True, slots=True)
class Room:
    """One GPU or slice, and who has it."""

    device: Device
    holders: tuple[Holder, ...] = ()

    @property
    def kind(self) -> Kind:
        whole = any(holder.percent == 0 for holder in self.holders)
        percent = 0 if whole else WHOLE_PERCENT - sum(holder.percent for holder in self.holders)
        fraction = 0.0 if whole else 1.0 - sum(holder.fraction for holder in self.holders)
        return Kind(
            sliced=self.device.slice is not None,
            memory_bytes=self.device.memory_bytes,
            separates=separation_problem(self.device.gpu) is None,
            shared=bool(self.holders),
            percent=max(0, percent),
            fraction=round(max(0.0, fraction), 6),
        )

    def held(self, holder: Holder) -> Room:
        return replace(self, holders=(*self.holders, holder))


Rooms = tuple[Room, ...]


def rooms_of(topology: Topology, claims: Iterable[GpuClaim] = ()) -> Rooms:
    """Every device with those who claim it; claims on GPUs that are not in the topology are passed over."""
    rooms = {device.uuid: Room(device) for device in topology.devices()}
    for claim in claims:
        holder = Holder(claim.holder, claim.mps_percent, claim.memory_fraction)
        for uuid in _claimed(topology, claim.gpu):
            rooms[uuid] = rooms[uuid].held(holder)
    return tuple(rooms.values())


def taken(rooms: Rooms, wish: GpuWish, uuids: Iterable[str]) -> Rooms:
    """The rooms after the shard of `wish` has moved in."""
    holder, wanted = Holder(wish.shard, wish.mps_percent, wish.memory_fraction), set(uuids)
    return tuple(room.held(holder) if room.device.uuid in wanted else room for room in rooms)


def _claimed(topology: Topology, name: str) -> tuple[str, ...]:
    """A claim on a split GPU is one on all of its slices."""
    if name == ALL_GPUS:
        return tuple(device.uuid for device in topology.devices())
    try:
        found = topology.find(name)
    except ConfigError:
        return ()
    if found.slice is None and found.gpu.mig_mode:
        return tuple(part.uuid for part in found.gpu.mig)
    return (found.uuid,)


State = tuple[tuple[Kind, int], ...]


def state_of(kinds: Iterable[Kind]) -> State:
    """How many rooms there are of each kind."""
    return _sorted(Counter(kinds))


def _sorted(counts: Mapping[Kind, int]) -> State:
    def order(item: tuple[Kind, int]) -> tuple[object, ...]:
        kind = item[0]
        return kind.sliced, kind.memory_bytes, kind.separates, kind.shared, kind.percent, kind.fraction

    return tuple(sorted(((kind, n) for kind, n in counts.items() if n), key=order))


def compositions(wish: GpuWish, state: State) -> Iterator[Mapping[Kind, int]]:
    """Every way to take `wish.tp` rooms by their kinds."""
    fitting = [(kind, count) for kind, count in state if kind.takes(wish)]
    yield from _ways(fitting, wish.tp)


def _ways(kinds: Sequence[tuple[Kind, int]], wanted: int) -> Iterator[dict[Kind, int]]:
    if wanted == 0:
        yield {}
    elif kinds:
        (kind, count), rest = kinds[0], kinds[1:]
        for used in range(min(count, wanted), -1, -1):
            for more in _ways(rest, wanted - used):
                yield {kind: used, **more} if used else more


def after(state: State, wish: GpuWish, used: Mapping[Kind, int]) -> State:
    counts = Counter(dict(state))
    for kind, number in used.items():
        counts[kind] -= number
        counts[kind.less(wish)] += number
    return _sorted(counts)


@dataclass(frozen=True, slots=True)
class Fitting:
    """Whether the wishes from one on fit, in their order; remembers what it found out."""

    wishes: tuple[GpuWish, ...]
    known: dict[tuple[int, State], bool] = field(default_factory=dict)

    def fits(self, state: State, at: int = 0) -> bool:
        if at == len(self.wishes):
            return True
        if (at, state) not in self.known:
            wish = self.wishes[at]
            self.known[at, state] = self._enough(state, at) and any(
                self.fits(after(state, wish, used), at + 1) for used in compositions(wish, state)
            )
        return self.known[at, state]

    def _enough(self, state: State, at: int) -> bool:
        """A bound that ends hopeless searches at once: the sum of what is asked for."""
        left = self.wishes[at:]
        asked = sum(wish.tp * (wish.mps_percent or WHOLE_PERCENT) for wish in left)
        return asked <= sum(kind.percent * count for kind, count in state)
