"""The embedded shard's HTTP surface, in process, over a tiny model and a real arena."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.embedded.shard.assemble import Shard, assemble
from orchestrator.embedded.shard.server import create_app
from orchestrator.errors import ConfigError
from tgi_patches.contract import GetTag, PutTag, Role, ShardSpec, StatusReply, new_handle

PROMPT = "the ship left the harbour before the sun rose and"
CHAT = [{"role": "user", "content": "one two three"}]


def spec(model: Path, arenas: Path, role: Role, **changes: Any) -> ShardSpec:
    values: dict[str, Any] = {
        "deployment": "test",
        "shard": f"{role}-0",
        "role": role,
        "model": str(model),
        "model_name": "tiny",
        "arena_dir": str(arenas),
        "arena_bytes": 8 << 20 if role is Role.PREFILL else 0,
        "max_input_tokens": 500,
        "max_total_tokens": 600,
        "cpus": (min(os.sched_getaffinity(0)),),
    }
    return ShardSpec(**values | changes)


@asynccontextmanager
async def serving(made: Shard) -> AsyncIterator[httpx.AsyncClient]:
    await made.server.warmup()
    app = create_app(made.server)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shard", timeout=30) as client:
            yield client
    made.close()


@pytest.fixture
async def prefill(tiny_model: Path, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(assemble(spec(tiny_model, tmp_path / "arenas", Role.PREFILL))) as client:
        yield client


@pytest.fixture
async def decode(tiny_model: Path, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(assemble(spec(tiny_model, tmp_path / "arenas", Role.DECODE))) as client:
        yield client


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data:").strip() for line in text.split("\n\n") if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def generate(client: httpx.AsyncClient, **parameters: Any) -> httpx.Response:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8, "details": True} | parameters}
    return await client.post("/generate", json=body)


async def test_stream_and_whole_answer_agree(prefill: httpx.AsyncClient) -> None:
    whole = (await generate(prefill)).json()
    asked = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8, "details": True}}
    response = await prefill.post("/generate_stream", json=asked)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    streamed = events(response.text)
    assert [event["index"] for event in streamed] == list(range(1, 9))
    assert [event["token"] for event in streamed] == whole["details"]["tokens"]
    assert streamed[-1]["generated_text"] == whole["generated_text"]
    assert streamed[-1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 8,
        "seed": None,
        "input_length": len((await prefill.post("/tokenize", json={"inputs": PROMPT})).json()),
    }
    assert [event["generated_text"] for event in streamed[:-1]] == [None] * 7
    plain = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}}
    assert events((await prefill.post("/generate_stream", json=plain)).text)[-1]["details"] is None
    assert "[DONE]" not in response.text


async def test_chat_stream_ends_with_done_and_adds_up_to_the_whole_answer(prefill: httpx.AsyncClient) -> None:
    body = {"messages": CHAT, "max_tokens": 6, "temperature": 0, "model": "mine"}
    whole = (await prefill.post("/v1/chat/completions", json=body)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = await prefill.post("/v1/chat/completions", json=body | options)
    assert streamed.text.endswith("data: [DONE]\n\n")
    *chunks, usage = events(streamed.text)
    assert {chunk["model"] for chunk in chunks} == {"mine"} == {whole["model"]}
    assert (
        "".join(c["choices"][0]["delta"]["content"] for c in chunks)
        == whole["choices"][0]["message"]["content"]
    )
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 6


async def test_completions_answer_every_prompt_whole_and_streamed(prefill: httpx.AsyncClient) -> None:
    body = {"prompt": [PROMPT, "one two"], "max_tokens": 5, "temperature": 0, "model": "mine"}
    whole = (await prefill.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert whole["object"] == "text_completion"
    assert whole["usage"]["completion_tokens"] == 10
    greedy = {"inputs": "one two", "parameters": {"max_new_tokens": 5}}
    alone = (await prefill.post("/generate", json=greedy)).json()
    assert whole["choices"][1]["text"] == alone["generated_text"]

    streamed = await prefill.post("/v1/completions", json=body | {"stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    pieces: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for event in events(streamed.text):
        (choice,) = event["choices"]
        pieces[choice["index"]].append(event)
    for index, found in pieces.items():
        texts = [event["choices"][0]["text"] for event in found]
        assert "".join(texts) == whole["choices"][index]["text"]
        assert [event["choices"][0]["finish_reason"] for event in found] == ["", "", "", "", "length"]
        assert "usage" not in found[0]
        assert found[-1]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"prompt": []}, "Empty array detected"),
        ({"prompt": ["a"] * 5}, "1 to 4 prompts. Given: 5"),
        ({"prompt": 5}, "prompt"),
    ],
)
async def test_completions_refuse_what_they_cannot_do(
    prefill: httpx.AsyncClient, changes: dict[str, Any], sentence: str
) -> None:
    response = await prefill.post("/v1/completions", json={"prompt": "a", "max_tokens": 1} | changes)
    assert response.status_code == 422
    assert sentence in response.json()["error"]


async def test_put_wait_get_over_http_equals_one_shard(
    prefill: httpx.AsyncClient, decode: httpx.AsyncClient
) -> None:
    alone = (await generate(decode)).json()
    handle = new_handle()
    waiting = asyncio.create_task(prefill.get(f"/kv/wait/{handle}?timeout_s=20"))
    put = (await generate(prefill, max_new_tokens=1, adapter_id=str(PutTag(handle)))).json()
    waited = (await waiting).json()
    status = StatusReply.from_dict((await prefill.get("/kv/status")).json())
    assert waited["found"] is True
    assert waited["ended"] is False
    assert waited["first_token_id"] == put["details"]["tokens"][0]["id"]
    assert waited["kv_bytes"] == waited["prompt_tokens"] * status.bytes_per_token
    tag = GetTag(handle, "prefill-0", status.epoch, waited["first_token_id"])
    got = await generate(decode, adapter_id=str(tag))
    assert got.headers["x-orchestrator-import"] == "hit"
    assert got.json()["generated_text"] == alone["generated_text"]
    assert [t["id"] for t in got.json()["details"]["tokens"]] == [t["id"] for t in alone["details"]["tokens"]]
    after = StatusReply.from_dict((await decode.get("/kv/status")).json())
    assert after.imports == {"hit": 1}
    assert after.kv_tokens_used == 0
    assert 'orchestrator_kv_imports_total{result="hit"} 1.0' in (await decode.get("/metrics")).text


async def test_wait_for_what_never_comes_says_missing(prefill: httpx.AsyncClient) -> None:
    reply = (await prefill.get(f"/kv/wait/{new_handle()}?timeout_s=0")).json()
    assert (reply["found"], reply["reason"]) == (False, "missing")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "Failed to parse the request body as JSON"),
        (b'{"inputs": "\xff"}', "Failed to parse the request body as JSON"),
        (b"{}", "inputs"),
        (b'{"inputs": ""}', "`inputs` cannot be empty"),
        (
            b'{"inputs": "a", "parameters": {"max_new_tokens": 0}}',
            "`max_new_tokens` must be strictly positive",
        ),
        (b'{"inputs": "a", "parameters": {"max_new_tokens": 600}}', "must be <= 600"),
        (b'{"inputs": "a", "parameters": {"temperature": -1}}', "`temperature` must be strictly positive"),
        (b'{"inputs": "a", "parameters": {"stop": ["1","2","3","4","5"]}}', "`stop` supports up to 4"),
        (b'{"inputs": "a", "parameters": {"adapter_id": "x|kv1:put:1"}}', "32 hexadecimal digits"),
        (b'{"inputs": "a", "parameters": {"adapter_id": "x|kv9:put:1"}}', "protocol 9"),
        (
            b'{"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": "["}}}',
            "grammar is not valid",
        ),
        (b'{"inputs": "a", "parameters": {"watermark": true}}', "watermark"),
    ],
)
async def test_bad_input_is_refused_in_a_sentence(
    prefill: httpx.AsyncClient, body: bytes, sentence: str
) -> None:
    response = await prefill.post("/generate", content=body)
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
    assert sentence in response.json()["error"]


async def test_a_body_over_the_limit_is_refused(prefill: httpx.AsyncClient) -> None:
    response = await prefill.post("/generate", content=b"x" * 2_000_001)
    assert response.status_code == 413


async def test_unknown_fields_are_ignored_as_in_tgi(prefill: httpx.AsyncClient) -> None:
    body = {"inputs": PROMPT, "colour": 1, "parameters": {"max_new_tokens": 2, "shade": 2}}
    assert (await prefill.post("/generate", json=body)).status_code == 200


async def test_return_full_text_and_truncate(prefill: httpx.AsyncClient) -> None:
    full = (await generate(prefill, return_full_text=True)).json()
    plain = (await generate(prefill)).json()
    assert full["generated_text"] == PROMPT + plain["generated_text"]
    short = await generate(prefill, truncate=3)
    assert short.headers["x-prompt-tokens"] == "3"


async def test_decoder_input_details_list_the_prompt(prefill: httpx.AsyncClient) -> None:
    details = (await generate(prefill, decoder_input_details=True)).json()["details"]
    tokens = (await prefill.post("/tokenize", json={"inputs": PROMPT})).json()
    assert [token["id"] for token in details["prefill"]] == [token["id"] for token in tokens]
    assert details["prefill"][0]["logprob"] is None
    assert all(token["logprob"] < 0 for token in details["prefill"][1:])
    assert (await generate(prefill)).json()["details"]["prefill"] == []


VARIANTS: dict[str, dict[str, Any]] = {
    "stop to prefill": {},
    "chunked": {"chunked_prefill": True, "max_batch_prefill_tokens": 16},
    "prefix caching": {"prefix_caching": True},
    "chunked with prefix caching": {
        "chunked_prefill": True,
        "max_batch_prefill_tokens": 16,
        "prefix_caching": True,
    },
}


async def test_scheduling_variants_answer_alike(tiny_model: Path, tmp_path: Path) -> None:
    """Greedy fp32, twelve requests at once, twice: the second time prefixes are known where they are kept."""
    prompts = [PROMPT * (1 + i % 3) + f" number {i % 5}" for i in range(12)]

    async def answers(client: httpx.AsyncClient) -> list[tuple[Any, ...]]:
        parameters = {"max_new_tokens": 12, "details": True, "ignore_eos_token": True}
        bodies = [{"inputs": prompt, "parameters": parameters} for prompt in prompts]
        replies = await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))
        details = [reply.json()["details"] for reply in replies]
        return [tuple(token["id"] for token in d["tokens"]) for d in details]

    seen = {}
    for name, changes in VARIANTS.items():
        made = assemble(spec(tiny_model, tmp_path, Role.MIXED, **changes))
        async with serving(made) as client:
            seen[name] = await answers(client)
            assert await answers(client) == seen[name]
            assert made.server.service.loop.kv_tokens_used == 0
    assert {len(ids) for ids in seen["chunked"]} == {12}
    for name, ids in seen.items():
        assert ids == seen["stop to prefill"], name


async def test_best_of_puts_the_likelier_answer_first(prefill: httpx.AsyncClient) -> None:
    details = (await generate(prefill, best_of=2, do_sample=True)).json()["details"]
    (other,) = details["best_of_sequences"]

    def mean(tokens: list[dict[str, Any]]) -> float:
        return sum(token["logprob"] for token in tokens) / len(tokens)

    assert mean(details["tokens"]) >= mean(other["tokens"])
    assert details["seed"] != other["seed"]


async def test_tokenize_reports_where_each_token_stands(prefill: httpx.AsyncClient) -> None:
    tokens = (await prefill.post("/tokenize", json={"inputs": PROMPT})).json()
    assert "".join(token["text"] for token in tokens) == PROMPT
    assert all(PROMPT[token["start"] : token["stop"]] == token["text"] for token in tokens)
    text = "h\u00e9 a"  # offsets are in bytes, as TGI's: the accent takes two
    tokens = (await prefill.post("/tokenize", json={"inputs": text})).json()
    assert tokens[-1]["stop"] == 5
    assert (tokens[-1]["text"], tokens[-1]["start"]) in ((" a", 3), ("a", 4))


def test_limits_over_the_model_and_a_pool_that_is_too_small_are_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="over the model's 4096 positions"):
        assemble(spec(tiny_model, tmp_path, Role.DECODE, max_total_tokens=5000))
    with pytest.raises(ConfigError, match="the longest request could never run"):
        assemble(spec(tiny_model, tmp_path, Role.DECODE, kv_pool_tokens=599))
