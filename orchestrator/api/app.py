"""The gateway as one ASGI application: TGI's routes, the OpenAI routes, the operator's.

Nothing is global: everything an application needs is handed to `create_app` and opened in its
lifespan.  Every error leaves in TGI's shape, `{"error", "error_type"}`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from orchestrator.access import Access
from orchestrator.admission import GatewaySettings
from orchestrator.api import admin, document, health, openai, tgi
from orchestrator.api.front import Front, refuse
from orchestrator.api.gateway import Gateway
from orchestrator.api.incoming import ClientLeft
from orchestrator.api.reply import INTERNAL_ERROR
from orchestrator.errors import GatewayError
from orchestrator.metrics import Metrics
from orchestrator.pipeline import Pipeline
from orchestrator.queues.protocol import RequestQueue
from orchestrator.shards.client import ShardClient

__all__ = ["GatewaySettings", "create_app"]

log = structlog.get_logger()


def create_app(
    settings: GatewaySettings,
    *,
    queue: RequestQueue,
    shards: ShardClient,
    access: Access | None = None,
    metrics: Metrics | None = None,
) -> Front:
    """The application.  Its lifespan starts the queue, and closes queue and client at the end.

    Without `access` everybody is let in; without `metrics` it counts for itself alone.
    """
    metrics = metrics or Metrics(queue.shards, lambda: queue.mode)
    pipeline = Pipeline(settings, queue, shards, metrics)
    metrics.open_here = lambda: len(pipeline.open)
    gateway = Gateway(pipeline, queue, metrics)
    metrics.redis_up = lambda: gateway.connected

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await queue.start()
        try:
            yield
        finally:
            await queue.aclose()
            await shards.aclose()

    app = FastAPI(
        title="tgi-orchestrator",
        lifespan=lifespan,
        openapi_url="/api-doc/openapi.json",
        redirect_slashes=False,  # to an address that the request's own Host header names
    )
    for part in (tgi, health, openai, admin):
        app.include_router(part.routes(gateway))
    document.describe(app)

    app.add_exception_handler(GatewayError, _refused)
    app.add_exception_handler(ClientLeft, _left)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_exception_handler(Exception, _our_bug)
    return Front(app, gateway, access or Access.anybody(), settings.admin_port)


class Refused(Response):
    """One of our errors, from a route of FastAPI's."""

    def __init__(self, error: GatewayError, request_id: str) -> None:
        super().__init__()
        self._error = error
        self._request_id = request_id

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await refuse(self._error, self._request_id, receive, send)


async def _left(_: Request, __: Exception) -> Response:
    """For the log: nobody is there to read it."""
    return Response(status_code=499)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return Refused(error, request.headers.get("x-request-id", ""))


async def _no_such_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "validation")
    body = {"error": error.detail, "error_type": kind}
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _our_bug(request: Request, error: Exception) -> Response:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    log.error("request_failed", path=request.url.path, error=type(error).__name__, exc_info=error)
    return Response(INTERNAL_ERROR, 500, media_type="application/json")
