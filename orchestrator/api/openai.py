"""The OpenAI routes that TGI has."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request, Response

from orchestrator.api import answers, document, jobs
from orchestrator.api.document import EVENTS, JSON
from orchestrator.api.gateway import Gateway
from orchestrator.api.incoming import Caller, read_body
from orchestrator.api.schemas import ChatRequest, CompletionRequest
from orchestrator.api.tgi import COUNTING_ERRORS, answered_in_front
from orchestrator.api.tool_answers import ToolChunk, ToolCompletion

_CHAT = {
    JSON: document.any_of(answers.ChatCompletion, ToolCompletion),
    EVENTS: document.events(answers.ChatChunk, ToolChunk, answers.OpenAIErrorEvent, done=True),
}
_COMPLETIONS = {
    JSON: document.of(answers.Completion),
    EVENTS: document.events(answers.Completion, answers.CompletionChunk, answers.OpenAIErrorEvent, done=True),
}


def routes(gateway: Gateway) -> APIRouter:
    """`/v1/chat/completions`, `/v1/completions`, `/chat_tokenize`, `/v1/models`."""
    router = APIRouter(tags=["OpenAI"])
    router.add_api_route(
        "/v1/chat/completions",
        answered_in_front,
        methods=["POST"],
        summary="Answer a chat",
        operation_id="chat_completions",
        **document.generation(ChatRequest, _CHAT),
    )
    router.add_api_route(
        "/v1/completions",
        answered_in_front,
        methods=["POST"],
        summary="Continue one or more prompts",
        operation_id="completions",
        **document.generation(CompletionRequest, _COMPLETIONS),
    )

    @router.post(
        "/chat_tokenize",
        summary="Apply the chat template, and tokenize",
        operation_id="get_chat_tokenize",
        **document.asked(ChatRequest, {JSON: document.of(answers.ChatTokenizeResponse)}, COUNTING_ERRORS),
    )
    async def chat_tokenize(request: Request) -> Response:
        _, raw = jobs.parsed_chat(await read_body(request, gateway))
        caller = Caller.of(request.headers)
        answer = await gateway.admission.ask_any("/chat_tokenize", orjson.dumps(raw), caller.request_id)
        return document.Json(answer.body)

    @router.get(
        "/v1/models",
        summary="The model that is served",
        operation_id="openai_get_model_info",
        **document.told(document.of(answers.ModelsInfo)),
    )
    async def models() -> Response:
        name = gateway.admission.model_name()
        listed = answers.ModelsInfo(data=[answers.ModelInfo(id=name, owned_by=name)])
        return document.Json(listed.to_json())

    document.add_heads(router)
    return router
