"""The load: connections that ask one request at a time and look at every byte of the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import httptools

from orchestrator.bench.gateway.wire import Ask, flaw
from orchestrator.errors import OrchestratorError

CONNECT_LIMIT_S = 5.0
FRESH_S = 2.0
"""Idle for longer, a connection is replaced: uvicorn closes it after 5 s."""
OPENING_AT_ONCE = 256
"""Connections that are opened together; more would overflow a peer's listen queue."""


class LoadFailed(OrchestratorError):
    """A gateway did not answer as it must: no figure of it would mean anything."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer that was checked.  Seconds since the request was written."""

    events: int
    """Of a stream, `[DONE]` not counted; 0 for a whole answer."""
    body_bytes: int
    reads: int
    """Pieces in which the body arrived: below `events` where a gateway or a socket joined some."""
    first_s: float
    took_s: float


Seen = Callable[["Client", int], None]
"""Is told of a client and the events of its stream so far, whenever some arrive."""


class Client(asyncio.Protocol):
    """One kept-alive connection."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._done: asyncio.Future[None] | None = None
        self._seen: Seen | None = None
        self._body = bytearray()
        self.events = 0
        """Blank lines so far, which is every event and `[DONE]`."""
        self._reads = 0
        self._begun_s = 0.0
        self._first_s = 0.0
        self._ended_s = time.perf_counter()

    async def ask(self, ask: Ask, limit_s: float, seen: Seen | None = None) -> Answer:
        """Raises LoadFailed for an answer that is not whole, or does not come in `limit_s`."""
        if self._transport.is_closing() or time.perf_counter() - self._ended_s > FRESH_S:
            await self._reconnect()
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._seen, self._body, self.events, self._reads, self._first_s = seen, bytearray(), 0, 0, 0.0
        message = ask.request(self._host)
        self._begun_s = time.perf_counter()
        self._transport.write(message)
        try:
            async with asyncio.timeout(limit_s):
                await self._done
        except TimeoutError:
            raise LoadFailed(f"{self._host} did not answer within {limit_s:g} s.") from None
        self._ended_s = time.perf_counter()
        took_s = self._ended_s - self._begun_s
        return self._checked(ask, took_s)

    async def _reconnect(self) -> None:
        """As any client does whose connection was idle for about as long as servers keep one."""
        self._done = None
        self._transport.close()
        host, _, port = self._host.partition(":")
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                await asyncio.get_running_loop().create_connection(lambda: self, host, int(port))
        except OSError as error:
            raise LoadFailed(f"{self._host} does not accept connections: {error}") from None

    def _checked(self, ask: Ask, took_s: float) -> Answer:
        body, status = bytes(self._body), self._parser.get_status_code()
        if status != 200:
            raise LoadFailed(f"{self._host} answered with status {status}: {_start_of(body)}")
        if wrong := flaw(ask, body):
            raise LoadFailed(f"{self._host} gave an answer with {wrong}: {_start_of(body[-200:])}")
        events = ask.tokens if ask.stream else 0
        return Answer(events, len(body), self._reads, self._first_s, took_s)

    def close(self) -> None:
        self._transport.close()

    # --- called by the event loop ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not derive from it

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"closed the connection within an answer{f': {exc}' if exc else ''}")

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            return
        before = len(self._body)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"sent what is no HTTP: {error}")
            return
        if len(self._body) > before:
            self._count(before)

    def _count(self, before: int) -> None:
        """The events that ended in the bytes after `before`."""
        if not self._reads:
            self._first_s = time.perf_counter() - self._begun_s
        self._reads += 1
        if self._seen is not None:
            self.events += self._body.count(b"\n\n", max(0, before - 1))
            self._seen(self, self.events)

    # --- called by the parser -------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, what: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(LoadFailed(f"{self._host} {what}."))


@asynccontextmanager
async def clients(port: int, count: int) -> AsyncIterator[list[Client]]:
    """`count` open connections to a port of loopback.  Raises LoadFailed."""
    opened: list[Client] = []
    try:
        while len(opened) < count:
            opened += await _open(port, min(OPENING_AT_ONCE, count - len(opened)))
        yield opened
    finally:
        for client in opened:
            client.close()


async def _open(port: int, count: int) -> list[Client]:
    host, loop = f"127.0.0.1:{port}", asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_LIMIT_S):
        connecting = (loop.create_connection(lambda: Client(host), "127.0.0.1", port) for _ in range(count))
        done = await asyncio.gather(*connecting, return_exceptions=True)
    opened = [one[1] for one in done if not isinstance(one, BaseException)]
    for one in done:
        if isinstance(one, BaseException):
            for client in opened:
                client.close()
            raise LoadFailed(f"{host} does not accept connections: {one}")
    return opened


async def each_asks(
    asking: list[Client], ask: Ask, limit_s: float, times: int = 1, seen: Seen | None = None
) -> list[Answer]:
    """All clients at the same time, each `times` requests one after another.  Raises LoadFailed."""

    async def repeat(client: Client) -> list[Answer]:
        return [await client.ask(ask, limit_s, seen) for _ in range(times)]

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(repeat(client)) for client in asking]
    except ExceptionGroup as failures:
        raise _first(failures) from None
    return [answer for task in tasks for answer in task.result()]


def _first(failures: BaseException) -> BaseException:
    while isinstance(failures, BaseExceptionGroup):
        failures = failures.exceptions[0]
    return failures


def _start_of(body: bytes) -> str:
    return body[:200].decode("utf-8", "replace")
