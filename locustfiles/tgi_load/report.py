"""The run in figures: rates, TTFT and TPOT percentiles, goodput."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .timing import Outcome

PERCENTILES = (0.5, 0.95, 0.99)
_HEAD = f"{'ms':<20}{'done':>6}" + "".join(
    f"{name:>10}" for kind in ("TTFT", "TPOT", "total") for name in (f"{kind} p50", "p95", "p99")
)


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objectives of one request, in milliseconds."""

    ttft_ms: float
    tpot_ms: float

    def met_by(self, outcome: Outcome) -> bool:
        """An answer of one token has no TPOT to miss; one without text misses TTFT."""
        return (
            outcome.ttft_ms is not None
            and outcome.ttft_ms <= self.ttft_ms
            and (outcome.tpot_ms is None or outcome.tpot_ms <= self.tpot_ms)
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a run, or of the requests of one name or route in it."""

    name: str
    done: int
    failed: int
    refused: int
    good: int
    """Done within the objectives."""
    tokens: int
    run_s: float
    ttft_ms: tuple[float | None, ...]
    tpot_ms: tuple[float | None, ...]
    total_ms: tuple[float | None, ...]

    @property
    def ended(self) -> int:
        return self.done + self.failed + self.refused

    def per_s(self, count: int) -> float:
        return count / self.run_s if self.run_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        def named(values: Iterable[float | None]) -> dict[str, float | None]:
            return {f"p{100 * p:.0f}": v for p, v in zip(PERCENTILES, values, strict=True)}

        return {
            "name": self.name,
            "run_s": self.run_s,
            "done": self.done,
            "failed": self.failed,
            "refused": self.refused,
            "requests_per_s": self.per_s(self.done),
            "tokens_per_s": self.per_s(self.tokens),
            "ttft_ms": named(self.ttft_ms),
            "tpot_ms": named(self.tpot_ms),
            "total_ms": named(self.total_ms),
            "goodput_per_s": self.per_s(self.good),
            "goodput_share": self.good / self.ended if self.ended else None,
        }


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Nearest rank: the smallest value that at least `share` of the values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)] if ordered else None


def run_seconds(outcomes: Sequence[Outcome]) -> float:
    """From the first request's start to the last one's end."""
    if not outcomes:
        return 0.0
    ended_s = max(outcome.started_s + outcome.total_ms / 1000 for outcome in outcomes)
    return ended_s - min(outcome.started_s for outcome in outcomes)


def figures(name: str, outcomes: Sequence[Outcome], slo: Slo, run_s: float) -> Figures:
    """Rates are over `run_s`."""
    done = [outcome for outcome in outcomes if outcome.kind == "done"]
    return Figures(
        name=name,
        done=len(done),
        failed=sum(outcome.kind == "failed" for outcome in outcomes),
        refused=sum(outcome.kind == "refused" for outcome in outcomes),
        good=sum(slo.met_by(outcome) for outcome in done),
        tokens=sum(outcome.tokens for outcome in done),
        run_s=run_s,
        ttft_ms=_percentiles(outcome.ttft_ms for outcome in done),
        tpot_ms=_percentiles(outcome.tpot_ms for outcome in done),
        total_ms=_percentiles(outcome.total_ms for outcome in done),
    )


def _percentiles(values: Iterable[float | None]) -> tuple[float | None, ...]:
    ordered = sorted(value for value in values if value is not None)
    return tuple(percentile(ordered, share) for share in PERCENTILES)


def parts(outcomes: Sequence[Outcome], slo: Slo, run_s: float) -> list[Figures]:
    """By name and, where a gateway tells it, by route."""
    return [
        *_grouped(outcomes, lambda outcome: outcome.name, slo, run_s),
        *_grouped(outcomes, lambda outcome: outcome.route and f"route {outcome.route}", slo, run_s),
    ]


def _grouped(
    outcomes: Sequence[Outcome], key: Callable[[Outcome], str], slo: Slo, run_s: float
) -> list[Figures]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome), []).append(outcome)
    return [figures(name, groups[name], slo, run_s) for name in sorted(groups) if name]


def exit_code(outcomes: Sequence[Outcome], tolerate_refusals: bool) -> int:
    """1 when something failed, was refused, or nothing was done; else 0."""
    kinds = {outcome.kind for outcome in outcomes}
    good = {"done", "refused"} if tolerate_refusals else {"done"}
    return 0 if "done" in kinds and kinds <= good else 1


def text(host: str, whole: Figures, groups: Sequence[Figures], slo: Slo, notes: Sequence[str]) -> str:
    """A page for people."""
    share = f"{100 * whole.good / whole.ended:.1f} %" if whole.ended else "nothing"
    objectives = f"at TTFT <= {slo.ttft_ms:g} ms and TPOT <= {slo.tpot_ms:g} ms"
    lines = [
        f"Load on {host}: {whole.run_s:.1f} s",
        f"requests  {whole.done} done, {whole.failed} failed, {whole.refused} refused",
        f"rate      {whole.per_s(whole.done):.2f} requests/s, {whole.per_s(whole.tokens):.1f} tokens/s",
        f"goodput   {whole.per_s(whole.good):.2f} requests/s, {share} of those that ended, {objectives}",
        "",
        _HEAD,
        *(_row(group) for group in (*groups, whole)),
    ]
    return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"


def _row(group: Figures) -> str:
    times = (*group.ttft_ms, *group.tpot_ms, *group.total_ms)
    return f"{group.name:<20}{group.done:>6}" + "".join(f"{_ms(time):>10}" for time in times)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"
