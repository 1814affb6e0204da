"""Wire shapes: what is read, what is written, byte by byte where clients look."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from orchestrator.api import answers, jobs
from orchestrator.api.incoming import Caller
from orchestrator.api.schemas import ChatRequest, GenerateBody, parse_body, parse_json
from orchestrator.core.validation import GenerateParameters
from orchestrator.errors import InvalidRequest

TOKEN = answers.Token(id=1, text="é", logprob=-0.5, special=False)


def generate(**parameters: Any) -> GenerateParameters:
    body, _ = parse_body(GenerateBody, orjson.dumps({"inputs": "x", "parameters": parameters}))
    return body.to_request().parameters


def test_every_parameter_arrives() -> None:
    given = {
        "best_of": 1,
        "temperature": 1,
        "repetition_penalty": 1.1,
        "frequency_penalty": -0.5,
        "top_k": 3,
        "top_p": 0.5,
        "typical_p": 0.5,
        "do_sample": True,
        "max_new_tokens": 9,
        "return_full_text": True,
        "stop": ["a", "b"],
        "truncate": 7,
        "watermark": True,
        "details": True,
        "decoder_input_details": True,
        "seed": 2**64 - 1,
        "top_n_tokens": 2,
        "adapter_id": "lora",
    }
    assert generate(**given) == GenerateParameters(**given | {"temperature": 1.0, "stop": ("a", "b")})


def test_absent_parameters_sample_and_empty_ones_do_not() -> None:
    body, _ = parse_body(GenerateBody, b'{"inputs":"x"}')
    assert body.to_request().parameters == GenerateParameters(do_sample=True)
    assert generate().do_sample is False


def test_nulls_are_allowed_where_tgi_has_an_option() -> None:
    nulls = dict.fromkeys(
        ["best_of", "temperature", "top_k", "max_new_tokens", "seed", "adapter_id", "grammar"]
    )
    assert generate(**nulls) == GenerateParameters()


def test_raw_body_keeps_unknown_fields_for_the_shard() -> None:
    _, raw = parse_body(GenerateBody, b'{"inputs":"x","later":{"a":1}}')
    assert raw == {"inputs": "x", "later": {"a": 1}}


def test_both_spellings_of_max_tokens() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body, _ = parse_body(ChatRequest, orjson.dumps({"messages": [], name: 5}))
        assert body.to_parameters().max_new_tokens == 5


def test_content_in_parts_becomes_tgis_text() -> None:
    parts = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    body, _ = parse_body(ChatRequest, orjson.dumps({"messages": [{"role": "user", "content": parts}]}))
    assert body.messages[0].as_text() == "see ![](http://x/y.png)"
    assert body.has_image is True


def test_tool_calls_stand_for_content() -> None:
    calls = [{"id": "0", "type": "function", "function": {"name": "f", "arguments": {}}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    body, _ = parse_body(ChatRequest, orjson.dumps({"messages": [message]}))
    assert orjson.loads(body.messages[0].as_text()) == calls
    assert body.has_image is False


def test_deep_nesting_is_refused_not_crashed_on() -> None:
    with pytest.raises(InvalidRequest):
        parse_body(GenerateBody, b'{"inputs":' + b"[" * 100_000)


def test_stream_event_has_tgis_nulls() -> None:
    assert (
        answers.StreamEvent(index=1, token=TOKEN).to_json()
        == (
            '{"index":1,"token":{"id":1,"text":"é","logprob":-0.5,"special":false},'
            '"generated_text":null,"details":null}'
        ).encode()
    )


def test_top_tokens_are_written_only_when_there_are_some() -> None:
    event = orjson.loads(answers.StreamEvent(index=1, token=TOKEN, top_tokens=[TOKEN]).to_json())
    assert event["top_tokens"][0]["id"] == 1


def test_generate_response_leaves_details_out() -> None:
    assert answers.GenerateResponse(generated_text="").to_json() == b'{"generated_text":""}'
    details = answers.Details(finish_reason="length", generated_tokens=1, tokens=[TOKEN])
    written = orjson.loads(answers.GenerateResponse(generated_text="é", details=details).to_json())
    assert list(written["details"]) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens"]


def test_chat_chunk_has_the_keys_that_clients_look_for() -> None:
    choice = answers.ChatChunkChoice(delta=answers.ChatMessage(content="a"))
    chunk = answers.ChatChunk(created=1, model="m", system_fingerprint="f", choices=[choice])
    assert orjson.loads(chunk.to_json()) == {
        "object": "chat.completion.chunk",
        "id": "",
        "created": 1,
        "model": "m",
        "system_fingerprint": "f",
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": "a"},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
        "usage": None,
    }


def test_chat_logprobs_pad_missing_top_lists() -> None:
    written = answers.ChatLogprobs.of([TOKEN, TOKEN], [[TOKEN]])
    assert [len(entry.top_logprobs) for entry in written.content] == [1, 0]


@pytest.mark.parametrize(
    ("reason", "name"), [("eos_token", "stop"), ("length", "length"), ("stop_sequence", "stop_sequence")]
)
def test_finish_reasons_of_the_chat_route(reason: Any, name: str) -> None:
    assert answers.openai_reason(reason) == name


def test_json_that_is_nested_too_deeply_to_be_written_again_is_refused() -> None:
    deep = b'{"inputs":"a","x":' + b"[" * 300 + b"]" * 300 + b"}"
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        parse_json(deep)
    assert parse_json(b'{"inputs":"a","x":' + b"[" * 100 + b"]" * 100 + b"}")["inputs"] == "a"


def test_many_brackets_that_are_not_deep_are_read() -> None:
    body = b'{"inputs":"a","x":[' + b",".join([b"[]"] * 1000) + b"]}"
    assert len(parse_json(body)["x"]) == 1000


@pytest.mark.parametrize("levels", [254, 255])
def test_nesting_is_refused_exactly_where_it_cannot_be_written(levels: int) -> None:
    inner = b"[" * (levels - 1) + b"]" * (levels - 1)
    if levels == 255:
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            parse_json(b'{"x":' + inner + b"}")
    else:
        assert orjson.dumps(parse_json(b'{"x":' + inner + b"}"))


def test_full_text_is_the_default_of_the_root_alone() -> None:
    caller = Caller("r")
    for body, asked in (
        (b'{"inputs":"x"}', {"do_sample": True, "return_full_text": True}),
        (b'{"inputs":"x","parameters":{}}', {"return_full_text": True}),
        (b'{"inputs":"x","parameters":{"return_full_text":null}}', {"return_full_text": True}),
        (b'{"inputs":"x","parameters":{"return_full_text":false}}', {"return_full_text": False}),
    ):
        job = jobs.compatible(body, caller)
        assert job.raw["parameters"] == asked
        assert job.parameters.return_full_text is asked["return_full_text"]
        assert job.parameters.do_sample is asked.get("do_sample", False)
        assert jobs.generate(body, caller).raw == orjson.loads(body)


def test_completion_of_several_prompts_is_sized_by_its_longest() -> None:
    job = jobs.completions(b'{"prompt":["a","a much longer one","b"],"stream":true}', Caller("r"))
    assert (job.inputs, job.choices, job.splittable) == ("a much longer one", 3, False)
    assert job.route == "completions_stream"
    assert jobs.completions(b'{"prompt":["a",""]}', Caller("r")).inputs == ""
    assert jobs.completions(b'{"prompt":"a"}', Caller("r")).splittable is True


def test_only_temperature_zero_makes_a_completion_greedy() -> None:
    greedy = jobs.completions(b'{"prompt":"a","temperature":0}', Caller("r")).parameters
    assert (greedy.do_sample, greedy.temperature) == (False, None)
    assert jobs.completions(b'{"prompt":"a"}', Caller("r")).parameters.do_sample is True


def test_two_names_of_one_field_are_refused_as_serde_does() -> None:
    body = orjson.dumps({"messages": [], "max_tokens": 1, "max_completion_tokens": 1})
    with pytest.raises(InvalidRequest, match="duplicate field `max_tokens`"):
        jobs.chat(body, Caller("r"))


@pytest.mark.parametrize(
    ("grammar", "good"),
    [
        ({"type": "regex", "value": "a+"}, True),
        ({"type": "regex", "value": {}}, False),
        ({"type": "json", "value": {}}, True),
        ({"type": "json_object", "value": "{}"}, True),
        ({"type": "json_schema", "value": {"schema": {}}}, True),
        ({"type": "json_schema", "value": {}}, False),
        ({"type": "json"}, False),
    ],
)
def test_value_of_a_grammar_is_of_its_type(grammar: dict[str, Any], good: bool) -> None:
    if good:
        assert generate(grammar=grammar).grammar is not None
    else:
        with pytest.raises(InvalidRequest):
            generate(grammar=grammar)


@pytest.mark.parametrize(
    ("choice", "good"),
    [
        ("auto", True),
        ("my_function", True),
        (None, True),
        ({"type": "function", "function": {"name": "f"}}, True),
        ({"type": "function"}, False),
        ({"type": "other", "function": {"name": "f"}}, False),
        (5, False),
    ],
)
def test_choices_of_a_tool(choice: Any, good: bool) -> None:
    body = orjson.dumps({"messages": [], "tool_choice": choice})
    if good:
        assert parse_body(ChatRequest, body)[0].tool_choice == choice
    else:
        with pytest.raises(InvalidRequest):
            parse_body(ChatRequest, body)


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "image_url"}, {"type": "audio", "text": "x"}])
def test_part_of_a_message_without_what_its_type_says_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        parse_body(ChatRequest, orjson.dumps({"messages": [{"role": "user", "content": [part]}]}))
