"""Wire shapes: what is read, what is written, byte by byte where clients look."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from orchestrator.api import schemas
from orchestrator.api.schemas import ChatRequest, GenerateBody, parse_body, parse_json
from orchestrator.core.validation import GenerateParameters
from orchestrator.errors import InvalidRequest

TOKEN = schemas.Token(id=1, text="é", logprob=-0.5, special=False)


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
        schemas.StreamEvent(index=1, token=TOKEN).to_json()
        == (
            '{"index":1,"token":{"id":1,"text":"é","logprob":-0.5,"special":false},'
            '"generated_text":null,"details":null}'
        ).encode()
    )


def test_top_tokens_are_written_only_when_there_are_some() -> None:
    event = orjson.loads(schemas.StreamEvent(index=1, token=TOKEN, top_tokens=[TOKEN]).to_json())
    assert event["top_tokens"][0]["id"] == 1


def test_generate_response_leaves_details_out() -> None:
    assert schemas.GenerateResponse(generated_text="").to_json() == b'{"generated_text":""}'
    details = schemas.Details(finish_reason="length", generated_tokens=1, tokens=[TOKEN])
    written = orjson.loads(schemas.GenerateResponse(generated_text="é", details=details).to_json())
    assert list(written["details"]) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens"]


def test_chat_chunk_has_the_keys_that_clients_look_for() -> None:
    choice = schemas.ChatChunkChoice(delta=schemas.ChatMessage(content="a"))
    chunk = schemas.ChatChunk(created=1, model="m", system_fingerprint="f", choices=[choice])
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
    written = schemas.ChatLogprobs.of([TOKEN, TOKEN], [[TOKEN]])
    assert [len(entry.top_logprobs) for entry in written.content] == [1, 0]


@pytest.mark.parametrize(
    ("reason", "name"), [("eos_token", "stop"), ("length", "length"), ("stop_sequence", "stop_sequence")]
)
def test_finish_reasons_of_the_chat_route(reason: Any, name: str) -> None:
    assert schemas.openai_reason(reason) == name


def test_json_that_is_nested_too_deeply_to_be_written_again_is_refused() -> None:
    deep = b'{"inputs":"a","x":' + b"[" * 300 + b"]" * 300 + b"}"
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        parse_json(deep)
    assert parse_json(b'{"inputs":"a","x":' + b"[" * 100 + b"]" * 100 + b"}")["inputs"] == "a"
