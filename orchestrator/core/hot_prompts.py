"""Hot prompts: equal ones share a prefill, groups of similar ones that come often keep to few decode shards.

A group is hot from `enter_per_s` on until it falls below `leave_per_s`.  Sharing does not wait for that: from
the second equal prompt on, a record that is there, or on its way, is used.  Memory is bounded by the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from orchestrator.core.decode_sets import DecodeSets
from orchestrator.core.fingerprint import NEAR_BITS
from orchestrator.core.heavy_hitters import Group, HeavyHitters
from orchestrator.core.near_index import DISTANCE_MOST
from orchestrator.core.recent import Recent
from orchestrator.core.shared_records import SharedRecords
from orchestrator.core.ticket import Choice, Completion, Grant, SharedRecord, Ticket


@dataclass(frozen=True, slots=True)
class HotRules:
    """When a group of prompts is hot, what it may use, and how long records are shared."""

    enter_per_s: float = 2.0
    leave_per_s: float = 1.0
    half_life_s: float = 5.0
    """After which an arrival counts half."""
    most_groups: int = 512
    """Counted at a time.  Groups with less than 1/512 of the arrivals can escape notice."""
    most_hot: int = 32
    """Hot at a time; more than that is ordinary traffic."""
    most_handles: int = 16_384
    """Remembered, so that a request counts once."""
    distance_bits: int = NEAR_BITS
    share_of_decode: float = 0.25
    """Of the decode shards, for one group."""
    pool_share: float = 0.5
    """Of the decode shards, for all groups together, unless one alone may have more."""
    most_records: int = 1024
    least_tokens: int = 32
    """Shorter prompts are not shared: prefill of them costs nothing."""
    ring_share: float = 0.25
    """A record counts as lost when so much of its ring was granted after it..."""
    ring_records: int = 256
    """... or so many records, a quarter of what an arena's index holds..."""
    record_ttl_s: float = 60.0
    """... or after so long."""

    def __post_init__(self) -> None:
        """Raises ValueError for rules that contradict themselves."""
        if not 0 < self.leave_per_s <= self.enter_per_s:
            raise ValueError("leave_per_s must be above 0 and not above enter_per_s")
        if not 0 <= self.distance_bits <= DISTANCE_MOST:
            raise ValueError(f"distance_bits must be from 0 to {DISTANCE_MOST}")
        if min(self.most_groups, self.most_hot, self.most_handles, self.most_records) < 1:
            raise ValueError("bounds must be at least 1")
        if not (self.half_life_s > 0 and self.record_ttl_s > 0):
            raise ValueError("half_life_s and record_ttl_s must be above 0")


@dataclass(frozen=True, slots=True)
class HotGroup:
    """For `status`."""

    group: int
    per_s: float
    share: float
    """Of all arrivals lately."""
    decodes: frozenset[str]


class HotPrompts:
    """Fed with what happens to requests; asked before each is decided.

    Times are seconds of one clock; one that goes back is held.
    """

    def __init__(self, rules: HotRules | None = None) -> None:
        self.rules = rules = rules or HotRules()
        self._hitters = HeavyHitters(
            most=rules.most_groups, half_life_s=rules.half_life_s, distance_bits=rules.distance_bits
        )
        self._seen: Recent[Group | None] = Recent(rules.most_handles)
        self._hot: dict[int, Group] = {}
        """By centre, in the order in which they became hot."""
        self._sets = DecodeSets(share=rules.share_of_decode, pool_share=rules.pool_share)
        self._records = SharedRecords(
            most=rules.most_records,
            ttl_s=rules.record_ttl_s,
            ring_share=rules.ring_share,
            ring_records=rules.ring_records,
        )
        self._now_s = float("-inf")

    # --- groups ---------------------------------------------------------------------------------

    def seen(self, ticket: Ticket, now_s: float) -> None:
        """An arrival; again for the same handle it does not count."""
        if not ticket.simhash or ticket.handle in self._seen:
            return
        now_s = self._clock(now_s)
        group = self._hitters.count(_fingerprint(ticket), now_s)
        self._seen[ticket.handle] = group
        if group.centre not in self._hot and self._heats(group, now_s):
            self._hot[group.centre] = group
            self._sets.add(group.centre)

    def group_of(self, ticket: Ticket, now_s: float) -> int | None:
        """The hot group that a ticket belongs to; None for ordinary traffic."""
        if not self._hot or not ticket.simhash:
            return None
        group = self._seen.get(ticket.handle)
        if group is None or group not in self._hitters:
            group = self._hitters.find(_fingerprint(ticket))
        if group is None or group.centre not in self._hot:
            return None
        return group.centre if self._still_hot(group, self._clock(now_s)) else None

    def decode_set(self, group: int, decodes: Sequence[str], now_s: float) -> frozenset[str]:
        """Which of `decodes` (sorted names) a hot group keeps to; all of them for one that is not hot."""
        self._cool(now_s)
        return self._sets.of(group, decodes)

    def reserved_for_hot(self, decodes: Sequence[str], now_s: float) -> frozenset[str]:
        """Which of `decodes` (sorted names) other traffic should avoid while it has a choice."""
        self._cool(now_s)
        return self._sets.union(decodes)

    def hot(self, now_s: float) -> tuple[HotGroup, ...]:
        """The hot groups, the longest hot one first; with the decode shards of the last decision."""
        self._cool(now_s)
        per_s, share, chosen = self._hitters.per_s, self._hitters.share, self._sets.last
        return tuple(
            HotGroup(centre, per_s(group, self._now_s), share(group), chosen(centre))
            for centre, group in self._hot.items()
        )

    # --- records --------------------------------------------------------------------------------

    def may_share(self, ticket: Ticket) -> bool:
        """Its record may serve others, and others' may serve it."""
        return (
            bool(ticket.prompt_hash)
            and ticket.splittable
            and ticket.choice is not Choice.MIXED
            and ticket.prompt_tokens >= self.rules.least_tokens
        )

    def record_for(self, ticket: Ticket, now_s: float) -> SharedRecord | None:
        """Another request's record of this prompt, there or on its way, that this one may read."""
        if not self.may_share(ticket):
            return None
        return self._records.find(ticket, self._clock(now_s))

    def pins(self, ticket: Ticket, now_s: float) -> bool:
        """Whether a prefill of this ticket should pin its record: of a hot group, while none is pinned."""
        if not self.may_share(ticket) or self.group_of(ticket, now_s) is None:
            return False
        return not self._records.pinned(ticket, self._clock(now_s))

    def began(self, ticket: Ticket, grant: Grant, ring_bytes: int, now_s: float) -> None:
        """A ticket was granted: what it writes to a ring of so many bytes, or whose record it reads."""
        if grant.shared is not None:
            self._records.reads(ticket.handle, grant.shared.handle)
        elif grant.prefill is not None:
            now_s, share = self._clock(now_s), self.may_share(ticket)
            self._records.wrote(ticket, grant, ring_bytes, now_s, share=share)

    def failed(self, handle: str) -> None:
        """A grant was not committed: there will be no record of it."""
        self._records.withdrawn(handle)

    def imported(self, handle: str, now_s: float) -> None:
        """A record was imported, so it has been published."""
        self._clock(now_s)
        self._records.published(handle)

    def ended(self, completion: Completion, now_s: float) -> None:
        """A request is over.  No record comes of an owner that failed; one that a reader missed is gone."""
        self._clock(now_s)
        self._records.ended(completion)

    def lost(self, shard: str, epoch: int) -> None:
        """An incarnation is gone, and its records with it."""
        self._records.lost(shard, epoch)

    # --- own ------------------------------------------------------------------------------------

    def _clock(self, now_s: float) -> float:
        if now_s > self._now_s:
            self._now_s = now_s
            self._hitters.drop_idle(now_s)
        return self._now_s

    def _heats(self, group: Group, now_s: float) -> bool:
        room = len(self._hot) < self.rules.most_hot
        return room and self._hitters.per_s(group, now_s) >= self.rules.enter_per_s

    def _cool(self, now_s: float) -> None:
        """Groups that come no longer are ordinary again."""
        if self._hot:
            now_s = self._clock(now_s)
            for group in list(self._hot.values()):
                self._still_hot(group, now_s)

    def _still_hot(self, group: Group, now_s: float) -> bool:
        known = group in self._hitters
        if known and self._hitters.per_s(group, now_s) >= self.rules.leave_per_s:
            return True
        del self._hot[group.centre]
        self._sets.remove(group.centre)
        return False


def _fingerprint(ticket: Ticket) -> int:
    """The prompt's, turned so that prompts of different models are not near each other."""
    if not ticket.model:
        return ticket.simhash
    return ticket.simhash ^ xxh3_64_intdigest(ticket.model.encode())
