"""The load: decode streams that never end, prompts that arrive by chance, and when each token came."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from tgi_patches.contract import GetTag, PutTag, new_handle

_WORDS = ("river", "stone", "lamp", "paper", "window", "garden", "engine", "letter", "bridge", "winter")
STREAM_PROMPT_TOKENS = 16
STREAM_TOKENS = 400
_TOKENS_PER_WORD = 1.1
"""Of the words above in SmolLM2's vocabulary; the exact count is what the shard reports."""


class Way(Protocol):
    """One way of serving: turns a request into the times at which its tokens arrived."""

    name: str

    def tokens(self, body: dict[str, Any]) -> AsyncGenerator[float]:
        """Monotonic seconds, one per token."""
        ...


@dataclass(slots=True)
class Colocated:
    """Every shard does both phases; requests take turns over the shards."""

    name: str
    client: httpx.AsyncClient
    urls: tuple[str, ...]
    _next: int = 0

    async def tokens(self, body: dict[str, Any]) -> AsyncGenerator[float]:
        url = self.urls[self._next % len(self.urls)]
        self._next += 1
        async with aclosing(_arrivals(self.client, url, body)) as arrivals:
            async for moment in arrivals:
                yield moment


@dataclass(slots=True)
class Separated:
    """One shard prefills and exports, the other imports and decodes."""

    name: str
    client: httpx.AsyncClient
    prefill_url: str
    prefill_shard: str
    prefill_epoch: int
    decode_url: str

    async def tokens(self, body: dict[str, Any]) -> AsyncGenerator[float]:
        handle = new_handle()
        put = _changed(body, max_new_tokens=1, adapter_id=str(PutTag(handle)))
        async with aclosing(_arrivals(self.client, self.prefill_url, put)) as arrivals:
            async for moment in arrivals:
                yield moment
        reply = (await self.client.get(f"{self.prefill_url}/kv/wait/{handle}")).json()
        tag = GetTag(handle, self.prefill_shard, self.prefill_epoch, reply["first_token_id"])
        get = _changed(body, adapter_id=str(tag))
        first = True
        async with aclosing(_arrivals(self.client, self.decode_url, get)) as arrivals:
            async for moment in arrivals:
                if not first:
                    yield moment
                first = False


@dataclass(slots=True)
class Samples:
    """What one phase of one way saw, seconds."""

    duration_s: float = 0.0
    gaps: list[list[float]] = field(default_factory=list)
    """Per stream, the times between its tokens."""
    ttft: list[float] = field(default_factory=list)
    """Of the arriving prompts."""
    second: list[float] = field(default_factory=list)
    """Between an arriving prompt's first and second token."""
    stream_tokens: int = 0
    prompt_tokens: int = 0
    prompts: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """`prompts_per_s` of `prompt_tokens` each, beside `streams` endless ones."""

    streams: int
    prompts_per_s: float
    prompt_tokens: int
    answer_tokens: int
    seed: int


async def measure(way: Way, load: Load, *, settle_s: float, duration_s: float) -> Samples:
    """Run the load on one way; only what happens after `settle_s` counts."""
    samples = Samples(duration_s=duration_s, gaps=[[] for _ in range(load.streams)])
    start = time.monotonic() + settle_s
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_stream(way, samples, samples.gaps[i], start, load.seed * 1000 + i))
            for i in range(load.streams)
        ]
        tasks.append(group.create_task(_arriving(way, samples, load, start)))
        await asyncio.sleep(settle_s + duration_s)
        for task in tasks:
            task.cancel()
    return samples


async def _stream(way: Way, samples: Samples, gaps: list[float], start: float, seed: int) -> None:
    chance = random.Random(seed)
    while True:
        last = None
        async with aclosing(way.tokens(_body(STREAM_PROMPT_TOKENS, STREAM_TOKENS, chance))) as tokens:
            async for moment in tokens:
                if last is not None and last >= start:
                    gaps.append(moment - last)
                    samples.stream_tokens += 1
                last = moment


async def _arriving(way: Way, samples: Samples, load: Load, start: float) -> None:
    if load.prompts_per_s == 0:
        return
    chance = random.Random(load.seed)
    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(chance.expovariate(load.prompts_per_s))
            body = _body(load.prompt_tokens, load.answer_tokens, chance)
            group.create_task(_prompt(way, samples, body, start))


async def _prompt(way: Way, samples: Samples, body: dict[str, Any], start: float) -> None:
    asked = time.monotonic()
    moments = []
    async with aclosing(way.tokens(body)) as tokens:
        async for moment in tokens:
            moments.append(moment)
            if asked < start:
                continue
            if len(moments) == 1:
                samples.ttft.append(moment - asked)
                samples.prompts += 1
                samples.prompt_tokens += int(len(body["inputs"].split()) * _TOKENS_PER_WORD)
            elif len(moments) == 2:
                samples.second.append(moments[1] - moments[0])


def _body(prompt_tokens: int, new_tokens: int, chance: random.Random) -> dict[str, Any]:
    words = " ".join(chance.choice(_WORDS) for _ in range(round(prompt_tokens / _TOKENS_PER_WORD)))
    return {"inputs": words, "parameters": {"max_new_tokens": new_tokens, "ignore_eos_token": True}}


def _changed(body: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    return body | {"parameters": body["parameters"] | parameters}


async def _arrivals(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncGenerator[float]:
    async with client.stream("POST", f"{url}/generate_stream", json=body) as response:
        response.raise_for_status()
        async for line in _lines(response):
            if line.startswith("data:"):
                if line.startswith('data:{"error"'):
                    raise RuntimeError(json.loads(line[5:])["error"])
                yield time.monotonic()


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        yield line
