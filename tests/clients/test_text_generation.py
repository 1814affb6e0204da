"""TGI's own client, 0.7: one conversation in an interpreter of its own, read step by step."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
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
    PROMPT,
    TOKENS,
    TOO_LARGE,
    TOOL,
    check_call,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).with_name("converse.py")
LIMIT_S = 120
Heard = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def heard(deployment: Deployment, text_generation_python: Path) -> Heard:
    """What became of every step of the conversation."""
    said = {
        "prompt": PROMPT,
        "messages": MESSAGES,
        "tokens": TOKENS,
        "tool": TOOL,
        "call_tokens": CALL_TOKENS,
        "too_large": TOO_LARGE,
        "digits": DIGITS,
        "digits_said": LONG,
        "hurry": HURRY,
    }
    line = [deployment.url, deployment.key, deployment.limited("text_generation"), json.dumps(said)]
    done = subprocess.run(
        [str(text_generation_python), "-I", str(SCRIPT), *line],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    read: Heard = json.loads(done.stdout)
    return read


def test_generate_and_its_stream_say_what_curl_gets(heard: Heard, ask: Curl) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS, "details": True}}
    expected = ask("/generate", body).json()
    answer, events = heard["generate"]["value"], heard["stream"]["items"]
    assert answer["generated_text"] == expected["generated_text"]
    assert (answer["details"]["finish_reason"], answer["details"]["generated_tokens"]) == ("length", TOKENS)
    assert answer["details"]["tokens"] == expected["details"]["tokens"]
    assert [event["token"] for event in events] == expected["details"]["tokens"]
    assert events[-1]["generated_text"] == expected["generated_text"]
    assert events[-1]["details"]["finish_reason"] == "length"
    assert "error" not in heard["stream"]


def test_a_chat_says_what_curl_gets(heard: Heard, ask: Curl, deployment: Deployment) -> None:
    body = {"messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}
    expected = ask("/v1/chat/completions", body).json()
    answer = heard["chat"]["value"]
    assert answer["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == expected["usage"]
    # It asks for `tgi`, which TGI answers with the model that it serves.
    assert answer["model"] == deployment.model


def test_a_chat_stream_is_what_this_client_cannot_read_of_tgi_either(heard: Heard) -> None:
    """It wants `delta.tool_calls` in every chunk, which TGI v3 leaves out, and fails over its own error."""
    assert heard["chat_stream"] == {
        "items": [],
        "error": "builtins.AttributeError",
        "says": "'Response' object has no attribute 'status'",
    }


def test_a_tool_is_called(heard: Heard) -> None:
    (call,) = heard["tool"]["value"]["choices"][0]["message"]["tool_calls"]
    check_call(call["function"]["name"], call["function"]["arguments"])


def test_a_grammar_is_kept(heard: Heard) -> None:
    text = heard["grammar"]["value"]["generated_text"]
    assert len(text) == 5
    assert text.isdecimal()


@pytest.mark.parametrize(
    ("step", "error", "says"),
    [
        ("no_key", "UnknownError", "A key is needed"),
        ("wrong_key", "UnknownError", "not known"),
        ("no_route", "NotFoundError", "Not Found"),
        ("too_large", "ValidationError", "larger than 20000 bytes"),
        ("bad_parameter", "ValidationError", "`max_new_tokens`"),
        ("bad_stream", "ValidationError", "`max_new_tokens`"),
        ("bad_chat", "ValidationError", "`top_p`"),
        ("limited_second", "OverloadedError", "1 times a minute"),
        ("limited_stream", "OverloadedError", "1 times a minute"),
        ("error_in_stream", "GenerationError", LATE),
    ],
)
def test_errors_are_the_clients_own(heard: Heard, step: str, error: str, says: str) -> None:
    assert heard[step]["error"] == f"text_generation.errors.{error}"
    assert says in heard[step]["says"]


def test_the_pieces_before_an_error_arrive(heard: Heard) -> None:
    assert 0 < len(heard["error_in_stream"]["items"]) < LONG
    assert heard["limited_first"]["value"]["details"]["generated_tokens"] == 1
