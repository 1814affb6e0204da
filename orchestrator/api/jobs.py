"""From a request body to a job, one function per route that generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.api.incoming import Caller, refuse_tags
from orchestrator.api.schemas import ChatRequest, CompletionRequest, GenerateBody, parse_body, wrong_type
from orchestrator.core.estimate import size_of_chat, size_of_text
from orchestrator.core.redress import Dialect, may_split
from orchestrator.core.validation import GenerateParameters
from orchestrator.errors import InvalidRequest
from orchestrator.run import Job


class ToolError(InvalidRequest):
    error_type = "tool_error"


class SuffixNotSupported(InvalidRequest):
    error_type = "suffix not supported"


_NO_SUFFIX = "Suffix is not supported and can be achieved by preprocessing the prompt."


JobOf = Callable[[bytes, Caller], Job]
"""Raises InvalidRequest for a body that is no request of the route."""


def generate(body: bytes, caller: Caller) -> Job:
    """`POST /generate`"""
    parsed, raw = parsed_generate(body)
    return _of_tgi(parsed.inputs, parsed.parameters.to_core(), raw, caller, stream=False)


def generate_stream(body: bytes, caller: Caller) -> Job:
    """`POST /generate_stream`"""
    parsed, raw = parsed_generate(body)
    return _of_tgi(parsed.inputs, parsed.parameters.to_core(), raw, caller, stream=True)


def compatible(body: bytes, caller: Caller) -> Job:
    """`POST /`: answers with the prompt in front unless told otherwise (server.rs, compat_generate)."""
    parsed, raw = parsed_generate(body)
    changes: dict[str, Any] = {}
    if parsed.parameters.return_full_text is None:
        changes = {"return_full_text": True}
        raw["parameters"] = raw.get("parameters", {"do_sample": True}) | changes
    parameters = parsed.parameters.to_core(**changes)
    return _of_tgi(parsed.inputs, parameters, raw, caller, stream=parsed.stream, array=not parsed.stream)


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


def completions(body: bytes, caller: Caller) -> Job:
    """`POST /v1/completions`: of several prompts the longest stands for each (size, length, count)."""
    parsed, raw = parse_body(CompletionRequest, body)
    refuse_tags(Dialect.COMPLETION, raw)
    if parsed.suffix is not None:
        raise SuffixNotSupported(_NO_SUFFIX)
    prompts = parsed.prompts()
    parameters = parsed.to_parameters()
    sizes = [size_of_text(prompt) for prompt in prompts]
    size = max(sizes, key=lambda each: each.upper_bound)
    return Job(
        route="completions_stream" if parsed.stream else "completions",
        path="/v1/completions",
        dialect=Dialect.COMPLETION,
        stream=parsed.stream,
        raw=raw,
        parameters=parameters,
        size=size,
        splittable=may_split(parameters, choices=len(prompts), tools=False, images=False),
        inputs=prompts[sizes.index(size)] if all(prompts) else "",
        model=parsed.model,
        choices=len(prompts),
        **of_caller(caller),
    )


GENERATIONS: Mapping[str, JobOf] = {
    "/": compatible,
    "/generate": generate,
    "/generate_stream": generate_stream,
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
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
    if "max_tokens" in raw and "max_completion_tokens" in raw:
        raise wrong_type("duplicate field `max_tokens`")  # two names of one field
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
        "choice": caller.choice,
        "charge": caller.charge,
    }


def _of_tgi(
    inputs: str,
    parameters: GenerateParameters,
    raw: dict[str, Any],
    caller: Caller,
    *,
    stream: bool,
    array: bool = False,
) -> Job:
    return Job(
        route="generate_stream" if stream else "generate",
        path="/generate_stream" if stream else "/generate",
        dialect=Dialect.TGI,
        stream=stream,
        raw=raw,
        parameters=parameters,
        size=size_of_text(inputs),
        splittable=may_split(parameters, tools=False, images=False),
        inputs=inputs,
        array=array,
        **of_caller(caller),
    )
