"""Grammars on the embedded shard: over HTTP, alone, split in two legs, and on two ranks."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.embedded.shard.assemble import assemble
from tests.integration.test_shard_server import CHAT, PROMPT, events, serving, spec
from tests.unit.rank_stand_ins import threads
from tgi_patches.contract import GetTag, PutTag, Role, StatusReply, new_handle

DATE = {"type": "regex", "value": "[0-9]{4}-[01][0-9](-[a-z]{2,6})?"}
SCHEMA = {
    "properties": {
        "ship": {"enum": ["Vasa", "Mayflower"]},
        "sunk": {"type": "boolean"},
        "tons": {"enum": [3, 4]},
    },
    "required": ["ship", "sunk", "tons"],
}
JSON = {"type": "json", "value": SCHEMA}
SEEDED: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "seed": 5}


@pytest.fixture
async def shard(tiny_model: Path, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(assemble(spec(tiny_model, tmp_path, Role.MIXED))) as client:
        yield client


async def generate(client: httpx.AsyncClient, **parameters: Any) -> dict[str, Any]:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 60, "details": True} | parameters}
    response = await client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def ids(answer: dict[str, Any]) -> list[int]:
    return [token["id"] for token in answer["details"]["tokens"]]


def check_json(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["ship", "sunk", "tons"]
    assert found["ship"] in ("Vasa", "Mayflower")
    assert isinstance(found["sunk"], bool)
    assert found["tons"] in (3, 4)


@pytest.mark.parametrize(
    "rules", [{}, SEEDED, {"repetition_penalty": 1.5}], ids=["greedy", "seeded", "penalty"]
)
async def test_an_answer_follows_its_grammar_to_the_end(
    shard: httpx.AsyncClient, rules: dict[str, Any]
) -> None:
    dated, written, plain = await asyncio.gather(
        generate(shard, grammar=DATE, **rules),
        generate(shard, grammar=JSON, **rules),
        generate(shard, **rules),
    )
    assert re.fullmatch(DATE["value"], dated["generated_text"])
    check_json(written["generated_text"])
    for answer in (dated, written):
        assert answer["details"]["finish_reason"] == "eos_token"
    # A batch with guided rows changes nothing for the others, nor for themselves.
    assert ids(await generate(shard, **rules)) == ids(plain)
    assert ids(await generate(shard, grammar=DATE, **rules)) == ids(dated)
    assert not re.fullmatch(DATE["value"], plain["generated_text"])


async def test_a_stream_says_the_same_and_tells_only_of_tokens_that_were_possible(
    shard: httpx.AsyncClient,
) -> None:
    parameters = {"max_new_tokens": 60, "details": True, "grammar": {"type": "regex", "value": "X|(Z{3})"}}
    whole = await generate(shard, **parameters)
    asked = {"inputs": PROMPT, "parameters": parameters | {"top_n_tokens": 5}}
    streamed = events((await shard.post("/generate_stream", json=asked)).text)
    assert [event["token"]["id"] for event in streamed] == ids(whole)
    assert {token["text"] for token in streamed[0]["top_tokens"]} == {"X", "Z"}
    assert sum(math.exp(token["logprob"]) for token in streamed[0]["top_tokens"]) == pytest.approx(1)


async def test_an_answer_that_is_cut_off_says_so(shard: httpx.AsyncClient) -> None:
    cut = await generate(shard, grammar=JSON, max_new_tokens=4)
    assert cut["details"]["finish_reason"] == "length"
    assert cut["generated_text"].startswith("{")
    assert "}" not in cut["generated_text"]


async def test_a_request_that_ignores_the_end_ends_by_its_length(shard: httpx.AsyncClient) -> None:
    asked = {"grammar": {"type": "regex", "value": "ab"}, "ignore_eos_token": True, "max_new_tokens": 7}
    answer = await generate(shard, **asked)
    assert (answer["generated_text"], answer["details"]["generated_tokens"]) == ("ab", 7)


@pytest.mark.parametrize("hit", [True, False], ids=["hit", "miss"])
async def test_two_legs_answer_as_one_shard(tiny_model: Path, tmp_path: Path, hit: bool) -> None:
    """On a miss the decode shard must follow the first token that the client has seen already."""
    arenas = tmp_path / "arenas"
    async with (
        serving(assemble(spec(tiny_model, arenas, Role.PREFILL))) as prefill,
        serving(assemble(spec(tiny_model, arenas, Role.DECODE))) as decode,
    ):
        status = StatusReply.from_dict((await prefill.get("/kv/status")).json())
        for grammar in (DATE, JSON):
            for rules in ({}, SEEDED):
                asked = {"grammar": grammar} | rules
                alone = await generate(decode, **asked)
                handle = new_handle()
                first = await generate(
                    prefill, **asked | {"max_new_tokens": 1, "adapter_id": str(PutTag(handle))}
                )
                tag = GetTag(handle if hit else new_handle(), "prefill-0", status.epoch, ids(first)[0])
                got = await generate(decode, **asked | {"adapter_id": str(tag)})
                assert ids(got) == ids(alone)
                assert got["generated_text"] == alone["generated_text"]
        imports = StatusReply.from_dict((await decode.get("/kv/status")).json()).imports
        assert imports == ({"hit": 4} if hit else {"missing": 4})


async def test_the_first_token_of_the_other_leg_moves_the_grammar_on(shard: httpx.AsyncClient) -> None:
    """It may be another than this shard would choose: what follows must fit it, not the own choice."""
    grammar = {"type": "regex", "value": "a0+b|b1+b|c2+b"}
    own = await generate(shard, grammar=grammar)
    listed = (await shard.post("/tokenize", json={"inputs": "a#b#c"})).json()
    tokens = {token["text"]: token["id"] for token in listed}
    for letter, digit in (("a", "0"), ("b", "1"), ("c", "2")):
        tag = GetTag(new_handle(), "prefill-0", 1, tokens[letter])
        got = await generate(shard, grammar=grammar, adapter_id=str(tag), max_new_tokens=5)
        assert re.match(letter + digit, got["generated_text"])
    assert own["generated_text"][0] in "abc"


async def test_two_ranks_follow_a_grammar_as_one_process_does(tiny_model: Path, tmp_path: Path) -> None:
    async with threads.serving(threads.spec(tiny_model, tmp_path, Role.MIXED, 2)) as ranked:
        two = [(await ranked.ask(PROMPT, 60, grammar=JSON, **rules))[0] for rules in ({}, SEEDED)]
    async with serving(assemble(spec(tiny_model, tmp_path / "one", Role.MIXED))) as single:
        one = [await generate(single, grammar=JSON, **rules) for rules in ({}, SEEDED)]
    assert two == [ids(answer) for answer in one]
    assert {answer["details"]["finish_reason"] for answer in one} == {"eos_token"}


async def chat(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"messages": CHAT} | body)


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object", "value": SCHEMA},
        {"type": "json_schema", "value": {"name": "ship", "schema": SCHEMA}},
        {"type": "json", "value": json.dumps(SCHEMA)},
    ],
)
async def test_a_chat_takes_a_response_format(
    shard: httpx.AsyncClient, response_format: dict[str, Any]
) -> None:
    reply = await chat(shard, response_format=response_format, max_tokens=60, seed=1)
    check_json(reply.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        ({"type": "json", "value": {}}, "grammar is not valid: Grammar must have a 'properties' field"),
        ({"type": "json", "value": 3}, "grammar is not supported"),
        ({"type": "regex", "value": "(?=a)b"}, "grammar is not valid: look-around, including"),
    ],
)
async def test_a_grammar_that_cannot_be_followed_is_refused(
    shard: httpx.AsyncClient, grammar: dict[str, Any], sentence: str
) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5, "grammar": grammar}}
    for response in (await shard.post("/generate", json=body), await chat(shard, response_format=grammar)):
        assert response.status_code == 422
        assert response.json()["error_type"] == "validation"
        assert response.json()["error"].startswith(f"Input validation error: {sentence}")
