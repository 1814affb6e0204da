"""A minute that slides in steps, and how long a refused request has to wait.  Pure: time is an argument.

What was counted leaves the window 60 to 65 s later: never early, so a limit per minute holds for every
minute that one could pick, and at most one step late.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

STEP_S = 5
STEPS = 13
"""A minute, and the step that has begun."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one key may do; None is without limit."""

    requests_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_minute: int | None = None

    @property
    def any(self) -> bool:
        return self != NO_LIMITS


NO_LIMITS = Limits()


def step_of(now_s: float) -> int:
    return int(now_s // STEP_S)


def first_step(step: int) -> int:
    """The oldest step that still counts at `step`."""
    return step - STEPS + 1


def retry_after_s(now_s: float, most: int, used_from: Callable[[int], int]) -> int:
    """Whole seconds until at most `most` are in the window, if nothing else comes; at least 1.

    `used_from(step)` counts what came in that step or later.
    """
    step = step_of(now_s)
    for later in range(step + 1, step + STEPS + 1):
        if used_from(first_step(later)) <= most:
            return max(1, math.ceil(later * STEP_S - now_s))
    return STEPS * STEP_S  # a worker that read its clock later has begun another step
