"""A gateway's side of the queue, and what a user of redis-py would write: `... client URL`.

A process of its own, so that its CPU time is the client's alone.  Each line on stdin asks for one
measurement, as JSON of `Ask`; each is answered with one line.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop
from redis.asyncio import Redis

from orchestrator.bench.scheduler.control import DEPLOYMENT
from orchestrator.core.ticket import Completion, Outcome, Relayed, Ticket
from orchestrator.deployment.logging import json_log
from orchestrator.queues import GatewayQueue
from tgi_patches.contract import new_handle

OURS, OURS_RELAYED, SEPARATE, PIPELINED = "ours", "ours, relayed too", "redis-py", "redis-py, pipelined"
LATENCY = "latency"
WARM_UP = 32
PAUSE_S = 0.003
_DEADLINE_S = 60.0
_STREAM, _GROUP, _NAME = "bench-tickets", "bench", "one"
_KEPT = 1000
_PHASES = {"queue": 0.001, "prefill": 0.1, "relay": 0.005, "decode_wait": 0.02, "decode": 2.0}


@dataclass(frozen=True, slots=True)
class Ask:
    """`requests` in groups of `at_once`."""

    way: str
    requests: int
    at_once: int = 1


@dataclass(frozen=True, slots=True)
class Way:
    """How tickets are served."""

    gateway: str
    serve: Callable[[Sequence[Ticket]], Awaitable[None]]
    """Some tickets at once."""
    finish: Callable[[], Awaitable[None]]
    """Until Redis has heard of everything."""


async def measured(url: str, ask: Ask) -> dict[str, Any]:
    """CPU time per request in us; of LATENCY the seconds from ticket to grant."""
    if ask.way == LATENCY:
        return {"seconds": await _latencies(url, ask.requests)}
    async with _way(url, ask.way) as way:
        await _all(way, _tickets(way.gateway, WARM_UP), ask.at_once)
        tickets = _tickets(way.gateway, ask.requests)
        gc.collect()
        begun_s = time.process_time()
        await _all(way, tickets, ask.at_once)
        return {"us": (time.process_time() - begun_s) / ask.requests * 1e6}


async def _all(way: Way, tickets: Sequence[Ticket], at_once: int) -> None:
    for start in range(0, len(tickets), at_once):
        await way.serve(tickets[start : start + at_once])
    await way.finish()


def _tickets(gateway: str, count: int) -> list[Ticket]:
    now_s = time.time()
    return [
        Ticket(new_handle(), gateway, 300, 200, now_s, now_s + _DEADLINE_S, model="bench")
        for _ in range(count)
    ]


@asynccontextmanager
async def _way(url: str, name: str) -> AsyncIterator[Way]:
    async with AsyncExitStack() as stack:
        if name in (OURS, OURS_RELAYED):
            queue = await stack.enter_async_context(GatewayQueue(url, DEPLOYMENT, "client"))
            yield _ours(queue, relayed=name == OURS_RELAYED)
        else:
            redis = Redis.from_url(url, decode_responses=True)
            stack.push_async_callback(redis.aclose)
            await redis.delete(_STREAM)
            await redis.xgroup_create(_STREAM, _GROUP, "0", mkstream=True)
            serve = _at_once(_separate(redis)) if name == SEPARATE else _pipelined(redis)
            yield Way("gateway.1", serve, _nothing)


def _at_once(one: Callable[[Ticket], Awaitable[None]]) -> Callable[[Sequence[Ticket]], Awaitable[None]]:
    """A task for each of several, as each request of a gateway has one."""

    async def group(tickets: Sequence[Ticket]) -> None:
        if len(tickets) == 1:
            await one(tickets[0])
        else:
            await asyncio.gather(*map(one, tickets))

    return group


# --- ours ---------------------------------------------------------------------------------------


def _ours(queue: GatewayQueue, *, relayed: bool) -> Way:
    """As the gateway does it: what is said of a request's end is not waited for."""
    said: list[Awaitable[None]] = []

    async def one(ticket: Ticket) -> None:
        await queue.submit(ticket)
        if relayed:
            queue.relayed(Relayed(ticket.handle, time.time(), 0.1, 0.005, ticket.prompt_tokens))
        said[:] = [queue.complete(_end(ticket))]

    async def finish() -> None:
        for last in said:
            await last

    return Way(queue.gateway, _at_once(one), finish)


def _end(ticket: Ticket) -> Completion:
    return Completion(ticket.handle, Outcome.DONE, dict(_PHASES), ticket.prompt_tokens, 200, imported=True)


async def _latencies(url: str, count: int) -> list[float]:
    """One request at a time, with a pause between them."""
    seconds: list[float] = []
    async with GatewayQueue(url, DEPLOYMENT, "client") as queue:
        for ticket in _tickets(queue.gateway, WARM_UP + count):
            begun_s = time.perf_counter()
            await queue.submit(ticket)
            seconds.append(time.perf_counter() - begun_s)
            await queue.complete(_end(ticket))
            await asyncio.sleep(PAUSE_S)
    return seconds[WARM_UP:]


# --- redis-py -----------------------------------------------------------------------------------


async def _nothing() -> None:
    """Every reply was awaited already."""


def _separate(redis: Redis) -> Callable[[Ticket], Awaitable[None]]:
    """XADD, XREADGROUP, XACK, one after the other; several at once have a connection each."""

    async def one(ticket: Ticket) -> None:
        await redis.xadd(_STREAM, {"b": orjson.dumps(ticket)}, maxlen=_KEPT)
        found: Any = await redis.xreadgroup(_GROUP, _NAME, {_STREAM: ">"}, count=1, block=1000)
        for _, entries in found:
            for entry_id, fields in entries:
                orjson.loads(fields["b"])
                await redis.xack(_STREAM, _GROUP, entry_id)

    return one


def _pipelined(redis: Redis) -> Callable[[Sequence[Ticket]], Awaitable[None]]:
    """The same three for a whole group: what it costs one who batches by hand."""

    async def group(tickets: Sequence[Ticket]) -> None:
        async with redis.pipeline(transaction=False) as pipe:
            for ticket in tickets:
                pipe.xadd(_STREAM, {"b": orjson.dumps(ticket)}, maxlen=_KEPT)
            await pipe.execute()
        found: Any = await redis.xreadgroup(_GROUP, _NAME, {_STREAM: ">"}, count=len(tickets), block=1000)
        for _, entries in found:
            for _, fields in entries:
                orjson.loads(fields["b"])
            await redis.xack(_STREAM, _GROUP, *(entry_id for entry_id, _ in entries))

    return group


def main(url: str) -> None:
    """Until stdin ends."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        _say({})
        for line in sys.stdin:
            _say(runner.run(measured(url, Ask(**json.loads(line)))))


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with json_log(Path(os.devnull)):
        main(sys.argv[1])
