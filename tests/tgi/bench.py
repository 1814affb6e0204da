"""What the overlay costs a real TGI server on this machine: `TGI_PYTHON=... python -m tests.tgi.bench`.

A put server, a get server and a stock server take turns; medians, and ratios of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from orchestrator.config import load_settings
from orchestrator.embedded import package
from orchestrator.embedded.shard.seam import Batch, Request, Sampling, Stopping
from orchestrator.embedded.tgi.client import Connection
from orchestrator.embedded.tgi.messages import batch_of, cached_from, cached_of
from orchestrator.embedded.tgi.model import TgiModel
from orchestrator.embedded.tgi.schema import read_schema
from tests.tgi.pair import LIMITS, Member, Prompt, arena_folder, member
from tests.tgi.prompts import tokenizer_of
from tests.tgi.servers import Server, ServerPlan, Servers, absolute_python
from tests.tgi.stepping import Slots
from tgi_patches.contract import GetTag, PutTag, new_handle

PROMPT_TOKENS = 490
DECODE_STEPS = 15
RING_BYTES = 512 << 20
_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one configuration; times are medians of the servers' own clocks."""

    configuration: str
    prompt_tokens: int
    rounds: int
    prefill_ms: float
    """Stock server, the whole prompt."""
    export_ms: float
    import_ms: float
    export_import_share: float
    """Of the stock server's prefill."""
    plain_prefill_ratio: float
    """Requests without a handle: overlay over stock."""
    plain_decode_ratio: float
    plain_cpu_ratio: float
    """CPU time of the two server processes over the whole run of requests without a handle."""


@dataclass(slots=True)
class Driven:
    """A server and what its replies say of its time."""

    connection: Connection
    model: TgiModel
    process: psutil.Process
    prefill_ms: list[float] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    async def answer(self, request: Request) -> tuple[float, list[float], int]:
        """Prefill in ms, decode steps in ms, and the first token's id."""
        message, info = self.connection.message, await self.model.info()
        batch = batch_of(message, Batch(next(_ids), (request,)), info)
        reply = await self.connection.call("Prefill", message("PrefillRequest")(batch=batch))
        first, prefill_ms, steps = reply.generations[0].tokens.ids[0], reply.total_ns / 1e6, []
        while reply.HasField("batch"):
            running = cached_of(message, cached_from(reply.batch))
            reply = await self.connection.call("Decode", message("DecodeRequest")(batches=[running]))
            steps.append(reply.total_ns / 1e6)
        return prefill_ms, steps, first

    async def plain(self, request: Request) -> None:
        """A request without a handle, counted."""
        before = _cpu_s(self.process)
        prefill_ms, steps, _ = await self.answer(request)
        self.cpu_s += _cpu_s(self.process) - before
        self.prefill_ms.append(prefill_ms)
        self.decode_ms.extend(steps)


async def measure(name: str, plan: ServerPlan, servers: Servers, python: Path, rounds: int) -> Cost:
    """Start the three servers of `plan` and let them take turns."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(arena_folder())
        put = stack.enter_context(member(servers, plan, "put", folder, arena_bytes=RING_BYTES))
        get = stack.enter_context(member(servers, plan, "get", folder))
        stock = stack.enter_context(servers.own(plan))
        driven = [await _driven(stack, server, python) for server in (put.server, get.server, stock)]
        prompts = _prompts(plan.model, rounds + 1)
        slots = Slots(await driven[0].model.info()).take(PROMPT_TOKENS + DECODE_STEPS + 1)
        spent = [await _round(driven, put, get, _request(prompt, slots)) for prompt in prompts]
    return _cost(name, driven, spent[1:])


async def _round(driven: Sequence[Driven], put: Member, get: Member, request: Request) -> tuple[float, float]:
    """Seconds that export and import took in one round; requests without a handle run before and after."""
    put_server, get_server, stock = driven
    order = [get_server, stock] if next(_ids) % 2 else [stock, get_server]
    for server in order:
        await server.plain(request)
    handle, before = new_handle(), (put.report.spent_s, get.report.spent_s)
    leg = replace(request, stopping=Stopping(1), adapter_id=str(PutTag(handle)))
    _, _, first = await put_server.answer(leg)
    tag = GetTag(handle, put.spec.shard, put.epoch, first)
    await get_server.answer(replace(request, stopping=Stopping(2), adapter_id=str(tag)))
    assert get.report.imports.get("hit", 0) > 0, get.report
    return put.report.spent_s - before[0], get.report.spent_s - before[1]


def _cost(name: str, driven: Sequence[Driven], spent: Sequence[tuple[float, float]]) -> Cost:
    _, overlay, stock = driven
    median = statistics.median
    export_ms = median(1e3 * export for export, _ in spent)
    import_ms = median(1e3 * imported for _, imported in spent)
    prefill_ms = median(stock.prefill_ms[1:])
    return Cost(
        configuration=name,
        prompt_tokens=PROMPT_TOKENS,
        rounds=len(spent),
        prefill_ms=round(prefill_ms, 1),
        export_ms=round(export_ms, 2),
        import_ms=round(import_ms, 2),
        export_import_share=round((export_ms + import_ms) / prefill_ms, 4),
        plain_prefill_ratio=round(_paired(overlay.prefill_ms, stock.prefill_ms, 1), 4),
        plain_decode_ratio=round(_paired(overlay.decode_ms, stock.decode_ms, DECODE_STEPS), 4),
        plain_cpu_ratio=round(overlay.cpu_s / stock.cpu_s, 4),
    )


def _paired(ours: Sequence[float], theirs: Sequence[float], warm_up: int) -> float:
    """The median of ours over theirs, pair by pair, which a slow minute of the machine does not move."""
    return statistics.median(a / b for a, b in zip(ours[warm_up:], theirs[warm_up:], strict=True))


async def _driven(stack: AsyncExitStack, server: Server, python: Path) -> Driven:
    connection = await Connection.open(server.uds, await read_schema(str(python)), deadline_s=60)
    stack.push_async_callback(connection.close)
    model = TgiModel(connection, LIMITS)
    await model.warmup()
    return Driven(connection, model, psutil.Process(server.processes[0].pid))


def _prompts(model: Path, count: int) -> Iterator[Prompt]:
    """Prompts of exactly PROMPT_TOKENS tokens, no two alike."""
    tokenizer, chance = tokenizer_of(model), random.Random(4)
    found = 0
    while found < count:
        ids = [chance.randrange(1_000, 20_000) for _ in range(PROMPT_TOKENS)]
        text = tokenizer.decode(ids)
        again = tokenizer(text)["input_ids"][:PROMPT_TOKENS]
        text = tokenizer.decode(again)
        if len(tokenizer(text)["input_ids"]) == PROMPT_TOKENS:
            found += 1
            yield Prompt(text, tuple(again))


def _request(prompt: Prompt, slots: tuple[int, ...]) -> Request:
    stopping = Stopping(DECODE_STEPS + 1, ignore_eos_token=True)
    return Request(1, prompt.text, prompt.ids, Sampling(), stopping, slots)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--rounds", type=int, default=12)
    asked.add_argument("--only", choices=["float32", "bfloat16", "causal"])
    chosen = asked.parse_args()
    python = absolute_python(os.environ.get("TGI_PYTHON", ""))
    if python is None:
        sys.stderr.write("TGI_PYTHON names no interpreter with TGI's server: see docs/tgi.md\n")
        return 2
    model = package.convert(load_settings(None, {}, os.environ).settings.model.cache, lambda said: None)
    plans: dict[str, dict[str, Any]] = {
        "float32": {},
        "bfloat16": {"dtype": "bfloat16"},
        "causal": {"flash": False},
    }
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder:
        servers = Servers(python, Path(folder))
        for name, changes in plans.items():
            if chosen.only in (None, name):
                plan = replace(ServerPlan(model), **changes)
                cost = asyncio.run(measure(name, plan, servers, python, chosen.rounds))
                sys.stdout.write(json.dumps(asdict(cost)) + "\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
