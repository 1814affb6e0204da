"""Deadlines for what another process does: they move with every byte, and our own lateness is not held
against it.  A loop that was busy runs its timers before it looks at what has arrived meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

LATE_S = 0.02
"""A timer that fires later than this after its time shows that the loop was busy elsewhere."""
LOOK_S = 0.001
"""Long enough for the loop to look at its sockets once."""


class Deadline:
    """Calls `passed` when the latest `within` has run out.  At most one timer at any time.

    A timer that fires too early, because the deadline moved on meanwhile, is set again for the rest.
    """

    __slots__ = ("_due_s", "_left_s", "_looked", "_loop", "_passed", "_timer", "_timer_s")

    def __init__(self, loop: asyncio.AbstractEventLoop, passed: Callable[[], None]) -> None:
        self._loop = loop
        self._passed = passed
        self._due_s: float | None = None
        self._left_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._looked = False

    def within(self, seconds: float) -> None:
        """From now on, so many seconds."""
        due_s = self._due_s = self._loop.time() + seconds
        self._looked = False
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
        now_s = self._loop.time()
        if now_s < self._due_s:
            self._set(self._due_s)
            return
        if now_s - self._timer_s > LATE_S and not self._looked:
            self._looked = True
            self._set(now_s + LOOK_S)
            return
        self._due_s = None
        self._passed()


class Within:
    """`async with Within(seconds)`: as `asyncio.timeout`, with a `Deadline`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expired = False
        self._task: asyncio.Task[object]
        self._cancelling = 0
        self._deadline: Deadline

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a deadline is for a task"
        self._task, self._cancelling = task, task.cancelling()
        self._deadline = Deadline(asyncio.get_running_loop(), self._expire)
        self._deadline.within(self._seconds)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._deadline.close()
        # Another cancellation that came as well goes first.
        ours = self._expired and self._task.uncancel() <= self._cancelling
        if ours and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()
