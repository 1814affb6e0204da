"""The gateway before real embedded shards: a separated pair answers as one mixed shard does."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson

from orchestrator.api.app import GatewaySettings, create_app
from orchestrator.core.ticket import ShardView
from orchestrator.embedded.shard.assemble import assemble
from orchestrator.embedded.shard.server import create_app as create_shard
from orchestrator.shards.client import ShardClient
from tgi_patches.contract import Role, ShardSpec

from .conftest import CountingQueue

PROMPT = "the ship left the harbour before the sun rose and"
MESSAGES = [{"role": "user", "content": "one two three"}]


def spec(model: Path, arenas: Path, role: Role) -> ShardSpec:
    return ShardSpec(
        deployment="test",
        shard=f"{role}-0",
        role=role,
        model=str(model),
        model_name="tiny",
        arena_dir=str(arenas),
        arena_bytes=8 << 20 if role is Role.PREFILL else 0,
        max_input_tokens=500,
        max_total_tokens=600,
        cpus=(min(os.sched_getaffinity(0)),),
    )


async def view_of(client: ShardClient, url: str) -> ShardView:
    status = await client.status(url)
    return ShardView(
        shard=status.shard,
        role=status.role,
        epoch=status.epoch,
        url=url,
        state="ready",
        fingerprint=status.fingerprint,
        limits=status.limits,
        kv_tokens=status.kv_tokens,
        slots=status.slots,
        ring_bytes=status.ring_bytes,
        record_limit_bytes=status.record_limit_bytes,
        bytes_per_token=status.bytes_per_token,
        hooked=status.hooked,
    )


@asynccontextmanager
async def pair(tiny_model: Path, folder: Path, listening: Any) -> AsyncIterator[Any]:
    """A client of the gateway, and one of the shard that serves alone."""
    queue, client = CountingQueue(), ShardClient()
    async with AsyncExitStack() as stack:
        urls = []
        for role in (Role.PREFILL, Role.DECODE, Role.MIXED):
            shard = assemble(spec(tiny_model, folder, role))
            stack.callback(shard.close)
            await shard.server.warmup()
            urls.append(await stack.enter_async_context(listening(create_shard(shard.server))))
        queue.set_shards([await view_of(client, url) for url in urls[:2]])
        app = create_app(GatewaySettings(limits=queue.shards()[0].limits), queue=queue, shards=client)
        gateway = await stack.enter_async_context(listening(app))
        gate = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway, timeout=30))
        alone = await stack.enter_async_context(httpx.AsyncClient(base_url=urls[2], timeout=30))
        yield gate, alone, queue


GREEDY = {"max_new_tokens": 12, "details": True}
SEEDED = {"do_sample": True, "seed": 5, "max_new_tokens": 12, "details": True}
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 9, "logprobs": True, "top_logprobs": 3}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": PROMPT, "parameters": GREEDY}),
    ("/generate", {"inputs": PROMPT, "parameters": SEEDED}),
    ("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 12}}),
    ("/generate_stream", {"inputs": PROMPT, "parameters": GREEDY}),
    ("/generate_stream", {"inputs": PROMPT, "parameters": SEEDED}),
    ("/v1/chat/completions", CHAT | {"temperature": 0, "model": "mine"}),
    ("/v1/chat/completions", CHAT | {"seed": 3}),
    ("/v1/chat/completions", CHAT | {"seed": 3, "stream": True}),
    (
        "/v1/chat/completions",
        CHAT | {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}},
    ),
]


def answer_in(response: httpx.Response, payloads_of: Any) -> list[Any]:
    """What was answered, without the clock."""
    streams = response.headers["content-type"].startswith("text/event-stream")
    payloads = payloads_of(response.content) if streams else [orjson.loads(response.content)]
    return [{k: v for k, v in p.items() if k != "created"} if isinstance(p, dict) else p for p in payloads]


async def test_pair_answers_as_one_shard_does(
    tiny_model: Path, tmp_path: Path, listening: Any, payloads_of: Any
) -> None:
    async with pair(tiny_model, tmp_path / "arenas", listening) as (gate, alone, queue):
        for path, body in CASES:
            got, told = await gate.post(path, json=body), await alone.post(path, json=body)
            assert (got.status_code, told.status_code) == (200, 200)
            assert got.headers["x-orchestrator-route"] == "separated"
            assert answer_in(got, payloads_of) == answer_in(told, payloads_of)
        assert [completion.imported for completion in queue.completions] == [True] * len(CASES)
        views = queue.shards()
        assert sum(view.outstanding_records + view.reserved_slots for view in views) == 0


async def test_limit_is_counted_by_the_shards_tokenizer(
    tiny_model: Path, tmp_path: Path, listening: Any
) -> None:
    async with pair(tiny_model, tmp_path / "arenas", listening) as (gate, alone, queue):
        body = {"inputs": PROMPT * 30, "parameters": {"max_new_tokens": 600}}
        got, told = await gate.post("/generate", json=body), await alone.post("/generate", json=body)
        assert (got.status_code, told.status_code) == (422, 422)
        assert got.json() == told.json()
        assert queue.granted == []
