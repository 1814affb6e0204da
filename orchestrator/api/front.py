"""What every request passes first: its key, its id, its one line in the log.

What generates is answered here, since it is asked a thousand times for once that anything else is;
the rest goes on to FastAPI, which also documents both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import orjson
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.access import Access
from orchestrator.api.gateway import Gateway
from orchestrator.api.incoming import ClientLeft, body_of, caller_of, request_id_of
from orchestrator.api.jobs import GENERATIONS
from orchestrator.api.reply import answer, encoded_headers, error_headers
from orchestrator.errors import BodyTooSlow, GatewayError, TooLarge

log = structlog.get_logger()

LINGER_S = 1.0
_ROUTES = {
    "/": "generate",
    "/generate": "generate",
    "/generate_stream": "generate_stream",
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
}
"""For the metrics, of what could not be read as a request."""


class Front:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, gateway: Gateway, access: Access, admin_port: int | None = None) -> None:
        self._app = app
        self._gateway = gateway
        self._access = access
        self._admin_port = admin_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        path: str = scope["path"]
        request_id = request_id_of(headers)
        job_of = GENERATIONS.get(path) if scope["method"] == "POST" else None
        began_s = time.perf_counter()
        visit = None
        try:
            visit = self._access.visit(scope["method"], path, headers, admin_port=self._on_admin_port(scope))
            if job_of is None:
                await self._other(scope, request_id, visit.key_name, receive, send)
                return
            caller = caller_of(headers, visit, request_id)
            # No name for the body: a stream would hold it to its end, beside what was made of it.
            job = job_of(await self._body(receive, headers), caller)
            await answer(self._gateway.pipeline, job, receive, send)
        except ClientLeft:
            log.info("request", route=path, request_id=request_id, outcome="cancelled")
        except GatewayError as error:
            key_name = error.key_name if visit is None else visit.key_name
            route = _ROUTES.get(path) if job_of is not None else None
            if route is not None:
                self._gateway.metrics.unparsed(route, error.error_type, key_name)
            took_s = time.perf_counter() - began_s
            _note_refusal(scope, request_id, route or path, key_name, error, took_s)
            await refuse(error, request_id, receive, send)
        finally:
            if visit is not None:
                visit.leave()

    def _on_admin_port(self, scope: Scope) -> bool:
        server = scope.get("server")
        return self._admin_port is not None and server is not None and server[1] == self._admin_port

    async def _other(
        self, scope: Scope, request_id: str, key_name: str, receive: Receive, send: Send
    ) -> None:
        """A request that generates nothing: FastAPI's, with its id on the way in and out."""
        began_s = time.perf_counter()
        tagged = (b"x-request-id", request_id.encode())
        others = [pair for pair in scope["headers"] if pair[0] != b"x-request-id"]
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), tagged]}
            await send(message)

        try:
            await self._app({**scope, "headers": [*others, tagged]}, receive, noted)
        finally:
            log.info(
                "request",
                route=scope["path"],
                method=scope["method"],
                request_id=request_id,
                key=key_name or None,
                status=status,
                took_s=round(time.perf_counter() - began_s, 4),
            )

    async def _body(self, receive: Receive, headers: Mapping[bytes, bytes]) -> bytes:
        gateway = self._gateway
        return await body_of(receive, headers, gateway.payload_bytes, gateway.body_timeout_s)


def _note_refusal(
    scope: Scope, request_id: str, route: str, key_name: str, error: GatewayError, took_s: float
) -> None:
    log.info(
        "request",
        route=route,
        method=scope["method"],
        request_id=request_id,
        key=key_name or None,
        status=error.status,
        error=error.error_type,
        took_s=round(took_s, 4),
    )


async def refuse(error: GatewayError, request_id: str, receive: Receive, send: Send) -> None:
    """An error as TGI writes it.

    A body that was not read is let come for LINGER_S, and dropped: closing at once would reset the
    connection under a client that still writes, and the answer would be lost with it.
    """
    body = orjson.dumps(error.body())
    told = {"x-request-id": request_id, **error_headers(error)}
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    head += encoded_headers(told)
    lingers = isinstance(error, TooLarge)
    if isinstance(error, (TooLarge, BodyTooSlow)):  # their bodies were not read to the end
        head.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": lingers})
    if not lingers:
        return
    try:
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})
