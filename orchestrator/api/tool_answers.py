"""TGI's wire format of function calls, beside `answers.py`.

A message holds either `content` or `tool_calls`, as TGI's untagged enums do.
"""

from __future__ import annotations

from typing import Literal

from orchestrator.api.answers import ChatLogprobs, OpenAiAnswer, Outgoing, Usage


class CalledFunction(Outgoing):
    description: None = None
    name: str
    arguments: str
    """JSON in a string."""


class ToolCall(Outgoing):
    id: str = "0"
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolMessage(Outgoing):
    role: Literal["assistant"] = "assistant"
    tool_calls: list[ToolCall]


class ToolChoice(Outgoing):
    index: int = 0
    message: ToolMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ToolCompletion(OpenAiAnswer):
    """A whole answer that calls a function."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ToolChoice]
    usage: Usage


class DeltaFunction(Outgoing):
    """The name comes with the first piece; the arguments are a part of a JSON text."""

    name: str | None
    arguments: str


class DeltaToolCall(Outgoing):
    index: int = 0
    id: str
    type: Literal["function"] = "function"
    function: DeltaFunction


class ToolDelta(Outgoing):
    role: Literal["assistant"] = "assistant"
    tool_calls: list[DeltaToolCall]


class ToolChunkChoice(Outgoing):
    index: int = 0
    delta: ToolDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ToolChunk(OpenAiAnswer):
    """A piece of a call in a chat's stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ToolChunkChoice]
    usage: Usage | None = None
