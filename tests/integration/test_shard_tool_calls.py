"""Tools on the embedded shard, as TGI's router answers them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.embedded.shard.assemble import assemble
from tests.integration.test_shard_server import CHAT, events, serving, spec
from tgi_patches.contract import Role

TOOL = {
    "type": "function",
    "function": {
        "name": "sail",
        "parameters": {
            "type": "object",
            "properties": {"to": {"enum": ["sea", "port"]}, "days": {"enum": [1, 2]}},
            "required": ["to", "days"],
        },
    },
}
CALL = {"messages": CHAT, "tools": [TOOL], "tool_choice": "required", "temperature": 0, "max_tokens": 100}


@pytest.fixture
async def shard(tiny_model: Path, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    order = spec(tiny_model, tmp_path, Role.MIXED, max_input_tokens=900, max_total_tokens=1000)
    async with serving(assemble(order)) as client:
        yield client


async def chat(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"messages": CHAT} | body)


async def test_a_call_is_answered_whole_and_in_pieces(shard: httpx.AsyncClient) -> None:
    whole = (await chat(shard, **CALL)).json()
    (choice,) = whole["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"] == {"role": "assistant", "tool_calls": [call]}
    assert choice["finish_reason"] == "stop"
    assert (call["id"], call["type"], call["function"]["name"]) == ("0", "function", "sail")
    arguments = json.loads(call["function"]["arguments"])
    assert list(arguments) == ["to", "days"]
    assert arguments["to"] in ("sea", "port")

    earlier = {"id": "6", "type": "function", "function": {"name": "sail", "arguments": "{}"}}
    options = {"stream": True, "logprobs": True, "stream_options": {"include_usage": True}}
    streamed = await chat(shard, **CALL | options)
    assert streamed.text.endswith("data: [DONE]\n\n")
    *chunks, last, usage = events(streamed.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    parts = [delta["tool_calls"][0] for delta in deltas]
    assert [part["function"]["name"] for part in parts] == ["sail", *[None] * (len(parts) - 1)]
    assert json.loads("".join(part["function"]["arguments"] for part in parts)) == arguments
    assert {(part["index"], part["id"], part["type"]) for part in parts} == {(0, "0", "function")}
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
    assert all(len(chunk["choices"][0]["logprobs"]["content"]) == 1 for chunk in chunks)
    assert last["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])

    messages = [*CHAT, {"role": "assistant", "tool_calls": [earlier]}, *CHAT]
    again = events((await chat(shard, **CALL | {"messages": messages, "stream": True})).text)
    assert again[0]["choices"][0]["delta"]["tool_calls"][0]["id"] == "7"


@pytest.mark.parametrize("choice", ["sail", {"type": "function", "function": {"name": "sail"}}])
async def test_the_named_tool_is_called(shard: httpx.AsyncClient, choice: Any) -> None:
    other = {"type": "function", "function": {"name": "anchor", "parameters": {}}}
    reply = await chat(shard, **CALL | {"tools": [other, TOOL], "tool_choice": choice, "max_tokens": 80})
    assert reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "sail"


async def test_a_model_that_would_rather_talk_answers_as_if_there_were_no_tools(
    shard: httpx.AsyncClient,
) -> None:
    """Without any tool, `no_tool` is all that can be chosen."""
    asked = {"temperature": 0, "max_tokens": 50}
    plain = (await chat(shard, **asked)).json()
    talking = (await chat(shard, **asked, tools=[])).json()
    assert talking["choices"] == plain["choices"]
    assert talking["usage"] == plain["usage"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events((await chat(shard, **asked, tools=[], **options)).text)
    assert [c["choices"] for c in chunks] == [
        c["choices"] for c in events((await chat(shard, **asked, **options)).text)
    ]
    assert chunks[-1]["usage"] == plain["usage"]
    refused = (await chat(shard, **asked, tools=[TOOL], tool_choice="none")).json()
    assert refused["choices"] == plain["choices"]


async def test_a_call_that_is_cut_off_is_an_error_whole_and_a_length_in_a_stream(
    shard: httpx.AsyncClient,
) -> None:
    whole = await chat(shard, **CALL | {"max_tokens": 3})
    assert whole.status_code == 422
    assert whole.json()["error_type"] == "tool_error"
    assert whole.json()["error"].startswith("Tool error: Failed to parse generated text: ")
    (early,) = events((await chat(shard, **CALL | {"max_tokens": 3, "stream": True})).text)
    assert early["choices"][0]["finish_reason"] == "length"
    pieces = events((await chat(shard, **CALL | {"max_tokens": 33, "stream": True})).text)
    assert pieces[0]["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "sail"
    assert [p["choices"][0]["finish_reason"] for p in pieces] == [*[None] * (len(pieces) - 1), "length"]


@pytest.mark.parametrize(
    ("body", "error_type", "sentence"),
    [
        ({"tools": [TOOL], "tool_choice": "moor"}, "tool_error", "Tool error: Tool with name moor not found"),
        (
            {"tools": [TOOL], "response_format": {"type": "regex", "value": "a"}},
            "tool_error",
            "Tool error: Grammar and tools are mutually exclusive",
        ),
        ({"tools": [TOOL], "tool_choice": 3}, "validation", "Failed to deserialize the JSON body"),
    ],
)
async def test_tools_that_cannot_be_called_are_refused(
    shard: httpx.AsyncClient, body: dict[str, Any], error_type: str, sentence: str
) -> None:
    for stream in (False, True):
        response = await chat(shard, **body, stream=stream)
        assert response.status_code == 422
        assert response.json()["error_type"] == error_type
        assert response.json()["error"].startswith(sentence)


async def test_a_chat_named_tgi_is_answered_under_the_models_name(shard: httpx.AsyncClient) -> None:
    for path, body in (("/v1/chat/completions", {"messages": CHAT}), ("/v1/completions", {"prompt": "one"})):
        for model in ({}, {"model": "tgi"}):
            reply = await shard.post(path, json=body | {"max_tokens": 1} | model)
            assert reply.json()["model"] == "tiny"
