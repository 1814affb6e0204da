"""OpenAI's own client, as its users configure it for TGI: a base URL with /v1 and a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

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

GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0}
CHAT: dict[str, Any] = GREEDY | {"messages": MESSAGES}
COMPLETE: dict[str, Any] = GREEDY | {"prompt": PROMPT}
CALL: dict[str, Any] = CHAT | {"max_tokens": CALL_TOKENS, "tools": [TOOL]}


@pytest.fixture
def client(deployment: Deployment) -> Iterator[OpenAI]:
    """It would try again by itself after 429 and 5xx: here it must not."""
    with OpenAI(base_url=f"{deployment.url}/v1", api_key=deployment.key, max_retries=0, timeout=60) as made:
        yield made


def test_models_are_listed(client: OpenAI, deployment: Deployment) -> None:
    assert [model.id for model in client.models.list()] == [deployment.model]


def test_a_chat_says_what_curl_gets(client: OpenAI, ask: Curl) -> None:
    answer = client.chat.completions.create(**CHAT)
    expected = ask("/v1/chat/completions", CHAT).json()
    assert answer.model == MODEL
    assert answer.choices[0].message.content == expected["choices"][0]["message"]["content"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.model_dump(exclude_none=True) == expected["usage"]


def test_a_chat_stream_is_the_whole_answer_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    *chunks, last = client.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}
    )
    assert {chunk.model for chunk in chunks} == {MODEL}
    said = [chunk.choices[0].delta.content for chunk in chunks]
    assert (len(said), "".join(said)) == (TOKENS, whole.choices[0].message.content)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (TOKENS - 1) + ["length"]
    assert (last.choices, last.usage) == ([], whole.usage)


def test_completions_and_their_stream_say_what_curl_gets(client: OpenAI, ask: Curl) -> None:
    answer = client.completions.create(**COMPLETE)
    expected = ask("/v1/completions", COMPLETE).json()
    assert answer.choices[0].text == expected["choices"][0]["text"]
    assert answer.choices[0].finish_reason == "length"
    chunks = list(client.completions.create(**COMPLETE, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].usage == answer.usage


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called(client: OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(**CALL, tool_choice=choice)
    assert answer.choices[0].message.tool_calls is not None
    (call,) = answer.choices[0].message.tool_calls
    assert call.type == "function"
    check_call(call.function.name, call.function.arguments)


def test_a_call_of_a_tool_streams(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(**CALL, tool_choice="required", stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    pieces = [call.function for delta in deltas for call in delta.tool_calls or [] if call.function]
    name = "".join(piece.name or "" for piece in pieces)
    check_call(name, "".join(piece.arguments or "" for piece in pieces))
    assert chunks[-1].choices[0].finish_reason == "stop"


Asking = Callable[[OpenAI], object]
REFUSED: dict[str, tuple[Asking, type[openai.APIStatusError], int, str]] = {
    "wrong key": (
        lambda client: client.with_options(api_key="nobody-has-this-key").chat.completions.create(**CHAT),
        openai.AuthenticationError,
        401,
        "unauthorized",
    ),
    "no such route": (
        lambda client: client.embeddings.create(model=MODEL, input="x"),
        openai.NotFoundError,
        404,
        "not_found",
    ),
    "too large": (
        lambda client: client.completions.create(**COMPLETE | {"prompt": TOO_LARGE}),
        openai.APIStatusError,
        413,
        "validation",
    ),
    "bad parameter": (
        lambda client: client.chat.completions.create(**CHAT | {"temperature": -1}),
        openai.UnprocessableEntityError,
        422,
        "validation",
    ),
    "bad parameter of a stream": (
        lambda client: client.chat.completions.create(**CHAT | {"top_p": 2}, stream=True),
        openai.UnprocessableEntityError,
        422,
        "validation",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_raises(client: OpenAI, name: str) -> None:
    ask, error, status, error_type = REFUSED[name]
    with pytest.raises(error) as raised:
        ask(client)
    assert type(raised.value) is error
    assert raised.value.status_code == status
    assert raised.value.response.json()["error_type"] == error_type
    # The client takes what stands below `error` for the body.
    assert raised.value.body == raised.value.response.json()["error"]


def test_the_second_request_of_a_minute_is_a_rate_limit_error(client: OpenAI, deployment: Deployment) -> None:
    limited = client.with_options(api_key=deployment.limited("openai"))
    limited.chat.completions.create(**CHAT)
    with pytest.raises(openai.RateLimitError) as raised:
        limited.chat.completions.create(**CHAT, stream=True)
    assert 1 <= int(raised.value.response.headers["retry-after"]) <= 65


def test_an_error_within_a_stream_raises_behind_the_pieces_before_it(client: OpenAI) -> None:
    body = CHAT | {"max_tokens": LONG, "response_format": DIGITS}
    stream = client.chat.completions.create(**body, stream=True, extra_headers=HURRY)
    said = []
    with pytest.raises(openai.APIError) as raised:
        said.extend(stream)
    assert raised.value.message == LATE
    assert 0 < len(said) < LONG
