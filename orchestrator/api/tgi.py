"""TGI's own routes."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request, Response

from orchestrator.api import jobs
from orchestrator.api.gateway import Gateway
from orchestrator.api.incoming import Caller, read_body
from orchestrator.api.reply import Generation
from orchestrator.api.schemas import ErrorBody
from orchestrator.core.shard import ShardState

_TAG = "Text Generation Inference"


def routes(gateway: Gateway) -> APIRouter:
    """`/`, `/generate`, `/generate_stream`, `/tokenize`, `/info` and the health checks."""
    router = APIRouter(tags=[_TAG])

    async def answered(request: Request, job_of: jobs.JobOf) -> Response:
        body = await read_body(request, gateway.payload_bytes)
        return Generation(gateway.pipeline, job_of(body, Caller.of(request.headers)))

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        return await answered(request, jobs.generate)

    @router.post("/generate_stream")
    async def generate_stream(request: Request) -> Response:
        return await answered(request, jobs.generate_stream)

    @router.post("/")
    async def compatible(request: Request) -> Response:
        return await answered(request, jobs.compatible)

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        _, raw = jobs.parsed_generate(await read_body(request, gateway.payload_bytes))
        caller = Caller.of(request.headers)
        answer = await gateway.admission.ask_any("/tokenize", orjson.dumps(raw), caller.request_id)
        return Response(answer.body, media_type="application/json")

    @router.get("/info")
    async def info() -> Response:
        answer = await gateway.admission.ask_any("/info")
        notes = [
            f"{view.shard} serves mixed only: {view.note}" for view in gateway.queue.shards() if view.note
        ]
        body = orjson.dumps({**answer.json(), "notes": notes}) if notes else answer.body
        return Response(body, media_type="application/json")

    @router.get("/health")
    @router.get("/ping")
    @router.get("/")
    async def health() -> Response:
        if any(view.state == ShardState.READY for view in gateway.queue.shards()):
            return Response()
        unhealthy = ErrorBody(error="unhealthy", error_type="healthcheck")
        return Response(unhealthy.to_json(), status_code=503, media_type="application/json")

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
