"""Embedded shards that share no arena, in one process: records go from one to the other over TCP."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.api.app import GatewaySettings, create_app
from orchestrator.core.shard import Answered, Launched, Watched, observe
from orchestrator.core.ticket import ShardView
from orchestrator.embedded.pulls import pulling
from orchestrator.embedded.shard.assemble import assemble
from orchestrator.embedded.shard.server import create_app as create_shard
from orchestrator.errors import ShardError
from orchestrator.queues import FakeQueue
from orchestrator.shards.client import ShardClient
from tgi_patches.contract import KEY_VARIABLE, PROTOCOL_VERSION, PullRequest, Role, ShardSpec, new_handle

KEY = {KEY_VARIABLE: "a key of enough bytes"}
PROMPT = "the ship left the harbour before the sun rose and"
BODY = {"inputs": PROMPT, "parameters": {"max_new_tokens": 12, "details": True}}


def spec(model: Path, folder: Path, role: Role, **changes: Any) -> ShardSpec:
    """In an arena folder of its own."""
    base = ShardSpec(
        deployment="test",
        shard=f"{role}-0",
        role=role,
        model=str(model),
        model_name="tiny",
        arena_dir=str(folder / role),
        arena_bytes=8 << 20 if role is Role.PREFILL else 0,
        max_input_tokens=500,
        max_total_tokens=600,
        cpus=(min(os.sched_getaffinity(0)),),
        pull_listen="127.0.0.1:0" if role is Role.PREFILL else "",
        pulled_bytes=8 << 20 if role is Role.DECODE else 0,
    )
    return replace(base, **changes)


@dataclass(frozen=True)
class Two:
    gate: httpx.AsyncClient
    http: httpx.AsyncClient
    """For the shards themselves."""
    queue: FakeQueue
    urls: tuple[str, str]
    views: tuple[ShardView, ...]


async def view_of(client: ShardClient, url: str) -> ShardView:
    """As a conductor makes it."""
    status = await client.status(url)
    launched = observe(Watched(status.shard, status.role), Launched(url), 0.0)
    view = observe(launched, Answered(status), 0.0).view()
    assert view is not None
    return view


@asynccontextmanager
async def two(
    model: Path, folder: Path, listening: Any, decode_key: Mapping[str, str] = KEY, **changes: Any
) -> AsyncIterator[Two]:
    """`changes` are of both orders."""
    queue, client = FakeQueue(), ShardClient(key=KEY[KEY_VARIABLE].encode())
    async with AsyncExitStack() as stack:
        urls = []
        for role, key in ((Role.PREFILL, KEY), (Role.DECODE, decode_key)):
            order = spec(model, folder, role, **changes)
            shard = assemble(order)
            stack.callback(shard.close)
            await stack.enter_async_context(pulling(order, shard.server, key))
            await shard.server.warmup()
            urls.append(await stack.enter_async_context(listening(create_shard(shard.server))))
        views = tuple([await view_of(client, url) for url in urls])
        queue.set_shards(views)
        app = create_app(GatewaySettings(limits=views[0].limits), queue=queue, shards=client)
        gateway = await stack.enter_async_context(listening(app))
        gate = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway, timeout=30))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=30))
        yield Two(gate, http, queue, (urls[0], urls[1]), views)


async def pulls_counted(gate: httpx.AsyncClient) -> dict[str, float]:
    counted: dict[str, float] = (await gate.get("/admin/status")).json()["counters"]["kv_pulls"]
    return counted


async def test_a_pulled_record_is_used_and_the_answer_is_that_of_the_shard_alone(
    tiny_model: Path, tmp_path: Path, listening: Any
) -> None:
    async with two(tiny_model, tmp_path, listening) as made:
        prefill, decode = made.views
        assert prefill.arena_id != decode.arena_id
        assert (prefill.pulls, decode.pulls, decode.pull_port) == (False, True, 0)
        alone = (await made.http.post(f"{made.urls[1]}/generate", json=BODY)).json()
        for path in ("/generate", "/generate_stream"):
            answer = await made.gate.post(path, json=BODY)
            assert alone["generated_text"].encode() in answer.content
            assert answer.headers["x-orchestrator-route"] == "separated"
        assert [grant.pull for grant in made.queue.granted] == [f"127.0.0.1:{prefill.pull_port}"] * 2
        assert [completion.imported for completion in made.queue.completions] == [True, True]
        assert await pulls_counted(made.gate) == {"ok": 2.0}


async def test_shards_with_different_keys_share_nothing_and_answer_all_the_same(
    tiny_model: Path, tmp_path: Path, listening: Any
) -> None:
    other = {KEY_VARIABLE: "another key of enough bytes"}
    async with two(tiny_model, tmp_path, listening, decode_key=other) as made:
        alone = (await made.http.post(f"{made.urls[1]}/generate", json=BODY)).json()
        answer = await made.gate.post("/generate", json=BODY)
        assert answer.json()["generated_text"] == alone["generated_text"]
        assert answer.headers["x-orchestrator-import"] == "unsupported"
        # The gateway's request itself is not signed with the decode shard's key.
        assert await pulls_counted(made.gate) == {"unsupported": 1.0}


async def test_a_record_is_pulled_from_the_address_that_is_listened_on_and_not_from_that_of_the_url(
    tiny_model: Path, tmp_path: Path, listening: Any
) -> None:
    async with two(tiny_model, tmp_path, listening, pull_listen="127.0.0.2:0") as made:
        answer = await made.gate.post("/generate", json=BODY)
        (grant,) = made.queue.granted
        assert grant.pull == f"127.0.0.2:{made.views[0].pull_port}"
        assert answer.headers["x-orchestrator-import"] == "hit"


async def test_a_shard_that_fetches_nothing_says_so_and_a_broken_request_is_refused(
    tiny_model: Path, tmp_path: Path, listening: Any
) -> None:
    async with two(tiny_model, tmp_path, listening) as made:
        http = made.http
        asked = PullRequest(PROTOCOL_VERSION, new_handle(), "prefill-0", 1, "127.0.0.1:1").to_dict()
        refused = await http.post(f"{made.urls[0]}/kv/pull", json=asked)
        assert (refused.status_code, refused.json()["error_type"]) == (404, "not_found")
        for broken in (b"{", b"[]", b"{}", b'{"protocol": 1, "handle": "x"}'):
            answer = await http.post(f"{made.urls[1]}/kv/pull", content=broken)
            assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
        told = (await http.post(f"{made.urls[1]}/kv/pull", json=asked)).json()
        assert (told["found"], told["reason"]) == (False, "unsupported")  # no signature


async def test_an_address_that_is_taken_is_a_sentence(
    tiny_model: Path, tmp_path: Path, listening: Any
) -> None:
    order = spec(tiny_model, tmp_path, Role.PREFILL)
    shard = assemble(order)
    try:
        async with pulling(order, shard.server, KEY):
            assert shard.server.pulls is not None
            taken = replace(order, pull_listen=f"127.0.0.1:{shard.server.pulls.pull_port}")
            with pytest.raises(ShardError, match=r"cannot offer its records at 127\.0\.0\.1:\d+: Address"):
                async with pulling(taken, shard.server, KEY):
                    pass
    finally:
        shard.close()
