"""Which wanted shards run already, and the one next step towards those that do not.

step:  a new one is proved before an old one goes, and again for each further one; old before new only
where there is no room for both.  Names are places: two shards of one content are interchangeable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from orchestrator.core.order import ShardOrder
from tgi_patches.contract import ShardSpec

PLACE = ("shard", "port", "sidecar_port", "gpus", "gpus_named", "cpus", "pull_listen")
"""Where a shard is, beside what it is."""
NAMED = ("gpus", "pull_listen")
"""Of that: what must be so where the order says it."""
Order = TypeVar("Order", bound=ShardSpec)


@dataclass(frozen=True, slots=True)
class Kept:
    """A wanted shard that runs."""

    wanted: ShardSpec
    order: ShardSpec
    """The same at the place where it runs."""


@dataclass(frozen=True, slots=True)
class Matched:
    """Each wanted shard is in one of `keep` and `launch`, each running one in one of `keep` and `retire`."""

    keep: tuple[Kept, ...] = ()
    launch: tuple[ShardSpec, ...] = ()
    """Under names that no running shard has."""
    retire: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """A shard that runs."""

    order: ShardSpec
    ready: bool = True
    held: bool = False
    """An operator has drained it: nobody waits for it, and it goes first."""

    @property
    def serves(self) -> bool:
        return self.ready and not self.held


@dataclass(frozen=True, slots=True)
class Launch:
    order: ShardSpec
    instead: str = ""
    """The shard that goes first where there is no room for both; empty where none would help."""


@dataclass(frozen=True, slots=True)
class Retire:
    shard: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Until `shard` is ready: before that no other one may go."""

    shard: str


Step = Launch | Retire | Wait


def content(order: ShardSpec) -> dict[str, Any]:
    """What a shard is, whatever its place; orders of either kind are comparable."""
    told = {name: value for name, value in fields_of(order).items() if name not in PLACE}
    return told | {
        "pull_listen": order.pull_listen.rpartition(":")[0],
        "sidecar_port": bool(order.sidecar_port),
    }


def fields_of(order: ShardSpec) -> dict[str, Any]:
    """All fields of a `ShardOrder`, with its defaults for a plain spec."""
    if not isinstance(order, ShardOrder):
        order = ShardOrder(**{f.name: getattr(order, f.name) for f in dataclasses.fields(ShardSpec)})
    return {f.name: getattr(order, f.name) for f in dataclasses.fields(ShardOrder)}


def match(wanted: Sequence[ShardSpec], running: Sequence[ShardSpec]) -> Matched:
    """As many wanted shards as possible are found among the running ones, each by its name if it can be."""
    at = _paired(wanted, running)
    keep = tuple(Kept(wanted[i], _placed(wanted[i], running[at[i]])) for i in sorted(at))
    new = [order for i, order in enumerate(wanted) if i not in at]
    running_names = {order.shard for order in running}
    taken = running_names | {order.shard for order in new}
    launch = []
    for order in new:
        named = replace(order, shard=_free_name(order, taken)) if order.shard in running_names else order
        taken.add(named.shard)
        launch.append(named)
    kept = set(at.values())
    return Matched(keep, tuple(launch), tuple(r.shard for i, r in enumerate(running) if i not in kept))


def step(wanted: Sequence[ShardSpec], fleet: Sequence[Member]) -> Step | None:
    """None where all that is wanted runs, and nothing else."""
    matched = match(wanted, [member.order for member in fleet])
    members = {member.order.shard: member for member in fleet}
    old = [members[shard] for shard in matched.retire]
    for role in dict.fromkeys(order.role for order in wanted):
        launch = [order for order in matched.launch if order.role == role]
        kept = [members[one.order.shard] for one in matched.keep if one.order.role == role]
        leaving = [member for member in old if member.order.role == role]
        count = sum(order.role == role for order in wanted)
        if leaving and kept and (len(kept) + len(leaving) > count or not launch):
            return _go(leaving, kept, count)
        if launch:
            victim = next(iter(_by_worth(leaving or old, launch[0])), None)
            return Launch(launch[0], victim.order.shard if victim else "")
    return _go(old, [members[one.order.shard] for one in matched.keep], 1) if old else None


def missing(wanted: Sequence[ShardSpec], running: Sequence[ShardSpec]) -> tuple[ShardSpec, ...]:
    """Wanted shards that do not run and that no running one stands in for until it is replaced."""
    matched = match(wanted, running)
    roles = {order.shard: order.role for order in running}
    stand_ins = [roles[shard] for shard in matched.retire]
    found = []
    for order in matched.launch:
        if order.role in stand_ins:
            stand_ins.remove(order.role)
        else:
            found.append(order)
    return tuple(found)


def conflict(order: ShardSpec, running: Sequence[ShardSpec]) -> str:
    """Why `order` cannot run beside these, in words; empty where it can."""
    for other in running:
        if _port(order) and _port(order) == _port(other):
            return f"shard {other.shard} offers its records at port {_port(order)}"
        shared = sorted(set(_gpus(order)) & set(_gpus(other)))
        if shared and not _share(order, other):
            return f"shard {other.shard} has the GPU {shared[0]}"
    return ""


def victims_most(order: ShardSpec, victim: ShardSpec) -> int:
    """How many shards like `victim` may go to make room for one of `order`: of fewer ranks, as many more."""
    return -(-order.tensor_parallel // victim.tensor_parallel)


# --- which wanted shard is which running one ----------------------------------------------------


def _paired(wanted: Sequence[ShardSpec], running: Sequence[ShardSpec]) -> dict[int, int]:
    """Running index by wanted index: a largest matching, that begins with equal names."""
    alike: dict[Hashable, list[int]] = {}
    for j, order in enumerate(running):
        alike.setdefault(_frozen(content(order)), []).append(j)
    fits = [
        [
            j
            for j in alike.get(_frozen(content(order)), ())
            if all(at_its_place(order, running[j], name) for name in NAMED)
        ]
        for order in wanted
    ]
    at: dict[int, int] = {}
    by: dict[int, int] = {}
    for i, order in enumerate(wanted):
        for j in fits[i]:
            if running[j].shard == order.shard and j not in by:
                at[i], by[j] = j, i
                break

    def find(i: int, seen: set[int]) -> bool:
        for j in fits[i]:
            if j in seen:
                continue
            seen.add(j)
            if j not in by or find(by[j], seen):
                at[i], by[j] = j, i
                return True
        return False

    for i in range(len(wanted)):
        if i not in at:
            find(i, set())
    return at


def at_its_place(wanted: ShardSpec, running: ShardSpec, name: str) -> bool:
    """GPUs, and a port for records, that are named must be those; `name` is one of NAMED."""
    if name == "gpus":
        named = isinstance(wanted, ShardOrder) and wanted.gpus_named
        return not named or set(_gpus(wanted)) == set(_gpus(running))
    return _port(wanted) in ("", _port(running))


def _placed(wanted: Order, running: ShardSpec) -> Order:
    """Ports that the launcher chose are its choice again at the next start."""
    place: dict[str, Any] = {
        "shard": running.shard,
        "cpus": running.cpus,
        "port": running.port if wanted.port else 0,
        "sidecar_port": running.sidecar_port,
        "pull_listen": running.pull_listen,
    }
    if isinstance(wanted, ShardOrder):
        place["gpus"] = _gpus(running)
    return replace(wanted, **place)


def _free_name(order: ShardSpec, taken: set[str]) -> str:
    """The first of its role."""
    names: Iterator[str] = (f"{order.role}-{number}" for number in range(len(taken) + 1))
    return next(name for name in names if name not in taken)


# --- which one goes -----------------------------------------------------------------------------


def _go(leaving: Sequence[Member], kept: Sequence[Member], count: int) -> Step:
    """The next one that goes: one that serves only where enough others do, a wanted one among them."""
    victim = _by_worth(leaving)[0]
    staying = [*kept, *(member for member in leaving if member is not victim)]
    late = [member for member in staying if not (member.ready or member.held)]
    enough = len(staying) - len(late) >= count and (not kept or any(one.ready or one.held for one in kept))
    if not victim.serves or enough or not late:
        return Retire(victim.order.shard)
    return Wait(late[0].order.shard)


def _by_worth(leaving: Sequence[Member], order: ShardSpec | None = None) -> list[Member]:
    """First what is in the way of `order`, then what does not serve anyway, then the highest number."""

    def worth(member: Member) -> tuple[bool, bool, int, str]:
        in_the_way = order is not None and bool(conflict(order, [member.order]))
        name, _, number = member.order.shard.rpartition("-")
        return (not in_the_way, member.serves, -int(number) if number.isdecimal() else 0, name)

    return sorted(leaving, key=worth)


def _share(one: ShardSpec, other: ShardSpec) -> bool:
    """Two orders that name one GPU may both have it, under MPS."""
    percents = [getattr(order, "mps_percent", 0) for order in (one, other)]
    return all(percents) and sum(percents) <= 100


def _gpus(order: ShardSpec) -> tuple[str, ...]:
    return order.gpus if isinstance(order, ShardOrder) else ()


def _port(order: ShardSpec) -> str:
    """At which it offers records, where that is given; empty for any."""
    port = order.pull_listen.rpartition(":")[2]
    return "" if port == "0" else port


def _frozen(told: Mapping[str, Any]) -> Hashable:
    return tuple(
        (name, tuple(sorted(value.items())) if isinstance(value, Mapping) else value)
        for name, value in told.items()
    )
