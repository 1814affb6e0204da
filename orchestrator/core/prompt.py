"""What of a request's body becomes its prompt: the parts of its identity, and its words.  Pure.

A field that is not known to leave the prompt alone is a part of the identity: where that is too careful it
costs a prefill.  Where it is not careful enough, the shards find other token ids in the record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

import orjson

from orchestrator.core.fingerprint import identity
from orchestrator.core.redress import Dialect, Json, adapter
from orchestrator.core.validation import GenerateParameters

PREFIX_CHARS = 1024
"""Some 250 tokens: less is computed anew in no time."""

_GENERATE = frozenset({"inputs", "parameters", "stream"})
_PARAMETERS = frozenset(field.name for field in fields(GenerateParameters)) - {"truncate"}
"""Of TGI's parameters only `truncate` changes the prompt; the adapter stands beside it."""
_OPENAI = frozenset(
    {
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "metadata",
        "model",
        "n",
        "presence_penalty",
        "response_format",
        "seed",
        "service_tier",
        "stop",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "top_logprobs",
        "top_p",
        "user",
    }
)
_COMPLETION = _OPENAI | {"prompt", "repetition_penalty"}


def parts(dialect: Dialect, raw: Json) -> Iterator[bytes]:
    """Of the body of a request with one prompt: equal for two only where a shard makes the same tokens of
    both, under the same adapter.  TGI's own routes and the completions take the same raw text."""
    yield adapter(dialect, raw).encode()
    yield b"chat" if dialect is Dialect.CHAT else b"text"
    if dialect is not Dialect.CHAT:
        yield text(dialect, raw).encode()
    if dialect is Dialect.TGI:
        yield from _others(raw.get("parameters") or {}, _PARAMETERS)
        yield from _others(raw, _GENERATE)
    else:
        yield from _others(raw, _OPENAI if dialect is Dialect.CHAT else _COMPLETION)


def text(dialect: Dialect, raw: Json) -> str:
    """The words that a prompt is made of, without what a chat template adds."""
    if dialect is Dialect.TGI:
        return str(raw["inputs"])
    if dialect is Dialect.CHAT:
        return "\n".join(_said(message) for message in raw["messages"])
    prompt = raw["prompt"]
    return str(prompt if isinstance(prompt, str) else prompt[0])


def prefix(dialect: Dialect, raw: Json, words: str) -> int:
    """64 bits, equal for prompts under one adapter whose `words` begin alike; 0 for short ones."""
    if len(words) < PREFIX_CHARS:
        return 0
    return int(identity((adapter(dialect, raw).encode(), words[:PREFIX_CHARS].encode()))[:16], 16)


def _others(body: Mapping[str, Any], known: Collection[str]) -> Iterator[bytes]:
    """Names and values of what is not known, in any order of the names; null is as good as absent."""
    for name in sorted(body.keys() - known):
        if body[name] is not None:
            yield name.encode()
            # As they came: a template may write an object down in the order of its keys.
            yield orjson.dumps(body[name])


def _said(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(chunk.get("text") or "") for chunk in content)
    return str(content or "")
