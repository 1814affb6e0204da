"""Part `queue`: CPU time of a gateway's client and the latency of a grant, on a Redis of their own.

The client has a core for itself; Redis and the conductor, a process too, share the other one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from orchestrator.bench.gateway import proc
from orchestrator.bench.interference.stats import percentile
from orchestrator.bench.scheduler import client
from orchestrator.bench.scheduler.child import Child, child
from orchestrator.bench.scheduler.client import Ask
from orchestrator.bench.scheduler.parts import Part, Row, Verdict
from orchestrator.embedded.redis import EmbeddedRedis

Say = Callable[[str], None]
ANSWER_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int = 7
    requests: int = 640
    latencies: int = 400
    prefill: int = 2
    decode: int = 2


QUICK = Plan(rounds=3, requests=320, latencies=200)
AT_ONCE = 16
_WAYS = (
    (client.OURS, 1),
    (client.OURS_RELAYED, 1),
    (client.SEPARATE, 1),
    (client.OURS, AT_ONCE),
    (client.OURS_RELAYED, AT_ONCE),
    (client.SEPARATE, AT_ONCE),
    (client.PIPELINED, AT_ONCE),
)
TARGETS = {1: 0.25, AT_ONCE: 0.1}
"""Client CPU of ours, against redis-py's three calls one request at a time."""
LATENCY_LIMIT_MS = 1.0


async def measure(plan: Plan, say: Say = lambda _: None) -> Part:
    """The client's CPU time per request, and how long a grant takes when nothing else is asked."""
    first, last = proc.cores()
    costs: dict[tuple[str, int], list[float]] = {way: [] for way in _WAYS}
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(EmbeddedRedis())
        os.sched_setaffinity(redis.pid, {last})
        shards = (str(plan.prefill), str(plan.decode))
        await stack.enter_async_context(child("conductor", "control", (redis.url, *shards), last))
        asked = await stack.enter_async_context(child("client", "client", (redis.url,), first))
        for number in range(plan.rounds):
            say(f"queue: round {number + 1}")
            turn = number % len(_WAYS)
            for name, at_once in (*_WAYS[turn:], *_WAYS[:turn]):
                costs[name, at_once].append(await _cost_us(asked, Ask(name, plan.requests, at_once)))
        say("queue: latency")
        answer = await _ask(asked, Ask(client.LATENCY, plan.latencies))
    return _part(plan, costs, answer["seconds"])


async def _ask(asked: Child, ask: Ask) -> dict[str, Any]:
    return await asked.ask(json.dumps(asdict(ask)), ANSWER_LIMIT_S)


async def _cost_us(asked: Child, ask: Ask) -> float:
    return float((await _ask(asked, ask))["us"])


def _part(plan: Plan, costs: Mapping[tuple[str, int], Sequence[float]], latencies_s: Sequence[float]) -> Part:
    base = costs[client.SEPARATE, 1]
    rows: list[Row] = [
        {
            "way": name,
            "at once": at_once,
            "us, median": round(median(each), 1),
            "us, least": round(min(each), 1),
            "ratio": round(median(each) / median(base), 3),
            "of the least": round(min(each) / min(base), 3),
        }
        for (name, at_once), each in costs.items()
    ]
    p50_ms, p99_ms = (percentile(latencies_s, share) * 1e3 for share in (0.5, 0.99))
    verdicts = [
        Verdict(
            f"client CPU, {at_once} at once, to redis-py's three calls",
            median(costs[client.OURS, at_once]) / median(base),
            limit,
        )
        for at_once, limit in TARGETS.items()
    ]
    verdicts.append(Verdict("grant latency p50 at light load, ms", p50_ms, LATENCY_LIMIT_MS))
    return Part(
        "queue",
        "client CPU of ticket, grant and completion; ratios to redis-py one at a time",
        rows,
        verdicts,
        {**asdict(plan), "grant_latency_p50_ms": p50_ms, "grant_latency_p99_ms": p99_ms},
        notes=(
            f"grant latency p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms, one request at a time.",
            "redis-py is its asyncio client with hiredis on uvloop: XADD, XREADGROUP, XACK awaited in turn.",
        ),
    )
