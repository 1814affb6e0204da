"""Release windows: which prompts are let through to a prefill shard, so that its batches are ours.

TGI's router starts whatever has arrived.  So each prefill shard gets one group that it computes and, just
before that is done, one behind it; who comes later waits in our queue, where order can still be changed.

    let through -> waiting --the group before it is done--> running --its last record is imported--> gone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.core.cost import PrefillCost
from orchestrator.core.fleet import Room

ALIKE = 4
"""Prompts of one group differ in length by at most this factor."""
SHARE_TOGETHER = 0.5
"""Of the tokens that wait for a shard: so many of them may make one group, within its limits."""
NEARLY_ALL = 0.99
"""Share of the best throughput that the largest group reaches."""
AHEAD_S = 0.03
"""So long before a shard is free the next group is let through: a grant takes its way, and may be late."""


@dataclass(slots=True)
class Group:
    """Prompts that are let through together."""

    prompts: dict[str, int] = field(default_factory=dict)
    """Handle -> tokens, of those whose record is not imported yet."""
    lengths: list[int] = field(default_factory=list)
    """Of all that were let through."""
    begun_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def takes(self, tokens: int, limit_tokens: int) -> bool:
        """Up to the limit together; a longer prompt goes alone."""
        if not self.lengths:
            return True
        alike = max(*self.lengths, tokens) <= ALIKE * min(*self.lengths, tokens)
        return alike and self.tokens + tokens <= limit_tokens

    def add(self, handle: str, tokens: int) -> None:
        self.prompts[handle] = tokens
        self.lengths.append(tokens)

    def seconds(self, cost: PrefillCost | None) -> float:
        """To compute as one batch; 0 where nothing is known."""
        return cost.batch_s(self.lengths) if cost is not None and self.lengths else 0.0


class Window:
    """Of one incarnation of a prefill shard.  Times are seconds of one clock."""

    __slots__ = ("epoch", "running", "waiting")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.running = Group()
        self.waiting = Group()

    def takes(self, tokens: int, limit_tokens: int, left_s: float = 0.0) -> bool:
        """An idle shard takes any prompt; behind a group that is done in `left_s` one group gathers."""
        if not self.running.prompts:
            return True
        return left_s <= AHEAD_S and self.waiting.takes(tokens, limit_tokens)

    def end_s(self, cost: PrefillCost | None) -> float:
        """When the group that runs is done, as far as is known."""
        return self.running.begun_s + self.running.seconds(cost) if self.running.prompts else 0.0

    def running_s(self, cost: PrefillCost | None, now_s: float) -> float:
        """Until then; 0 where nothing is known."""
        return max(0.0, self.end_s(cost) - now_s)

    def let_through(self, handle: str, tokens: int, now_s: float) -> None:
        if self.running.prompts:
            self.waiting.add(handle, tokens)
        else:
            self.running = Group(begun_s=now_s)
            self.running.add(handle, tokens)

    def done(self, handle: str, now_s: float) -> bool:
        """A record is imported, or will never be; False where it was not here."""
        for group in (self.running, self.waiting):
            if group.prompts.pop(handle, None) is not None:
                self._advance(now_s)
                return True
        return False

    def overdue(self, cost: PrefillCost | None, now_s: float) -> list[str]:
        """A group is taken for done when it should be, whether that was heard or not; its handles."""
        given_up: list[str] = []
        while self.running.seconds(cost) and 0.0 < (end_s := self.end_s(cost)) <= now_s:
            given_up += self.running.prompts
            self.running.prompts.clear()
            self._advance(end_s)
        return given_up

    def left_s(self, cost: PrefillCost | None, now_s: float) -> float:
        """Until the shard has computed all that was let through."""
        if not self.running.prompts:
            return 0.0
        return self.running_s(cost, now_s) + self.waiting.seconds(cost)

    def _advance(self, now_s: float) -> None:
        if not self.running.prompts and self.waiting.prompts:
            self.running, self.waiting = self.waiting, Group()
            self.running.begun_s = now_s
        elif not self.running.prompts:
            self.waiting = Group()


@dataclass(frozen=True, slots=True)
class Limit:
    """How many tokens go together on one shard."""

    least: int
    """L_m: enough for 90 % of the best throughput."""
    most: int
    """For 99 %."""

    def tokens(self, waiting_tokens: float) -> int:
        """More go together the more waits: then throughput shortens the wait of all."""
        return max(self.least, min(self.most, int(waiting_tokens * SHARE_TOGETHER)))


class Windows:
    """Of all prefill shards."""

    def __init__(self) -> None:
        self._windows: dict[str, Window] = {}
        self._where: dict[str, str] = {}
        """Handle -> shard."""
        self._limits: dict[str, tuple[PrefillCost | None, Limit]] = {}
        self._now_s = 0.0
        self._waiting_tokens = 0.0
        self.ajar: set[str] = set()
        """Shards that may take a prompt in this pass."""

    def begin(self, prefills: Sequence[Room], waiting_tokens: int, now_s: float) -> None:
        """A pass on these shards: forget what is gone, and tell each room how long it is busy.

        `waiting_tokens`: of all prompts that wait here.
        """
        self._now_s = now_s
        self._waiting_tokens = waiting_tokens / max(len(prefills), 1)
        rooms = {room.view.shard: room for room in prefills}
        for shard in self._windows.keys() - rooms.keys():
            self._drop(shard)
        for shard, room in rooms.items():
            window = self._windows.get(shard)
            if window is None or window.epoch != room.view.epoch or not room.records:
                # Nothing is outstanding: whatever is still listed here has ended unheard.
                self._drop(shard)
                window = self._windows[shard] = Window(room.view.epoch)
            cost = room.costs.prefill
            for handle in window.overdue(cost, now_s):
                self._where.pop(handle, None)
            known = self._limits.get(shard)
            if known is None or known[0] is not cost:
                self._limits[shard] = cost, limit_of(room)
            if cost is not None:
                room.queue_s = window.left_s(cost, now_s)
                room.ranked()
        self.ajar = {shard for shard in self._windows if self._left_s(shard) <= AHEAD_S}

    def opens_s(self) -> float | None:
        """When the next group may be let through somewhere, by what is predicted; None where nothing is."""
        ends = [window.end_s(self._limits[shard][0]) for shard, window in self._windows.items()]
        return min((end_s - AHEAD_S for end_s in ends if end_s > self._now_s + AHEAD_S), default=None)

    def gate(self, room: Room, tokens: int) -> bool:
        """See `routing.Hint.gate`."""
        window = self._windows.get(room.view.shard)
        if window is None:
            return True
        limit = self._limits[room.view.shard][1]
        return window.takes(tokens, limit.tokens(self._waiting_tokens), self._left_s(room.view.shard))

    def let_through(self, handle: str, shard: str, tokens: int) -> None:
        """A grant of this pass."""
        window = self._windows.get(shard)
        if window is not None:
            window.let_through(handle, tokens, self._now_s)
            self._where[handle] = shard
            if self._left_s(shard) > AHEAD_S:
                self.ajar.discard(shard)

    def _left_s(self, shard: str) -> float:
        return self._windows[shard].running_s(self._limits[shard][0], self._now_s)

    def done(self, handle: str, now_s: float) -> None:
        """Its record is imported, or the request is over."""
        window = self._windows.get(self._where.pop(handle, ""))
        if window is not None:
            window.done(handle, now_s)

    def _drop(self, shard: str) -> None:
        window = self._windows.pop(shard, None)
        for handle in () if window is None else (*window.running.prompts, *window.waiting.prompts):
            self._where.pop(handle, None)


def limit_of(room: Room) -> Limit:
    """From what was measured; without that, as much as the shard's longest prompt."""
    most = room.view.limits.max_input_tokens
    cost = room.costs.prefill
    if cost is None:
        return Limit(most, most)
    return Limit(cost.saturation_tokens(most), cost.saturation_tokens(most, NEARLY_ALL))
