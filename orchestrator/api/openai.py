"""The OpenAI routes that TGI has."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from orchestrator.api.gateway import Gateway
from orchestrator.api.incoming import Caller, read_body, refuse_tags
from orchestrator.api.reply import Generation
from orchestrator.api.schemas import ChatRequest, ModelInfo, ModelsInfo, parse_body
from orchestrator.core.estimate import size_of_chat
from orchestrator.core.redress import Dialect, may_split
from orchestrator.errors import InvalidRequest
from orchestrator.run import Job


class ToolError(InvalidRequest):
    error_type = "tool_error"


def routes(gateway: Gateway) -> APIRouter:
    """`/v1/chat/completions`, `/chat_tokenize`, `/v1/models`."""
    router = APIRouter(tags=["OpenAI"])

    async def parsed(request: Request) -> tuple[ChatRequest, dict[str, Any]]:
        body, raw = parse_body(ChatRequest, await read_body(request, gateway.payload_bytes))
        refuse_tags(Dialect.CHAT, raw)
        if body.tools is not None and body.response_format is not None:
            raise ToolError("Tool error: Grammar and tools are mutually exclusive")
        return body, raw

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body, raw = await parsed(request)
        return Generation(gateway.pipeline, job_of(body, raw, Caller.of(request)))

    @router.post("/chat_tokenize")
    async def chat_tokenize(request: Request) -> Response:
        _, raw = await parsed(request)
        caller = Caller.of(request)
        answer = await gateway.admission.ask_any("/chat_tokenize", orjson.dumps(raw), caller.request_id)
        return Response(answer.body, media_type="application/json")

    @router.get("/v1/models")
    async def models() -> Response:
        name = gateway.admission.model_name()
        listed = ModelsInfo(data=[ModelInfo(id=name, owned_by=name)])
        return Response(listed.to_json(), media_type="application/json")

    return router


def job_of(body: ChatRequest, raw: dict[str, Any], caller: Caller) -> Job:
    """The job of a chat whose types are checked."""
    parameters = body.to_parameters()
    return Job(
        route="chat_stream" if body.stream else "chat",
        path="/v1/chat/completions",
        dialect=Dialect.CHAT,
        stream=body.stream,
        raw=raw,
        parameters=parameters,
        size=size_of_chat([message.as_text() for message in body.messages]),
        splittable=may_split(
            parameters, choices=body.n or 1, tools=body.tools is not None, images=body.has_image
        ),
        request_id=caller.request_id,
        model=body.model,
        debug=caller.debug,
    )
