"""`/generate`, `/generate_stream` and `/` through a separated pair."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.decision import Mode
from orchestrator.core.ticket import Outcome
from orchestrator.shards.fake import FIRST_ID, Part
from tgi_patches.contract import GetTag, PutTag, Role, parse_tag

BODY = {"inputs": "What is the capital of France?", "parameters": {"max_new_tokens": 20, "details": True}}
IDS = [FIRST_ID + i for i in range(5)]


async def test_stream_emits_each_token_once_and_in_order(house: Any, payloads_of: Any) -> None:
    response = await house.http.post("/generate_stream", json=BODY)
    payloads = payloads_of(response.content)
    assert response.status_code == 200
    assert [payload["token"]["id"] for payload in payloads] == IDS
    assert [payload["index"] for payload in payloads] == [1, 2, 3, 4, 5]
    assert [payload["generated_text"] for payload in payloads] == [None] * 4 + ["The capital is Paris."]
    assert [payload["details"] for payload in payloads[:4]] == [None] * 4
    assert payloads[4]["details"]["finish_reason"] == "eos_token"
    assert payloads[4]["details"]["generated_tokens"] == 5


async def test_stream_has_tgis_headers_and_ours(house: Any) -> None:
    response = await house.http.post("/generate_stream", json=BODY, headers={"x-request-id": "abc-1"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == "abc-1"
    assert response.headers["x-orchestrator-route"] == "separated"
    assert response.headers["x-orchestrator-reason"] == "pair"


async def test_rest_of_a_tgi_stream_is_relayed_byte_for_byte(house: Any, events_of: Any) -> None:
    got = events_of((await house.http.post("/generate_stream", json=BODY)).content)
    async with house.http.stream("POST", house.decode.url + "/generate_stream", json=BODY) as direct:
        told = events_of(await direct.aread())
    assert [event.raw for event in got[1:]] == [event.raw for event in told[1:]]


async def test_put_leg_asks_for_one_token_and_get_leg_names_the_record(house: Any) -> None:
    await house.http.post("/generate_stream", json=BODY)
    [put] = house.prefill.generations()
    [get] = house.decode.generations()
    put_tag = parse_tag(put.body["parameters"]["adapter_id"])
    get_tag = parse_tag(get.body["parameters"]["adapter_id"])
    assert isinstance(put_tag, PutTag)
    assert put.body["parameters"]["max_new_tokens"] == 1
    assert get_tag == GetTag(put_tag.handle, "prefill-0", 7, FIRST_ID)
    assert get.body["parameters"]["max_new_tokens"] == 20
    assert get.body["inputs"] == BODY["inputs"]
    assert house.queue.tickets[0].handle == put_tag.handle


async def test_request_id_travels_with_both_legs(house: Any) -> None:
    await house.http.post("/generate", json=BODY, headers={"x-request-id": "trace.7"})
    legs = house.prefill.generations() + house.decode.generations()
    assert [leg.headers["x-request-id"] for leg in legs] == ["trace.7", "trace.7"]


async def test_whole_answer_is_the_decode_shards(house: Any) -> None:
    response = await house.http.post("/generate", json=BODY)
    answer = response.json()
    assert answer["generated_text"] == "The capital is Paris."
    assert [token["id"] for token in answer["details"]["tokens"]] == IDS
    assert response.headers["x-orchestrator-import"] == "hit"
    assert response.headers["x-generated-tokens"] == "5"
    assert response.headers["x-prompt-tokens"] == "9"


async def test_completion_tells_counts_phases_and_the_import(house: Any) -> None:
    await house.http.post("/generate_stream", json=BODY)
    await house.settled()
    [completion] = house.queue.completed
    assert completion.outcome is Outcome.DONE
    assert (completion.prompt_tokens, completion.generated_tokens, completion.imported) == (9, 5, True)
    assert set(completion.phases_s) == {"queue", "prefill", "relay", "decode_wait", "decode"}
    assert all(took_s >= 0 for took_s in completion.phases_s.values())
    assert house.reserved == (0, 0, 0)
    assert house.queue.cancelled == []


async def test_miss_is_counted_and_answered_all_the_same(house: Any, payloads_of: Any) -> None:
    house.decode.import_result = "overwritten"
    payloads = payloads_of((await house.http.post("/generate_stream", json=BODY)).content)
    assert [payload["token"]["id"] for payload in payloads] == IDS
    await house.settled()
    assert house.queue.completed[0].imported is False
    metrics = (await house.http.get("/metrics")).text
    assert 'orchestrator_kv_imports_total{result="overwritten"} 1.0' in metrics


async def test_record_that_never_comes_still_gets_an_answer(house: Any, payloads_of: Any) -> None:
    house.prefill.found = False
    payloads = payloads_of((await house.http.post("/generate_stream", json=BODY)).content)
    assert [payload["token"]["id"] for payload in payloads] == IDS
    tag = parse_tag(house.decode.generations()[0].body["parameters"]["adapter_id"])
    assert isinstance(tag, GetTag)
    assert tag.first_token_id == FIRST_ID


@pytest.mark.parametrize("details", [True, False])
async def test_stream_that_ends_at_its_first_token_never_reaches_decode(
    house: Any, payloads_of: Any, details: bool
) -> None:
    house.prefill.tokens = ("Yes",)
    body = {"inputs": "?", "parameters": {"max_new_tokens": 20, "details": details}}
    [payload] = payloads_of((await house.http.post("/generate_stream", json=body)).content)
    assert payload["generated_text"] == "Yes"
    expected = {"finish_reason": "eos_token", "generated_tokens": 1, "seed": None, "input_length": 9}
    assert payload["details"] == (expected if details else None)
    assert house.decode.generations() == []
    await house.settled()
    assert house.queue.completed[0].outcome is Outcome.DONE
    assert house.reserved == (0, 0, 0)


@pytest.mark.parametrize("details", [True, False])
async def test_whole_answer_that_ends_at_its_first_token_is_the_put_legs(house: Any, details: bool) -> None:
    house.prefill.tokens = ("Yes",)
    body = {"inputs": "?", "parameters": {"max_new_tokens": 20, "details": details}}
    answer = (await house.http.post("/generate", json=body)).json()
    assert answer["generated_text"] == "Yes"
    assert ("details" in answer) is details
    assert house.decode.generations() == []


async def test_end_that_only_decode_sees_reaches_the_client_without_a_second_token(
    house: Any, payloads_of: Any
) -> None:
    house.decode.tokens = ("The",)
    first, last = payloads_of((await house.http.post("/generate_stream", json=BODY)).content)
    assert first["token"]["text"] + last["token"]["text"] == "The"
    assert (first["generated_text"], last["generated_text"]) == (None, "The")
    assert last["details"]["finish_reason"] == "eos_token"


async def test_absent_parameters_sample_with_one_seed_on_both_legs(house: Any) -> None:
    await house.http.post("/generate", json={"inputs": "Tell me"})
    put, get = (shard.generations()[0].body["parameters"] for shard in (house.prefill, house.decode))
    assert put["do_sample"] is True
    assert get["do_sample"] is True
    assert put["seed"] == get["seed"]
    assert isinstance(put["seed"], int)
    assert "max_new_tokens" not in get


async def test_two_sampled_requests_have_different_seeds(house: Any) -> None:
    for _ in range(2):
        await house.http.post("/generate", json={"inputs": "Tell me"})
    first, second = (seen.body["parameters"]["seed"] for seen in house.prefill.generations())
    assert first != second


async def test_greedy_request_gets_no_seed_and_a_given_seed_is_kept(house: Any) -> None:
    await house.http.post("/generate", json=BODY)
    assert "seed" not in house.prefill.generations()[0].body["parameters"]
    sampled = {"inputs": "x", "parameters": {"do_sample": True, "seed": 2**64 - 1}}
    await house.http.post("/generate", json=sampled)
    assert [shard.generations()[1].body["parameters"]["seed"] for shard in (house.prefill, house.decode)] == [
        2**64 - 1,
        2**64 - 1,
    ]


async def test_adapter_of_the_client_travels_inside_the_tag(house: Any) -> None:
    await house.http.post("/generate", json={"inputs": "x", "parameters": {"adapter_id": "my/lora"}})
    tags = [
        parse_tag(shard.generations()[0].body["parameters"]["adapter_id"])
        for shard in (house.prefill, house.decode)
    ]
    assert [tag.adapter for tag in tags if tag is not None] == ["my/lora", "my/lora"]


async def test_root_answers_a_list_with_the_prompt_in_front_by_default(house: Any) -> None:
    response = await house.http.post("/", json={"inputs": "x", "parameters": {"max_new_tokens": 20}})
    assert [answer["generated_text"] for answer in response.json()] == ["The capital is Paris."]
    assert house.decode.generations()[0].body["parameters"]["return_full_text"] is True
    assert "do_sample" not in house.decode.generations()[0].body["parameters"]


async def test_root_streams_when_asked(house: Any, payloads_of: Any) -> None:
    body = {"inputs": "x", "stream": True, "parameters": {"return_full_text": False}}
    payloads = payloads_of((await house.http.post("/", json=body)).content)
    assert [payload["token"]["id"] for payload in payloads] == IDS
    assert house.decode.generations()[0].body["parameters"]["return_full_text"] is False


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_what_cannot_be_split_is_one_plain_request(house: Any, path: str, payloads_of: Any) -> None:
    extra = {"decoder_input_details": True} if path == "/generate" else {"max_new_tokens": 1}
    body = {"inputs": "x", "parameters": {"details": True} | extra}
    response = await house.http.post(path, json=body)
    assert response.headers["x-orchestrator-route"] == "mixed"
    asked = house.prefill.generations() + house.decode.generations()
    assert [seen.body for seen in asked] == [body]
    await house.settled()
    assert house.queue.completed[0].imported is None
    assert house.reserved == (0, 0, 0)


async def test_mixed_stream_is_relayed_byte_for_byte(house_of: Any) -> None:
    async with house_of(roles=(Role.MIXED, Role.MIXED)) as house:
        got = await house.http.post("/generate_stream", json=BODY)
        direct = await house.http.post(house.decode.url + "/generate_stream", json=BODY)
        assert got.headers["x-orchestrator-route"] == "mixed"
        assert got.content == direct.content
        await house.settled()
        [completion] = house.queue.completed
        assert completion.generated_tokens == 5
        assert set(completion.phases_s) == {"queue", "prefill", "decode"}


async def test_put_leg_is_read_to_its_end_so_that_its_connection_serves_again(house: Any) -> None:
    await house.http.post("/generate_stream", json=BODY)
    put, wait = house.prefill.seen
    assert (put.path, wait.path[:9]) == ("/generate_stream", "/kv/wait/")
    assert put.connection == wait.connection


async def test_put_leg_that_never_ends_does_not_hold_the_answer(house_of: Any, payloads_of: Any) -> None:
    async with house_of(wait_timeout_s=0.1) as house:
        house.prefill.hold(Part.PUT, 1)
        payloads = payloads_of((await house.http.post("/generate_stream", json=BODY)).content)
        assert [payload["token"]["id"] for payload in payloads] == IDS


async def test_cap_of_the_mode_shortens_the_get_leg(house: Any) -> None:
    house.queue.mode = Mode(level=1, output_cap=3)
    answer = (await house.http.post("/generate", json=BODY)).json()
    assert answer["generated_text"] == "The capital is"
    assert house.decode.generations(Part.GET)[0].body["parameters"]["max_new_tokens"] == 3


async def test_debug_header_brings_the_phases(house: Any, events_of: Any) -> None:
    asked = {"x-orchestrator-debug": "1"}
    whole = await house.http.post("/generate", json=BODY, headers=asked)
    names = [part.split(";")[0] for part in whole.headers["server-timing"].split(", ")]
    assert names == ["queue", "prefill", "relay", "decode"]
    events = events_of((await house.http.post("/generate_stream", json=BODY, headers=asked)).content)
    assert events[-1].data is None
    assert events[-1].raw.startswith(b": orchestrator route=separated reason=pair import=hit queue;dur=")
    assert [event.data is None for event in events[:-1]] == [False] * 5


async def test_without_the_debug_header_nothing_is_added(house: Any, events_of: Any) -> None:
    whole = await house.http.post("/generate", json=BODY)
    assert "server-timing" not in whole.headers
    events = events_of((await house.http.post("/generate_stream", json=BODY)).content)
    assert all(event.data is not None for event in events)
