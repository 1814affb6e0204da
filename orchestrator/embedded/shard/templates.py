"""A chat's prompt, as TGI's router writes it (`infer/chat_template.rs` of v3.3.7).

Tools are told to the model twice: to the template where it knows them, else as JSON after the last
message; the tool prompt follows in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import orjson
from jinja2 import Environment, TemplateError, meta

from orchestrator.api.schemas import Message, Tool
from orchestrator.errors import InvalidRequest

TOOL_PROMPT = (
    "\nGiven the functions available, please respond with a JSON for a function call with its proper "
    "arguments that best answers the given prompt. Respond in the format {name: function name, "
    "parameters: dictionary of argument name and its value}.Do not use variables.\n"
)


class TemplateRefused(InvalidRequest):
    """The chat template does not take these messages, or there is none."""

    error_type = "template_error"

    def __init__(self, why: str) -> None:
        super().__init__(f"Template error: {why}")


class Templates:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), tool_prompt: str = "") -> str:
        """The text that the model goes on from.  Raises TemplateRefused."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise TemplateRefused("template not found")
        told = [told_tool(tool) for tool in tools]
        turns = [{"role": message.role, "content": content_of(message)} for message in messages]
        if told and messages and messages[-1].content is not None:
            turns[-1]["content"] += self._told(told, tool_prompt or TOOL_PROMPT)
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns, tools=told or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            raise TemplateRefused(str(error)) from error
        return _continued(text, turns)

    def _told(self, tools: list[dict[str, Any]], tool_prompt: str) -> str:
        listed = "" if self._takes_tools else orjson.dumps(tools).decode() + "\n"
        return f"\n---\n{listed}{tool_prompt}"

    @cached_property
    def _takes_tools(self) -> bool:
        """The template reads a variable `tools`."""
        source = self._tokenizer.get_chat_template()
        for mark in ("{% generation %}", "{% endgeneration %}"):
            source = source.replace(mark, "")
        try:
            parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        except TemplateError as error:
            raise TemplateRefused(str(error)) from error
        return "tools" in meta.find_undeclared_variables(parsed)


def told_tool(tool: Tool) -> dict[str, Any]:
    """A tool as TGI writes it: the schema of its arguments as a string."""
    return {"type": tool.type, "function": _function(tool.function.model_dump())}


def content_of(message: Message) -> str:
    """What the template sees as `content`: earlier calls as JSON, their arguments as a string in it."""
    if message.content is not None:
        return message.as_text()
    calls = [
        {"id": call.get("id"), "type": call.get("type"), "function": _function(call.get("function") or {})}
        for call in message.tool_calls or []
    ]
    return orjson.dumps(calls).decode()


def _function(told: dict[str, Any]) -> dict[str, Any]:
    arguments = told.get("arguments", told.get("parameters"))
    return {
        "description": told.get("description"),
        "name": told.get("name"),
        "arguments": orjson.dumps(arguments).decode(),
    }


def _continued(text: str, turns: Sequence[dict[str, str]]) -> str:
    """A chat that ends with the assistant's words is continued, not answered."""
    if not turns or turns[-1]["role"] != "assistant":
        return text
    content = turns[-1]["content"]
    start = text.rfind(content)
    return text if start < 0 else text[: start + len(content)].rstrip()
