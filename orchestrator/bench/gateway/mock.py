"""Two mock shards in one process, as cheap as Python allows: prefill on one port, decode on another.

They answer like TGI, with the sidecar's routes beside, and tell what `vllm-router` wants to know.
A decode step writes one event to every stream of its pace: one HTTP chunk and one write each.
`python -m orchestrator.bench.gateway.mock PREFILL_PORT DECODE_PORT` runs until SIGTERM.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import cast

import orjson
import uvloop

from orchestrator.bench.gateway.shards import status_of
from orchestrator.bench.gateway.wire import FIRST_ID, MODEL, PROMPT_TOKENS, Events, Route, whole_answer
from tgi_patches.contract import PROTOCOL_VERSION, Role, WaitReply

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_(?:new_)?tokens": ?(\d+)')
_PACE = re.compile(rb"pace_us=(\d+) hold_us=(\d+)")
_MODEL = re.compile(rb'"model": ?"([^"]*)"')
_STREAM = re.compile(rb'"stream": ?true')
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"x-accel-buffering: no\r\ntransfer-encoding: chunked\r\n"
)
_ROUTES = {
    b"/v1/chat/completions": Route.CHAT,
    b"/v1/completions": Route.COMPLETIONS,
    b"/generate": Route.GENERATE,
    b"/generate_stream": Route.GENERATE,
}


class Clock:
    """The decode steps of one pace: every stream that listens gets one event a step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._streams: set[Connection] = set()
        self._running = False

    def add(self, stream: Connection) -> None:
        self._streams.add(stream)
        if not self._running:
            self._running = True
            self._again()

    def discard(self, stream: Connection) -> None:
        self._streams.discard(stream)

    def _again(self) -> None:
        loop = asyncio.get_running_loop()
        if self._step_s:
            loop.call_later(self._step_s, self._step)
        else:
            loop.call_soon(self._step)

    def _step(self) -> None:
        for stream in tuple(self._streams):
            stream.write_next()
        self._running = bool(self._streams)
        if self._running:
            self._again()


class Shard:
    """What the connections of one port share."""

    def __init__(self, role: Role, port: int) -> None:
        self.role = role
        self._clocks: dict[int, Clock] = {}
        told = {"model_id": MODEL, "max_input_tokens": 4096, "max_total_tokens": 8192, "version": "3.3.7"}
        models = {
            "object": "list",
            "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}],
        }
        self.answers = {
            b"/health": b"",
            b"/info": orjson.dumps(told),
            b"/v1/models": orjson.dumps(models),
            b"/kv/status": orjson.dumps(status_of(role, port).to_dict()),
        }

    def clock(self, pace_us: int) -> Clock:
        if pace_us not in self._clocks:
            self._clocks[pace_us] = Clock(pace_us / 1e6)
        return self._clocks[pace_us]


class Connection(asyncio.Protocol):
    """One connection: a request at a time, kept alive."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._buffer = b""
        self._transport: asyncio.Transport
        self._clock: Clock | None = None
        self._events: Events
        self._next = 0
        self._full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not derive from it

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the Protocol's name
        self._leave()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head, start = self._buffer[: end + 2], end + 4
            found = _LENGTH.search(head)
            stop = start + (int(found[1]) if found else 0)
            if len(self._buffer) < stop:
                return
            body, self._buffer = self._buffer[start:stop], self._buffer[stop:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        target = head[head.find(b" ") + 1 : head.find(b" HTTP/")]
        path = target.partition(b"?")[0]
        route = _ROUTES.get(path)
        if route is not None:
            self._generate(route, path, body)
        elif path.startswith(b"/kv/wait/"):
            handle = path.rpartition(b"/")[2].decode()
            reply = WaitReply(PROTOCOL_VERSION, handle, True, FIRST_ID, prompt_tokens=PROMPT_TOKENS)
            self._send(orjson.dumps(reply.to_dict()))
        elif path in self._shard.answers:
            self._send(self._shard.answers[path])
        else:
            self._send(b'{"error":"no such route","error_type":"not_found"}', b"404 Not Found")

    def _generate(self, route: Route, path: bytes, body: bytes) -> None:
        wanted, paced, named = _TOKENS.search(body), _PACE.search(body), _MODEL.search(body)
        tokens = int(wanted[1]) if wanted else 1
        pace_us, hold_us = (int(paced[1]), int(paced[2])) if paced else (0, 0)
        model = named[1] if named else MODEL.encode()
        imported = b"x-orchestrator-import: hit\r\n" if b"|kv1:get:" in body else b""
        if path == b"/generate_stream" or (route is not Route.GENERATE and _STREAM.search(body)):
            self._stream(Events(route, tokens, model), pace_us, imported)
            return
        transfer = b'"do_remote_decode":true' in body
        answer = whole_answer(route, tokens, model.decode(), transfer)
        extra = _counts(tokens) + imported
        if hold_us and self._shard.role is not Role.PREFILL:
            self._later(hold_us / 1e6, lambda: self._send(answer, extra=extra))
        else:
            self._send(answer, extra=extra)

    def _stream(self, events: Events, pace_us: int, extra: bytes) -> None:
        """The head and the first event at once, the rest in steps."""
        self._events, self._next = events, 1
        ending = events.ending() if events.tokens == 1 else b""
        self._transport.write(b"%b%b\r\n%b%b" % (_STREAM_HEAD, extra, events.chunk(0), ending))
        if not ending:
            self._clock = self._shard.clock(pace_us)
            self._clock.add(self)

    def write_next(self) -> None:
        """The next event, unless the reader is slow."""
        if self._full:
            return
        piece = self._events.chunk(self._next)
        self._next += 1
        if self._next == self._events.tokens:
            self._leave()
            piece += self._events.ending()
        self._transport.write(piece)

    def _leave(self) -> None:
        if self._clock is not None:
            self._clock.discard(self)
            self._clock = None

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(delay_s, act)

    def _send(self, body: bytes, status: bytes = b"200 OK", extra: bytes = b"") -> None:
        self._transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
            % (status, extra, len(body), body)
        )


def _counts(tokens: int) -> bytes:
    """TGI's headers of a whole answer, as far as a gateway may read them."""
    return (
        b"x-compute-type: cpu\r\nx-compute-time: 0.412\r\nx-compute-characters: 1200\r\nx-total-time: 412\r\n"
        b"x-validation-time: 0\r\nx-queue-time: 0\r\nx-inference-time: 411\r\nx-time-per-token: 2\r\n"
        b"x-prompt-tokens: %d\r\nx-generated-tokens: %d\r\n" % (PROMPT_TOKENS, tokens)
    )


async def serve(prefill_port: int, decode_port: int) -> None:
    """Until cancelled."""
    loop = asyncio.get_running_loop()
    for role, port in ((Role.PREFILL, prefill_port), (Role.DECODE, decode_port)):
        shard = Shard(role, port)
        await loop.create_server(partial(Connection, shard), "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1]), int(sys.argv[2])))
