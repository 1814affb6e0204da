"""TGI's own routes."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from orchestrator.api import answers, document, jobs
from orchestrator.api.document import EVENTS, JSON
from orchestrator.api.gateway import Gateway
from orchestrator.api.incoming import Caller, read_body
from orchestrator.api.schemas import GenerateBody

TAG = "Text Generation Inference"
COUNTING_ERRORS = (401, 408, 413, 422, 424, 429, 503)
_TOKENS = {JSON: document.array(answers.SimpleToken)}
_ANSWER = document.of(answers.GenerateResponse)
_ARRAY = document.array(answers.GenerateResponse)
_EVENTS = document.events(answers.StreamEvent, answers.ErrorBody)


def routes(gateway: Gateway) -> APIRouter:
    """`/`, `/generate`, `/generate_stream`, `/tokenize`, `/info` and `/metrics`."""
    router = APIRouter(tags=[TAG])
    _add_generations(router)

    @router.post(
        "/tokenize",
        summary="Tokenize a prompt",
        operation_id="tokenize",
        **document.asked(GenerateBody, {JSON: document.array(answers.SimpleToken)}, COUNTING_ERRORS),
    )
    async def tokenize(request: Request) -> Response:
        _, raw = jobs.parsed_generate(await read_body(request, gateway))
        caller = Caller.of(request.headers)
        answer = await gateway.admission.ask_any("/tokenize", orjson.dumps(raw), caller.request_id)
        return document.Json(answer.body)

    @router.get(
        "/info",
        summary="The served model and its limits, from a shard",
        operation_id="get_model_info",
        **document.told(document.of(answers.Info), 424, 503),
    )
    async def info() -> Response:
        answer = await gateway.admission.ask_any("/info")
        notes = [
            f"{view.shard} serves mixed only: {view.note}" for view in gateway.queue.shards() if view.note
        ]
        body = orjson.dumps({**answer.json(), "notes": notes}) if notes else answer.body
        return document.Json(body)

    @router.get(
        "/metrics",
        summary="Prometheus metrics",
        operation_id="metrics",
        response_class=PlainTextResponse,
        responses=document.refusals(401, 404),
    )
    async def metrics() -> Response:
        return Response(gateway.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    document.add_heads(router)
    return router


def _add_generations(router: APIRouter) -> None:
    """Documented here, answered by `Front` before FastAPI sees them."""
    shapes = {
        "/": ("Generate, or stream with `stream`", {JSON: _ARRAY, EVENTS: _EVENTS}, "compat_generate"),
        "/generate": ("Generate", {JSON: _ANSWER}, "generate"),
        "/generate_stream": ("Generate a stream of tokens", {EVENTS: _EVENTS}, "generate_stream"),
    }
    for path, (summary, answered, name) in shapes.items():
        described = document.generation(GenerateBody, answered)
        router.add_api_route(
            path, answered_in_front, methods=["POST"], summary=summary, operation_id=name, **described
        )


async def answered_in_front() -> Response:
    raise AssertionError("the front answers what generates")
