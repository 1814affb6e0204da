"""Numbers of users over time; times in seconds since the start."""

from __future__ import annotations

import math
from dataclasses import dataclass

DAY = (
    0.22, 0.16, 0.12, 0.10, 0.10, 0.14, 0.24, 0.42, 0.66, 0.86, 0.96, 0.97,
    0.90, 0.92, 1.00, 0.99, 0.93, 0.84, 0.76, 0.72, 0.70, 0.60, 0.46, 0.32,
)  # fmt: skip
"""Share of the most users at each full hour: an office day with an evening after it.  Ours."""


@dataclass(frozen=True, slots=True)
class Burst:
    """`base_users`, and `users` for `length_s` at the end of every period."""

    base_users: int
    users: int
    period_s: float
    length_s: float

    def at(self, now_s: float) -> int:
        return self.users if now_s % self.period_s >= self.period_s - self.length_s else self.base_users


@dataclass(frozen=True, slots=True)
class Day:
    """A day from midnight to midnight in `length_s`, again and again."""

    users: int
    length_s: float

    def at(self, now_s: float) -> int:
        hour = (now_s % self.length_s) / self.length_s * len(DAY)
        before = int(hour)
        low, high = DAY[before], DAY[(before + 1) % len(DAY)]
        return max(1, math.floor(self.users * (low + (high - low) * (hour - before)) + 0.5))
