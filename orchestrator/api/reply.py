"""A generation as an ASGI answer: the head waits for the first token, a client that left is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence

import orjson
import structlog
from starlette.types import Receive, Send

from orchestrator.api.stepping import Departure, begun
from orchestrator.core.sse import KEEP_ALIVE
from orchestrator.errors import GatewayError, Unavailable
from orchestrator.pipeline import Pipeline
from orchestrator.run import Job

log = structlog.get_logger()

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
INTERNAL_ERROR = b'{"error":"Internal error","error_type":"internal"}'
RETRY_AFTER_S = 1


class AsgiOut:
    """Writes one answer to an ASGI server; `run.Out`.

    A stream on which nothing was sent for `keep_alive_s` gets a comment.
    """

    __slots__ = ("_fresh", "_keep_alive_s", "_send", "_timer", "ended", "started")

    def __init__(self, send: Send, keep_alive_s: float) -> None:
        self.started = False
        self.ended = False
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._timer: asyncio.TimerHandle | None = None
        self._fresh = False

    async def whole(
        self,
        body: bytes,
        headers: Mapping[str, str],
        passed: Sequence[tuple[bytes, bytes]] = (),
        status: int = 200,
    ) -> None:
        self.started = self.ended = True
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *passed]
        head += encoded_headers(headers)
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body})

    async def start(self, headers: Mapping[str, str]) -> None:
        self.started = True
        head = [*_STREAM_HEADERS, *encoded_headers(headers)]
        await self._send({"type": "http.response.start", "status": 200, "headers": head})
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s, self._quiet)

    def push(self, piece: bytes) -> Awaitable[None] | None:
        """Send without a task; see `shards.relay.Push`."""
        if self.ended:
            return None
        self._fresh = True
        return begun(self._send({"type": "http.response.body", "body": piece, "more_body": True}))  # type: ignore[arg-type]

    async def send(self, piece: bytes) -> None:
        rest = self.push(piece)
        if rest is not None:
            await rest

    async def finish(self) -> None:
        if not self.ended:
            self.ended = True
            await self._send({"type": "http.response.body", "body": b""})

    def close(self) -> None:
        """Nothing more will be sent."""
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()

    def _quiet(self) -> None:
        if self.ended:
            return
        # To a client that does not even take what was sent it is dropped.
        if not self._fresh:
            self.push(KEEP_ALIVE)
        self._fresh = False
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s, self._quiet)


async def answer(pipeline: Pipeline, job: Job, receive: Receive, send: Send) -> None:
    """Serve `job`; ends when its answer is complete or its client has left."""
    out = AsgiOut(send, pipeline.settings.keep_alive_s)
    task = asyncio.current_task()
    assert task is not None, "ASGI servers run applications in tasks"
    gone = False

    def left() -> None:
        # The server says the same once an answer is complete.
        nonlocal gone
        if not out.ended:
            gone = True
            task.cancel()

    departure = Departure(receive, left)
    try:
        await _serve(pipeline, job, out)
    except asyncio.CancelledError:
        if gone and not task.uncancel():
            return
        if not out.started:
            # The server stops and has waited long enough for this one.
            await _refuse(job, out, Unavailable("The gateway is shutting down."))
        raise
    finally:
        departure.close()
        out.close()


async def _serve(pipeline: Pipeline, job: Job, out: AsgiOut) -> None:
    try:
        await pipeline.serve(job, out)
    except GatewayError as error:
        await _refuse(job, out, error)
    except Exception:
        # A bug of ours: its request ends, in TGI's shape while that is possible, and nothing else does.
        log.exception("request_failed", route=job.route, request_id=job.request_id)
        if out.started:
            raise
        await out.whole(INTERNAL_ERROR, {"x-request-id": job.request_id}, status=500)


def error_headers(error: GatewayError) -> dict[str, str]:
    """`Retry-After` for what may work a moment later, the scheme for who shows no key."""
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    told: str | None = getattr(error, "retry_after", None)
    return {"retry-after": told or str(RETRY_AFTER_S)} if error.status in (429, 503) else {}


def encoded_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]


async def _refuse(job: Job, out: AsgiOut, error: GatewayError) -> None:
    headers = error_headers(error) | {"x-request-id": job.request_id}
    await out.whole(orjson.dumps(error.body()), headers, status=error.status)
