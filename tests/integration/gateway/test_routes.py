"""The routes that need no generation."""

from __future__ import annotations

import asyncio
from typing import Any

from orchestrator.core.shard import ShardState
from orchestrator.shards.fake import Part

BODY = {"inputs": "Hello", "parameters": {"max_new_tokens": 20}}


async def test_health_follows_the_shard_table(house: Any) -> None:
    for path in ("/health", "/ping", "/"):
        response = await house.http.get(path)
        assert (response.status_code, response.content) == (200, b"")
    house.queue.set_state("prefill-0", ShardState.DEAD)
    assert (await house.http.get("/health")).status_code == 200
    house.queue.set_state("decode-1", ShardState.SUSPECT)
    for path in ("/health", "/ping", "/"):
        response = await house.http.get(path)
        assert response.status_code == 503
        assert response.json() == {"error": "unhealthy", "error_type": "healthcheck"}


async def test_info_comes_from_a_shard(house: Any) -> None:
    told = (await house.http.get("/info")).json()
    assert (told["model_id"], told["max_input_tokens"], told["max_total_tokens"]) == ("fake", 400, 500)


async def test_next_shard_is_asked_when_the_first_is_gone(house: Any) -> None:
    house.prefill.url = "http://127.0.0.1:9"
    house.queue.set_shards([house.prefill.view(), house.decode.view()])
    assert (await house.http.get("/info")).status_code == 200
    house.queue.set_shards([house.prefill.view()])
    gone = await house.http.get("/info")
    assert gone.status_code == 503
    assert gone.json()["error_type"] == "generation"


async def test_tokenize_is_passed_through(house: Any) -> None:
    response = await house.http.post("/tokenize", json={"inputs": "Hello", "odd": 1})
    assert len(response.json()) == 9
    assert house.prefill.seen[0].body == {"inputs": "Hello", "odd": 1}
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    response = await house.http.post("/chat_tokenize", json=chat)
    assert len(response.json()["tokenize_response"]) == 9


async def test_models_names_the_served_one(house: Any) -> None:
    listed = {"id": "served/model", "object": "model", "created": 0, "owned_by": "served/model"}
    assert (await house.http.get("/v1/models")).json() == {"object": "list", "data": [listed]}


async def test_model_without_a_setting_is_what_the_shards_serve(house_of: Any) -> None:
    async with house_of(model_name="") as house:
        assert (await house.http.get("/v1/models")).json()["data"][0]["id"] == "fake"


async def test_metrics_tell_what_happened(house: Any) -> None:
    await house.http.post("/generate_stream", json=BODY)
    await house.http.post("/generate", json={"inputs": ""})
    await house.http.post("/generate", content=b"{")
    await house.settled()
    lines = (await house.http.get("/metrics")).text.splitlines()
    for line in (
        'orchestrator_requests_total{outcome="done",route="generate_stream"} 1.0',
        'orchestrator_requests_total{outcome="refused",route="generate"} 2.0',
        'orchestrator_routing_total{choice="separated",reason="pair"} 1.0',
        'orchestrator_kv_imports_total{result="hit"} 1.0',
        'orchestrator_tokens_total{kind="generated"} 5.0',
        'orchestrator_reserved_kv_tokens{shard="decode-1"} 0.0',
        'orchestrator_phase_seconds_count{phase="decode_wait"} 1.0',
        "orchestrator_ttft_seconds_count 1.0",
        "orchestrator_tpot_seconds_count 1.0",
        "orchestrator_mode 0.0",
        "tgi_request_count 3.0",
        "tgi_request_success 1.0",
        'tgi_request_failure{err="validation"} 2.0',
        "tgi_queue_size 0.0",
    ):
        assert line in lines


async def test_status_shows_what_is_reserved_while_a_request_runs_and_nothing_after(house: Any) -> None:
    gate = house.decode.hold(Part.GET, 1)
    running = asyncio.create_task(house.http.post("/generate", json=BODY))
    await asyncio.wait_for(gate.reached.wait(), 10)
    during = (await house.http.get("/admin/status")).json()
    gate.opened.set()
    await running
    await house.settled()
    after = (await house.http.get("/admin/status")).json()
    assert (during["open_requests"], during["outstanding"]["records"], during["reserved"]["slots"]) == (
        1,
        1,
        1,
    )
    assert during["reserved"]["kv_tokens"] > 20
    assert (after["open_requests"], after["outstanding"], after["reserved"]) == (
        0,
        {"records": 0, "bytes": 0},
        {"kv_tokens": 0, "slots": 0},
    )
    assert [shard["shard"] for shard in after["shards"]] == ["prefill-0", "decode-1"]
    assert [shard["role"] for shard in after["shards"]] == ["prefill", "decode"]
    mode = after["mode"]
    assert (mode["level"], mode["output_cap"], mode["shed_below"]) == (0, None, None)
    assert after["counters"]["kv_imports"] == {"hit": 1.0}


async def test_unsafe_request_id_is_replaced(house: Any) -> None:
    for given in ("a b", "x" * 200, 'quo"te'):
        response = await house.http.post("/generate", json=BODY, headers={"x-request-id": given})
        assert response.headers["x-request-id"] != given
        assert len(response.headers["x-request-id"]) == 32


async def test_refusals_carry_the_request_id_too(house: Any) -> None:
    response = await house.http.post("/generate", json={"inputs": ""}, headers={"x-request-id": "r1"})
    assert (response.status_code, response.headers["x-request-id"]) == (422, "r1")


async def test_prompt_never_reaches_the_log(house: Any, capsys: Any) -> None:
    secret = "xyzzy-plugh"
    await house.http.post("/generate", json={"inputs": secret})
    await house.http.post("/generate", json={"inputs": secret, "parameters": {"top_p": 7}})
    await house.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": secret}]})
    await house.http.post("/generate", json={"inputs": [secret]})
    await house.http.post("/generate", content=b'{"inputs": "' + secret.encode())
    written = capsys.readouterr()
    assert "request" in written.out + written.err
    assert secret not in written.out + written.err


async def test_estimate_learns_from_what_shards_report(house: Any) -> None:
    body = {"inputs": "word " * 60, "parameters": {"max_new_tokens": 20}}
    house.prefill.prompt_tokens = house.decode.prompt_tokens = 250
    for _ in range(2):
        await house.http.post("/generate", json=body)
    first, second = house.queue.tickets
    assert first.prompt_tokens < 250
    assert second.prompt_tokens >= 250


async def test_estimate_learns_from_an_exact_count_too(house: Any) -> None:
    house.prefill.prompt_tokens = 390
    too_long = {"inputs": "word " * 85, "parameters": {"max_new_tokens": 200}}
    assert (await house.http.post("/generate", json=too_long)).status_code == 422
    # 390 tokens for 425 bytes: more than 0.9 a byte, so 200 bytes are at least 180 tokens.
    await house.http.post("/generate", json={"inputs": "word " * 40})
    assert house.queue.tickets[0].prompt_tokens >= 180


async def test_equal_prompts_have_equal_hashes_that_say_nothing(house: Any) -> None:
    for inputs in ("same", "same", "other"):
        await house.http.post("/generate", json={"inputs": inputs})
    first, second, third = (ticket.prompt_hash for ticket in house.queue.tickets)
    assert first == second != third
    assert "same" not in first
