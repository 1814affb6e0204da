"""The pool as a transport of httpx: `httpx.AsyncClient(transport=PooledTransport())`.

For what is asked seldom and reads well with httpx.  Its own per-request cost stays: the legs of a
generation go to the pool directly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

from orchestrator.shards.http.connection import Connection
from orchestrator.shards.http.errors import CannotConnect, ConnectionLost, Malformed, PoolFull
from orchestrator.shards.http.pool import Origin, Pool, message

_WRITTEN_HERE = frozenset({"host", "content-length", "transfer-encoding", "connection"})
_NOT_SPOKEN = frozenset({"HEAD", "CONNECT"})
"""Their answers end at the head whatever it says, which the parser cannot be told."""
LONGEST_S = 3600.0
"""Where httpx is told to wait for ever."""


class PooledTransport(httpx.AsyncBaseTransport):
    """Plain HTTP only.  httpx's `connect` and `read` timeouts hold; `read` is also the first byte's."""

    def __init__(self, pool: Pool | None = None) -> None:
        self._pool = pool or Pool()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        timeouts = request.extensions.get("timeout", {})
        read_s = _seconds(timeouts.get("read"))
        origin = _origin(request)
        body = await request.aread()
        headers = [pair for pair in request.headers.items() if pair[0] not in _WRITTEN_HERE]
        sent = message(request.method, origin, request.url.raw_path.decode("ascii"), body, headers)
        try:
            connection = await self._pool.send(
                origin, sent, connect_s=_seconds(timeouts.get("connect")), within_s=read_s
            )
        except (CannotConnect, ConnectionLost, Malformed, PoolFull, TimeoutError) as error:
            raise _as_httpx(error, request) from error
        stream = _Body(self._pool, origin, connection, read_s, request)
        answered = list(connection.headers.items())
        return httpx.Response(connection.status, headers=answered, stream=stream)

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(
        self, pool: Pool, origin: Origin, connection: Connection, read_s: float, request: httpx.Request
    ) -> None:
        self._pool, self._origin, self._connection = pool, origin, connection
        self._read_s = read_s
        self._request = request
        self._open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self._connection.expect(self._read_s)
            try:
                piece = await self._connection.piece()
            except (ConnectionLost, Malformed, TimeoutError) as error:
                raise _as_httpx(error, self._request) from error
            if not piece:
                return
            yield piece

    async def aclose(self) -> None:
        if self._open:
            self._open = False
            self._pool.release(self._origin, self._connection)


def _origin(request: httpx.Request) -> Origin:
    if request.url.scheme != "http" or request.method in _NOT_SPOKEN:
        raise httpx.UnsupportedProtocol("Shards speak plain HTTP, without HEAD and CONNECT.", request=request)
    return Origin(request.url.host, request.url.port or 80)


def _seconds(told: float | None) -> float:
    return LONGEST_S if told is None else told


def _as_httpx(error: Exception, request: httpx.Request) -> httpx.TransportError:
    if isinstance(error, CannotConnect) and error.late:
        return httpx.ConnectTimeout(str(error), request=request)
    kinds: dict[type[Exception], type[httpx.TransportError]] = {
        CannotConnect: httpx.ConnectError,
        PoolFull: httpx.PoolTimeout,
        TimeoutError: httpx.ReadTimeout,
        Malformed: httpx.RemoteProtocolError,
    }
    return kinds.get(type(error), httpx.ReadError)(str(error), request=request)
