"""`/v1/chat/completions` through a separated pair."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.ticket import Outcome
from orchestrator.shards.fake import FIRST_ID, Part
from tgi_patches.contract import GetTag, PutTag, parse_tag

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
WORDS = ["The", " capital", " is", " Paris", "."]


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "max_tokens": 20} | fields


def texts(payloads: list[Any]) -> list[str]:
    chunks = [payload for payload in payloads if payload != "[DONE]" and payload["choices"]]
    return [chunk["choices"][0]["delta"]["content"] for chunk in chunks]


async def test_stream_says_each_word_once_and_ends_with_done(house: Any, payloads_of: Any) -> None:
    response = await house.http.post("/v1/chat/completions", json=body(stream=True))
    payloads = payloads_of(response.content)
    assert texts(payloads) == WORDS
    assert [chunk["choices"][0]["finish_reason"] for chunk in payloads[:-1]] == [None] * 4 + ["stop"]
    assert payloads[-1] == "[DONE]"
    assert response.content.endswith(b"\n\ndata: [DONE]\n\n")
    assert response.headers["x-orchestrator-route"] == "separated"


@pytest.mark.parametrize(
    ("asked", "named"), [("my-model", "my-model"), ("tgi", "served/model"), (None, "served/model")]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_model_in_every_answer_is_the_clients_name(
    house: Any, payloads_of: Any, stream: bool, asked: str | None, named: str
) -> None:
    fields: dict[str, Any] = {"stream": stream} | ({} if asked is None else {"model": asked})
    response = await house.http.post("/v1/chat/completions", json=body(**fields))
    answers = payloads_of(response.content)[:-1] if stream else [response.json()]
    assert {answer["model"] for answer in answers} == {named}
    assert b"|kv" not in response.content


async def test_legs_carry_tags_and_the_get_leg_learns_the_first_token_from_wait(house: Any) -> None:
    await house.http.post("/v1/chat/completions", json=body(stream=True, model="my-model"))
    [put] = house.prefill.generations(Part.PUT)
    [get] = house.decode.generations(Part.GET)
    handle = house.queue.tickets[0].handle
    assert parse_tag(put.body["model"]) == PutTag(handle, "my-model")
    assert parse_tag(get.body["model"]) == GetTag(handle, "prefill-0", 7, FIRST_ID, "my-model")
    assert (put.body["max_tokens"], get.body["max_tokens"]) == (1, 20)


async def test_other_spelling_of_max_tokens_does_not_reach_the_put_leg(house: Any) -> None:
    asked = {"messages": MESSAGES, "max_completion_tokens": 3}
    answer = (await house.http.post("/v1/chat/completions", json=asked)).json()
    assert answer["choices"][0]["message"]["content"] == "The capital is"
    put = house.prefill.generations()[0].body
    assert put["max_tokens"] == 1
    assert "max_completion_tokens" not in put
    assert house.queue.tickets[0].max_new_tokens == 3


async def test_usage_is_told_once_for_the_whole_answer(house: Any, payloads_of: Any) -> None:
    asked = body(stream=True, stream_options={"include_usage": True})
    payloads = payloads_of((await house.http.post("/v1/chat/completions", json=asked)).content)
    usages = [payload["usage"] for payload in payloads[:-1] if payload["usage"] is not None]
    assert usages == [{"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}]
    assert payloads[-2]["choices"] == []


async def test_whole_answer_is_the_decode_shards(house: Any) -> None:
    answer = (await house.http.post("/v1/chat/completions", json=body())).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "The capital is Paris."}
    assert answer["usage"]["completion_tokens"] == 5
    await house.settled()
    assert house.queue.completed[0].generated_tokens == 5


async def test_stream_that_ends_at_its_first_token_is_the_put_legs_to_the_end(
    house: Any, payloads_of: Any
) -> None:
    house.prefill.tokens = ("Yes",)
    asked = body(stream=True, model="mine", stream_options={"include_usage": True})
    first, usage, done = payloads_of((await house.http.post("/v1/chat/completions", json=asked)).content)
    assert first["choices"][0]["finish_reason"] == "stop"
    assert (first["model"], usage["model"]) == ("mine", "mine")
    assert usage["usage"]["completion_tokens"] == 1
    assert done == "[DONE]"
    assert house.decode.generations() == []
    await house.settled()
    assert house.queue.completed[0].outcome is Outcome.DONE


async def test_whole_answer_that_ends_at_its_first_token_names_the_clients_model(house: Any) -> None:
    house.prefill.tokens = ("Yes",)
    answer = (await house.http.post("/v1/chat/completions", json=body(model="mine"))).json()
    assert answer["model"] == "mine"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert house.decode.generations() == []


async def test_character_split_over_the_boundary_comes_out_whole(house: Any, payloads_of: Any) -> None:
    # A detokenizer holds back half a character: the first token's text is empty, the second has it all.
    house.prefill.tokens = house.decode.tokens = ("", "🦊", " runs")
    response = await house.http.post("/v1/chat/completions", json=body(stream=True))
    assert texts(payloads_of(response.content)) == ["", "🦊", " runs"]
    whole = await house.http.post("/v1/chat/completions", json=body())
    assert whole.json()["choices"][0]["message"]["content"] == "🦊 runs"


async def test_only_temperature_zero_is_greedy(house: Any) -> None:
    await house.http.post("/v1/chat/completions", json=body(temperature=0))
    await house.http.post("/v1/chat/completions", json=body())
    greedy, sampled = (seen.body for seen in house.prefill.generations())
    assert "seed" not in greedy
    assert sampled["seed"] == house.decode.generations()[1].body["seed"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"n": 2},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
    ],
    ids=["tools", "n", "image"],
)
async def test_what_cannot_be_split_is_one_plain_request(house: Any, fields: dict[str, Any]) -> None:
    response = await house.http.post("/v1/chat/completions", json=body(**fields))
    assert response.status_code == 200
    assert response.headers["x-orchestrator-route"] == "mixed"
    assert [seen.body for seen in house.decode.generations()] == [body(**fields)]
    assert house.prefill.generations() == []


async def test_answer_that_writes_about_tags_is_not_changed(house: Any, payloads_of: Any) -> None:
    words = ("see", ' "model": "x|kv1:get:y"', " |kv1:", " ok")
    house.prefill.tokens = house.decode.tokens = words
    payloads = payloads_of((await house.http.post("/v1/chat/completions", json=body(stream=True))).content)
    assert texts(payloads) == list(words)
    assert {payload["model"] for payload in payloads[:-1]} == {"served/model"}
