"""What the tests of the own HTTP client share."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orchestrator.shards.http import (
    Connection,
    Origin,
    Pool,
    message,
)
from tests.integration.raw_shard import HOST, Line, RawShard

SOON_S = 5.0
READ_BYTES = 256 * 1024
"""The most that either loop reads from a socket at once."""


def get(origin: Origin, target: str = "/x") -> bytes:
    return message("GET", origin, target, b"")


async def begin(pool: Pool, shard: RawShard, within_s: float = SOON_S) -> Connection:
    return await pool.send(shard.origin, get(shard.origin), connect_s=SOON_S, within_s=within_s)


async def whole(pool: Pool, origin: Origin, sent: bytes | None = None) -> tuple[int, bytes]:
    got = await pool.send(origin, sent or get(origin), connect_s=SOON_S, within_s=SOON_S, whole=True)
    body = got.take()
    pool.release(origin, got)
    return got.status, body


async def in_pieces(got: Connection) -> bytes:
    body = b""
    while piece := await got.piece():
        body += piece
    return body


@contextmanager
def full_backlog() -> Iterator[Origin]:
    """A socket that listens and takes nobody any more."""
    with socket.create_server((HOST, 0), backlog=0) as listening:
        address = listening.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        yield Origin(*address)
        for each in waiting:
            each.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not true():  # noqa: ASYNC110 - what is waited for is in the kernel
            await asyncio.sleep(0.001)


async def stuck(line: Line) -> None:
    """The shard cannot send any more: this side does not read."""
    await until(lambda: len(line.asked) > 0)
    sent, still = -1, 0
    while still < 10:
        now = line.writer.transport.get_write_buffer_size()
        still = still + 1 if now == sent and now > 0 else 0
        sent = now
        await asyncio.sleep(0.005)
