"""Part `burst`: what a hundred requests of three nearly equal texts cost, and what they do to others."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from statistics import fmean
from typing import Any

from orchestrator.bench.interference.stats import percentile
from orchestrator.bench.scheduler.fleet import COSTS, Fleet
from orchestrator.bench.scheduler.parts import Part, Row, Verdict
from orchestrator.bench.scheduler.policies import FirstCome, SchedulingPolicy
from orchestrator.bench.scheduler.served import Served
from orchestrator.bench.scheduler.simulation import Simulation
from orchestrator.bench.scheduler.workload import ANSWERS, PROMPTS, Arrival, Burst, capacity_per_s, steady
from orchestrator.core.cost import Costs
from orchestrator.core.hot_prompts import HotPrompts
from orchestrator.core.scheduling import Scheduler

HARM_LIMIT = 1.2
"""p99 of the steady traffic's TTFT and TPOT with the burst, against without."""
OURS, BASELINE = "ours", "first come"
BURST = Burst(at_s=20.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """One burst a run, over steady traffic; what comes from the burst on is counted for `watched_s`."""

    seeds: Sequence[int] = tuple(range(1, 21))
    load: float = 0.6
    """Of the steady traffic, as a share of the predicted prefill capacity."""
    prefill: int = 2
    decode: int = 4
    burst: Burst = BURST
    watched_s: float = 15.0
    until_s: float = 45.0
    costs: Costs = COSTS


QUICK = Plan(seeds=(1, 2, 3, 4, 5, 6))


def _production() -> Scheduler:
    return Scheduler(hot=HotPrompts())


def measure(plan: Plan, say: Callable[[str], None] = lambda _: None) -> Part:
    """Each policy with and without the burst, over the same steady requests."""
    assert plan.costs.prefill is not None, "a plan without a prefill model"
    rate_per_s = plan.load * plan.prefill * capacity_per_s(plan.costs.prefill, PROMPTS)
    fleet = Fleet(plan.prefill, plan.decode, plan.costs)
    rows: list[Row] = []
    verdicts: list[Verdict] = []
    for name, make, told in ((BASELINE, FirstCome, False), (OURS, _production, True)):
        calm: Figures | None = None
        for with_burst in (False, True):
            say(f"burst: {name}, {'with' if with_burst else 'without'} it")
            figures = _figures(plan, replace(fleet, told=told), make, rate_per_s, with_burst)
            calm = calm or figures
            rows.append(figures.row(name, with_burst, calm))
            if name == OURS and with_burst:
                verdicts = _verdicts(plan, figures, calm)
    return Part(
        "burst",
        f"{plan.burst.requests} requests of {len(plan.burst.prompt_tokens)} texts in "
        f"{plan.burst.within_s:g} s over steady traffic, virtual time, seconds",
        rows,
        verdicts,
        _conditions(plan, rate_per_s),
        notes=(
            "prefills: computed for the burst, most of any run, and the mean; TTFT, TPOT, ratios: of the",
            "steady requests, to the same without the burst; counted: those; unserved: never granted.",
        ),
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one policy, over all seeds; `prefills` is None without a burst.  Seconds."""

    prefills: int | None
    mean_prefills: float | None
    burst_ttft_p99_s: float | None
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    steady: int
    """Steady requests that were counted."""
    unserved: int

    def row(self, name: str, with_burst: bool, calm: Figures) -> Row:
        """With ratios to the same policy without the burst."""
        return {
            "policy": name,
            "burst": "yes" if with_burst else "no",
            "prefills": self.prefills,
            "mean": self.mean_prefills,
            "burst TTFT p99": None if self.burst_ttft_p99_s is None else round(self.burst_ttft_p99_s, 3),
            "TTFT p50": round(self.ttft_p50_s, 3),
            "TTFT p99": round(self.ttft_p99_s, 3),
            "ratio": round(self.ttft_p99_s / calm.ttft_p99_s, 3),
            "TPOT p99": round(self.tpot_p99_s, 4),
            "TPOT ratio": round(self.tpot_p99_s / calm.tpot_p99_s, 3),
            "counted": self.steady,
            "unserved": self.unserved,
        }


def _figures(
    plan: Plan, fleet: Fleet, make: Callable[[], SchedulingPolicy], rate_per_s: float, with_burst: bool
) -> Figures:
    runs = [
        Simulation(fleet, make(), _arrivals(plan, rate_per_s, seed, with_burst)).run().served
        for seed in plan.seeds
    ]
    served = [one for run in runs for one in run]
    watched = [one for run in runs for one in _watched(plan, run)]
    bursts = [[one for one in run if one.arrival.kind == "burst"] for run in runs]
    counts = [sum(one.prefilled for one in burst) for burst in bursts]
    ttft = [one.ttft_s for burst in bursts for one in burst if not math.isnan(one.first_s)]
    return Figures(
        prefills=max(counts) if with_burst else None,
        mean_prefills=round(fmean(counts), 2) if with_burst else None,
        burst_ttft_p99_s=percentile(ttft, 0.99) if ttft else None,
        ttft_p50_s=percentile([one.ttft_s for one in watched], 0.5),
        ttft_p99_s=percentile([one.ttft_s for one in watched], 0.99),
        tpot_p99_s=percentile([one.tpot_s for one in watched if one.arrival.answer_tokens > 1], 0.99),
        steady=len(watched),
        unserved=sum(math.isnan(one.done_s) for one in served),
    )


def _arrivals(plan: Plan, rate_per_s: float, seed: int, with_burst: bool) -> list[Arrival]:
    calm = steady(rate_per_s, PROMPTS, ANSWERS, seed=seed, until_s=plan.until_s)
    burst = plan.burst.arrivals(ANSWERS, seed=seed) if with_burst else []
    return list(heapq.merge(calm, burst, key=attrgetter("at_s")))


def _watched(plan: Plan, run: Sequence[Served]) -> list[Served]:
    """The steady requests that came while the burst could touch them."""
    begun_s = plan.burst.at_s
    return [
        one
        for one in run
        if one.arrival.kind == "steady"
        and begun_s <= one.arrived_s < begun_s + plan.watched_s
        and not math.isnan(one.done_s)
    ]


def _verdicts(plan: Plan, burst: Figures, calm: Figures) -> list[Verdict]:
    return [
        Verdict("prefills of a burst, at most", _number(burst.prefills), len(plan.burst.prompt_tokens)),
        Verdict("steady p99 TTFT, with burst to without", burst.ttft_p99_s / calm.ttft_p99_s, HARM_LIMIT),
        Verdict("steady p99 TPOT, with burst to without", burst.tpot_p99_s / calm.tpot_p99_s, HARM_LIMIT),
    ]


def _number(count: int | None) -> float | None:
    return None if count is None else float(count)


def _conditions(plan: Plan, rate_per_s: float) -> dict[str, Any]:
    return {
        "shards": f"{plan.prefill}+{plan.decode}",
        "burst": asdict(plan.burst),
        "steady_per_s": round(rate_per_s, 3),
        "load": plan.load,
        "watched_s": plan.watched_s,
        "seeds": list(plan.seeds),
        "prompts": asdict(PROMPTS),
        "answers": asdict(ANSWERS),
        "costs": asdict(plan.costs),
    }
