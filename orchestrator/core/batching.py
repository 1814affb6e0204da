"""Release windows: which prompts are let through to a prefill shard, so that its batches are ours.

TGI's router starts whatever has arrived.  So each prefill shard gets one group that it computes and at most
one that waits behind it; who comes later waits in our queue, where order can still be changed.

    let through -> waiting --the group before it is done--> running --its last record is imported--> gone
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.core.cost import PrefillCost
from orchestrator.core.fleet import Room

ALIKE = 4
"""Prompts of one group differ in length by at most this factor."""
OVERDUE = 2.0
"""A group that takes so many times what was predicted no longer holds the next one back."""


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

    def takes(self, tokens: int, saturation_tokens: int) -> bool:
        """Up to L_m together; a longer prompt goes alone."""
        if not self.lengths:
            return True
        alike = max(*self.lengths, tokens) <= ALIKE * min(*self.lengths, tokens)
        return alike and self.tokens + tokens <= saturation_tokens

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

    def takes(self, tokens: int, saturation_tokens: int) -> bool:
        """An idle shard takes any prompt; behind a running group one group gathers."""
        return not self.running.prompts or self.waiting.takes(tokens, saturation_tokens)

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

    def overdue(self, cost: PrefillCost | None, now_s: float) -> None:
        """What is never said to be imported must not hold others back for ever."""
        expected_s = self.running.seconds(cost)
        if expected_s and self.running.prompts and now_s - self.running.begun_s > OVERDUE * expected_s:
            self.running.prompts.clear()
            self._advance(now_s)

    def left_s(self, cost: PrefillCost | None, now_s: float) -> float:
        """Until the shard has computed all that was let through."""
        if not self.running.prompts:
            return 0.0
        running_s = max(0.0, self.running.begun_s + self.running.seconds(cost) - now_s)
        return running_s + self.waiting.seconds(cost)

    def _advance(self, now_s: float) -> None:
        if not self.running.prompts and self.waiting.prompts:
            self.running, self.waiting = self.waiting, Group()
            self.running.begun_s = now_s
        elif not self.running.prompts:
            self.waiting = Group()


class Windows:
    """Of all prefill shards."""

    def __init__(self) -> None:
        self._windows: dict[str, Window] = {}
        self._where: dict[str, str] = {}
        """Handle -> shard."""
        self._saturation: dict[str, int] = {}
        self._now_s = 0.0

    def begin(self, prefills: Iterable[Room], now_s: float) -> None:
        """A pass on these shards: forget what is gone, and tell each room how long it is busy."""
        self._now_s = now_s
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
            window.overdue(cost, now_s)
            self._saturation[shard] = _saturation(room)
            if cost is not None:
                room.queue_s = window.left_s(cost, now_s)
                room.ranked()

    def gate(self, room: Room, tokens: int) -> bool:
        """See `routing.Hint.gate`."""
        window = self._windows.get(room.view.shard)
        return window is None or window.takes(tokens, self._saturation[room.view.shard])

    def let_through(self, handle: str, shard: str, tokens: int) -> None:
        """A grant of this pass."""
        window = self._windows.get(shard)
        if window is not None:
            window.let_through(handle, tokens, self._now_s)
            self._where[handle] = shard

    def done(self, handle: str, now_s: float) -> None:
        """Its record is imported, or the request is over."""
        shard = self._where.pop(handle, None)
        if shard is not None:
            self._windows[shard].done(handle, now_s)

    def _drop(self, shard: str) -> None:
        window = self._windows.pop(shard, None)
        self._saturation.pop(shard, None)
        for handle in () if window is None else (*window.running.prompts, *window.waiting.prompts):
            self._where.pop(handle, None)


def _saturation(room: Room) -> int:
    """L_m of a shard; without a measurement as much as its longest prompt."""
    most = room.view.limits.max_input_tokens
    return room.costs.prefill.saturation_tokens(most) if room.costs.prefill is not None else most
