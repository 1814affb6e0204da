"""The shards of one scheduling pass, with what is promised on each: booked in place, ranked by load.

A snapshot is read into it once; every grant of the pass is booked before the next decision, so that no
room is counted twice.  A rank is a tuple that is smallest for the shard to take first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

from orchestrator.core.cost import Costs
from orchestrator.core.link import link
from orchestrator.core.shard import ShardState
from orchestrator.core.ticket import Facts, Grant, Leg, ShardView
from tgi_patches.contract import Fingerprint, Role
from tgi_patches.heads import held

Rank = tuple[float, int, int]
"""Load, legs, place among the names."""

UNPRICED = Costs()


class Room:
    """One incarnation of a shard and what is promised on it now."""

    __slots__ = (
        "block",
        "costs",
        "kv_tokens",
        "limit",
        "order",
        "queue_s",
        "rank",
        "record_bytes",
        "records",
        "slots",
        "step_s",
        "view",
    )

    def __init__(self, view: ShardView, order: int, *, priced: bool) -> None:
        self.view = view
        self.order = order
        self.limit = view.capacity
        self.block = max(view.fingerprint.block_size, 1)
        self.kv_tokens = view.reserved_kv_tokens
        self.slots = view.reserved_slots
        self.record_bytes = view.outstanding_bytes
        self.records = view.outstanding_records
        self.costs = view.costs if priced and view.costs is not None else UNPRICED
        self.queue_s = 0.0
        """Until the shard could begin another prompt."""
        self.step_s = 0.0
        """One decode step with one more sequence."""
        self.rank: Rank = (0.0, 0, order)
        self._estimate_queue()
        self.ranked()

    @property
    def legs(self) -> int:
        return self.slots + self.records

    def takes(self, kv_tokens: int) -> bool:
        """Room for one more sequence of so many tokens."""
        limit = self.limit
        return (
            self.kv_tokens + kv_tokens <= limit.kv_tokens
            and self.slots < limit.slots
            and self.slots + self.records < limit.requests
        )

    def exports(self, record_bytes: int) -> bool:
        """Room for one more record under half of the ring."""
        limit = self.limit
        return (
            self.record_bytes + record_bytes <= limit.arena_bytes
            and self.slots + self.records < limit.requests
        )

    def fits(self, record_bytes: int) -> bool:
        """A record of this size could be exported if the shard were idle."""
        return record_bytes <= self.view.record_limit_bytes and record_bytes <= self.limit.arena_bytes

    def leg(self) -> Leg:
        view = self.view
        return Leg(view.shard, view.epoch, view.url, view.sidecar_url)

    def ranked(self) -> None:
        """Bring rank and step up to date with what is promised."""
        if self.view.role is Role.PREFILL:
            load = self.queue_s
            if self.costs.prefill is None:
                # KV bytes of what it computes, mixed requests included.
                load = self.record_bytes + self.kv_tokens * self.view.bytes_per_token
        else:
            decode = self.costs.decode
            if decode is not None:
                self.step_s = load = decode.step_s(self.slots + 1, self.kv_tokens)
            else:
                # The fuller of pool and slots.
                load = max(
                    self.kv_tokens / max(self.limit.kv_tokens, 1), self.slots / max(self.limit.slots, 1)
                )
        self.rank = (load, self.slots + self.records, self.order)

    def _estimate_queue(self) -> None:
        """From the records that are outstanding; whoever knows better sets `queue_s`."""
        prefill = self.costs.prefill
        if prefill is not None and self.records:
            tokens = self.record_bytes // max(self.view.bytes_per_token, 1)
            self.queue_s = prefill.seconds(tokens, tokens * tokens // self.records)


BY_RANK = attrgetter("rank")


class Fleet:
    """Rooms by name, and the ready ones by role."""

    def __init__(self, shards: Iterable[ShardView], ways: Ways | None = None) -> None:
        self.ways = ways or Ways()
        self.views = tuple(shards)
        working = [view for view in self.views if view.state == ShardState.READY]
        self.priced = bool(working) and all(_priced(view) for view in working)
        """What every ready shard does is known: choices are made by predicted seconds."""
        names = sorted(view.shard for view in working) if len(working) > 1 else ()
        places = {name: place for place, name in enumerate(names)}
        self.ready = [Room(view, places.get(view.shard, 0), priced=self.priced) for view in working]
        self.rooms = {room.view.shard: room for room in self.ready}
        self.by_role: Mapping[Role, list[Room]] = {
            role: [room for room in self.ready if room.view.role is role] for role in Role
        }
        self.decodes = self.by_role[Role.DECODE]
        self.ways.begin([room.view for room in self.decodes])
        self.most_kv_tokens = max((view.kv_tokens for view in self.views), default=0)

    def paths(self, prefill: Room) -> Paths:
        """The ways of its records to `decodes`."""
        return self.ways.of(prefill.view, self.decodes)

    def room(self, leg: Leg) -> Room | None:
        """Of the incarnation that a leg names; None where it is not ready, or gone."""
        room = self.rooms.get(leg.shard)
        return room if room is not None and room.view.epoch == leg.epoch else None

    def book(self, grant: Grant) -> None:
        """Promise what the grant holds."""
        decode = self.room(grant.decode)
        if decode is not None:
            decode.kv_tokens += grant.kv_tokens
            decode.slots += 1
            decode.ranked()
        prefill = self.room(grant.prefill) if grant.prefill is not None else None
        if prefill is not None:
            prefill.record_bytes += grant.record_bytes
            prefill.records += 1
            if prefill.costs.prefill is not None:
                tokens = grant.record_bytes // max(prefill.view.bytes_per_token, 1)
                prefill.queue_s += prefill.costs.prefill.alone_s(tokens)
            prefill.ranked()


def _priced(view: ShardView) -> bool:
    """It is known what the phases of its role take."""
    costs = view.costs or UNPRICED
    computes = costs.prefill is not None or view.role is Role.DECODE
    return computes and (costs.decode is not None or view.role is Role.PREFILL)


# --- pairs --------------------------------------------------------------------------------------

Way = tuple[int, str]
"""(-1, address to pull from, empty in place), or what keeps the two apart: how far they came, and a word."""
OPEN = -1


@dataclass(frozen=True, slots=True)
class Paths:
    """The ways from one prefill shard to every decode shard, in their order."""

    ways: tuple[Way, ...]
    all_in_place: bool
    """Every decode shard reads its records where they are."""


class Ways:
    """How records get from one shard to another, remembered as long as all of them stay what they are."""

    def __init__(self) -> None:
        self._decodes: tuple[Facts, ...] = ()
        self._known: dict[str, tuple[Facts, tuple[Facts, ...], Paths]] = {}

    def begin(self, decodes: Sequence[ShardView]) -> None:
        """These are the decode shards of the pass."""
        facts = tuple(view.facts for view in decodes)
        if facts != self._decodes:
            self._decodes = facts

    def of(self, prefill: ShardView, decodes: Sequence[Room]) -> Paths:
        """From `prefill` to each of `decodes`, those that the pass has begun with."""
        facts = prefill.facts
        known = self._known.get(prefill.shard)
        if known is not None and known[1] is self._decodes and (known[0] is facts or known[0] == facts):
            return known[2]
        ways = tuple(_way(prefill, room.view) for room in decodes)
        paths = Paths(ways, all(way == (OPEN, "") for way in ways))
        self._known[prefill.shard] = facts, self._decodes, paths
        return paths


def _way(prefill: ShardView, decode: ShardView) -> Way:
    if not (prefill.hooked and decode.hooked):
        return 0, "unhooked"
    differing = difference(prefill, decode)
    if differing is not None:
        return 1, f"fingerprint_{differing}"
    address = link(prefill, decode)
    return (2, "no_link") if address is None else (OPEN, address)


def difference(prefill: ShardView, decode: ShardView) -> str | None:
    """The first field that keeps two shards from sharing KV; None if they may pair."""
    return _difference(prefill.fingerprint, decode.fingerprint)


@lru_cache(maxsize=1024)
def _difference(prefill: Fingerprint, decode: Fingerprint) -> str | None:
    mine, theirs = prefill.content(), decode.content()
    for name, value in mine.items():
        if value != theirs[name]:
            return name
    return None if _splits(prefill) and _splits(decode) else "tensor_parallel"


def _splits(fingerprint: Fingerprint) -> bool:
    """True when every rank has whole heads: its records can then be cut for any other number of ranks."""
    try:
        held(fingerprint.kv_heads, fingerprint.tensor_parallel, 0)
    except ValueError:
        return False
    return True
