"""The rounds: every gateway in every round, in another order each time, so that drift hits all alike."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from orchestrator.bench.gateway import measure, proc
from orchestrator.bench.gateway.load import LoadFailed
from orchestrator.bench.gateway.measure import Figures, Plan
from orchestrator.bench.gateway.running import Bench, Subject, bench
from orchestrator.bench.gateway.subjects import KINDS, choose
from orchestrator.bench.gateway.targets import judge
from orchestrator.errors import ConfigError

MEASURES: Mapping[str, Callable[[Subject, Plan], Awaitable[Figures]]] = {
    "open": measure.open_streams,
    "event": measure.event,
    "flood": measure.flood,
    "request": measure.request,
    "pool": measure.pool,
}
TTFT = "ttft"
NAMES = ("open", "event", "flood", "request", TTFT, "pool")
"""In this order."""
ONCE = ("open",)
"""Measured first and in one round only: memory that was taken once is not taken again."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything of one run; `to_dict` is what `--json` prints."""

    conditions: Mapping[str, Any]
    versions: Mapping[str, str]
    missing: Mapping[str, str]
    medians: Mapping[str, Mapping[str, float]]
    """By gateway, by figure."""
    rounds: Mapping[str, Sequence[Figures]]
    failures: Mapping[str, Sequence[str]]
    """By gateway: what it could not do, with the measure's name."""

    def to_dict(self) -> dict[str, Any]:
        verdicts = [
            {**asdict(verdict.target), "value": verdict.value, "met": verdict.met}
            for verdict in judge(self.medians)
        ]
        return {**asdict(self), "targets": verdicts}


def run(only: Sequence[str], measures: Sequence[str], rounds: int, plan: Plan, say: Say) -> Report:
    """Raises ConfigError for unknown names, LoadFailed when a gateway does not start."""
    unknown = [name for name in measures if name not in NAMES]
    if unknown:
        raise ConfigError(f"There is no measure {unknown[0]!r}: choose from {', '.join(NAMES)}.")
    chosen = choose(only)
    wanted = [name for name in NAMES if not measures or name in measures]
    gateway_core, load_core = proc.cores()
    with proc.pinned(load_core), proc.many_files() as files:
        conditions = _conditions(plan, rounds, gateway_core, load_core, files)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            results = runner.run(_all_rounds(list(chosen.versions), wanted, rounds, plan, say))
    conditions["load_average_at_end"] = round(os.getloadavg()[0], 2)
    return Report(
        conditions, chosen.versions, chosen.missing, results.medians(), results.figures, results.failures
    )


class Results:
    """What the rounds brought."""

    def __init__(self, names: Sequence[str]) -> None:
        self.figures: dict[str, list[Figures]] = {name: [] for name in names}
        self.failures: dict[str, list[str]] = {}

    def add(self, name: str, figures: Figures) -> None:
        self.figures[name].append(figures)

    def fail(self, name: str, what: str) -> None:
        self.failures.setdefault(name, []).append(what)

    def medians(self) -> dict[str, dict[str, float]]:
        """Of every figure, over the rounds that have it."""
        found: dict[str, dict[str, float]] = {}
        for name, rounds in self.figures.items():
            figures = dict.fromkeys(figure for one in rounds for figure in one)
            found[name] = {
                figure: median(one[figure] for one in rounds if figure in one) for figure in figures
            }
        return found


async def _all_rounds(
    names: Sequence[str], measures: Sequence[str], rounds: int, plan: Plan, say: Say
) -> Results:
    gateway_core, load_core = proc.cores()
    results = Results(names)
    async with bench(names, gateway_core, load_core) as running:
        for name, reason in running.failed.items():
            results.fail(name, f"starting: {reason}")
        for what in measures:
            for number in range(1 if what in ONCE else rounds):
                say(f"{what}: round {number + 1}")
                await _round(what, number, running, plan, results)
    return results


async def _round(what: str, number: int, running: Bench, plan: Plan, results: Results) -> None:
    turn = number % max(1, len(running.subjects))
    direct = measure.percentiles(await measure.first_token(running.decode_port, plan)) if what == TTFT else {}
    for subject in (*running.subjects[turn:], *running.subjects[:turn]):
        try:
            if what == TTFT:
                figures = measure.added(await measure.first_token(subject.port, plan), direct)
            else:
                figures = await MEASURES[what](subject, plan)
        except LoadFailed as failure:
            results.fail(subject.kind.name, f"{what}: {failure}")
        else:
            results.add(subject.kind.name, figures)


def _conditions(plan: Plan, rounds: int, gateway_core: int, load_core: int, files: int) -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gateway_core": gateway_core,
        "load_and_mock_core": load_core,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "open_files": files,
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "rounds": rounds,
        "calls": {kind.name: kind.calls for kind in KINDS.values()},
        "plan": {**asdict(plan), "route": plan.route.path(stream=True)},
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
