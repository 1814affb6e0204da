"""From a shard's socket to a client's without a task in between.

The socket's callback feeds the passage and pushes what it lets through.  Only a client that is slow
needs the waiting task: reading the shard pauses until that client has taken what is under way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from orchestrator.core.passage import Passage
from orchestrator.shards.http import Connection

Push = Callable[[bytes], Awaitable[None] | None]
"""Sends to the client.  None: taken; else the client is slow, and awaiting ends when it took all."""


class Stopped(Exception):
    """The passage lets nothing more through: the rest of the stream is nobody's concern."""


class Relay:
    """One stream's rest.  What one read of the socket brought is one push, and all that ever waits."""

    def __init__(self, connection: Connection, passage: Passage, push: Push, idle_s: float) -> None:
        self._connection = connection
        self._passage = passage
        self._push = push
        self._idle_s = idle_s
        self._blocked: Awaitable[None] | None = None

    async def run(self, unread: bytes) -> None:
        """Returns at the end of the stream or at an error event.

        Raises what the exchange raises, ValueError for an unreadable event; the client has all that
        came before.
        """
        connection = self._connection
        connection.expect(self._idle_s)
        connection.push_into(self._arrived)
        try:
            if unread := unread + connection.take():
                self._arrived(unread)
            await self._until_taken()
            while not await connection.news():
                await self._until_taken()
        except Stopped:
            pass
        await self._until_taken()
        if self._passage.failure is not None:
            raise self._passage.failure
        if rest := self._passage.finish():
            self._hand_on(rest)
            await self._until_taken()

    def _arrived(self, piece: bytes) -> None:
        ready = self._passage.feed(piece)
        if ready:
            self._hand_on(ready)
        if self._passage.over:
            raise Stopped

    def _hand_on(self, ready: bytes) -> None:
        assert self._blocked is None, "a connection that is paused brings nothing"
        self._blocked = self._push(ready)
        if self._blocked is None:
            self._connection.expect(self._idle_s)
        else:
            self._connection.pause()

    async def _until_taken(self) -> None:
        """The client has everything; only then the shard is read again."""
        if self._blocked is not None:
            await self._blocked
            self._blocked = None
            self._connection.resume(self._idle_s)
