"""What Redis must hold after each call of the queue, worked out in Python and not in Lua.

Written from what the queue promises, for `test_books_properties`: it knows nothing of streams or counters.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

QUEUE_SIZE = 6


@dataclass(frozen=True)
class Plan:
    """Where a request shall run: incarnations and amounts."""

    decode: str
    prefill: str
    kv: int
    record_bytes: int

    def holds(self, *, retired: frozenset[str] = frozenset()) -> Counter[str]:
        held = Counter({f"{self.decode}|kv": self.kv, f"{self.decode}|slots": 1})
        if self.prefill:
            held.update({f"{self.prefill}|bytes": self.record_bytes, f"{self.prefill}|records": 1})
        return Counter({name: n for name, n in held.items() if n and name.split("|")[0] not in retired})

    def relayed(self) -> Plan:
        return Plan(self.decode, "", self.kv, 0)


@dataclass
class Room:
    """What one shard can be promised at most."""

    kv: int
    slots: int
    requests: int
    arena_bytes: int


@dataclass
class Model:
    """Tickets and leases by gateway and handle, in order; who is alive; what is published."""

    room: Room
    leader: str = ""
    waiting: dict[tuple[str, str], None] = field(default_factory=dict)
    leased: dict[tuple[str, str], Plan] = field(default_factory=dict)
    beating: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    published: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By shard: state and incarnation."""
    retired: frozenset[str] = frozenset()
    submitted: int = 0
    ended: int = 0

    # --- what must be seen ----------------------------------------------------------------------

    def reserved(self) -> Counter[str]:
        """On incarnations that were not retired: there, the sum over the leases."""
        total: Counter[str] = Counter()
        for plan in self.leased.values():
            total.update(plan.holds(retired=self.retired))
        return total

    # --- calls ----------------------------------------------------------------------------------

    def submit(self, gateway: str, handle: str) -> str:
        key = (gateway, handle)
        if key in self.waiting or key in self.leased:
            return "queued"
        if len(self.waiting) >= QUEUE_SIZE:
            return "full"
        self.waiting[key] = None
        self.known.add(gateway)
        self.submitted += 1
        return "queued"

    def commit(self, leader: str, gateway: str, handle: str, plan: Plan) -> str:
        """`leader` is empty for a gateway's own decision."""
        key, own = (gateway, handle), not leader
        if not own and leader != self.leader:
            return "fenced"
        if key in self.leased:
            self.waiting.pop(key, None)
            return "duplicate"
        if not own and key not in self.waiting:
            return "gone"
        if not own and gateway not in self.beating:
            return "silent"
        if own and self.leader and key in self.waiting and next(iter(self.waiting)) != key:
            return "behind"
        if not (self._usable(plan.decode) and (not plan.prefill or self._usable(plan.prefill))):
            return "stale"
        if not self._fits(plan):
            return "full"
        if key not in self.waiting:
            self.submitted += 1  # decided by the gateway before its ticket came, or after it was forgotten
        self.waiting.pop(key, None)
        self.leased[key] = plan
        self.known.add(gateway)
        return "granted"

    def _usable(self, incarnation: str) -> bool:
        shard = incarnation.split(".")[0]
        if shard not in self.published:
            return not self.leader
        return self.published[shard] == ("ready", incarnation)

    def _fits(self, plan: Plan) -> bool:
        total, room = self.reserved(), self.room

        def legs(name: str) -> int:
            return total[f"{name}|slots"] + total[f"{name}|records"]

        fits = (
            total[f"{plan.decode}|kv"] + plan.kv <= room.kv
            and total[f"{plan.decode}|slots"] < room.slots
            and legs(plan.decode) < room.requests
        )
        if plan.prefill:
            fits = fits and legs(plan.prefill) < room.requests
            fits = fits and total[f"{plan.prefill}|bytes"] + plan.record_bytes <= room.arena_bytes
        return fits

    def end(self, gateway: str, handle: str) -> int:
        """A completion; 1 where there was something to end."""
        key = (gateway, handle)
        found = key in self.waiting or key in self.leased
        self.waiting.pop(key, None)
        self.leased.pop(key, None)
        self.ended += found
        return int(found)

    def refuse(self, leader: str, gateway: str, handle: str) -> str:
        if leader != self.leader:
            return "fenced"
        if (gateway, handle) not in self.waiting:
            return "gone"
        del self.waiting[gateway, handle]
        self.ended += 1
        return "refused"

    def relayed(self, gateway: str, handle: str, now: Plan) -> int:
        held = self.leased.get((gateway, handle))
        if held is None or not held.prefill:
            return 0
        self.leased[gateway, handle] = now
        return 1

    def heartbeat(self, gateway: str, granted: list[str], undecided: list[str]) -> set[str]:
        self.beating.add(gateway)
        self.known.add(gateway)
        self._sweep(gateway, {*granted, *undecided})
        leased = {handle for owner, handle in self.leased if owner == gateway}
        waiting = {handle for owner, handle in self.waiting if owner == gateway}
        return {*granted} - leased | {*undecided} - leased - waiting

    def _sweep(self, gateway: str, opened: set[str]) -> int:
        mine = {*self.waiting, *self.leased}
        over = [key for key in mine if key[0] == gateway and key[1] not in opened]
        return sum(self.end(*key) for key in over)

    def restore(self, gateway: str, handle: str, plan: Plan) -> int:
        key = (gateway, handle)
        self.known.add(gateway)
        if key not in self.waiting and key not in self.leased:
            self.submitted += 1
        self.waiting.pop(key, None)
        changed = self.leased.get(key) != plan
        self.leased[key] = plan
        return int(changed)

    def reap(self) -> int:
        dead = self.known - self.beating
        self.known -= dead
        return sum(self._sweep(gateway, set()) for gateway in sorted(dead))

    def forget(self) -> None:
        """Redis came up empty."""
        self.ended += len({*self.waiting, *self.leased})
        self.waiting.clear()
        self.leased.clear()
        self.beating.clear()
        self.known.clear()
        self.published.clear()
        self.leader = ""
        self.retired = frozenset()
