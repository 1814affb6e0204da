"""One HTTP/1.1 connection to a shard, one exchange at a time.

idle -exchange-> asked -head-> answering -complete-> answered -release-> idle
any -bytes that are no HTTP, deadline, the other side, close()-> closed

The body is read in one of three ways: whole, piece by piece, or pushed into a sink as it arrives.
Unread pieces stop the reading of the socket at HIGH_WATER_BYTES, so nobody's slowness fills memory.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import httptools

from orchestrator.shards.http.deadline import Deadline
from orchestrator.shards.http.errors import ConnectionLost, Malformed

HIGH_WATER_BYTES = 256 * 1024
WHOLE_LIMIT_BYTES = 256 * 1024 * 1024
HEAD_LIMIT_BYTES = 64 * 1024

Sink = Callable[[bytes], None]


class Connection(asyncio.Protocol):
    """`status` and `headers` (names in lower case) are those of the present answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, idle_ended: Callable[[Connection], None]) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.complete = False
        self.closed = False
        self.idle_since_s = 0.0
        self._loop = loop
        self._idle_ended = idle_ended
        self._deadline = Deadline(loop, self._late)
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._busy = False
        self._keep = False
        self._touched = False
        self._until_close = False
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._paused = False
        self._gathering = False
        self._sink: Sink | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    # --- an exchange ----------------------------------------------------------------------------

    async def exchange(self, message: bytes, within_s: float, *, whole: bool = False) -> None:
        """Send a request; returns when the head of its answer is there, or with `whole` all of it.

        Raises ConnectionLost, Malformed or TimeoutError; the connection is closed then, and also when
        the caller is cancelled.
        """
        assert self._transport is not None, "it is connected"
        self._begin(whole)
        self._deadline.within(within_s)
        try:
            self._transport.write(message)
            while not (self.complete if whole else self.status):
                await self._something()
        except BaseException:
            self.close()
            raise
        self._deadline.hold()

    def expect(self, within_s: float) -> None:
        """The answer must go on within so many seconds, of those in which somebody waits for it."""
        if not self.complete and not self.closed:
            self._deadline.within(within_s)

    async def rest(self) -> bytes:
        """The rest of the body at once.  Raises as `exchange` does."""
        self._gathering = True
        self._resume()
        self._deadline.go_on()
        while not self.complete:
            await self._something()
        return self.take()

    async def piece(self) -> bytes:
        """What has arrived since the last call, at least a byte; empty at the end of the body."""
        self._deadline.go_on()
        while not self._pieces and not self.complete:
            self._resume()
            await self._something()
        self._deadline.hold()
        return self.take()

    def take(self) -> bytes:
        """What has arrived and was not read yet, perhaps nothing."""
        pieces, self._pieces, self._held_bytes = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def push_into(self, sink: Sink) -> None:
        """From now on the body goes into `sink` as it arrives, at once what one read of the socket brought.

        It runs inside the socket's callback: it must not block.  What it raises ends the exchange.
        """
        self._sink = sink
        self._resume()

    async def news(self) -> bool:
        """Until reading was paused, or True: the body is complete.  Raises what ended the exchange."""
        if self._error is not None or not self.complete:
            await self._something()
        return self.complete

    def pause(self) -> None:
        """Read no more until `resume`, and wake who waits for news.  The deadline stands still."""
        self._deadline.hold()
        if not self._paused and self._transport is not None and not self.complete and not self.closed:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def resume(self, within_s: float) -> None:
        """Read on; what follows is expected within so many seconds."""
        self._resume()
        self.expect(within_s)

    def release(self) -> bool:
        """The exchange is over; True when the connection can carry another one, else it is closed."""
        if not self.complete or not self._keep or self.closed:
            self.close()
            return False
        self._busy = False
        self._sink = None
        self._pieces = []
        # A connection that is not read would never notice that the other side has closed it.
        self._resume()
        self.idle_since_s = self._loop.time()
        return True

    def close(self) -> None:
        """At once, whatever is under way: who waits for it gets ConnectionLost."""
        if self._busy and not self.complete and self._error is None:
            # Ours, so no body that runs until the end of the connection may pass for complete.
            self._error = ConnectionLost(untouched=False)
        self.closed = True
        self._deadline.close()
        if self._transport is not None:
            self._transport.abort()

    def _begin(self, whole: bool) -> None:
        assert not self._busy, "one exchange at a time"
        self.status = 0
        self.headers = {}
        self.complete = self._touched = self._until_close = False
        self._gathering = whole
        self._head_bytes = self._held_bytes = 0
        self._pieces = []
        self._error = None
        self._busy = True

    async def _something(self) -> None:
        """Until there is news.  Raises what ended the exchange."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            if not self.closed:
                self._transport.resume_reading()

    def _late(self) -> None:
        self._fail(TimeoutError())

    def _fail(self, error: Exception) -> None:
        if self._busy and not self.complete and self._error is None:
            self._error = error
        self.close()
        self._wake()

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if not self._busy or self.complete:
            self._fail(Malformed("Bytes that nobody asked for."))
            self._leave_the_pool()
            return
        self._touched = True
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # What a callback raises travels as the context of the parser's own error.
            raised = error.__context__
            self._sink_pieces()
            self._fail(raised if isinstance(raised, Malformed) else Malformed(f"No HTTP answer: {error}"))
            return
        if self._sink is not None:
            self._sink_pieces()
        elif not self.status and self._head_bytes > HEAD_LIMIT_BYTES:
            self._fail(Malformed(f"A head of more than {HEAD_LIMIT_BYTES} bytes."))

    def _sink_pieces(self) -> None:
        if self._sink is None or not self._pieces:
            return
        try:
            self._sink(self.take())
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to who gave the sink
            if self._error is None:
                self._error = error
            if not self.complete:
                self.close()
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._deadline.close()
        if self._busy and not self.complete:
            if self._until_close and exc is None and self._error is None:
                self.complete = True
            elif self._error is None:
                self._error = ConnectionLost(untouched=not self._touched)
            self._wake()
        self._leave_the_pool()

    def _leave_the_pool(self) -> None:
        if not self._busy:
            self._idle_ended(self)

    # --- httptools ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            raise Malformed("Bytes that nobody asked for.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else it is a trailer
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = {}
            return
        self.status = status
        if not self._parser.should_keep_alive():
            # Without a length the end of the connection is the end of the body.
            self._until_close = not {b"content-length", b"transfer-encoding"} & self.headers.keys()
        if not self._gathering:
            self._wake()

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)
        if self._sink is not None:
            return
        self._held_bytes += len(piece)
        if not self._gathering:
            self._wake()
            if self._held_bytes >= HIGH_WATER_BYTES:
                self.pause()
        elif self._held_bytes > WHOLE_LIMIT_BYTES:
            raise Malformed(f"An answer of more than {WHOLE_LIMIT_BYTES} bytes.")

    def on_message_complete(self) -> None:
        if not self.status:
            return
        self.complete = True
        self._keep = self._parser.should_keep_alive() and not self._until_close
        self._deadline.off()
        self._wake()
