"""TGI's own routes."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from orchestrator.api.gateway import Gateway
from orchestrator.api.incoming import Caller, read_body, refuse_tags
from orchestrator.api.reply import Generation
from orchestrator.api.schemas import ErrorBody, GenerateBody, parse_body
from orchestrator.core.estimate import size_of_text
from orchestrator.core.redress import Dialect, may_split
from orchestrator.core.shard import ShardState
from orchestrator.run import Job

_TAG = "Text Generation Inference"


def routes(gateway: Gateway) -> APIRouter:
    """`/`, `/generate`, `/generate_stream`, `/tokenize`, `/info` and the health checks."""
    router = APIRouter(tags=[_TAG])

    async def parsed(request: Request) -> tuple[GenerateBody, dict[str, Any]]:
        body, raw = parse_body(GenerateBody, await read_body(request, gateway.payload_bytes))
        refuse_tags(Dialect.TGI, raw)
        return body, raw

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        body, raw = await parsed(request)
        return Generation(gateway.pipeline, job_of(body, raw, Caller.of(request), stream=False))

    @router.post("/generate_stream")
    async def generate_stream(request: Request) -> Response:
        body, raw = await parsed(request)
        return Generation(gateway.pipeline, job_of(body, raw, Caller.of(request), stream=True))

    @router.post("/")
    async def compatible(request: Request) -> Response:
        body, raw = await parsed(request)
        body, raw = parse_body(GenerateBody, orjson.dumps(_with_full_text(raw)))
        job = job_of(body, raw, Caller.of(request), stream=body.stream, array=not body.stream)
        return Generation(gateway.pipeline, job)

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        _, raw = await parsed(request)
        caller = Caller.of(request)
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


def job_of(
    body: GenerateBody, raw: dict[str, Any], caller: Caller, *, stream: bool, array: bool = False
) -> Job:
    """The job of a body whose types are checked."""
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
        request_id=caller.request_id,
        inputs=body.inputs,
        debug=caller.debug,
        array=array,
    )


def _with_full_text(raw: dict[str, Any]) -> dict[str, Any]:
    """`POST /` answers with the prompt in front unless told otherwise (server.rs, compat_generate)."""
    parameters = dict(raw.get("parameters", {"do_sample": True}))
    if parameters.get("return_full_text") is None:
        parameters["return_full_text"] = True
    return {**raw, "parameters": parameters}
