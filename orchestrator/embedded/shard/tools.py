"""Function calls as TGI's router makes them of a grammar (`infer/tool_grammar.rs`, `chat.rs` of v3.3.7).

The model writes {"function": {"_name": NAME, ...arguments}}; NAME `no_tool` means that it would
rather talk, and the chat is asked again without tools.  Pure.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.api.schemas import Grammar, Message, Tool, ToolFunction
from orchestrator.errors import InvalidRequest

NO_TOOL = "no_tool"
_TALK = Tool(
    type="function",
    function=ToolFunction(
        name=NO_TOOL,
        description="Open ended response with no specific tool selected",
        arguments={"type": "object"},
    ),
)
_OPENING = re.compile(r'\s*\{\s*"function"\s*:\s*\{\s*"_name"\s*:\s*("(?:[^"\\]|\\.)*")\s*(?:,|(?=\}))')


class ToolError(InvalidRequest):
    """Tools that cannot be called, or a text that is no call of one."""

    error_type = "tool_error"

    def __init__(self, why: str) -> None:
        super().__init__(f"Tool error: {why}")


# --- what the model may write -------------------------------------------------------------------


def offered(tools: Sequence[Tool], choice: Any) -> list[Tool]:
    """The tools that the model may choose from, `no_tool` among them where it may talk.

    `choice` is the body's `tool_choice`; empty: answer without tools.
    """
    match choice:
        case None | "auto":
            return [*tools, _TALK]
        case "none":
            return []
        case "required":
            return list(tools)
        case str(name) | {"type": "function", "function": {"name": str(name)}}:
            return [_named(tools, name)]
    raise InvalidRequest(
        "Failed to deserialize the JSON body into the target type: tool_choice: "
        "data did not match any variant of untagged enum ToolTypeDeserializer"
    )


def grammar_of(tools: Sequence[Tool]) -> Grammar:
    """The grammar of a call to one of `tools`.

    TGI leaves out that a call is required, and so allows `{}`, which it cannot read; we do not.
    """
    schema = {
        "$functions": {tool.function.name: _schema(tool) for tool in tools},
        "properties": {"function": {"anyOf": [{"$ref": f"#/$functions/{t.function.name}"} for t in tools]}},
        "required": ["function"],
    }
    return Grammar(type="json", value=schema)


def _named(tools: Sequence[Tool], name: str) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    raise ToolError(f"Tool with name {name} not found")


def _schema(tool: Tool) -> dict[str, Any]:
    function = tool.function
    given = function.arguments if isinstance(function.arguments, dict) else {}
    properties, required = given.get("properties"), given.get("required")
    return {
        "description": function.description or "",
        "additionalProperties": given.get("additionalProperties") == "true",
        "properties": {
            "_name": {"type": "string", "const": function.name},
            **(properties if isinstance(properties, dict) else {}),
        },
        "required": ["_name", *(required if isinstance(required, list) else [])],
    }


# --- what it wrote ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str
    """JSON, without spaces."""


def parse_call(text: str) -> Call:
    """Raises ToolError for a text that was cut off, or is no call."""
    try:
        function = json.loads(text)["function"]
        name = function.pop("_name")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"missing field `{error.args[0]}`" if isinstance(error, KeyError) else str(error)
        raise ToolError(f"Failed to parse generated text: {why} {json.dumps(text)}") from None
    return Call(str(name), json.dumps(function, separators=(",", ":"), ensure_ascii=False))


def next_id(messages: Sequence[Message]) -> str:
    """One more than the largest number among earlier calls; random where they are not numbered."""
    given = [call.get("id") for message in messages for call in message.tool_calls or []]
    try:
        return str(max((int(number) for number in given), default=-1) + 1)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return str(uuid.uuid4())


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a call's arguments; the first names the function."""

    name: str | None
    arguments: str


class CallStream:
    """Tokens of a call as pieces of its arguments.

        opening --name read--> arguments --last brace--> over

    The name's own tokens yield nothing.  `talks` is set, for good, once the name is `no_tool`.
    TGI drops what a token holds beyond the name; we pass it on.
    """

    def __init__(self) -> None:
        self.talks = False
        self._text = ""
        self._named = False
        self._over = False

    def push(self, text: str) -> Piece | None:
        self._text += text
        if self._over or self.talks:
            return None
        return self._arguments(None, text) if self._named else self._opened()

    def _opened(self) -> Piece | None:
        found = _OPENING.match(self._text)
        if found is None:
            return None
        name = str(json.loads(found[1]))
        if name == NO_TOOL:
            self.talks = True
            return None
        self._named = True
        return self._arguments(name, "{" + self._text[found.end() :])

    def _arguments(self, name: str | None, text: str) -> Piece:
        if _is_json(self._text):
            self._over = True
            text = text.rstrip().removesuffix("}")
        return Piece(name, text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
