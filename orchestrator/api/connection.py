"""A client's connection: uvicorn's protocol, where clients do what it does not expect.

`uvicorn.Config(http=ClientConnection)`.
"""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_LIMIT_BYTES = 64 * 1024
_OFFER = re.compile(rb"(\nup)grade(?=[ \t]*:)", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"
_KEEP_ALIVE = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 60),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 15),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 4),
)
"""Seconds and probes after which the kernel ends a connection to a machine that has vanished: two minutes."""


class ClientConnection(HttpToolsProtocol):
    """Bounds a request's head in size and time, passes over an offered upgrade, and holds nothing for a
    client that went away or does not read.

    The parser takes what follows an offer (`upgrade: h2c`, with every first request of Java's client and
    of `curl --http2`) for the other protocol, and a body would be lost: the header is renamed in time.
    """

    def __init__(self, *args: Any, head_timeout_s: float = 30.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: RequestResponseCycle | None = None
        self._unread_bytes = sys.maxsize
        self._in_head = True
        self._head_bytes = 0
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
            for option, value in _KEEP_ALIVE:
                connected.setsockopt(*option, value)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._expect_head()
            self._head_bytes += len(data)
            data = _without_offer(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_LIMIT_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's head is larger than {HEAD_LIMIT_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._head_came()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells the latest request only; with one behind it, the running one would go on."""
        super().connection_lost(exc)
        self._head_came()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection.  Of a client that does not read, closing it would wait for ever."""
        unread_bytes = self.transport.get_write_buffer_size()
        if not unread_bytes:
            super().timeout_keep_alive_handler()
        elif unread_bytes < self._unread_bytes:
            # It does read, if slowly.
            self._unread_bytes = unread_bytes
            after_s = self.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_later(after_s, self.timeout_keep_alive_handler)
        else:
            self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._unread_bytes = sys.maxsize
        super()._start_asgi_task(cycle, _cut_short(app, cycle))

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._head_is_late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.transport.abort()


def _cut_short(app: Any, cycle: RequestResponseCycle) -> Any:
    """An answer that is given up ends its connection at once, not when its client has read what there is."""

    async def cut(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)
        if not cycle.response_complete and not cycle.disconnected:
            cycle.disconnected = True
            cycle.transport.abort()

    return cut


def _without_offer(data: bytes) -> bytes:
    end = data.find(_HEAD_END)
    if data.find(b"pgrade", 0, end) < 0 and data.find(b"PGRADE", 0, end) < 0:
        return data  # as nearly always, and sooner than the pattern says so
    found = _OFFER.search(data, 0, end if end >= 0 else len(data))
    return data if found is None else data[: found.end(1)] + b"xxxxx" + data[found.end() :]
