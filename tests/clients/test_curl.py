"""curl: the bytes themselves."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Deployment
from .curl import Curl
from .said import (
    CALL_TOKENS,
    DIGITS,
    HURRY,
    LATE,
    LONG,
    MESSAGES,
    MODEL,
    PROMPT,
    TOKENS,
    TOO_LARGE,
    TOOL,
    check_call,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

GENERATE: dict[str, Any] = {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS, "details": True}}
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}
COMPLETE: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
CALL = CHAT | {"tools": [TOOL], "tool_choice": "required", "max_tokens": CALL_TOKENS}


def test_generate_stream_and_root_say_the_same(ask: Curl) -> None:
    whole = ask("/generate", GENERATE)
    assert whole.status == 200
    assert whole.headers["x-orchestrator-route"] == "separated"
    text, details = whole.json()["generated_text"], whole.json()["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", TOKENS)
    assert "".join(token["text"] for token in details["tokens"]) == text

    stream = ask("/generate_stream", GENERATE)
    events = stream.events()
    assert stream.headers["content-type"] == "text/event-stream"
    assert [event["index"] for event in events] == list(range(1, TOKENS + 1))
    assert [event["token"] for event in events] == details["tokens"]
    assert [event["generated_text"] for event in events] == [None] * (TOKENS - 1) + [text]
    assert events[-1]["details"]["generated_tokens"] == TOKENS
    assert "[DONE]" not in stream.body

    assert ask("/", GENERATE).json()[0]["generated_text"] == PROMPT + text
    counted = ask("/tokenize", {"inputs": PROMPT}).json()
    assert events[-1]["details"]["input_length"] == len(counted)
    assert whole.headers["x-prompt-tokens"] == str(len(counted))


def test_chat_and_its_stream_say_the_same(ask: Curl) -> None:
    whole = ask("/v1/chat/completions", CHAT).json()
    choice, usage = whole["choices"][0], whole["usage"]
    assert (whole["model"], whole["object"], choice["finish_reason"]) == (MODEL, "chat.completion", "length")
    assert usage["completion_tokens"] == TOKENS
    assert usage["total_tokens"] == usage["prompt_tokens"] + TOKENS

    stream = ask("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}})
    *chunks, last = stream.events()
    assert stream.body.endswith("data: [DONE]\n\n")
    assert {chunk["model"] for chunk in [*chunks, last]} == {MODEL}
    said = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert (len(said), "".join(said)) == (TOKENS, choice["message"]["content"])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (TOKENS - 1) + ["length"]
    assert (last["choices"], last["usage"]) == ([], usage)


def test_completions_and_their_stream_say_what_generate_says(ask: Curl) -> None:
    text = ask("/generate", GENERATE).json()["generated_text"]
    whole = ask("/v1/completions", COMPLETE).json()
    assert (whole["object"], whole["choices"][0]["text"]) == ("text_completion", text)
    assert whole["choices"][0]["finish_reason"] == "length"
    stream = ask("/v1/completions", COMPLETE | {"stream": True})
    events = stream.events()
    assert stream.lines()[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == TOKENS


def test_it_says_what_it_serves(ask: Curl, deployment: Deployment) -> None:
    models = ask("/v1/models").json()
    assert [model["id"] for model in models["data"]] == [deployment.model]
    assert ask("/info").json()["model_id"] == deployment.model
    assert ask("/health", key="").status == 200


def test_a_tool_is_called_with_arguments_that_its_schema_allows(ask: Curl) -> None:
    choice = ask("/v1/chat/completions", CALL).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    check_call(call["function"]["name"], call["function"]["arguments"])
    assert "content" not in choice["message"]
    assert choice["finish_reason"] == "stop"

    events = ask("/v1/chat/completions", CALL | {"stream": True}).events()
    deltas = [event["choices"][0]["delta"] for event in events]
    pieces = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    check_call(pieces[0]["name"], "".join(piece["arguments"] for piece in pieces))
    assert {piece["name"] for piece in pieces[1:]} == {None}


def test_a_grammar_is_kept(ask: Curl) -> None:
    parameters = {"max_new_tokens": 20, "grammar": {"type": "regex", "value": "[0-9]{5}"}}
    text = ask("/generate", {"inputs": PROMPT, "parameters": parameters}).json()["generated_text"]
    assert len(text) == 5
    assert text.isdecimal()


@pytest.mark.parametrize("path", ["/", "/generate_stream", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("key", ["", "nobody-has-this-key"])
def test_without_a_known_key_it_is_401(ask: Curl, path: str, key: str) -> None:
    got = ask(path, GENERATE, key=key)
    assert (got.status, got.json()["error_type"]) == (401, "unauthorized")
    assert got.headers["www-authenticate"] == "Bearer"
    assert key not in got.body or not key


@pytest.mark.parametrize(
    ("path", "body", "status", "error_type", "says"),
    [
        ("/nowhere", GENERATE, 404, "not_found", "Not Found"),
        ("/generate", {"inputs": TOO_LARGE}, 413, "validation", "larger than 20000 bytes"),
        ("/v1/completions", COMPLETE | {"prompt": TOO_LARGE}, 413, "validation", "larger than 20000 bytes"),
        ("/generate_stream", {"inputs": ""}, 422, "validation", "`inputs`"),
        ("/generate", GENERATE | {"parameters": {"temperature": -1}}, 422, "validation", "`temperature`"),
        ("/v1/chat/completions", CHAT | {"top_p": 2.0}, 422, "validation", "`top_p`"),
        ("/v1/chat/completions", CHAT | {"messages": 3}, 422, "validation", "messages"),
    ],
)
def test_what_cannot_be_served_is_refused_in_tgis_shape(
    ask: Curl, path: str, body: Any, status: int, error_type: str, says: str
) -> None:
    got = ask(path, body)
    assert (got.status, got.json()["error_type"]) == (status, error_type)
    assert got.json().keys() == {"error", "error_type"}
    assert says in got.json()["error"]


def test_the_second_request_of_a_minute_is_429(ask: Curl, deployment: Deployment) -> None:
    key = deployment.limited("curl")
    assert ask("/generate", GENERATE, key=key).status == 200
    got = ask("/v1/chat/completions", CHAT | {"stream": True}, key=key)
    assert (got.status, got.json()["error_type"]) == (429, "overloaded")
    assert 1 <= int(got.headers["retry-after"]) <= 65
    assert ask("/generate", GENERATE).status == 200


def test_an_error_within_a_stream_is_its_last_event(ask: Curl) -> None:
    parameters = {"max_new_tokens": LONG, "grammar": DIGITS}
    got = ask("/generate_stream", {"inputs": "x", "parameters": parameters}, headers=HURRY)
    *tokens, error = got.events()
    assert got.status == 200
    assert 0 < len(tokens) < LONG
    assert error == {"error": LATE, "error_type": "generation"}
