"""FastAPI, httpx and StreamingResponse, as most proxies of this kind are written.

`python -m orchestrator.bench.gateway.peers.fastapi_httpx --port PORT --prefill URL --decode URL`
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from orchestrator.bench.gateway.peers.legs import (
    PASSED_ON,
    PUT_PATH,
    Shards,
    arguments,
    get_body,
    put_body,
    serve,
)


def create_app(shards: Shards) -> FastAPI:
    """The application; its clients are opened in the lifespan."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(60, connect=10, pool=None)
        async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:
            app.state.client = client
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.post("/{path:path}")
    async def generate(path: str, request: Request) -> Response:
        body = await request.json()
        client: httpx.AsyncClient = request.app.state.client
        put = await _put(client, shards.prefill + PUT_PATH.get(f"/{path}", f"/{path}"), body)
        return await _get(client, f"{shards.decode}/{path}", get_body(body, put), _streams(path, body))

    return app


def _streams(path: str, body: dict[str, Any]) -> bool:
    return path == "generate_stream" or bool(body.get("stream"))


async def _put(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(url, json=put_body(body))
    answer.raise_for_status()
    told: dict[str, Any] = answer.json()
    return told


async def _get(client: httpx.AsyncClient, url: str, body: dict[str, Any], stream: bool) -> Response:
    if not stream:
        whole = await client.post(url, json=body)
        return Response(whole.content, whole.status_code, headers=_passed_on(whole))
    async with AsyncExitStack() as stack:
        answer = await stack.enter_async_context(client.stream("POST", url, json=body))
        closing = stack.pop_all()

    async def pieces() -> AsyncIterator[bytes]:
        async with closing:
            async for piece in answer.aiter_raw():
                yield piece

    return StreamingResponse(pieces(), answer.status_code, headers=_passed_on(answer))


def _passed_on(answer: httpx.Response) -> dict[str, str]:
    return {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}


def main() -> None:
    port, shards = arguments(__doc__)
    serve(create_app(shards), port)


if __name__ == "__main__":
    main()
