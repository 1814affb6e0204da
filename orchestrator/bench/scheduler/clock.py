"""Virtual time: what is to happen, in order of its time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Act = Callable[[], None]


class Clock:
    """Runs acts at their times; those of one time in the order in which they were asked for."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self._waiting: list[tuple[float, int, Act]] = []
        self._count = 0

    def after(self, delay_s: float, act: Act) -> None:
        self.at(self.now_s + delay_s, act)

    def at(self, time_s: float, act: Act) -> None:
        """A time that is past counts as now."""
        self._count += 1
        heapq.heappush(self._waiting, (max(time_s, self.now_s), self._count, act))

    def run(self, until_s: float) -> None:
        """Until nothing is left to happen, or up to a time."""
        while self._waiting and self._waiting[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._waiting)
            act()
