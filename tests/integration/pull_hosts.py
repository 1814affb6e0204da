"""Two hosts for tests: a prefill shard whose records are served, a decode shard that pulls them.

Each has a folder of arenas; between them real sockets on loopback, with a proxy where one is wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tgi_patches.bridge import FirstToken, Record
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import PROTOCOL_VERSION, Fingerprint, PullReply, PullRequest
from tgi_patches.key import sign
from tgi_patches.pull import PullLimits
from tgi_patches.pull.puller import Puller
from tgi_patches.pull.server import PullServer
from tgi_patches.pull.source import ArenaSource, Source

FINGERPRINT = Fingerprint("smol", "r1", "tok", "float32", "float32", layers=2, kv_heads=4, head_dim=64)
KEY = b"a key of the deployment"
LIMITS = PullLimits(connect_s=2.0, step_s=2.0, chunk_bytes=256 * 1024)
MEBIBYTE = 2**20
TOKENS = 300
PLANES = (300_000, 300_000, 600, 300_000)
"""Blocks: 262,144 + 37,856 twice, 600, and again two."""
KV_BYTES = sum(PLANES)
FIRST = FirstToken(11, -0.25, ((11, -0.25), (12, -3.5)))
EPOCH = 7


def handle(number: int) -> str:
    return f"{number:032x}"


def data_of(number: int, rank: int = 0) -> list[bytes]:
    noise = random.Random(number * 100 + rank)
    return [noise.randbytes(size) for size in PLANES]


@dataclass
class PrefillHost:
    """A shard with arenas of every rank, and a server for them where one runs."""

    folder: Path
    ranks: int = 1
    epoch: int = EPOCH
    ring_bytes: int = 8 * MEBIBYTE
    bridges: list[ArenaBridge] = field(default_factory=list)

    def open(self) -> None:
        for rank in range(self.ranks):
            self.bridges.append(
                ArenaBridge(
                    self.folder,
                    "dep",
                    "p",
                    rank,
                    self.epoch,
                    replace(FINGERPRINT, tensor_parallel=self.ranks),
                    self.ring_bytes,
                    60.0,
                )
            )

    def restart(self, epoch: int) -> None:
        self.close()
        self.epoch = epoch
        self.open()

    def close(self) -> None:
        for bridge in self.bridges:
            bridge.close()
        self.bridges.clear()

    def export(self, number: int, *, checked: bool = True) -> list[Record]:
        """One record per rank."""
        made = []
        for rank, bridge in enumerate(self.bridges):
            planes = data_of(number, rank)
            if checked:
                views = [[memoryview(plane)] for plane in planes]
                made.append(bridge.export(handle(number), range(TOKENS), FIRST, True, views))
                continue
            reservation = bridge.reserve(handle(number), range(TOKENS), FIRST, True, PLANES, checked=False)
            reservation.data[:] = b"".join(planes)
            made.append(reservation.publish())
        return made

    def source(self) -> ArenaSource:
        return ArenaSource(self.folder, "dep", "p", self.epoch, FINGERPRINT, self.ranks)

    @asynccontextmanager
    async def serving(
        self,
        key: bytes = KEY,
        limits: PullLimits = LIMITS,
        source: Source | None = None,
        port: int = 0,
    ) -> AsyncIterator[tuple[PullServer, str]]:
        """The server, and its address."""
        server = PullServer(source or self.source(), key, limits)
        async with server.serving("127.0.0.1", port) as bound:
            yield server, f"127.0.0.1:{bound}"


@dataclass
class DecodeHost:
    """A puller, and a shard beside it that reads what was pulled."""

    folder: Path
    puller: Puller
    reader: ArenaBridge

    def read(self, reply: PullReply, rank: int = 0) -> tuple[Record, list[bytes]]:
        """As the overlay would: by the shard and epoch of the reply."""
        record = self.reader.lookup(reply.shard, reply.epoch, reply.handle, rank)
        targets = [bytearray(size) for size in PLANES]
        self.reader.read_into(record, [[memoryview(target)] for target in targets], TOKENS)
        return record, [bytes(target) for target in targets]

    @property
    def open_bytes(self) -> int:
        """Reserved and neither published nor given up."""
        rings = self.puller._rings.current
        limit = 0 if rings is None else rings.bridges[0].ring_bytes // 2
        return 0 if rings is None else sum(limit - budget.free_bytes for budget in rings.budgets)


@contextlib.contextmanager
def decode_host(
    folder: Path,
    *,
    pulled_bytes: int = 8 * MEBIBYTE,
    key: bytes = KEY,
    limits: PullLimits = LIMITS,
    fingerprint: Fingerprint = FINGERPRINT,
) -> Iterator[DecodeHost]:
    puller = Puller(folder, "dep", "q", fingerprint, pulled_bytes, 60.0, key, limits)
    reader = ArenaBridge(folder, "dep", "q", 0, 1, fingerprint, 0, 60.0)
    try:
        yield DecodeHost(folder, puller, reader)
    finally:
        reader.close()
        puller.close()


def request(
    address: str,
    number: int,
    *,
    key: bytes = KEY,
    epoch: int = EPOCH,
    shard: str = "p",
    timeout_s: float = 10.0,
) -> PullRequest:
    unsigned = PullRequest(PROTOCOL_VERSION, handle(number), shard, epoch, address, timeout_s)
    return replace(unsigned, signature=sign(key, *unsigned.signed()))


# --- a proxy that does to a connection what networks do ------------------------------------------


@dataclass
class Fault:
    """What happens to one connection's bytes on their way from the server."""

    at: int = 2**62
    """Byte that it happens at."""
    flip: bool = False
    cut: bool = False
    until: asyncio.Event | None = None
    """Nothing more comes before this is set."""
    bytes_per_s: float = 0.0
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    async def pass_on(self, data: bytes, offset: int, send: Callable[[bytes], None]) -> bool:
        """False where the connection ends."""
        if self.bytes_per_s:
            await asyncio.sleep(len(data) / self.bytes_per_s)
        inside = self.at - offset
        if not 0 <= inside < len(data):
            send(data)
            return True
        self.reached.set()
        if self.flip:
            send(data[:inside] + bytes([data[inside] ^ 4]) + data[inside + 1 :])
            return True
        send(data[:inside])
        if self.until is not None:
            await self.until.wait()
        if not self.cut:
            send(data[inside:])
        return not self.cut


class Proxy:
    """Connection `n` suffers `faults[n]`; `passed[n]` counts the bytes that came from the server."""

    def __init__(self, target: str, faults: list[Fault]) -> None:
        self._target = target
        self._faults = faults
        self.passed: list[int] = []
        self._running: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        number = len(self.passed)
        self.passed.append(0)
        fault = self._faults[number] if number < len(self._faults) else Fault()
        host, _, port = self._target.rpartition(":")
        with contextlib.suppress(OSError, asyncio.CancelledError):
            from_server, to_server = await asyncio.open_connection(host, int(port))
            up = asyncio.create_task(self._up(reader, to_server))
            try:
                await self._down(number, fault, from_server, writer)
            finally:
                up.cancel()
                for end in (writer, to_server):
                    end.transport.abort()
        self._running.discard(task)

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
            writer.close()

    async def _down(
        self, number: int, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(16384):
            if not await fault.pass_on(data, self.passed[number], writer.write):
                return
            self.passed[number] += len(data)
            await writer.drain()


@pytest.fixture
def prefill(tmp_path: Path) -> Iterator[PrefillHost]:
    host = PrefillHost(tmp_path / "prefill")
    host.open()
    yield host
    host.close()


@pytest.fixture
def away(tmp_path: Path) -> Path:
    return tmp_path / "decode"
