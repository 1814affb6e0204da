"""Part `lengths`: TTFT by length of the prompt, batched by length against first come, first served."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from orchestrator.bench.interference.stats import percentile
from orchestrator.bench.scheduler.fleet import COSTS, Fleet
from orchestrator.bench.scheduler.parts import Part, Row, Verdict
from orchestrator.bench.scheduler.policies import FirstCome, SchedulingPolicy
from orchestrator.bench.scheduler.served import Result, Served
from orchestrator.bench.scheduler.simulation import Delays, Simulation
from orchestrator.bench.scheduler.workload import ANSWERS, PROMPTS, capacity_per_s, steady
from orchestrator.core.cost import Costs, PrefillCost
from orchestrator.core.decision import Policy
from orchestrator.core.scheduling import Scheduler
from orchestrator.core.ticket import Choice

SHORT, MIDDLE, LONG = "<1k", "1-4k", ">4k"
TARGETS = {SHORT: 0.6, LONG: 1.3}
"""p99 of the TTFT against first come."""
WARM_UP = 0.1
"""Share of the requests that come before what is counted."""
BASELINE, OURS = "first come", "by length"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is simulated; the quick one takes seconds."""

    requests: int = 5000
    seeds: Sequence[int] = (1, 2, 3)
    load: float = 0.85
    """Share of the prefill capacity that the model predicts."""
    fleets: Sequence[tuple[int, int]] = ((2, 2), (1, 1), (4, 4))
    costs: Costs = COSTS


QUICK = Plan(requests=2000, seeds=(1, 2))


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of scheduling; `lm_budget`: prefill shards take batches of L_m tokens, not of 4,096."""

    name: str
    policy: Callable[[], SchedulingPolicy]
    told: bool = True
    lm_budget: bool = False


CONTENDERS = (
    Contender(BASELINE, FirstCome, told=False),
    Contender("first come, L_m", FirstCome, told=False, lm_budget=True),
    Contender("by length, split", lambda: Scheduler(Policy(choice=Choice.SEPARATED))),
    Contender(OURS, Scheduler),
)
"""The production policy chooses split or mixed by itself; with `split` only its batching is left."""
MAIN = tuple(one for one in CONTENDERS if one.name in (BASELINE, OURS))
"""On all fleets but the first."""


def class_of(prompt_tokens: int) -> str:
    """`<1k`, `1-4k` or `>4k`, in units of 1,024."""
    if prompt_tokens < 1024:
        return SHORT
    return MIDDLE if prompt_tokens <= 4096 else LONG


def measure(plan: Plan, say: Callable[[str], None] = lambda _: None) -> Part:
    """Every contender on every fleet with the same requests."""
    assert plan.costs.prefill is not None, "a plan without a prefill model"
    rows: list[Row] = []
    verdicts: list[Verdict] = []
    capacity = capacity_per_s(plan.costs.prefill, PROMPTS)
    for prefill, decode in plan.fleets:
        fleet = Fleet(prefill, decode, plan.costs)
        base: Figures | None = None
        for one in CONTENDERS if (prefill, decode) == plan.fleets[0] else MAIN:
            say(f"lengths: {fleet}, {one.name}")
            figures = _figures(plan, fleet, one, plan.load * capacity * prefill)
            base = base or figures
            rows.append(figures.row(str(fleet), one.name, base))
            if one.name == OURS:
                verdicts += _verdicts(fleet, figures, base)
    return Part(
        "lengths",
        f"TTFT at {plan.load:.0%} of the prefill capacity, virtual time, seconds (ratio to first come)",
        rows,
        verdicts,
        _conditions(plan, plan.costs.prefill, capacity),
        notes=(
            "shards: prefill + decode; ratio: p99 to that of first come; batch, prompts: mean tokens and",
            "prompts of a prefill; wait: longest until a shard began; mixed: share that was not split.",
        ),
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one contender on one fleet, over all seeds.  Seconds."""

    ttft_p50_s: Mapping[str, float]
    ttft_p99_s: Mapping[str, float]
    tpot_p99_s: float
    answers_per_s: float
    batch_tokens: float
    batch_prompts: float
    longest_wait_s: float
    mixed: float
    """Share of the requests."""
    unserved: int

    def row(self, fleet: str, name: str, base: Figures) -> Row:
        """With ratios to the baseline."""
        row: dict[str, str | float | int | None] = {"shards": fleet, "policy": name}
        for kind in (SHORT, MIDDLE, LONG):
            row[f"{kind} p50"] = round(self.ttft_p50_s[kind], 3)
            row[f"{kind} p99"] = round(self.ttft_p99_s[kind], 3)
            row[f"{kind} ratio"] = round(self.ttft_p99_s[kind] / base.ttft_p99_s[kind], 3)
        row["TPOT p99"] = round(self.tpot_p99_s, 4)
        row["req/s"] = round(self.answers_per_s, 2)
        row["batch"] = round(self.batch_tokens)
        row["prompts"] = round(self.batch_prompts, 2)
        row["wait"] = round(self.longest_wait_s, 2)
        row["mixed"] = round(self.mixed, 3)
        row["unserved"] = self.unserved
        return row


def _figures(plan: Plan, fleet: Fleet, one: Contender, rate_per_s: float) -> Figures:
    cost = plan.costs.prefill
    assert cost is not None, "a plan without a prefill model"
    fleet = replace(fleet, told=one.told)
    if one.lm_budget:
        fleet = replace(fleet, prefill_budget_tokens=cost.saturation_tokens(PROMPTS.most))
    results = []
    for seed in plan.seeds:
        arrivals = steady(rate_per_s, PROMPTS, ANSWERS, seed=seed, count=plan.requests)
        results.append(Simulation(fleet, one.policy(), arrivals).run())
    return summed(results)


def summed(results: Sequence[Result]) -> Figures:
    """Over all runs, each without its warm-up."""
    counted = [one for result in results for one in _counted(result.served)]
    done = [one for one in counted if not math.isnan(one.done_s)]
    by_class: dict[str, list[float]] = {SHORT: [], MIDDLE: [], LONG: []}
    for one in done:
        by_class[class_of(one.arrival.prompt_tokens)].append(one.ttft_s)
    batches = [batch for result in results for batch in result.prefill_batches]
    tpot = [one.tpot_s for one in done if one.arrival.answer_tokens > 1]
    return Figures(
        ttft_p50_s={kind: _percentile(values, 0.5) for kind, values in by_class.items()},
        ttft_p99_s={kind: _percentile(values, 0.99) for kind, values in by_class.items()},
        tpot_p99_s=_percentile(tpot, 0.99),
        answers_per_s=sum(len(result.served) for result in results) / sum(r.took_s for r in results),
        batch_tokens=fmean(batch.tokens for batch in batches),
        batch_prompts=fmean(batch.prompts for batch in batches),
        longest_wait_s=max((one.waited_s for one in done), default=math.nan),
        mixed=sum(_is_mixed(one) for one in counted) / max(len(counted), 1),
        unserved=len(counted) - len(done),
    )


def _counted(served: Sequence[Served]) -> Sequence[Served]:
    return served[int(len(served) * WARM_UP) :]


def _is_mixed(one: Served) -> bool:
    return one.grant is not None and one.grant.choice is Choice.MIXED


def _percentile(values: Sequence[float], share: float) -> float:
    return percentile(values, share) if values else math.nan


def _verdicts(fleet: Fleet, ours: Figures, base: Figures) -> list[Verdict]:
    return [
        Verdict(f"{fleet}: p99 TTFT of prompts {kind}", ours.ttft_p99_s[kind] / base.ttft_p99_s[kind], limit)
        for kind, limit in TARGETS.items()
    ]


def _conditions(plan: Plan, cost: PrefillCost, capacity: float) -> dict[str, Any]:
    return {
        "prompts": asdict(PROMPTS),
        "answers": asdict(ANSWERS),
        "arrivals": "Poisson",
        "load": plan.load,
        "prefill_capacity_per_shard_per_s": round(capacity, 3),
        "requests_per_seed": plan.requests,
        "warm_up_share": WARM_UP,
        "seeds": list(plan.seeds),
        "costs": asdict(plan.costs),
        "l_m_tokens": cost.saturation_tokens(PROMPTS.most),
        "delays": asdict(Delays()),
    }
