"""The parts of `bench scheduler`: which run, with what plan, under which conditions."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from orchestrator.bench.gateway import proc
from orchestrator.bench.scheduler import break_even, burst, client_cost, conductor_cost, lengths
from orchestrator.bench.scheduler.fleet import COSTS, read_costs
from orchestrator.bench.scheduler.parts import Part
from orchestrator.errors import ConfigError

Say = Callable[[str], None]
Deployed = Callable[[], AbstractAsyncContextManager[httpx.AsyncClient]]
"""A client of a gateway with one prefill and one decode shard behind it, for as long as it is open."""

QUEUE, CONDUCTOR, LENGTHS, BURST, BREAK_EVEN = "queue", "conductor", "lengths", "burst", "break-even"
PARTS = (QUEUE, CONDUCTOR, LENGTHS, BURST, BREAK_EVEN)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asks for."""

    parts: Sequence[str] = PARTS
    quick: bool = False
    million: bool = False
    """Part `conductor` goes on until a million tickets are decided."""
    costs_file: Path | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.parts if name not in PARTS]
        if unknown:
            raise ConfigError(f"There is no part {unknown[0]!r}: choose from {', '.join(PARTS)}.")


async def run(wanted: Wanted, deployed: Deployed, say: Say) -> AsyncIterator[Part]:
    """Each part as soon as it is measured, in the order of PARTS.

    Raises ConfigError for a cost file that is none, ChildFailed, Unanswered or Unreachable when a part
    cannot be measured.
    """
    model = COSTS if wanted.costs_file is None else read_costs(wanted.costs_file)
    for name in PARTS:
        if name not in wanted.parts:
            continue
        if name == QUEUE:
            yield await client_cost.measure(client_cost.QUICK if wanted.quick else client_cost.Plan(), say)
        elif name == CONDUCTOR:
            yield await conductor_cost.measure(_conductor_plan(wanted), say)
        elif name == LENGTHS:
            lengths_plan = lengths.QUICK if wanted.quick else lengths.Plan()
            yield await asyncio.to_thread(lengths.measure, replace(lengths_plan, costs=model), say)
        elif name == BURST:
            burst_plan = burst.QUICK if wanted.quick else burst.Plan()
            yield await asyncio.to_thread(burst.measure, replace(burst_plan, costs=model), say)
        else:
            say("break-even: starting two shards")
            async with deployed() as gateway:
                plan = break_even.QUICK if wanted.quick else break_even.Plan()
                yield await break_even.measure(gateway, plan, say)


def _conductor_plan(wanted: Wanted) -> conductor_cost.Plan:
    plan = conductor_cost.QUICK if wanted.quick else conductor_cost.Plan()
    return replace(plan, memory_s=conductor_cost.MILLION_LIMIT_S) if wanted.million else plan


def conditions(wanted: Wanted) -> dict[str, Any]:
    """Of the machine and the run."""
    client_core, other_core = proc.cores()
    return {
        "version": version("tgi-orchestrator"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "measured_core": client_core,
        "other_core": other_core,
        "redis_py": version("redis"),
        "hiredis": version("hiredis"),
        "quick": wanted.quick,
        "costs_file": None if wanted.costs_file is None else wanted.costs_file.name,
        "load_average": round(os.getloadavg()[0], 2),
    }
