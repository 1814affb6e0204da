"""The end that gives: exports records into its arena, offers them to pulls and to groups.

Prints the port of its control connection, and ends with SIGTERM, with its time, or when killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi_patches.bridge import ArenaError, FirstToken
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.bridge.arena_id import arena_id
from tgi_patches.bridge.files import arena_path
from tgi_patches.contract import BridgeMiss, new_epoch
from tgi_patches.key import read_key
from tgi_patches.peer.control import Refused, order_of
from tgi_patches.peer.group import NotHere, check, serve_group
from tgi_patches.peer.look import torch_version
from tgi_patches.peer.records import (
    FINGERPRINT,
    RECORD_TTL_S,
    file_at,
    fill,
    planes_of,
    record_bytes,
    ring_bytes,
    tokens_of,
)
from tgi_patches.pull.server import PullServer
from tgi_patches.pull.source import ArenaSource

LIFE_S = 900.0
"""Nobody forgets one that ends by itself."""


@dataclass(frozen=True, slots=True)
class End:
    """What one end is told."""

    arenas: str
    name: str
    """Of the measurement: the folder in the arenas."""
    shard: str
    key_file: str
    size_bytes: int
    """Of the largest record."""
    host: str = "0.0.0.0"
    """Where to listen."""


async def serve(end: End, say: Callable[[dict[str, Any]], None]) -> None:
    """Raises ContractError for a key that cannot be read, OSError for an address that is not ours."""
    logging.disable(logging.CRITICAL)  # stdout and stderr are read by the other side
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    giver = _Giver(end, read_key(Path(end.key_file), "key_file"))
    async with AsyncExitStack() as stack:
        stack.callback(giver.close)
        await giver.open(stack)
        server = await asyncio.start_server(giver.answer, end.host, 0)
        stack.callback(server.close)
        say({"port": server.sockets[0].getsockname()[1]})
        with suppress(TimeoutError):
            async with asyncio.timeout(LIFE_S):
                await ended.wait()


class _Giver:
    """Orders and what they do; a method's name is the order's."""

    def __init__(self, end: End, key: bytes) -> None:
        self._end = end
        self._key = key
        self._epoch = new_epoch()
        self._bridge: ArenaBridge | None = None
        self._fault = ""
        """Why there is no arena."""
        self._server: PullServer | None = None
        self._pull_port = 0
        self._data = memoryview(bytearray(record_bytes(end.size_bytes)))

    async def open(self, stack: AsyncExitStack) -> None:
        end = self._end
        folder = Path(end.arenas)
        try:
            arena_id(folder)
            self._bridge = ArenaBridge(
                folder,
                end.name,
                end.shard,
                0,
                self._epoch,
                FINGERPRINT,
                ring_bytes(end.size_bytes),
                RECORD_TTL_S,
            )
        except ArenaError as error:
            self._fault = str(error)
            return
        source = ArenaSource(folder, end.name, end.shard, self._epoch, FINGERPRINT)
        self._server = PullServer(source, self._key)
        self._pull_port = await stack.enter_async_context(self._server.serving(end.host, 0))

    def close(self) -> None:
        if self._bridge is not None:
            self._bridge.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Orders of one connection."""
        orders: dict[str, Callable[..., dict[str, Any]]] = {
            "hello": self.hello,
            "export": self.export,
            "pulled": self.pulled,
            "group": self.group,
            "fill": self.fill,
        }
        with suppress(ConnectionError):
            while line := await reader.readline():
                try:
                    order = order_of(self._key, line)
                    told = orders[order.pop("do")](**order)
                except (Refused, NotHere, BridgeMiss) as error:
                    told = {"refused": str(error)}
                writer.write(json.dumps(told).encode() + b"\n")
                await writer.drain()
        writer.close()

    def hello(self) -> dict[str, Any]:
        end = self._end
        told: dict[str, Any] = {"torch": torch_version(), "fault": self._fault}
        if self._bridge is not None:
            told |= {
                "epoch": self._epoch,
                "id": arena_id(Path(end.arenas)),
                "file": file_at(arena_path(Path(end.arenas), end.name, end.shard, 0)),
                "pull_port": self._pull_port,
            }
        return told

    def export(self, handle: str, size_bytes: int) -> dict[str, Any]:
        """A record of new content; CPU seconds of the export alone."""
        if self._bridge is None:
            raise Refused(self._fault)
        tokens = tokens_of(size_bytes)
        data = self._data[: record_bytes(size_bytes)]
        digest, planes = fill(data), planes_of(data, tokens)
        start = time.thread_time()
        self._bridge.export(handle, range(tokens), FirstToken(1, 0.0), False, planes)
        return {"seconds": time.thread_time() - start, "kv_bytes": len(data), "digest": digest}

    def pulled(self) -> dict[str, Any]:
        """Fetches that this end has served whole."""
        return {"ok": 0 if self._server is None else self._server.counts["ok"]}

    def group(self, backend: str, host: str) -> dict[str, Any]:
        """Wait for the other end of a group; `host` is this end's address as that one reaches it."""
        check(backend)
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        serve_group(backend, f"{host}:{port}", host, self._data)
        return {"port": port}

    def fill(self) -> dict[str, Any]:
        """New content for the group to fetch."""
        return {"digest": fill(self._data), "kv_bytes": len(self._data)}
