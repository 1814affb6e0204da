"""Ramp to break: one more step of users as long as the last one held.

A step holds when nothing failed, nothing was refused and its TTFT p95 met the objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .report import percentile
from .timing import Outcome

SILENT_STEPS = 3
"""A step in which no request ends is prolonged up to so many times its length."""


@dataclass(frozen=True, slots=True)
class Step:
    """What ended during a step."""

    users: int
    lasted_s: float
    done: int
    failed: int
    refused: int
    ttft_p95_ms: float | None

    @property
    def requests_per_s(self) -> float:
        return self.done / self.lasted_s if self.lasted_s else 0.0

    def __str__(self) -> str:
        ttft = "none" if self.ttft_p95_ms is None else f"{self.ttft_p95_ms:.0f} ms"
        return f"{self.users} users, {self.requests_per_s:.2f} requests/s, TTFT p95 {ttft}"


def step_of(users: int, lasted_s: float, ended: Sequence[Outcome]) -> Step:
    """`ended`: the requests that ended during the step."""
    kinds = [outcome.kind for outcome in ended]
    ttfts = sorted(outcome.ttft_ms for outcome in ended if outcome.ttft_ms is not None)
    return Step(
        users,
        lasted_s,
        kinds.count("done"),
        kinds.count("failed"),
        kinds.count("refused"),
        percentile(ttfts, 0.95),
    )


def broken(step: Step, slo_ttft_ms: float, tolerate_refusals: bool) -> str | None:
    """Why the step did not hold, or None."""
    if step.failed:
        return f"{step.failed} requests failed"
    if step.refused and not tolerate_refusals:
        return f"{step.refused} requests were refused"
    if not step.done:
        return f"no request ended within {step.lasted_s:.0f} s"
    if step.ttft_p95_ms is not None and step.ttft_p95_ms > slo_ttft_ms:
        return f"TTFT p95 {step.ttft_p95_ms:.0f} ms is above {slo_ttft_ms:.0f} ms"
    return None


def over(step: Step, step_s: float) -> bool:
    """True when the step may be judged."""
    ended = step.done + step.failed + step.refused
    return step.lasted_s >= step_s and (ended > 0 or step.lasted_s >= SILENT_STEPS * step_s)


def sentence(step: Step, why: str, held: Step | None) -> str:
    """Where it broke."""
    before = f"the last step that held: {held}" if held else "no step held"
    return f"Broke at {step.users} users: {why}; {before}."
