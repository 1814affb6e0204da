"""Start the shards once, let the ways take turns, and sum up."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from orchestrator.bench.interference.load import Colocated, Load, Samples, Separated, Way, measure
from orchestrator.bench.interference.stats import Estimate, estimate
from orchestrator.errors import ConfigError, ShardError, Unreachable
from orchestrator.shards.process import ProcessLauncher
from tgi_patches.contract import Role, ShardSpec

_START_LIMIT_S = 120.0
_SETTLE_S = 1.5
CHUNK_TOKENS = 64
"""Prefill tokens of a step with chunks; small, so that this rival's decodes wait as little as they can."""

WAYS = ("prefill first", "in chunks", "separated")
"""Colocated with a prefill that stops decodes, colocated with chunked prefill, and apart."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how hard; the quick plan ends within 90 s."""

    model: Path
    dtype: str
    streams: int = 8
    prompt_tokens: int = 300
    answer_tokens: int = 8
    prefill_shares: tuple[float, ...] = (0.0, 0.2, 0.6)
    """Prefill tokens as a share of all tokens, at the decode-only rate of the first way."""
    seconds: float = 6.5
    arena_dir: Path = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Result:
    """One way at one share."""

    way: str
    prefill_share: float
    tpot_p50: Estimate
    tpot_p99: Estimate
    ttft_p50: Estimate
    ttft_p99: Estimate
    second_gap_p50: Estimate
    second_gap_p99: Estimate
    stream_tokens_per_s: float
    prompt_tokens_per_s: float
    prompts: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


async def run(plan: Plan, report: Callable[[str], None] = lambda _: None) -> list[Result]:
    """Every way at every share, in turn.  ConfigError when there are fewer than two cores."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise ConfigError("This benchmark compares two shards on two cores; this process may use only one.")
    async with _shards(plan, cores, report) as ways:
        results: list[Result] = []
        decode_rate = 0.0
        for share in plan.prefill_shares:
            for way in ways:
                report(f"{way.name}: {share:.0%} prefill tokens")
                load = _load(plan, share, decode_rate)
                samples = await measure(way, load, settle_s=_SETTLE_S, duration_s=plan.seconds)
                results.append(_summed(way.name, share, samples))
                if share == 0 and way is ways[0]:
                    decode_rate = results[-1].stream_tokens_per_s
        return results


def _load(plan: Plan, share: float, decode_rate: float) -> Load:
    prompts_per_s = share / (1 - share) * decode_rate / plan.prompt_tokens
    return Load(plan.streams, prompts_per_s, plan.prompt_tokens, plan.answer_tokens, seed=7)


def _summed(way: str, share: float, samples: Samples) -> Result:
    ttft, second = [[value] for value in samples.ttft], [[value] for value in samples.second]
    return Result(
        way=way,
        prefill_share=share,
        tpot_p50=estimate(samples.gaps, 0.5),
        tpot_p99=estimate(samples.gaps, 0.99),
        ttft_p50=estimate(ttft, 0.5),
        ttft_p99=estimate(ttft, 0.99),
        second_gap_p50=estimate(second, 0.5),
        second_gap_p99=estimate(second, 0.99),
        stream_tokens_per_s=round(samples.stream_tokens / samples.duration_s, 1),
        prompt_tokens_per_s=round(samples.prompt_tokens / samples.duration_s, 1),
        prompts=samples.prompts,
    )


@asynccontextmanager
async def _shards(
    plan: Plan, cores: list[int], report: Callable[[str], None]
) -> AsyncIterator[tuple[Way, ...]]:
    """Two shards per scheduling variant, one on each core; only the pair under test gets requests."""
    with tempfile.TemporaryDirectory(prefix="tgi-orchestrator-bench-", dir=plan.arena_dir) as folder:
        specs = _specs(plan, cores, Path(folder))
        launcher = ProcessLauncher(Path(folder) / "logs")
        try:
            report("starting four shards")
            running = [await launcher.launch(spec) for spec in specs]
            urls = [shard.url for shard in running]
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            async with httpx.AsyncClient(timeout=60.0, limits=limits) as client:
                await _until_ready(client, launcher, [spec.shard for spec in specs], urls)
                status = (await client.get(f"{urls[0]}/kv/status")).json()
                yield (
                    Colocated(WAYS[0], client, (urls[0], urls[1])),
                    Colocated(WAYS[1], client, (urls[2], urls[3])),
                    Separated(WAYS[2], client, urls[0], specs[0].shard, status["epoch"], urls[1]),
                )
        finally:
            await launcher.close(2.0)


def _specs(plan: Plan, cores: list[int], folder: Path) -> list[ShardSpec]:
    plain = ShardSpec(
        deployment="bench",
        shard="plain-0",
        role=Role.MIXED,
        model=str(plan.model),
        model_name="bench",
        dtype=plan.dtype,
        cpus=(cores[0],),
        arena_dir=str(folder),
        arena_bytes=256 << 20,
        max_input_tokens=1000,
        max_total_tokens=1024,
        kv_pool_tokens=16 * 1024,
    )
    second = replace(plain, shard="plain-1", cpus=(cores[1],), arena_bytes=0)
    chunked = replace(
        plain,
        shard="chunked-0",
        arena_bytes=0,
        chunked_prefill=True,
        prefix_caching=True,
        max_batch_prefill_tokens=CHUNK_TOKENS,
    )
    return [plain, second, chunked, replace(chunked, shard="chunked-1", cpus=(cores[1],))]


async def _until_ready(
    client: httpx.AsyncClient, launcher: ProcessLauncher, names: list[str], urls: list[str]
) -> None:
    limit = time.monotonic() + _START_LIMIT_S
    for name, url in zip(names, urls, strict=True):
        while not await _healthy(client, url):
            if name not in await launcher.running():
                lines = await launcher.logs(name, 1)
                raise ShardError(f"Shard {name} did not start: {lines[0] if lines else 'no word from it'}")
            if time.monotonic() > limit:
                raise Unreachable(f"Shard {name} was not ready within {_START_LIMIT_S:.0f} s.")
            await asyncio.sleep(0.1)


async def _healthy(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health")).is_success
    except httpx.TransportError:
        return False
