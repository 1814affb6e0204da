"""`huggingface_hub.InferenceClient` with the gateway's URL for a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import (
    GenerationError,
    HfHubHTTPError,
    OverloadedError,
    TextGenerationError,
    UnknownError,
    ValidationError,
)

from .conftest import Deployment
from .curl import Curl
from .said import (
    CALL_TOKENS,
    DIGITS,
    HURRY,
    LATE,
    LONG,
    MESSAGES,
    PROMPT,
    TOKENS,
    TOO_LARGE,
    TOOL,
    check_call,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

# Without `return_full_text` TGI's root route puts the prompt in front, and this client does not say it.
GREEDY: dict[str, Any] = {"max_new_tokens": TOKENS, "return_full_text": False}
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}
CALL: dict[str, Any] = CHAT | {"max_tokens": CALL_TOKENS, "tools": [TOOL], "tool_choice": "required"}


def client_of(url: str, key: str, headers: dict[str, str] | None = None) -> InferenceClient:
    return InferenceClient(url, api_key=key, timeout=60, headers=headers)


@pytest.fixture(autouse=True)
def no_token_of_this_machines_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a key the client would show the one that is stored for the Hub."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))


@pytest.fixture
def client(deployment: Deployment) -> Iterator[InferenceClient]:
    with client_of(deployment.url, deployment.key) as made:
        yield made


def test_generate_and_its_stream_say_what_curl_gets(client: InferenceClient, ask: Curl) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS, "details": True}}
    expected = ask("/generate", body).json()
    answer = client.text_generation(PROMPT, **GREEDY, details=True)
    assert answer.generated_text == expected["generated_text"]
    assert answer.details is not None
    assert (answer.details.finish_reason, answer.details.generated_tokens) == ("length", TOKENS)
    assert [token.id for token in answer.details.tokens] == [
        token["id"] for token in expected["details"]["tokens"]
    ]
    events = list(client.text_generation(PROMPT, **GREEDY, details=True, stream=True))
    assert "".join(event.token.text for event in events) == expected["generated_text"]
    assert (len(events), events[-1].generated_text) == (TOKENS, expected["generated_text"])
    assert events[-1].details is not None
    assert events[-1].details.finish_reason == "length"


def test_the_prompt_stands_in_front_unless_it_is_told_otherwise(client: InferenceClient) -> None:
    assert client.text_generation(PROMPT, max_new_tokens=2).startswith(PROMPT)
    assert not client.text_generation(PROMPT, **GREEDY).startswith(PROMPT)


def test_a_chat_and_its_stream_say_what_curl_gets(client: InferenceClient, ask: Curl) -> None:
    expected = ask("/v1/chat/completions", CHAT).json()
    answer = client.chat_completion(**CHAT)
    assert answer.choices[0].message.content == expected["choices"][0]["message"]["content"]
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        expected["usage"]["prompt_tokens"],
        TOKENS,
    )
    *chunks, last = client.chat_completion(**CHAT, stream=True, stream_options={"include_usage": True})
    said = [chunk.choices[0].delta.content for chunk in chunks]
    assert (len(said), "".join(said)) == (TOKENS, answer.choices[0].message.content)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.total_tokens) == (
        answer.usage.prompt_tokens,
        answer.usage.prompt_tokens + TOKENS,
    )


def test_a_model_that_is_named_is_named_in_the_answer(deployment: Deployment) -> None:
    with InferenceClient(base_url=deployment.url, api_key=deployment.key, timeout=60) as client:
        assert client.chat_completion(**CHAT, model="my/name").model == "my/name"


def test_a_tool_is_called(client: InferenceClient) -> None:
    answer = client.chat_completion(**CALL)
    (call,) = answer.choices[0].message.tool_calls or []
    check_call(call.function.name, call.function.arguments)
    chunks = list(client.chat_completion(**CALL, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    name = "".join(call.function.name or "" for call in calls)
    check_call(name, "".join(call.function.arguments for call in calls))


def test_a_grammar_is_kept(client: InferenceClient) -> None:
    grammar = {"type": "regex", "value": "[0-9]{5}"}
    text = client.text_generation(PROMPT, max_new_tokens=20, return_full_text=False, grammar=grammar)
    assert len(text) == 5
    assert text.isdecimal()


Asking = Callable[[Deployment], object]
REFUSED: dict[str, tuple[Asking, type[TextGenerationError], str]] = {
    "no key": (
        lambda at: client_of(at.url, "").text_generation(PROMPT),
        UnknownError,
        "A key is needed",
    ),
    "wrong key": (
        lambda at: client_of(at.url, "nobody-has-this-key").text_generation(PROMPT),
        UnknownError,
        "not known",
    ),
    "no such route": (
        lambda at: client_of(f"{at.url}/nowhere", at.key).text_generation(PROMPT),
        UnknownError,
        "Not Found",
    ),
    "too large": (
        lambda at: client_of(at.url, at.key).text_generation(TOO_LARGE),
        ValidationError,
        "larger than 20000 bytes",
    ),
    "bad parameter": (
        lambda at: client_of(at.url, at.key).text_generation(PROMPT, temperature=-1.0),
        ValidationError,
        "`temperature`",
    ),
    "bad parameter of a stream": (
        lambda at: list(client_of(at.url, at.key).text_generation(PROMPT, top_p=2.0, stream=True)),
        ValidationError,
        "`top_p`",
    ),
}
"""Text generation knows TGI's error types, and no others."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_generated_raises(deployment: Deployment, name: str) -> None:
    ask, error, says = REFUSED[name]
    with pytest.raises(error, match=says) as raised:
        ask(deployment)
    assert type(raised.value) is error


REFUSED_CHATS: dict[str, tuple[Asking, int, str]] = {
    "wrong key": (lambda at: client_of(at.url, "nobody").chat_completion(**CHAT), 401, "not known"),
    "no such route": (
        lambda at: client_of(f"{at.url}/nowhere", at.key).chat_completion(**CHAT),
        404,
        "Not Found",
    ),
    "too large": (
        lambda at: client_of(at.url, at.key).chat_completion([{"role": "user", "content": TOO_LARGE}]),
        413,
        "larger than 20000 bytes",
    ),
    "bad parameter": (
        lambda at: client_of(at.url, at.key).chat_completion(MESSAGES, top_p=2.0, stream=True),
        422,
        "`top_p`",
    ),
}


@pytest.mark.parametrize("name", REFUSED_CHATS)
def test_a_chat_that_is_refused_raises_with_its_status(deployment: Deployment, name: str) -> None:
    ask, status, says = REFUSED_CHATS[name]
    with pytest.raises(HfHubHTTPError, match=says) as raised:
        ask(deployment)
    assert raised.value.response.status_code == status


def test_the_second_request_of_a_minute_is_an_overload(deployment: Deployment) -> None:
    with client_of(deployment.url, deployment.limited("huggingface_hub")) as limited:
        limited.text_generation(PROMPT, **GREEDY)
        with pytest.raises(OverloadedError, match="1 times a minute"):
            limited.text_generation(PROMPT, **GREEDY)
        with pytest.raises(HfHubHTTPError) as raised:
            limited.chat_completion(**CHAT)
    assert raised.value.response.status_code == 429
    assert 1 <= int(raised.value.response.headers["retry-after"]) <= 65


def test_an_error_within_a_stream_raises_behind_the_pieces_before_it(deployment: Deployment) -> None:
    said: list[Any] = []
    with client_of(deployment.url, deployment.key, HURRY) as client:
        stream = client.text_generation("x", max_new_tokens=LONG, grammar=DIGITS, stream=True)
        with pytest.raises(GenerationError, match=LATE):
            said.extend(stream)
        assert 0 < len(said) < LONG
        chat = client.chat_completion(MESSAGES, max_tokens=3000, response_format=DIGITS, stream=True)
        with pytest.raises(GenerationError, match=LATE):
            said.extend(chat)
