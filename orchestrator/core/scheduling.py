"""The conductor's policy as one object: which tickets go now, and where.  No I/O and no clock.

The conductor and the simulator of `bench scheduler` feed it the same events and apply its decisions.
Order: by turn, shorter prompts a little earlier; through a window per prefill shard; hot prompts apart.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core.batching import Windows, limit_of
from orchestrator.core.cost import PrefillCost
from orchestrator.core.decision import Hint, Mode, Policy, Refuse, Wait
from orchestrator.core.fleet import Fleet, Ways
from orchestrator.core.hot_prompts import HotPrompts
from orchestrator.core.pending import Pending, Place
from orchestrator.core.routing import decide
from orchestrator.core.ticket import Choice, Completion, Grant, Relayed, ShardView, SharedRecord, Ticket
from tgi_patches.contract import Role

PATIENCE = 14.0
"""Prompts of a whole group's length stand behind shorter ones that come within so many of its prefills."""
SCAN = 64
"""Tickets behind a closed window that are looked at in one pass for one that fits an open one."""
SCAN_SHUT = 8
"""The same while no window is open, of tickets that would need one: one shard may serve them sooner."""
SKIP_MOST = 128
"""Tickets that a pass leaves out unseen: equal ones, hot ones without room, and those beyond SCAN_SHUT."""
PREFIXES_MOST = 4096
PASSED_BY = frozenset({"prefill_window", "prefill_full", "hot_full"})
"""Reasons to wait that do not stop others: what waits for a window has the first claim on the next one."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a scheduler differs from plain first come, first served."""

    patience: float = PATIENCE
    windows: bool = True
    new_tokens: int = 128
    """Of an answer, until enough have ended to know."""


class Scheduler:
    """Holds what waits, and what it must remember of what runs.  Times are seconds of one clock."""

    def __init__(
        self, policy: Policy | None = None, *, hot: HotPrompts | None = None, tuning: Tuning | None = None
    ) -> None:
        self.policy = policy or Policy()
        self.tuning = tuning or Tuning()
        self.hot = hot
        """None where prompts are not told apart."""
        self.pending = Pending(self._later_s)
        self._windows = Windows()
        self._ways = Ways()
        self._prefill: PrefillCost | None = None
        """Of the first prefill shard that has one: for the order, which needs one number per ticket."""
        self._group_s = 0.0
        """Prefill of the largest group."""
        self._prefixes: OrderedDict[int, str] = OrderedDict()
        self._new_tokens = float(self.tuning.new_tokens)

    # --- what happens ---------------------------------------------------------------------------

    def add(self, tickets: Mapping[Place, Ticket], now_s: float) -> None:
        """New tickets, or claimed ones."""
        self.pending.add(tickets)
        if self.hot is not None:
            for ticket in tickets.values():
                self.hot.seen(ticket, now_s)

    def forget(self, handles: Iterable[str]) -> None:
        """Tickets that were withdrawn, or decided by others."""
        self.pending.forget(handles)

    def clear(self) -> None:
        """Another term: whatever waits is claimed anew, and what runs is not known any more."""
        self.pending.clear()
        self._windows = Windows()

    def granted(self, ticket: Ticket, grant: Grant, now_s: float) -> None:  # noqa: ARG002
        """A decision was committed."""
        self.pending.forget((ticket.handle,))

    def failed(self, ticket: Ticket, now_s: float) -> None:
        """A decision was not committed: the ticket waits on."""
        self._windows.done(ticket.handle, now_s)
        if self.hot is not None:
            self.hot.failed(ticket.handle)

    def relayed(self, relayed: Relayed, now_s: float) -> None:
        """A record was imported."""
        self._windows.done(relayed.handle, now_s)
        if self.hot is not None:
            self.hot.imported(relayed.handle, now_s)

    def ended(self, completion: Completion, now_s: float) -> None:
        """A request is over."""
        self._windows.done(completion.handle, now_s)
        if self.hot is not None:
            self.hot.ended(completion, now_s)
        if completion.generated_tokens:
            self._new_tokens += (completion.generated_tokens - self._new_tokens) * 0.02

    def lost(self, shard: str, epoch: int) -> None:
        """An incarnation is gone."""
        if self.hot is not None:
            self.hot.lost(shard, epoch)

    def hot_groups(self, now_s: float) -> Counter[str]:
        """How many groups of hot prompts keep to each decode shard."""
        groups = self.hot.hot(now_s) if self.hot is not None else ()
        return Counter(shard for group in groups for shard in group.decodes)

    # --- decisions ------------------------------------------------------------------------------

    def opens_s(self) -> float | None:
        """When a decision may change although nothing happens; None where nothing waits for that."""
        return self._windows.opens_s() if len(self.pending) else None

    def decide(
        self, shards: Sequence[ShardView], mode: Mode, now_s: float
    ) -> Iterator[tuple[Ticket, Grant | Refuse]]:
        """Decisions on `shards`, which has all reservations in it, each on what the earlier ones left.

        Every one is taken for committed until `failed` is told otherwise.
        """
        fleet = Fleet(shards, self._ways)
        prefills = fleet.by_role[Role.PREFILL]
        if self.tuning.windows:
            self._windows.begin(prefills, self.pending.tokens, now_s)
        self._learn_order(fleet)
        hot = _Hot(self.hot, fleet, now_s)
        passed_by, skipped, ahead_s = 0, 0, 0.0
        for ticket in self._next():
            group = hot.group(ticket)
            shut = passed_by >= SCAN_SHUT and not self._windows.ajar and _needs_window(ticket)
            if group in hot.full or hot.follows(ticket) or (shut and hot.shared(ticket) is None):
                skipped += 1
                if skipped >= SKIP_MOST:
                    return
                continue
            hint = self._hint(ticket, hot, group, ahead_s)
            decision = decide(ticket, fleet, mode=mode, policy=self.policy, hint=hint)
            if isinstance(decision, Wait):
                hot.waits(ticket)
                if decision.reason == "hot_full":
                    hot.full.add(group)
                    continue
                passed_by += 1
                if self._prefill is not None and prefills:
                    ahead_s += self._prefill.alone_s(ticket.prompt_tokens) / len(prefills)
                if decision.reason not in PASSED_BY or passed_by >= SCAN:
                    return
                continue
            if isinstance(decision, Grant):
                self._take(ticket, decision, fleet, now_s)
            yield ticket, decision

    def _next(self) -> Iterator[Ticket]:
        """The pending ones in order, read in pieces: a pass seldom needs all of a long queue."""
        for start in range(0, len(self.pending), SCAN):
            yield from self.pending.some(start, start + SCAN)

    def _take(self, ticket: Ticket, grant: Grant, fleet: Fleet, now_s: float) -> None:
        fleet.book(grant)
        view = None if grant.prefill is None else fleet.rooms[grant.prefill.shard].view
        if self.hot is not None:
            grant.pinned = view is not None and view.pinned_bytes > 0 and self.hot.pins(ticket, now_s)
            self.hot.began(ticket, grant, 0 if view is None else view.ring_bytes, now_s)
        if view is None:
            return
        shard = view.shard
        if self.tuning.windows:
            self._windows.let_through(ticket.handle, shard, ticket.prompt_tokens)
        if ticket.prefix:
            self._prefixes[ticket.prefix] = shard
            self._prefixes.move_to_end(ticket.prefix)
            if len(self._prefixes) > PREFIXES_MOST:
                self._prefixes.popitem(last=False)

    def _hint(self, ticket: Ticket, hot: _Hot, group: int | None, ahead_s: float) -> Hint:
        return Hint(
            ahead_s=ahead_s,
            gate=self._windows.gate,
            ajar=self._windows.ajar if self.tuning.windows else None,
            shared=hot.shared(ticket),
            only=None if group is None else hot.decode_set(group),
            avoid=hot.avoid if group is None else (),
            holder=self._prefixes.get(ticket.prefix, ""),
            new_tokens=self.new_tokens,
        )

    # --- order ----------------------------------------------------------------------------------

    @property
    def new_tokens(self) -> int:
        """That an answer has on the average, lately."""
        return max(1, round(self._new_tokens))

    def _later_s(self, ticket: Ticket) -> float:
        """Grows with the square of the prefill time, up to a group's: what is short passes, the rest in turn.

        If everything overtook what is longer, the longest would wait without end.
        """
        full_s, cost = self._group_s, self._prefill
        if cost is None or not full_s:
            return 0.0
        share = min(1.0, cost.alone_s(ticket.prompt_tokens) / full_s)
        return self.tuning.patience * full_s * share * share

    def _learn_order(self, fleet: Fleet) -> None:
        for room in fleet.by_role[Role.PREFILL]:
            cost = room.costs.prefill
            if cost is not None:
                if cost is not self._prefill:
                    self._prefill = cost
                    self._group_s = cost.alone_s(limit_of(room).most)
                return


def _needs_window(ticket: Ticket) -> bool:
    """It goes through a prefill shard, unless one shard serves it sooner."""
    return ticket.splittable and ticket.choice is not Choice.MIXED and ticket.max_new_tokens > 1


class _Hot:
    """What hot prompts mean in one pass."""

    def __init__(self, hot: HotPrompts | None, fleet: Fleet, now_s: float) -> None:
        self._hot = hot
        self._now_s = now_s
        self._decodes = sorted(room.view.shard for room in fleet.by_role[Role.DECODE]) if hot else []
        self.avoid: frozenset[str] = hot.reserved_for_hot(self._decodes, now_s) if hot else frozenset()
        """Decode shards that ordinary traffic leaves to the hot groups, while it has a choice."""
        self.full: set[int | None] = set()
        """Groups whose decode shards have no room left."""
        self._waiting: set[tuple[str, str]] = set()
        """Model and prompt of which one waits: its record will serve those behind it."""

    def group(self, ticket: Ticket) -> int | None:
        return None if self._hot is None else self._hot.group_of(ticket, self._now_s)

    def shared(self, ticket: Ticket) -> SharedRecord | None:
        return None if self._hot is None else self._hot.record_for(ticket, self._now_s)

    def waits(self, ticket: Ticket) -> None:
        if self._hot is not None and self._hot.may_share(ticket):
            self._waiting.add((ticket.model, ticket.prompt_hash))

    def follows(self, ticket: Ticket) -> bool:
        """An equal prompt goes before it and will leave a record that this one may read."""
        same = bool(self._waiting) and (ticket.model, ticket.prompt_hash) in self._waiting
        return same and self._hot is not None and self._hot.may_share(ticket)

    def decode_set(self, group: int) -> frozenset[str]:
        assert self._hot is not None, "a group needs hot prompts"
        return self._hot.decode_set(group, self._decodes, self._now_s)
