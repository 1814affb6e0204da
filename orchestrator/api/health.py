"""Whether a shard is ready, in TGI's way: a status and no body.  Who asks for it gets the detail as well."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from orchestrator.api import document
from orchestrator.api.gateway import Gateway
from orchestrator.core import degraded
from orchestrator.core.shard import ShardState
from orchestrator.run import DEGRADED_HEADER, MODE_HEADER

TAG = "Text Generation Inference"
_DETAIL = {
    "name": "detail",
    "in": "query",
    "required": False,
    "description": "With any value: a JSON body that tells mode, Redis and shards.",
    "schema": {"type": "string"},
}


def routes(gateway: Gateway) -> APIRouter:
    """`/`, `/health` and `/ping`: 200, or 503 while no shard is ready."""
    router = APIRouter(tags=[TAG])

    async def health(request: Request) -> Response:
        told = detail(gateway)
        unhealthy = told["status"] == "unhealthy"
        error = {"error": "unhealthy", "error_type": "healthcheck"} if unhealthy else {}
        wanted = told if "detail" in request.query_params else {}
        headers = headers_of(told)
        if error or wanted:
            return document.Json(orjson.dumps(error | wanted), 503 if error else 200, headers)
        return Response(headers=headers)

    for path, name in (("/", "root_health"), ("/health", "health"), ("/ping", "ping")):
        router.add_api_route(
            path,
            health,
            methods=["GET"],
            summary="Whether a shard is ready",
            operation_id=name,
            response_class=Response,
            responses={200: {"description": "A shard is ready"}, **document.refusals(503)},
            openapi_extra={"parameters": [_DETAIL]},
        )
    document.add_heads(router)
    return router


def detail(gateway: Gateway) -> dict[str, Any]:
    """What anybody may know: no address, no name of a shard."""
    queue = gateway.queue
    mode = queue.mode
    shards = queue.shards()
    ready = sum(view.state == ShardState.READY for view in shards)
    status = "ok" if mode.level == 0 and queue.degraded is None else "degraded"
    named = degraded.facts(mode)
    return {
        "status": status if ready else "unhealthy",
        "mode": {name: named[name] for name in ("level", "name", "output_cap", "shed_below")},
        "redis": gateway.connected,
        "impaired": queue.degraded is not None,
        "shards": {"ready": ready, "known": len(shards)},
    }


def headers_of(told: dict[str, Any]) -> dict[str, str]:
    """As answers carry them: only where something is unusual."""
    level = told["mode"]["level"]
    headers = {MODE_HEADER: str(level)} if level else {}
    return headers | ({DEGRADED_HEADER: "1"} if told["impaired"] else {})
