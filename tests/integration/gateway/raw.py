"""Bare sockets on both sides of a gateway, and a look at what it holds inside."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import httpx

from orchestrator.admission import GatewaySettings
from orchestrator.api.app import create_app
from orchestrator.api.connection import ClientConnection
from orchestrator.pipeline import Pipeline
from orchestrator.shards.client import ShardClient
from orchestrator.shards.fake import FakeShard
from orchestrator.shards.http import Pool
from tgi_patches.contract import Role

from .conftest import LIMITS, CountingQueue, House, InLoopServer, all_listening

PATIENCE_S = 10.0
GENERATE = {"inputs": "Hello", "parameters": {"max_new_tokens": 20, "details": True}}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "model": "my/name"}
PROMPT = {"prompt": "Hello", "max_tokens": 20, "model": "my/name"}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "compatible": ("/", GENERATE),
    "generate": ("/generate", GENERATE),
    "generate_stream": ("/generate_stream", GENERATE),
    "chat": ("/v1/chat/completions", CHAT),
    "chat_stream": ("/v1/chat/completions", CHAT | {"stream": True}),
    "completions": ("/v1/completions", PROMPT),
    "completions_stream": ("/v1/completions", PROMPT | {"stream": True}),
}
END = b"\r\n\r\n"


def head_of(path: str, *lines: str, method: str = "POST", version: str = "1.1") -> bytes:
    """A request's head."""
    return "\r\n".join([f"{method} {path} HTTP/{version}", "host: x", *lines, "", ""]).encode()


def request_of(kind: str, *lines: str, version: str = "1.1") -> bytes:
    """A whole request, as one piece."""
    path, body = REQUESTS[kind]
    content = json.dumps(body).encode()
    return head_of(path, f"content-length: {len(content)}", *lines, version=version) + content


def chunked(body: bytes, sizes: Iterable[int]) -> bytes:
    """`body` in chunks of the given sizes, the last of which takes the rest."""
    out, at = b"", 0
    for size in [*sizes, len(body)]:
        if piece := body[at : at + size]:
            out += b"%x\r\n%b\r\n" % (len(piece), piece)
        at += size
    return out + b"0\r\n\r\n"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    """Without the framing of chunks."""

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Line:
    """A client's connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, sent: bytes) -> None:
        self.writer.write(sent)
        await asyncio.wait_for(self.writer.drain(), PATIENCE_S)

    async def drip(self, sent: bytes) -> None:
        """One byte at a time, each read before the next is written: both sides share this loop."""
        for byte in sent:
            self.writer.write(bytes([byte]))
            await asyncio.sleep(0)

    async def until(self, mark: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(mark), PATIENCE_S)

    async def answer(self) -> Answer:
        """The next whole answer."""
        first, *lines = (await self.until(END)).decode().removesuffix("\r\n\r\n").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        length = headers.get("content-length")
        body = await self._chunks() if length is None else await self._exactly(int(length))
        return Answer(int(first.split()[1]), headers, body)

    async def ended(self) -> bytes:
        """Everything until the other side closes."""
        return await asyncio.wait_for(self.reader.read(), PATIENCE_S)

    async def closes_within(self, seconds: float) -> bool:
        """Whether the other side closes; nothing may come meanwhile."""
        try:
            return await asyncio.wait_for(self.reader.read(1), seconds) == b""
        except TimeoutError:
            return False

    async def leave(self, *, reset: bool = False) -> None:
        if reset:
            linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
            connection = self.writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort() if reset else self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            assert reset or self.reader.exception() is not None

    async def _exactly(self, size: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(size), PATIENCE_S)

    async def _chunks(self) -> bytes:
        pieces = []
        while size := int(await self.until(b"\r\n"), 16):
            pieces.append(await self._exactly(size))
            await self.until(b"\r\n")
        await self.until(b"\r\n")
        return b"".join(pieces)


async def line_to(house: OpenHouse, receive_bytes: int | None = None) -> Line:
    """A new connection; `receive_bytes` is how much the kernel takes for a client that does not read."""
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, house.address())
    line = Line(*await asyncio.open_connection(sock=connection, limit=2**16))
    house.lines.append(line)
    return line


async def until(condition: Callable[[], bool]) -> None:
    """Other tasks of this loop make it true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what it looks at tells nobody
            await asyncio.sleep(0)


@dataclass
class OpenHouse(House):
    """One whose gateway can be looked into."""

    pipeline: Pipeline
    pool: Pool
    server: InLoopServer
    lines: list[Line] = field(default_factory=list)
    """All that clients opened."""

    def client_bytes(self) -> int:
        """Written for clients, and not yet taken by the kernel."""
        connections: Any = self.server.server_state.connections
        return sum(one.transport.get_write_buffer_size() for one in connections)

    def shard_bytes(self) -> int:
        """Read from shards, and not yet passed on."""
        return sum(one._held_bytes for one in self.pool._busy)

    def paused(self) -> bool:
        """Some shard is not read, because its client does not read."""
        return any(one._paused for one in self.pool._busy)

    def nothing_open(self) -> bool:
        return not (self.pipeline.open or self.pool._busy or self.pool._connecting)


@asynccontextmanager
async def open_house(head_timeout_s: float = 30.0, **settings: Any) -> AsyncIterator[OpenHouse]:
    prefill = FakeShard("prefill-0", Role.PREFILL, limits=LIMITS)
    decode = FakeShard("decode-1", Role.DECODE, limits=LIMITS)
    queue, pool = CountingQueue(), Pool()
    chosen = GatewaySettings(**{"limits": LIMITS, "model_name": "served/model"} | settings)
    app = create_app(chosen, queue=queue, shards=ShardClient(pool=pool))
    servers = [InLoopServer(shard, lifespan="off") for shard in (prefill, decode)]
    prefill.url, decode.url = (server.url for server in servers)
    gateway = InLoopServer(app, lifespan="on")
    gateway.config.http = partial(ClientConnection, head_timeout_s=head_timeout_s)  # type: ignore[assignment]
    async with (
        all_listening(*servers, gateway),
        httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_S, trust_env=False) as http,
    ):
        queue.set_shards([prefill.view(), decode.view()])
        pipeline = app._gateway.pipeline
        house = OpenHouse(gateway.url, http, queue, prefill, decode, pipeline, pool, gateway)
        try:
            yield house
        finally:
            for line in house.lines:
                line.writer.transport.abort()


@asynccontextmanager
async def dripping(url: str) -> AsyncIterator[str]:
    """The URL of a proxy before `url` that passes everything on one byte at a time."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    pumps: set[asyncio.Task[None]] = set()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(2**16):
                for byte in piece:
                    sink.write(bytes([byte]))
                    await asyncio.sleep(0)
        except ConnectionError:
            pass
        finally:
            sink.close()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ahead, behind = await asyncio.open_connection(host, int(port))
        both = {asyncio.create_task(pump(reader, behind)), asyncio.create_task(pump(ahead, writer))}
        pumps.update(both)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    async with server:
        name, number = server.sockets[0].getsockname()
        yield f"http://{name}:{number}"
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@dataclass
class FloodingShard:
    """Answers every request with `events` events of `size` bytes, as fast as it is read."""

    events: int
    size: int
    url: str = ""
    written: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Its answer ended, whole or not."""

    def event(self, index: int) -> bytes:
        last = index == self.events
        token = {"id": index, "text": f"{index} " + "y" * self.size, "logprob": -0.5, "special": False}
        event = {"index": index, "token": token, "generated_text": "all" if last else None, "details": None}
        return b"data:" + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            self.url = f"http://{host}:{port}"
            yield

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(END)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
            for index in range(1, self.events + 1):
                event = self.event(index)
                writer.write(event)
                await writer.drain()
                self.written += len(event)
        except ConnectionError:
            pass
        finally:
            self.stopped.set()
            writer.close()


def socket_that_accepts_nobody() -> tuple[str, list[socket.socket]]:
    """A URL whose connections stay half open, and the sockets to close: its backlog is full."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    address = cast("tuple[str, int]", listener.getsockname())
    filling = []
    for _ in range(4):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(address)
        filling.append(one)
    return f"http://{address[0]}:{address[1]}", [listener, *filling]
