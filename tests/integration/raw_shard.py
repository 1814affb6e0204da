"""A shard of which each byte is scripted, on a real socket."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from orchestrator.shards.http import Origin

HOST = "127.0.0.1"


@dataclass(slots=True)
class Line:
    """The shard's end of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    asked: list[bytes] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """The talk is over."""

    async def request(self) -> bytes:
        """The next request, head and body.  Raises IncompleteReadError where the other side left."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        self.asked.append(head + await self.reader.readexactly(length))
        return self.asked[-1]

    async def say(self, text: bytes, size: int | None = None) -> None:
        """In pieces of `size`, each in a turn of its own."""
        for start in range(0, len(text), size or len(text) or 1):
            piece = text[start : start + (size or len(text))]
            if self.writer.transport.is_closing():
                raise ConnectionError  # on uvloop writing would raise something else
            self.writer.write(piece)
            await self.writer.drain()
            if size is not None:
                await asyncio.sleep(0)

    def reset(self) -> None:
        """End with RST, as a killed process with unread bytes does."""
        connected: socket.socket = self.writer.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def left(self) -> None:
        """Until the other side has closed."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass


Talk = Callable[[Line], Awaitable[None]]


@dataclass(slots=True)
class RawShard:
    origin: Origin
    lines: list[Line] = field(default_factory=list)

    @property
    def asked(self) -> list[list[bytes]]:
        """The requests of each connection."""
        return [line.asked for line in self.lines]

    async def all_ended(self) -> None:
        """Every talk is over; those that wait for it saw the other side leave."""
        async with asyncio.timeout(5):
            for line in self.lines:
                await line.ended.wait()


@asynccontextmanager
async def raw_shard(*talks: Talk) -> AsyncIterator[RawShard]:
    """Each connection follows the next talk, later ones the last; its end closes the connection."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        shard.lines.append(line)
        try:
            await talks[min(len(shard.lines), len(talks)) - 1](line)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            line.ended.set()

    server = await asyncio.start_server(connected, HOST, 0)
    shard = RawShard(Origin(HOST, server.sockets[0].getsockname()[1]))
    try:
        yield shard
    finally:
        server.close()
        for line in shard.lines:
            line.writer.transport.abort()
        await asyncio.sleep(0.01)


def answers(*whole: bytes, size: int | None = None) -> Talk:
    """One after another, each to a request; then wait until the other side leaves."""

    async def talk(line: Line) -> None:
        for each in whole:
            await line.request()
            await line.say(each, size)
        await line.left()

    return talk


def says(body: bytes, *head: bytes) -> bytes:
    """A whole answer with its length."""
    lines = (b"HTTP/1.1 200 OK", b"content-length: %d" % len(body), *head)
    return b"\r\n".join((*lines, b"", body))


def chunked(*chunks: bytes, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b"".join(b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    return head + body + b"0" + extension + b"\r\n" + trailer + b"\r\n"
