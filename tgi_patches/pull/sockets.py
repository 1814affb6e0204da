"""TCP sockets of both sides: without delay, and with buffers for a fast network."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

BACKLOG = 128
BUFFER_BYTES = 4 * 2**20
"""Of a socket: what one side may be ahead of the other."""


def stream_socket(family: int, buffer: int) -> socket.socket:
    """Non-blocking, without delay, its `buffer` (SO_RCVBUF, SO_SNDBUF) large where the kernel allows that.

    Where it does not, the kernel grows the buffer by itself and further than a fixed one would be.
    """
    sock = _plain_socket(family)
    sock.setsockopt(socket.SOL_SOCKET, buffer, BUFFER_BYTES)
    if sock.getsockopt(socket.SOL_SOCKET, buffer) < BUFFER_BYTES:
        sock.close()
        sock = _plain_socket(family)
    return sock


def _plain_socket(family: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


async def dialled(address: str) -> socket.socket:
    """A connected socket, of the first of the host's addresses that answers.  Raises OSError, ValueError."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    fault: OSError | None = None
    for family, place in await _places(host.strip("[]"), int(port)):
        sock = stream_socket(family, socket.SO_RCVBUF)
        try:
            await loop.sock_connect(sock, place)
            return sock
        except OSError as error:
            sock.close()
            fault = error
        except BaseException:
            sock.close()
            raise
    raise fault or OSError("no address")


async def _places(host: str, port: int) -> list[tuple[int, Any]]:
    """(family, address) of all addresses of `host`; a number is no matter for the resolver's thread."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, place) for family, _, _, _, place in found]


async def listening(host: str, port: int) -> socket.socket:
    """A listening socket.  Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, _, _, _, address = found[0]
    listener = stream_socket(family, socket.SO_SNDBUF)  # connections inherit its options
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
