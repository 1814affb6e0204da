"""Part `conductor`: CPU time per ticket and memory of one conductor, in a process and on a core of its own.

Redis and the load share the other core, so that what is measured is never moved.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.bench.gateway import proc
from orchestrator.bench.scheduler.child import Child, ChildFailed, child
from orchestrator.bench.scheduler.parts import Part, Verdict
from orchestrator.embedded.redis import EmbeddedRedis

Say = Callable[[str], None]
ANSWER_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How long; `tickets` ends it before `memory_s` has passed."""

    prefill: int = 32
    decode: int = 32
    standing: int = 10_000
    warm_up: int = 2_000
    """Decided before anything is counted."""
    speed_s: float = 10.0
    memory_s: float = 25.0
    sample_every_s: float = 2.0
    tickets: int = 1_000_000


QUICK = Plan(speed_s=4.0, memory_s=5.0, sample_every_s=1.0)
MILLION_LIMIT_S = 3600.0
SPEED_TARGET = 8000.0
"""Tickets decided in a second of the conductor's CPU time."""
GROWTH_LIMIT = 1.05
"""Memory at the end to that after the first tenth of the tickets."""


async def measure(plan: Plan, say: Say = lambda _: None) -> Part:
    """One conductor with a queue that stands: its CPU time per ticket, then its memory."""
    first, last = proc.cores()
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(EmbeddedRedis())
        os.sched_setaffinity(redis.pid, {last})
        shards = (str(plan.prefill), str(plan.decode))
        conductor = await stack.enter_async_context(
            child("conductor", "control", (redis.url, *shards), first)
        )
        say("conductor: filling the queue")
        arguments = (redis.url, str(conductor.pid), str(plan.standing))
        load = await stack.enter_async_context(child("load", "load", arguments, last))
        begun = await _until(load, lambda said: said["decided"] >= plan.warm_up, ANSWER_LIMIT_S)
        say("conductor: speed")
        end_s = begun["at_s"] + plan.speed_s
        spoken = [begun]
        while spoken[-1]["at_s"] < end_s:
            spoken.append(await load.hear(ANSWER_LIMIT_S))
        memory = await _memory(plan, conductor, load, say)
    return _part(plan, spoken, memory)


async def _until(load: Child, there: Callable[[dict[str, Any]], bool], limit_s: float) -> dict[str, Any]:
    end_s = time.monotonic() + limit_s
    while not there(said := await load.hear(limit_s)):
        if time.monotonic() > end_s:
            raise ChildFailed(f"The conductor had decided {said['decided']} tickets after {limit_s:g} s.")
    return said


Sample = tuple[int, int]
"""Tickets decided, and the conductor's resident bytes after a collection."""


async def _memory(plan: Plan, conductor: Child, load: Child, say: Say) -> list[Sample]:
    """Samples until the time is over or all tickets are decided."""
    end_s = time.monotonic() + plan.memory_s
    samples: list[Sample] = []
    next_s = 0.0
    while time.monotonic() < end_s:
        said = await load.hear(ANSWER_LIMIT_S)
        if time.monotonic() < next_s:
            continue
        next_s = time.monotonic() + plan.sample_every_s
        rss = await conductor.ask("memory", ANSWER_LIMIT_S)
        samples.append((said["decided"], rss["rss_bytes"]))
        say(f"conductor: memory, {said['decided']:,} tickets")
        if said["decided"] >= plan.tickets:
            break
    return samples


def growth_bytes(samples: Sequence[Sample], per: int = 100_000) -> float:
    """The slope of the least-squares line through the samples, for so many tickets."""
    n = len(samples)
    if n < 2:
        return 0.0
    mean_x = sum(x for x, _ in samples) / n
    mean_y = sum(y for _, y in samples) / n
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return per * sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


def _after_a_tenth(samples: Sequence[Sample]) -> Sample:
    """The first sample after a tenth of the tickets."""
    return next(one for one in samples if one[0] >= samples[-1][0] / 10)


def _part(plan: Plan, spoken: Sequence[Mapping[str, Any]], memory: Sequence[Sample]) -> Part:
    begun, ended = spoken[0], spoken[-1]
    decided = ended["decided"] - begun["decided"]
    per_cpu_s = decided / max(ended["conductor_cpu_s"] - begun["conductor_cpu_s"], 1e-9)
    least_us = min(_us_per_ticket(one, two) for one, two in itertools.pairwise(spoken))
    ratio = memory[-1][1] / _after_a_tenth(memory)[1] if memory else None
    row = {
        "tickets": decided,
        "per CPU second": round(per_cpu_s),
        "us, mean": round(1e6 / per_cpu_s, 1) if decided else None,
        "us, least": round(least_us, 1),
        "per second": round(decided / (ended["at_s"] - begun["at_s"])),
        "standing, least": min(said["waiting"] for said in spoken),
        "memory, MB": round(memory[-1][1] / 1e6, 1) if memory else None,
        "kB per 100k": round(growth_bytes(memory) / 1e3) if memory else None,
        "all tickets": memory[-1][0] if memory else ended["decided"],
    }
    return Part(
        "conductor",
        f"one conductor, {plan.prefill + plan.decode} shards, {plan.standing:,} tickets waiting",
        [row],
        [
            Verdict("tickets decided per second of CPU", per_cpu_s, SPEED_TARGET, at_least=True),
            Verdict("memory at the end to that after a tenth of the tickets", ratio, GROWTH_LIMIT),
        ],
        {**asdict(plan), "memory_samples": [list(sample) for sample in memory]},
        notes=(
            "us: CPU time of the conductor's process per ticket; least: of half a second.",
            "per second: by the clock, with Redis and the load on the other core.",
        ),
    )


def _us_per_ticket(one: Mapping[str, Any], two: Mapping[str, Any]) -> float:
    decided = two["decided"] - one["decided"]
    return (two["conductor_cpu_s"] - one["conductor_cpu_s"]) / decided * 1e6 if decided else float("inf")
