"""The gateway as one ASGI application: TGI's routes, the OpenAI routes, the operator's.

Nothing is global: everything an application needs is handed to `create_app` and opened in its
lifespan.  Every error leaves in TGI's shape, `{"error", "error_type"}`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import structlog
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from orchestrator.admission import GatewaySettings
from orchestrator.api import admin, openai, tgi
from orchestrator.api.gateway import Gateway
from orchestrator.api.reply import error_headers
from orchestrator.errors import GatewayError, TooLarge
from orchestrator.metrics import Metrics
from orchestrator.pipeline import Pipeline
from orchestrator.queues.protocol import RequestQueue
from orchestrator.shards.client import ShardClient

__all__ = ["GatewaySettings", "create_app"]

log = structlog.get_logger()

LINGER_S = 1.0
_GENERATIONS = {
    "/": "generate",
    "/generate": "generate",
    "/generate_stream": "generate_stream",
    "/v1/chat/completions": "chat",
}


def create_app(settings: GatewaySettings, *, queue: RequestQueue, shards: ShardClient) -> FastAPI:
    """The application.  Its lifespan starts the queue, and closes queue and client at the end."""
    metrics = Metrics(queue.shards, lambda: queue.mode)
    pipeline = Pipeline(settings, queue, shards, metrics)
    gateway = Gateway(pipeline, queue, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await queue.start()
        try:
            yield
        finally:
            await queue.aclose()
            await shards.aclose()

    app = FastAPI(title="tgi-orchestrator", lifespan=lifespan, openapi_url="/api-doc/openapi.json")
    for router in (tgi.routes(gateway), openai.routes(gateway), admin.routes(gateway)):
        app.include_router(router)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, GatewayError)
        route = _GENERATIONS.get(request.url.path)
        if route is not None:
            metrics.unparsed(route, error.error_type)
        log.info("request", route=route or request.url.path, status=error.status, error=error.error_type)
        if isinstance(error, TooLarge):
            return Lingering(error)
        return JSONResponse(error.body(), error.status, headers=error_headers(error))

    app.add_exception_handler(GatewayError, refused)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_exception_handler(Exception, _our_bug)
    return app


class Lingering(Response):
    """Refuses a body that was not read, and lets its sender finish the sentence.

    Closing at once would reset the connection under a client that still writes, and the answer
    would be lost with it.  What arrives within LINGER_S is dropped.
    """

    def __init__(self, error: GatewayError) -> None:
        super().__init__(orjson.dumps(error.body()), error.status, media_type="application/json")
        self.headers["connection"] = "close"

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b""})


async def _no_such_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "validation")
    body = {"error": error.detail, "error_type": kind}
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _our_bug(request: Request, error: Exception) -> Response:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    log.error("request_failed", path=request.url.path, error=type(error).__name__, exc_info=error)
    return JSONResponse({"error": "Internal error", "error_type": "internal"}, 500)
