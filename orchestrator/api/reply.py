"""A generation as an ASGI answer: the head waits for the first token, a client that left is noticed.

Three tasks: one serves the request, one listens for the client's departure and cancels the first,
one sends a comment on a stream that is silent for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orchestrator.core.sse import KEEP_ALIVE
from orchestrator.errors import GatewayError
from orchestrator.pipeline import Pipeline
from orchestrator.run import Job

_STREAM_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
RETRY_AFTER_S = 1


class AsgiOut:
    """Writes one answer to an ASGI server; `run.Out`."""

    def __init__(self, send: Send) -> None:
        self.started = False
        self.ended = False
        self._send = send
        self._lock = asyncio.Lock()
        self._sent_since_check = False

    async def whole(self, body: bytes, headers: Mapping[str, str], status: int = 200) -> None:
        self.started = self.ended = True
        head = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        await self._send({"type": "http.response.start", "status": status, "headers": _encoded(head)})
        await self._send({"type": "http.response.body", "body": body})

    async def start(self, headers: Mapping[str, str]) -> None:
        self.started = True
        head = _encoded({**_STREAM_HEADERS, **headers})
        await self._send({"type": "http.response.start", "status": 200, "headers": head})

    async def send(self, piece: bytes) -> None:
        async with self._lock:
            if not self.ended:
                self._sent_since_check = True
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def finish(self) -> None:
        async with self._lock:
            if not self.ended:
                self.ended = True
                await self._send({"type": "http.response.body", "body": b""})

    async def keep_alive(self, period_s: float) -> None:
        """A comment for every period in which nothing was sent; runs until it is cancelled."""
        while True:
            await asyncio.sleep(period_s)
            if self.started and not self._sent_since_check:
                await self.send(KEEP_ALIVE)
            self._sent_since_check = False


class Generation(Response):
    """Answers one job."""

    def __init__(self, pipeline: Pipeline, job: Job) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._job = job

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        out = AsgiOut(send)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(self._serve(out))
            beside = [
                group.create_task(_cancel_when_left(receive, out, serving)),
                group.create_task(out.keep_alive(self._pipeline.settings.keep_alive_s)),
            ]
            serving.add_done_callback(lambda _: [task.cancel() for task in beside])

    async def _serve(self, out: AsgiOut) -> None:
        try:
            await self._pipeline.serve(self._job, out)
        except GatewayError as error:
            headers = error_headers(error) | {"x-request-id": self._job.request_id}
            await out.whole(orjson.dumps(error.body()), headers, error.status)


def error_headers(error: GatewayError) -> dict[str, str]:
    """`Retry-After` for what may work a moment later."""
    told: str | None = getattr(error, "retry_after", None)
    return {"retry-after": told or str(RETRY_AFTER_S)} if error.status in (429, 503) else {}


async def _cancel_when_left(receive: Receive, out: AsgiOut, serving: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    # The server says the same once an answer is complete.
    if not out.ended:
        serving.cancel()


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
