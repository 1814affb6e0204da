"""A conversation of `text-generation`'s client, run by an interpreter that has it; prints JSON.

python converse.py URL KEY LIMITED_KEY SAID, where SAID is the JSON of what to say.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

from text_generation import Client
from text_generation.types import Grammar, Message, Tool

# The client's own: it reads `.dict()` of pydantic 2's models.
warnings.simplefilter("ignore", DeprecationWarning)

TIMEOUT_S = 60
"""The client's own limit is 10 s, also between two events."""


def client_of(url: str, key: str, **headers: str) -> Client:
    named = {"authorization": f"Bearer {key}"} if key else {}
    return Client(url, headers=named | headers, timeout=TIMEOUT_S)


def told(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def outcome(ask: Callable[[], Any]) -> dict[str, Any]:
    """What came back, a stream's items up to its end or its error, and the error."""
    items: list[Any] = []
    try:
        answer = ask()
        if not hasattr(answer, "__next__"):
            return {"value": told(answer)}
        items.extend(map(told, answer))
    except Exception as error:  # noqa: BLE001 - whichever it is, the test wants to know
        kind = f"{type(error).__module__}.{type(error).__name__}"
        return {"items": items, "error": kind, "says": str(error)}
    return {"items": items}


def steps(url: str, key: str, limited_key: str, said: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    client, prompt, tokens = client_of(url, key), said["prompt"], said["tokens"]
    limited = client_of(url, limited_key)
    messages = [Message(**message) for message in said["messages"]]
    tool = Tool(**said["tool"])
    grammar = Grammar(type="regex", value="[0-9]{5}")
    digits = Grammar(**said["digits"])
    hurried = client_of(url, key, **said["hurry"])
    chat = {"messages": messages, "max_tokens": tokens, "temperature": 0.0}
    return {
        "generate": lambda: client.generate(prompt, max_new_tokens=tokens),
        "stream": lambda: client.generate_stream(prompt, max_new_tokens=tokens),
        "chat": lambda: client.chat(**chat),
        "chat_stream": lambda: client.chat(**chat, stream=True),
        "tool": lambda: client.chat(
            messages, max_tokens=said["call_tokens"], temperature=0.0, tools=[tool], tool_choice="required"
        ),
        "grammar": lambda: client.generate(prompt, max_new_tokens=20, grammar=grammar),
        "no_key": lambda: client_of(url, "").generate(prompt),
        "wrong_key": lambda: client_of(url, "nobody-has-this-key").generate_stream(prompt),
        "no_route": lambda: client_of(f"{url}/nowhere", key).generate(prompt),
        "too_large": lambda: client.generate(said["too_large"]),
        "bad_parameter": lambda: client.generate(prompt, max_new_tokens=1_000_000),
        "bad_stream": lambda: client.generate_stream(prompt, max_new_tokens=1_000_000),
        "bad_chat": lambda: client.chat(messages, top_p=2.0),
        "limited_first": lambda: limited.generate(prompt, max_new_tokens=1),
        "limited_second": lambda: limited.generate(prompt, max_new_tokens=1),
        "limited_stream": lambda: limited.generate_stream(prompt, max_new_tokens=1),
        "error_in_stream": lambda: hurried.generate_stream(
            "x", max_new_tokens=said["digits_said"], grammar=digits
        ),
    }


def main() -> None:
    url, key, limited_key, said = sys.argv[1:]
    conversation = steps(url, key, limited_key, json.loads(said))
    json.dump({name: outcome(ask) for name, ask in conversation.items()}, sys.stdout)


main()
