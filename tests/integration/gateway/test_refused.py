"""What a gateway refuses: TGI's status and shape, and nothing reserved for it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from orchestrator.core.shard import ShardState
from tgi_patches.contract import Role

GENERATE = ["/generate", "/generate_stream", "/"]
CHAT = "/v1/chat/completions"
TAG = "x|kv1:put:" + "0" * 32


def generate(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "Hello", "parameters": parameters}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}]} | fields


async def refused(house: Any, path: str, **request: Any) -> dict[str, str]:
    """The error body of a 422 that reached neither queue nor shard's model."""
    response = await house.http.post(path, **request)
    assert response.status_code == 422, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()
    assert set(error) == {"error", "error_type"}
    assert house.queue.tickets == []
    assert house.prefill.generations() + house.decode.generations() == []
    assert house.reserved == (0, 0, 0)
    return error


RULES = [
    ({"inputs": ""}, "`inputs` cannot be empty"),
    (generate(max_new_tokens=0), "`max_new_tokens` must be strictly positive"),
    (generate(temperature=-1.0), "`temperature` must be strictly positive"),
    (generate(top_p=1.0), "`top_p` must be > 0.0 and < 1.0"),
    (generate(stop=["a"] * 5), "`stop` supports up to 4 stop sequences. Given: 5"),
    (generate(truncate=401), "`truncate` must be strictly positive and less than 400. Given: 401"),
]


@pytest.mark.parametrize("path", GENERATE)
async def test_rules_of_tgi(house: Any, path: str) -> None:
    for body, sentence in RULES:
        error = await refused(house, path, json=body)
        assert error == {"error": f"Input validation error: {sentence}", "error_type": "validation"}


@pytest.mark.parametrize("path", GENERATE)
async def test_more_new_tokens_than_fit(house: Any, path: str) -> None:
    error = await refused(house, path, json=generate(max_new_tokens=1000))
    assert error["error"] == (
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 500. "
        "Given: 9 `inputs` tokens and 1000 `max_new_tokens`"
    )


@pytest.mark.parametrize("path", GENERATE)
async def test_long_prompt_is_counted_by_a_shard_before_it_is_refused(house: Any, path: str) -> None:
    house.prefill.prompt_tokens = house.decode.prompt_tokens = 450
    error = await refused(house, path, json={"inputs": "word " * 450, "parameters": {}})
    assert error["error"] == "Input validation error: `inputs` must have less than 400 tokens. Given: 450"


async def test_long_chat_is_counted_with_its_template(house: Any) -> None:
    house.prefill.prompt_tokens = house.decode.prompt_tokens = 450
    messages = [{"role": "user", "content": "word " * 450}]
    error = await refused(house, CHAT, json={"messages": messages, "max_tokens": 100})
    assert error["error"].startswith(
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 500"
    )
    assert error["error"].endswith("Given: 450 `inputs` tokens and 100 `max_new_tokens`")
    counted = [seen.path for seen in house.prefill.seen + house.decode.seen]
    assert counted == ["/chat_tokenize"]


async def test_prompt_whose_bound_is_too_high_is_served_once_it_is_counted(house: Any) -> None:
    response = await house.http.post("/generate", json={"inputs": "word " * 450, "parameters": {}})
    assert response.status_code == 200
    assert house.queue.tickets[0].prompt_tokens == 9
    assert house.queue.tickets[0].max_new_tokens == 491


async def test_truncated_prompt_needs_no_count(house: Any) -> None:
    body = {"inputs": "word " * 450, "parameters": {"truncate": 50, "max_new_tokens": 10}}
    assert (await house.http.post("/generate", json=body)).status_code == 200
    assert house.queue.tickets[0].prompt_tokens == 50
    assert [seen.path for seen in house.prefill.seen] == [
        "/generate",
        f"/kv/wait/{house.queue.tickets[0].handle}",
    ]


NO_REQUESTS = [b"", b"{", b"[]", b"null", b'"x"', b'{"inputs": "\xff\xfe"}', b'{"inputs": "\\ud800"}', b"{}"]


@pytest.mark.parametrize("path", [*GENERATE, CHAT, "/tokenize", "/chat_tokenize"])
async def test_body_that_is_no_request(house: Any, path: str) -> None:
    for content in NO_REQUESTS:
        error = await refused(house, path, content=content)
        assert error["error_type"] == "validation"


WRONG_TYPES = [
    ({"inputs": 1}, "inputs"),
    ({"inputs": None}, "inputs"),
    ({"inputs": ["a"]}, "inputs"),
    ({"inputs": "a", "parameters": None}, "parameters"),
    ({"inputs": "a", "parameters": []}, "parameters"),
    (generate(max_new_tokens="5"), "parameters.max_new_tokens"),
    (generate(max_new_tokens=5.0), "parameters.max_new_tokens"),
    (generate(max_new_tokens=-5), "parameters.max_new_tokens"),
    (generate(max_new_tokens=True), "parameters.max_new_tokens"),
    (generate(temperature="hot"), "parameters.temperature"),
    (generate(do_sample=1), "parameters.do_sample"),
    (generate(do_sample=None), "parameters.do_sample"),
    (generate(stop="x"), "parameters.stop"),
    (generate(stop=[1]), "parameters.stop.0"),
    (generate(seed=2**64), "parameters.seed"),
    (generate(seed=-1), "parameters.seed"),
    (generate(grammar={"type": "poem", "value": "x"}), "parameters.grammar.type"),
]


async def test_wrong_type_is_named(house: Any) -> None:
    for body, field in WRONG_TYPES:
        error = await refused(house, "/generate", content=json.dumps(body))
        start = f"Failed to deserialize the JSON body into the target type: {field}: "
        assert error["error"].startswith(start)


WRONG_CHATS = [
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"temperature": "0"}, "temperature"),
    ({"stream": "yes"}, "stream"),
    ({"stop": "x"}, "stop"),
]


async def test_wrong_type_in_a_chat_is_named(house: Any) -> None:
    for fields, field in WRONG_CHATS:
        error = await refused(house, CHAT, json=chat(**fields))
        start = f"Failed to deserialize the JSON body into the target type: {field}: "
        assert error["error"].startswith(start)


async def test_chat_rules(house: Any) -> None:
    error = await refused(house, CHAT, json=chat(temperature=-0.5))
    assert error["error"] == "Input validation error: `temperature` must be strictly positive"
    error = await refused(house, CHAT, json=chat(top_logprobs=6))
    assert error["error"] == "Input validation error: `top_n_tokens` must be >= 0 and <= 5. Given: 6"


async def test_grammar_and_tools_exclude_each_other(house: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    both = chat(tools=tools, response_format={"type": "regex", "value": "a"})
    error = await refused(house, CHAT, json=both)
    assert error == {
        "error": "Tool error: Grammar and tools are mutually exclusive",
        "error_type": "tool_error",
    }


@pytest.mark.parametrize("path", [*GENERATE, "/tokenize"])
async def test_adapter_that_carries_a_tag(house: Any, path: str) -> None:
    error = await refused(house, path, json=generate(adapter_id=TAG))
    assert "|kv" in error["error"]


@pytest.mark.parametrize("path", [CHAT, "/chat_tokenize"])
@pytest.mark.parametrize("stream", [True, False])
async def test_model_that_carries_a_tag(house: Any, path: str, stream: bool) -> None:
    error = await refused(house, path, json=chat(model="|kv1:get:a.1:" + "0" * 32 + ":-", stream=stream))
    assert "|kv" in error["error"]


async def test_unknown_fields_are_ignored(house: Any) -> None:
    body = generate(max_new_tokens=20, no_such_parameter=1) | {"no_such_field": {"a": 1}}
    assert (await house.http.post("/generate", json=body)).status_code == 200


async def test_unknown_route_and_wrong_method_answer_json(house: Any) -> None:
    missing = await house.http.post("/v1/embeddings", json={"input": "x"})
    assert missing.status_code == 404
    assert missing.json() == {"error": "Not Found", "error_type": "not_found"}
    wrong = await house.http.get("/generate")
    assert wrong.status_code == 405
    assert wrong.json()["error_type"] == "method_not_allowed"


async def test_body_over_the_limit_is_refused_from_its_announced_length(house: Any) -> None:
    host, port = house.address()
    reader, writer = await asyncio.open_connection(host, port)
    head = "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 104857600\r\n\r\n"
    writer.write(head.encode())
    answer = await asyncio.wait_for(reader.readuntil(b"}"), 10)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"error_type":"validation"' in answer
    writer.close()
    await writer.wait_closed()
    assert house.queue.tickets == []


async def test_client_that_sends_on_is_not_reset_before_it_has_read_why(house: Any) -> None:
    reader, writer = await asyncio.open_connection(*house.address())
    writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n")
    for _ in range(50):
        writer.write(b" " * 100_000)
        await writer.drain()
    assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 413 ")
    writer.close()
    await writer.wait_closed()


async def test_100_megabytes_in_pieces_are_refused_without_being_kept(house: Any) -> None:
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        for _ in range(1600):
            sent += 65536
            yield b" " * 65536

    response = await house.http.post("/generate", content=endless())
    assert response.status_code == 413
    assert response.json()["error_type"] == "validation"
    assert house.queue.tickets == []
    assert (await house.http.get("/health")).status_code == 200


async def test_body_at_the_limit_is_read(house: Any) -> None:
    frame = len(json.dumps({"inputs": "", "parameters": {"truncate": 5}}))
    body = json.dumps({"inputs": "x" * (100_000 - frame), "parameters": {"truncate": 5}})
    assert len(body) == 100_000
    assert (await house.http.post("/generate", content=body)).status_code == 200
    assert (await house.http.post("/generate", content=body + " ")).status_code == 413


async def test_shards_own_refusal_reaches_the_client_as_it_is(house: Any) -> None:
    house.prefill.refuses = (429, {"error": "Model is overloaded", "error_type": "overloaded"})
    for path in ("/generate", "/generate_stream"):
        response = await house.http.post(path, json=generate())
        assert response.status_code == 429
        assert response.json() == house.prefill.refuses[1]
        assert response.headers["retry-after"] == "1"
    assert house.reserved == (0, 0, 0)
    assert len(house.queue.completed) == 2


async def test_more_than_the_gateway_may_hold_is_refused(house_of: Any) -> None:
    async with house_of(max_open_requests=0) as house:
        response = await house.http.post("/generate", json=generate())
        assert response.status_code == 429
        assert response.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
        assert house.queue.tickets == []


async def test_without_a_ready_shard_the_answer_is_503_or_the_deadline(house_of: Any) -> None:
    async with house_of(request_timeout_s=0.2, roles=(Role.PREFILL, Role.DECODE)) as house:
        house.queue.set_shards([])
        response = await house.http.post("/generate", json=generate())
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        house.queue.set_shards([house.prefill.view(), house.decode.view()])
        for shard in ("prefill-0", "decode-1"):
            house.queue.set_state(shard, ShardState.SUSPECT)
        assert (await house.http.post("/generate", json=generate())).status_code in (429, 503, 504)
        assert house.queue.tickets[-1].handle not in {grant.handle for grant in house.queue.granted}
