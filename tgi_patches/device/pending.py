"""Copies that are under way: looked at, never waited for, until too many bytes are.

added -> ready -> finished
      -> its deadline passed -> abandoned, and stuck until the device is done with its memory after all

There is no thread: `Copies.poll` is called by every step of the server, and by its event loop between
steps (LoopPoller).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Pending:
    """A copy under way; `deadline_s` on the clock that `poll` is told."""

    ready: Callable[[], bool]
    """The device is done with source and target; returns at once."""
    finish: Callable[[], None]
    """Called once, after `ready`."""
    deadline_s: float
    size_bytes: int = 0
    wait: Callable[[], None] = _nothing
    """Blocks until `ready`."""
    abandoned: Callable[[], None] = _nothing
    """Called in place of `finish`; the memory still belongs to the device."""


class Copies:
    """At most `bytes_max` under way, or one copy of any size."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._under_way: list[Pending] = []
        self._stuck: list[Pending] = []
        self.counts: Counter[str] = Counter()
        """`finished`, `abandoned`, and `waited`: how often a new copy had to wait for an old one."""

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def bytes_in_flight(self) -> int:
        return sum(copy.size_bytes for copy in (*self._under_way, *self._stuck))

    @property
    def stuck(self) -> bool:
        """The device may still write where an abandoned copy was to go."""
        self._stuck = [copy for copy in self._stuck if not copy.ready()]
        return bool(self._stuck)

    def add(self, copy: Pending) -> None:
        self._under_way.append(copy)

    def poll(self, now_s: float) -> None:
        """Finish what is ready, oldest first; give up what is late.  Raises what a `finish` raises."""
        waiting, self._under_way = self._under_way, []
        try:
            while waiting:
                self._look_at(waiting.pop(0), now_s)
        finally:
            self._under_way = [*self._under_way, *waiting]

    def make_room(self, size_bytes: int) -> None:
        """Wait for the oldest copies until `size_bytes` more may be under way."""
        while self._under_way and self._in_the_way(size_bytes):
            self.counts["waited"] += 1
            self._wait_for_oldest()

    def drain(self) -> None:
        """Wait for all of them, the stuck ones too: nothing of the device's is under way afterwards."""
        while self._under_way:
            self._wait_for_oldest()
        while self._stuck:
            self._stuck.pop(0).wait()

    def _in_the_way(self, size_bytes: int) -> bool:
        return self.bytes_in_flight + size_bytes > self._bytes_max

    def _wait_for_oldest(self) -> None:
        oldest = self._under_way.pop(0)
        oldest.wait()
        self.counts["finished"] += 1
        oldest.finish()

    def _look_at(self, copy: Pending, now_s: float) -> None:
        if copy.ready():
            self.counts["finished"] += 1
            copy.finish()
        elif now_s >= copy.deadline_s:
            self._stuck.append(copy)
            self.counts["abandoned"] += 1
            copy.abandoned()
        else:
            self._under_way.append(copy)


class Timer(Protocol):
    """What is used of an asyncio event loop."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> object: ...

    def time(self) -> float: ...


class Polled(Protocol):
    """What has things under way: Copies, or the links of transport.rendezvous."""

    def __len__(self) -> int:
        """How many of them are awaited."""

    def poll(self, now_s: float) -> None: ...


class LoopPoller:
    """Polls from an event loop every `every_s` while something is under way, and not otherwise.

    `now_s` is the loop's time: deadlines have to be on that clock, which is time.monotonic's.
    """

    def __init__(self, loop: Timer, copies: Polled, every_s: float = 0.0005) -> None:
        self._loop = loop
        self._copies = copies
        self._every_s = every_s
        self._scheduled = False

    def kick(self) -> None:
        """Call it after every `add`."""
        if not self._scheduled and len(self._copies):
            self._scheduled = True
            self._loop.call_later(self._every_s, self._tick)

    def _tick(self) -> None:
        self._scheduled = False
        try:
            self._copies.poll(self._loop.time())
        finally:
            self.kick()
