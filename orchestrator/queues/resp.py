"""A client for Redis' protocol: what is sent in one turn of the loop leaves in one write.

lost --send--> connecting --hello answered--> connected --broken, deadline, NOSCRIPT--> lost
A connection that is lost takes nothing along: calls that may be tried again go first, in their order, on
the next one.  So Redis sees all calls in the order in which they were made, whatever breaks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, cast

import hiredis

from orchestrator.errors import OrchestratorError, Unreachable
from orchestrator.queues.address import Address, Command

ATTEMPTS = 2
LOOK_S = 0.001
"""Long enough for the loop to look at its sockets once."""

Say = Callable[[Sequence[Command]], Awaitable[list[Any]]]
"""Sends commands together; replies in order, or the first error."""


class Refused(Unreachable):
    """Redis answered, with an error."""

    def __init__(self, reply: str) -> None:
        super().__init__(f"Redis refused a command: {reply.rstrip('.')}.")
        self.reply = reply


class _Call:
    """One command on its way; `due_s` is when its present attempt has taken too long."""

    __slots__ = ("attempts", "due_s", "packed", "reply")

    def __init__(self, packed: bytes, attempts: int, due_s: float, reply: asyncio.Future[Any]) -> None:
        self.packed = packed
        self.attempts = attempts
        self.due_s = due_s
        self.reply = reply

    def answer(self, reply: Any) -> None:
        if isinstance(reply, Refused):
            self.fail(reply)
        elif not self.reply.done():
            self.reply.set_result(reply)

    def fail(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()  # nobody may wait for it


class _Connection(asyncio.Protocol):
    """One connection from its start to its end; `lost` is told once why it ended."""

    def __init__(self, deadline_s: float, lost: Callable[[_Connection, str], None]) -> None:
        self.unanswered: deque[_Call] = deque()
        self.closed = asyncio.Event()
        self.why = ""
        """Why it ended; empty before."""
        self._deadline_s = deadline_s
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reader = hiredis.Reader(encoding="utf-8", errors="replace", replyError=Refused)

    def write(self, calls: Sequence[_Call]) -> None:
        """All in one write; never to a connection that has ended."""
        assert self._transport is not None
        self.unanswered.extend(calls)
        self._transport.write(b"".join([call.packed for call in calls]))
        if self._timer is None:
            self._timer = self._loop.call_at(calls[0].due_s, self._watch)

    def end(self, why: str) -> None:
        """At once; what was not answered stays in `unanswered`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()
        if not self.why:
            self.why = why
            self._lost(self, why)

    def _watch(self, looked: bool = False) -> None:
        """One timer for all: it goes on to the oldest call, which is the first one due.

        A loop that was busy runs its timers before it reads: its own lateness is not held against Redis.
        """
        self._timer = None
        if not self.unanswered:
            return
        due_s = self.unanswered[0].due_s
        if due_s > self._loop.time():
            self._timer = self._loop.call_at(due_s, self._watch)
        elif not looked:
            self._timer = self._loop.call_later(LOOK_S, self._watch, True)
        else:
            self.end(_late(self._deadline_s))

    # --- asyncio's side -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reader, unanswered = self._reader, self.unanswered
        try:
            reader.feed(data)
            # RESP2 knows no booleans: False is an incomplete reply.
            while (reply := reader.gets()) is not False:
                if not unanswered:
                    unasked = "a reply came to nothing that was asked"
                    self.end(reply.reply if isinstance(reply, Refused) else unasked)
                elif isinstance(reply, Refused) and reply.reply.startswith("NOSCRIPT"):
                    self.end("it forgot the scripts")
                else:
                    unanswered.popleft().answer(reply)
                if self.why:
                    return
        except hiredis.ProtocolError as error:
            self.end(f"what came is no reply ({error})")

    def connection_lost(self, error: Exception | None) -> None:
        self.end(str(error or "it closed the connection"))
        self.closed.set()


class RespClient:
    """One connection to a Redis, made when it is needed and again when it broke.

    `greet` speaks first on each new connection; what it raises ends the attempt.  The deadline is for one
    attempt of one call, with the connection that it may need.
    """

    def __init__(
        self, url: str, *, deadline_s: float, greet: Callable[[Say], Awaitable[None]] | None = None
    ) -> None:
        self._address = Address.of(url)
        self._deadline_s = deadline_s
        self._greet = greet
        self._queued: deque[_Call] = deque()
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._flushing = False
        self._closed = False

    async def open(self) -> None:
        """Connect before anything is sent.  Raises Unreachable, and what `greet` raises."""
        self._connection = await self._connect()

    def send(self, *command: str | int, attempts: int = ATTEMPTS) -> asyncio.Future[Any]:
        """Queue a command; it is sent even if nobody waits.

        The future raises Refused for an error reply, Unreachable when no attempt brought a reply.
        """
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        call = _Call(_packed(command), attempts, loop.time() + self._deadline_s, reply)
        if self._closed:
            call.fail(_closed())
            return reply
        self._queued.append(call)
        if not self._flushing:
            self._flushing = True
            loop.call_soon(self._flush)
        return reply

    async def all(self, commands: Iterable[Command]) -> list[Any]:
        """Replies in order, in one round trip; raises the first error."""
        replies = [self.send(*command) for command in commands]
        return [await reply for reply in replies]

    async def aclose(self) -> None:
        """At once; what is not answered fails."""
        self._closed = True
        connection, self._connection = self._connection, None
        for call in (*(connection.unanswered if connection else ()), *self._queued):
            call.fail(_closed())
        self._queued.clear()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if connection is not None:
            connection.end("closed")
            await connection.closed.wait()

    # --- connections ----------------------------------------------------------------------------

    def _flush(self) -> None:
        self._flushing = False
        if not self._queued or self._connecting is not None:
            return
        if self._connection is None:
            self._connecting = asyncio.get_running_loop().create_task(self._reconnect())
            return
        queued, self._queued = self._queued, deque()
        self._connection.write(queued)

    async def _reconnect(self) -> None:
        """Until a connection stands or no call is left that may be tried again."""
        try:
            while self._connection is None and self._queued:
                try:
                    self._connection = await self._connect()
                except OrchestratorError as error:
                    self._queued = self._tried(self._queued, Unreachable(str(error)))
        finally:
            self._connecting = None
        self._flush()

    async def _connect(self) -> _Connection:
        """Raises Unreachable, and what `greet` raises."""
        made: _Connection | None = None
        try:
            async with asyncio.timeout(self._deadline_s):
                made = await self._address.connect(lambda: _Connection(self._deadline_s, self._broken))
                await self._begin(made)
            if made.why:
                raise _unreachable(made.why)
        except BaseException as error:
            if made is not None:
                made.end("not greeted")
            if isinstance(error, TimeoutError):
                raise _unreachable(_late(self._deadline_s)) from None
            if isinstance(error, OSError):
                raise _unreachable(f"{self._address}: {error.strerror or error}") from None
            raise
        return made

    async def _begin(self, made: _Connection) -> None:
        async def say(commands: Sequence[Command]) -> list[Any]:
            loop = asyncio.get_running_loop()
            due_s = loop.time() + self._deadline_s
            calls = [_Call(_packed(one), 1, due_s, loop.create_future()) for one in commands]
            if made.why:
                raise _unreachable(made.why)
            if calls:
                made.write(calls)
            return [await call.reply for call in calls]

        try:
            await say(self._address.hello)
        except Refused as error:
            raise Unreachable(f"Redis refuses this client: {error.reply.rstrip('.')}.") from None
        if self._greet is not None:
            await self._greet(say)

    def _broken(self, connection: _Connection, why: str) -> None:
        if connection is self._connection:
            self._connection = None
            self._queued = self._tried(connection.unanswered, _unreachable(why)) + self._queued
            self._flush()
        else:
            # While it was greeted, or closed on purpose.
            for call in connection.unanswered:
                call.fail(_unreachable(why))

    def _tried(self, calls: Iterable[_Call], error: Unreachable) -> deque[_Call]:
        """Those that may be tried again, in order; the others fail."""
        due_s = asyncio.get_running_loop().time() + self._deadline_s
        kept: deque[_Call] = deque()
        for call in calls:
            call.attempts -= 1
            call.due_s = due_s
            if call.attempts > 0:
                kept.append(call)
            else:
                call.fail(error)
        return kept


def _packed(command: Command) -> bytes:
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]  # its stub says one element
    return packed


def _closed() -> Unreachable:
    return Unreachable("The queue is closed.")


def _unreachable(why: str) -> Unreachable:
    return Unreachable(f"Redis does not answer: {why.rstrip('.')}.")


def _late(deadline_s: float) -> str:
    return f"no answer within {deadline_s:g} s"
