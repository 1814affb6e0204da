"""A server's end of a connection: whole frames in, a record's memory out without a copy.

On the bare socket and not on a transport, which would keep what the other side does not take.
"""

from __future__ import annotations

import asyncio
import socket

from tgi_patches.pull.wire import HEADER, Kind, WireError, parse_header, unsealed


class Stream:
    """`sock` is non-blocking.  Raises OSError and TimeoutError where the connection fails."""

    def __init__(self, sock: socket.socket, step_s: float) -> None:
        self._sock = sock
        self._step_s = step_s
        self._loop = asyncio.get_running_loop()

    async def frame(self, *kinds: Kind, within_s: float) -> tuple[Kind, bytes] | None:
        """The next frame, which starts within `within_s`; None where the other side is done.

        Raises WireError.
        """
        raw = await self._read(HEADER.size, within_s)
        if not raw:
            return None
        header = parse_header(raw, *kinds)
        return header.kind, unsealed(header, await self._read(header.payload_bytes, self._step_s))

    async def send(self, data: bytes | memoryview) -> None:
        """All of it, to the kernel; a peer that does not take it within a step is gone."""
        async with asyncio.timeout(self._step_s):
            await self._loop.sock_sendall(self._sock, data)

    async def _read(self, size: int, within_s: float) -> bytes:
        """So many bytes; none where the connection ends before the first of a frame."""
        raw = bytearray(size)
        view = memoryview(raw)
        filled = 0
        async with asyncio.timeout(within_s):
            while filled < size:
                received = await self._loop.sock_recv_into(self._sock, view[filled:])
                if not received:
                    break
                filled += received
        if 0 < filled < size:
            raise WireError("half a frame")
        return bytes(raw[:filled])
