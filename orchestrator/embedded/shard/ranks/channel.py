"""Messages between two processes of one shard, over a socket pair that only they hold.

A frame is its length in 4 bytes and a pickle.  Pickles of anyone else are never read here: the other
end is a process that we started, or that started us.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")


class ChannelClosed(Exception):
    """The other process is gone, or going."""


class Channel:
    """One end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Channel:
        """Takes the socket over."""
        return cls(*await asyncio.open_connection(sock=end))

    def send(self, message: object) -> None:
        """Queue a message.  Lost without a word where the other end is gone: `receive` tells."""
        frame = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._writer.write(_LENGTH.pack(len(frame)) + frame)

    async def receive(self) -> Any:
        """The next message.  Raises ChannelClosed; the caller sets the deadline."""
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return pickle.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChannelClosed from error

    async def close(self) -> None:
        """At once: what was not yet sent is dropped."""
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
