"""A raw ASGI application over aiohttp's client: no framework, chunks passed on as they come.

`python -m orchestrator.bench.gateway.peers.asgi_aiohttp --port PORT --prefill URL --decode URL`
"""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson
from starlette.types import Receive, Scope, Send

from orchestrator.bench.gateway.peers.legs import (
    PASSED_ON,
    PUT_PATH,
    Shards,
    arguments,
    get_body,
    put_body,
    serve,
)

_JSON = {"content-type": "application/json"}


class Gateway:
    """The application."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._session: aiohttp.ClientSession

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["path"] == "/health":
            await _start(send, 200, [])
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._generate(scope["path"], receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60),
            auto_decompress=False,
        )
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._session.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _generate(self, path: str, receive: Receive, send: Send) -> None:
        body = orjson.loads(await _read(receive))
        put = await self._put(PUT_PATH.get(path, path), put_body(body))
        asked = self._session.post(
            self._shards.decode + path, data=orjson.dumps(get_body(body, put)), headers=_JSON
        )
        async with asked as answer:
            passed = [
                (name.encode(), answer.headers[name].encode()) for name in PASSED_ON if name in answer.headers
            ]
            await _start(send, answer.status, passed)
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _put(self, path: str, body: dict[str, Any]) -> Any:
        asked = self._session.post(self._shards.prefill + path, data=orjson.dumps(body), headers=_JSON)
        async with asked as answer:
            answer.raise_for_status()
            return orjson.loads(await answer.read())


async def _read(receive: Receive) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    while message.get("more_body", False):
        message = await receive()
        body += message.get("body", b"")
    return body


async def _start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


def main() -> None:
    port, shards = arguments(__doc__)
    serve(Gateway(shards), port)


if __name__ == "__main__":
    main()
