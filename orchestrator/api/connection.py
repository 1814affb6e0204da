"""A client's connection: uvicorn's protocol, where clients do what it does not expect.

`uvicorn.Config(http=ClientConnection)`.
"""

from __future__ import annotations

import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_LIMIT_BYTES = 64 * 1024
_OFFER = re.compile(rb"(\nup)grade(?=[ \t]*:)", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"


class ClientConnection(HttpToolsProtocol):
    """Bounds a request's head, passes over an offered upgrade, and tells a running request of the end.

    The parser takes what follows an offer (`upgrade: h2c`, with every first request of Java's client and
    of `curl --http2`) for the other protocol, and a body would be lost: the header is renamed in time.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: RequestResponseCycle | None = None
        self._in_head = True
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            data = _without_offer(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_LIMIT_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's head is larger than {HEAD_LIMIT_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells the latest request only; with one behind it, the running one would go on."""
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)


def _without_offer(data: bytes) -> bytes:
    end = data.find(_HEAD_END)
    if data.find(b"pgrade", 0, end) < 0 and data.find(b"PGRADE", 0, end) < 0:
        return data  # as nearly always, and sooner than the pattern says so
    found = _OFFER.search(data, 0, end if end >= 0 else len(data))
    return data if found is None else data[: found.end(1)] + b"xxxxx" + data[found.end() :]
