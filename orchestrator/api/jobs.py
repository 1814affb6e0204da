"""From a request body to a job, one function per route that generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from orchestrator.api.incoming import Caller, refuse_tags
from orchestrator.api.schemas import ChatRequest, GenerateBody, parse_body
from orchestrator.core.estimate import size_of_chat, size_of_text
from orchestrator.core.redress import Dialect, may_split
from orchestrator.errors import InvalidRequest
from orchestrator.run import Job


class ToolError(InvalidRequest):
    error_type = "tool_error"


JobOf = Callable[[bytes, Caller], Job]
"""Raises InvalidRequest for a body that is no request of the route."""


def generate(body: bytes, caller: Caller) -> Job:
    """`POST /generate`"""
    return _of_tgi(*parsed_generate(body), caller, stream=False)


def generate_stream(body: bytes, caller: Caller) -> Job:
    """`POST /generate_stream`"""
    return _of_tgi(*parsed_generate(body), caller, stream=True)


def compatible(body: bytes, caller: Caller) -> Job:
    """`POST /`"""
    _, raw = parsed_generate(body)
    parsed, raw = parse_body(GenerateBody, orjson.dumps(_with_full_text(raw)))
    return _of_tgi(parsed, raw, caller, stream=parsed.stream, array=not parsed.stream)


def chat(body: bytes, caller: Caller) -> Job:
    """`POST /v1/chat/completions`"""
    parsed, raw = parsed_chat(body)
    parameters = parsed.to_parameters()
    return Job(
        route="chat_stream" if parsed.stream else "chat",
        path="/v1/chat/completions",
        dialect=Dialect.CHAT,
        stream=parsed.stream,
        raw=raw,
        parameters=parameters,
        size=size_of_chat([message.as_text() for message in parsed.messages]),
        splittable=may_split(
            parameters, choices=parsed.n or 1, tools=parsed.tools is not None, images=parsed.has_image
        ),
        model=parsed.model,
        **of_caller(caller),
    )


GENERATIONS: Mapping[str, JobOf] = {
    "/": compatible,
    "/generate": generate,
    "/generate_stream": generate_stream,
    "/v1/chat/completions": chat,
}
"""By path, what is posted there and answered by a generation."""


def parsed_generate(body: bytes) -> tuple[GenerateBody, dict[str, Any]]:
    """A body of TGI's own routes, checked."""
    parsed, raw = parse_body(GenerateBody, body)
    refuse_tags(Dialect.TGI, raw)
    return parsed, raw


def parsed_chat(body: bytes) -> tuple[ChatRequest, dict[str, Any]]:
    """A chat, checked."""
    parsed, raw = parse_body(ChatRequest, body)
    refuse_tags(Dialect.CHAT, raw)
    if parsed.tools is not None and parsed.response_format is not None:
        raise ToolError("Tool error: Grammar and tools are mutually exclusive")
    return parsed, raw


def of_caller(caller: Caller) -> dict[str, Any]:
    """What a job takes from its caller."""
    return {
        "request_id": caller.request_id,
        "debug": caller.debug,
        "key_name": caller.key_name,
        "priority": caller.priority,
        "timeout_s": caller.timeout_s,
    }


def _of_tgi(
    body: GenerateBody, raw: dict[str, Any], caller: Caller, *, stream: bool, array: bool = False
) -> Job:
    parameters = body.to_request().parameters
    return Job(
        route="generate_stream" if stream else "generate",
        path="/generate_stream" if stream else "/generate",
        dialect=Dialect.TGI,
        stream=stream,
        raw=raw,
        parameters=parameters,
        size=size_of_text(body.inputs),
        splittable=may_split(parameters, tools=False, images=False),
        inputs=body.inputs,
        array=array,
        **of_caller(caller),
    )


def _with_full_text(raw: dict[str, Any]) -> dict[str, Any]:
    """`POST /` answers with the prompt in front unless told otherwise (server.rs, compat_generate)."""
    parameters = dict(raw.get("parameters", {"do_sample": True}))
    if parameters.get("return_full_text") is None:
        parameters["return_full_text"] = True
    return {**raw, "parameters": parameters}
