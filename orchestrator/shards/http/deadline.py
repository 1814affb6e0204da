"""A deadline that moves with every byte and costs a timer only when it may have passed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls `passed` when the latest `within` has run out.  At most one timer at any time.

    A timer that fires too early, because the deadline moved on meanwhile, is set again for the rest.
    """

    __slots__ = ("_due_s", "_left_s", "_loop", "_passed", "_timer", "_timer_s")

    def __init__(self, loop: asyncio.AbstractEventLoop, passed: Callable[[], None]) -> None:
        self._loop = loop
        self._passed = passed
        self._due_s: float | None = None
        self._left_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    def within(self, seconds: float) -> None:
        """From now on, so many seconds."""
        due_s = self._due_s = self._loop.time() + seconds
        if self._timer is None:
            self._set(due_s)
        elif due_s < self._timer_s:
            self._timer.cancel()
            self._set(due_s)

    def hold(self) -> None:
        """Stand still: nothing is expected until `go_on` or `within`."""
        if self._due_s is not None:
            self._left_s = self._due_s - self._loop.time()
            self._due_s = None

    def go_on(self) -> None:
        """After `hold`: with the seconds that were left."""
        if self._due_s is None and self._left_s is not None:
            self.within(self._left_s)

    def off(self) -> None:
        """Nothing is expected; a timer that is set will find nothing to do."""
        self._due_s = self._left_s = None

    def close(self) -> None:
        self.off()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, due_s: float) -> None:
        self._timer_s = due_s
        self._timer = self._loop.call_at(due_s, self._fired)

    def _fired(self) -> None:
        self._timer = None
        if self._due_s is None:
            return
        if self._loop.time() < self._due_s:
            self._set(self._due_s)
            return
        self._due_s = None
        self._passed()
