"""The OpenAI routes that TGI has."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request, Response

from orchestrator.api import jobs
from orchestrator.api.gateway import Gateway
from orchestrator.api.incoming import Caller, read_body
from orchestrator.api.reply import Generation
from orchestrator.api.schemas import ModelInfo, ModelsInfo


def routes(gateway: Gateway) -> APIRouter:
    """`/v1/chat/completions`, `/chat_tokenize`, `/v1/models`."""
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, gateway.payload_bytes)
        return Generation(gateway.pipeline, jobs.chat(body, Caller.of(request.headers)))

    @router.post("/chat_tokenize")
    async def chat_tokenize(request: Request) -> Response:
        _, raw = jobs.parsed_chat(await read_body(request, gateway.payload_bytes))
        caller = Caller.of(request.headers)
        answer = await gateway.admission.ask_any("/chat_tokenize", orjson.dumps(raw), caller.request_id)
        return Response(answer.body, media_type="application/json")

    @router.get("/v1/models")
    async def models() -> Response:
        name = gateway.admission.model_name()
        listed = ModelsInfo(data=[ModelInfo(id=name, owned_by=name)])
        return Response(listed.to_json(), media_type="application/json")

    return router
