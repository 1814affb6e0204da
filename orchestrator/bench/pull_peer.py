"""The other host of `bench pull`: exports a record when it is told to, and offers it in every way.

Control is one JSON object a line, each with an answer; the bytes travel over ports of their own.
`python -m orchestrator.bench.pull_peer HOST:PORT` prints the address it listens at and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.bench.pull_others import Nixl, NotHere, gloo_serve
from tgi_patches.bridge import FirstToken
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import Fingerprint, new_epoch
from tgi_patches.pull.server import PullServer
from tgi_patches.pull.source import ArenaSource

FINGERPRINT = Fingerprint("bench", "", "", "float32", "float32", layers=30, kv_heads=3, head_dim=64)
KEY = b"not a secret: of a benchmark"
PLANES = 60
ROW_BYTES = 768
"""One token of one plane: SmolLM2-135M in fp32."""
RING_RECORDS = 5
RECORD_TTL_S = 600.0


def tokens_of(size: int) -> int:
    """As many as a record of at most `size` bytes holds."""
    return max(1, size // (PLANES * ROW_BYTES))


def planes_of(data: memoryview, tokens: int) -> list[list[memoryview]]:
    """`data` cut into the planes of a record."""
    plane = tokens * ROW_BYTES
    return [[data[start : start + plane]] for start in range(0, PLANES * plane, plane)]


def memory() -> str | None:
    """The tmpfs that arenas live in; None leaves it to the system's temporary folder."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


class Peer:
    """`limit_bytes` is the largest record that will be asked for."""

    def __init__(self, host: str, folder: Path) -> None:
        self._host = host
        self._folder = folder
        self._epoch = new_epoch()
        self._bridge: ArenaBridge | None = None
        self._data = memoryview(b"")
        self._last = memoryview(b"")
        """The bytes of the newest record, where it lies."""
        self._others: list[Any] = []

    def start(self, limit_bytes: int) -> dict[str, Any]:
        """Make the arena."""
        self.close()
        ring_bytes = RING_RECORDS * (limit_bytes + 2**20)
        self._bridge = ArenaBridge(
            self._folder, "bench", "p", 0, self._epoch, FINGERPRINT, ring_bytes, RECORD_TTL_S
        )
        self._data = memoryview(bytearray(b"\x5a") * limit_bytes)
        return {"epoch": self._epoch}

    def export(self, handle: str, size: int) -> dict[str, Any]:
        """One record of at most `size` bytes."""
        assert self._bridge is not None
        tokens = tokens_of(size)
        planes = planes_of(self._data, tokens)
        record = self._bridge.export(handle, range(tokens), FirstToken(1, 0.0), False, planes)
        self._last = self._bridge.data_of(record)
        return {"kv_bytes": record.kv_bytes}

    def gloo(self, limit_bytes: int) -> dict[str, Any]:
        with socket.create_server((self._host, 0)) as free:
            port = free.getsockname()[1]
        gloo_serve(self._host, port, limit_bytes)
        return {"port": port}

    def nixl(self, limit_bytes: int) -> dict[str, Any]:
        agent = Nixl("server", limit_bytes)
        self._others.append(agent)
        return agent.offer()

    def cpu(self) -> dict[str, Any]:
        """Of this process so far."""
        return {"seconds": time.process_time()}

    def close(self) -> None:
        self._last.release()
        if self._bridge is not None:
            self._bridge.close()

    def send_blocking(self, listener: socket.socket) -> None:
        """In a thread: the newest record to whoever connects, by one blocking call."""
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.sendall(self._last)

    async def send_asyncio(self, listener: socket.socket) -> None:
        """The same on the event loop."""
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listener)
            with sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_sendall(sock, self._last)

    async def control(
        self, ports: dict[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Orders of one connection."""
        orders: dict[str, Callable[..., dict[str, Any]]] = {
            "start": self.start,
            "export": self.export,
            "gloo": self.gloo,
            "nixl": self.nixl,
            "cpu": self.cpu,
        }
        while line := await reader.readline():
            order = json.loads(line)
            try:
                answer = ports if order["do"] == "ports" else orders[order.pop("do")](**order)
            except NotHere as missing:
                answer = {"missing": str(missing)}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()


@asynccontextmanager
async def serving(host: str, port: int) -> AsyncIterator[int]:
    """Everything that `bench pull --from` needs; yields the port of the control connection."""
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="tgi-orchestrator-bench-pull-", dir=memory())
        )
        peer = Peer(host, Path(folder) / "arenas")
        stack.callback(peer.close)
        source = ArenaSource(Path(folder) / "arenas", "bench", "p", peer._epoch, FINGERPRINT)
        blocking, plain = (stack.enter_context(socket.create_server((host, 0))) for _ in range(2))
        plain.setblocking(False)
        threading.Thread(target=peer.send_blocking, args=(blocking,), daemon=True).start()
        async with PullServer(source, KEY).serving(host, 0) as pull_port:
            ports = {
                "pull": pull_port,
                "blocking": blocking.getsockname()[1],
                "asyncio": plain.getsockname()[1],
            }
            sending = asyncio.create_task(peer.send_asyncio(plain))
            server = await asyncio.start_server(partial(peer.control, ports), host, port)
            try:
                yield server.sockets[0].getsockname()[1]
            finally:
                server.close()
                sending.cancel()
                await asyncio.wait([sending])


async def serve(host: str, port: int, *, owned: bool = False) -> None:
    """Until SIGTERM or SIGINT, or where it is `owned`, until stdin ends; the address goes to stdout."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    if owned:
        loop.add_reader(sys.stdin.fileno(), ended.set)  # nothing is ever written to it
    async with serving(host, port) as bound:
        sys.stdout.write(f"{host}:{bound}\n")
        sys.stdout.flush()
        await ended.wait()


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    asyncio.run(serve(host, int(port), owned=True))


if __name__ == "__main__":
    main()
