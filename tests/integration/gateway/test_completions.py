"""`/v1/completions` through a separated pair, and what is served by one shard."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.ticket import Outcome
from orchestrator.shards.fake import FIRST_ID, Fault, Part
from tgi_patches.contract import GetTag, PutTag, parse_tag

PATH = "/v1/completions"
WORDS = ["The", " capital", " is", " Paris", "."]
USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "What is the capital of France?", "max_tokens": 20} | fields


def choices(payloads: list[Any]) -> list[dict[str, Any]]:
    return [payload["choices"][0] for payload in payloads if payload != "[DONE]"]


async def streamed(house: Any, payloads_of: Any, **fields: Any) -> list[Any]:
    response = await house.http.post(PATH, json=body(stream=True, **fields))
    assert response.status_code == 200, response.text
    payloads: list[Any] = payloads_of(response.content)
    return payloads


async def test_stream_says_each_word_once_counts_at_its_last_and_ends_with_done(
    house: Any, payloads_of: Any
) -> None:
    *pieces, done = await streamed(house, payloads_of)
    assert [choice["text"] for choice in choices(pieces)] == WORDS
    assert [choice["finish_reason"] for choice in choices(pieces)] == ["", "", "", "", "eos_token"]
    assert [piece.get("usage") for piece in pieces] == [None, None, None, None, USAGE]
    assert done == "[DONE]"


async def test_first_piece_is_dressed_as_every_other(house: Any, payloads_of: Any) -> None:
    first, second, *_ = await streamed(house, payloads_of)
    assert set(first) == set(second)
    assert set(choices([first])[0]) == set(choices([second])[0])


async def test_first_piece_comes_from_prefill_before_decode_is_asked(house: Any) -> None:
    gate = house.decode.hold(Part.GET, 0)
    async with house.http.stream("POST", PATH, json=body(stream=True)) as response:
        assert response.headers["x-orchestrator-route"] == "separated"
        pieces = response.aiter_bytes()
        assert b'"text":"The"' in await anext(pieces)
        gate.opened.set()
        assert (b"".join([piece async for piece in pieces])).count(b'"text":"The"') == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("asked", "echoes", "named"),
    [
        ("my-model", True, "my-model"),
        ("my-model", False, "fake"),  # TGI names the served model whatever was asked for
        ("tgi", True, "served/model"),
        (None, True, "served/model"),
        (None, False, "fake"),
    ],
)
async def test_no_answer_names_our_tag(
    house: Any, payloads_of: Any, stream: bool, asked: str | None, echoes: bool, named: str
) -> None:
    house.prefill.echoes_model = house.decode.echoes_model = echoes
    fields: dict[str, Any] = {"stream": stream} | ({} if asked is None else {"model": asked})
    response = await house.http.post(PATH, json=body(**fields))
    answers = payloads_of(response.content)[:-1] if stream else [response.json()]
    assert {answer["model"] for answer in answers} == {named}
    assert b"|kv" not in response.content


async def test_legs_carry_tags_and_the_get_leg_learns_the_first_token_from_wait(house: Any) -> None:
    await house.http.post(PATH, json=body(stream=True, model="my-model", temperature=0))
    [put] = house.prefill.generations(Part.PUT)
    [get] = house.decode.generations(Part.GET)
    handle = house.queue.tickets[0].handle
    assert parse_tag(put.body["model"]) == PutTag(handle, "my-model")
    assert parse_tag(get.body["model"]) == GetTag(handle, "prefill-0", 7, FIRST_ID, "my-model")
    assert (put.body["max_tokens"], get.body["max_tokens"]) == (1, 20)
    assert "seed" not in put.body  # greedy


async def test_sampling_legs_share_a_seed(house: Any) -> None:
    await house.http.post(PATH, json=body())
    put, get = house.prefill.generations() + house.decode.generations()
    assert isinstance(put.body["seed"], int)
    assert put.body["seed"] == get.body["seed"]


async def test_clients_own_seed_stays(house: Any) -> None:
    await house.http.post(PATH, json=body(seed=5))
    assert [leg.body["seed"] for leg in house.prefill.generations() + house.decode.generations()] == [5, 5]


async def test_whole_answer_is_the_decode_shards(house: Any) -> None:
    response = await house.http.post(PATH, json=body())
    answer = response.json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "The capital is Paris.", "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"] == USAGE
    assert response.headers["x-orchestrator-import"] == "hit"
    await house.settled()
    assert house.queue.completed[0].generated_tokens == 5


async def test_stream_that_ends_at_its_first_token_is_the_put_legs(house: Any, payloads_of: Any) -> None:
    house.prefill.tokens = ("Yes",)
    piece, done = await streamed(house, payloads_of)
    assert choices([piece])[0] == {"index": 0, "text": "Yes", "logprobs": None, "finish_reason": "eos_token"}
    assert piece["usage"]["completion_tokens"] == 1
    assert done == "[DONE]"
    assert house.decode.generations() == []
    await house.settled()
    assert house.queue.completed[0].outcome is Outcome.DONE


async def test_whole_answer_that_ends_at_its_first_token(house: Any) -> None:
    house.prefill.tokens = ("Yes",)
    answer = (await house.http.post(PATH, json=body())).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    assert house.decode.generations() == []


async def test_end_that_only_decode_saw_comes_without_the_text_again(house: Any, payloads_of: Any) -> None:
    house.decode.tokens = ("The",)
    first, end, done = await streamed(house, payloads_of)
    assert [choice["text"] for choice in choices([first, end])] == ["The", ""]
    assert (first.get("usage"), end["usage"]["completion_tokens"]) == (None, 1)
    assert choices([end])[0]["finish_reason"] == "eos_token"
    assert done == "[DONE]"


async def test_length_is_a_reason_only_where_the_client_set_it(house: Any, payloads_of: Any) -> None:
    *pieces, _ = await streamed(house, payloads_of, max_tokens=3)
    assert [choice["finish_reason"] for choice in choices(pieces)] == ["", "", "length"]


async def test_character_split_over_the_boundary_comes_out_whole_and_once(
    house: Any, payloads_of: Any
) -> None:
    house.prefill.tokens = house.decode.tokens = ("", "", "🦊", " runs")
    *pieces, _ = await streamed(house, payloads_of)
    assert [choice["text"] for choice in choices(pieces)] == ["", "", "🦊", " runs"]
    whole = (await house.http.post(PATH, json=body())).json()
    assert whole["choices"][0]["text"] == "🦊 runs"


async def test_stop_string_over_the_boundary_reaches_both_legs(house: Any) -> None:
    await house.http.post(PATH, json=body(stop=["e c"]))
    legs = house.prefill.generations() + house.decode.generations()
    assert [leg.body["stop"] for leg in legs] == [["e c"], ["e c"]]


async def test_several_prompts_are_one_plain_request(house: Any) -> None:
    asked = body(prompt=["one", "two", "three"])
    response = await house.http.post(PATH, json=asked)
    assert response.headers["x-orchestrator-route"] == "mixed"
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1, 2]
    assert response.json()["usage"] == {"prompt_tokens": 27, "completion_tokens": 15, "total_tokens": 42}
    assert [seen.body for seen in house.decode.generations()] == [asked]
    assert house.prefill.generations() == []


async def test_stream_of_several_prompts_ends_when_each_has_ended(house: Any, payloads_of: Any) -> None:
    *pieces, done = await streamed(house, payloads_of, prompt=["one", "two"])
    ended = [choice["index"] for choice in choices(pieces) if choice["finish_reason"]]
    assert ended == [0, 1]
    for prompt in (0, 1):
        assert [choice["text"] for choice in choices(pieces) if choice["index"] == prompt] == WORDS
    assert done == "[DONE]"


async def test_stream_of_several_prompts_that_stops_before_the_last_is_an_error(
    house: Any, payloads_of: Any
) -> None:
    house.decode.fail(Part.PLAIN, 4, Fault.STOP)
    *_, error, done = await streamed(house, payloads_of, prompt=["one", "two"])
    assert done == "[DONE]"
    assert error["error"]["http_status_code"] == 502


async def test_one_prompt_in_a_list_is_split(house: Any) -> None:
    response = await house.http.post(PATH, json=body(prompt=["one"]))
    assert response.headers["x-orchestrator-route"] == "separated"


async def test_error_inside_a_stream_has_the_shape_of_the_openai_routes(house: Any, payloads_of: Any) -> None:
    house.decode.fail(Part.GET, 2, Fault.ERROR_EVENT)
    *_, error, _ = await streamed(house, payloads_of)
    assert set(error["error"]) == {"message", "http_status_code"}
    assert "out of memory" in error["error"]["message"]


async def test_shard_that_is_gone_is_an_error_event(house: Any, payloads_of: Any) -> None:
    house.decode.fail(Part.GET, 3, Fault.DIE)
    *pieces, error, _ = await streamed(house, payloads_of)
    assert [choice["text"] for choice in choices(pieces)] == WORDS[:3]
    assert error["error"]["http_status_code"] == 502


REFUSED = [
    ({"suffix": "end"}, "suffix not supported", "Suffix is not supported"),
    ({"prompt": []}, "validation", "Failed to deserialize the JSON body into the target type: prompt: Empty"),
    ({"prompt": 5}, "validation", "Failed to deserialize the JSON body into the target type: prompt"),
    ({"prompt": [1, 2]}, "validation", "Failed to deserialize the JSON body into the target type: prompt"),
    ({"prompt": ""}, "validation", "Input validation error: `inputs` cannot be empty"),
    ({"prompt": ["a", ""]}, "validation", "Input validation error: `inputs` cannot be empty"),
    ({"max_tokens": 0}, "validation", "Input validation error: `max_new_tokens` must be strictly positive"),
    ({"temperature": -1.0}, "validation", "Input validation error: `temperature` must be strictly"),
    ({"model": "a|kv1:put:0"}, "validation", "Input validation error: `model` must not contain `|kv`"),
]


@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_refused_before_a_shard_is_asked(house: Any, stream: bool) -> None:
    for fields, error_type, sentence in REFUSED:
        response = await house.http.post(PATH, json=body(stream=stream, **fields))
        assert response.status_code == 422
        assert response.json()["error_type"] == error_type
        assert response.json()["error"].startswith(sentence)
    assert house.queue.tickets == []
    assert house.prefill.seen + house.decode.seen == []


async def test_what_tgi_ignores_is_ignored_and_still_split(house: Any) -> None:
    ignored = {"n": 3, "best_of": 2, "echo": True, "logprobs": 5, "logit_bias": {"1": 2}, "user": "u"}
    response = await house.http.post(PATH, json=body(**ignored))
    assert response.headers["x-orchestrator-route"] == "separated"
    assert len(response.json()["choices"]) == 1
    assert response.json()["choices"][0]["logprobs"] is None
    assert ignored.items() <= house.decode.generations()[0].body.items()


async def test_nulls_are_absent_fields(house: Any) -> None:
    nulls = dict.fromkeys(["model", "max_tokens", "temperature", "top_p", "seed", "suffix", "stop"])
    response = await house.http.post(PATH, json=body(**nulls))
    assert response.status_code == 200
    assert response.headers["x-orchestrator-route"] == "separated"
