"""Connections that wait for their next exchange, by origin; the one retry on a stale one.

Taking and giving back cost the same whatever the number of connections.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from orchestrator.shards.http.connection import Connection
from orchestrator.shards.http.deadline import Within
from orchestrator.shards.http.errors import CannotConnect, ConnectionLost, PoolFull

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""No fault of the shard's: this process or machine has nothing left to connect with."""


class Origin(NamedTuple):
    """Where a shard listens."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        """Of `http://host:port`; ValueError for anything that is not HTTP."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url} is no address of a shard: it must begin with http://.")
        return cls(parts.hostname, parts.port or 80)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Pool:
    """`limit` bounds all connections, `keep_idle_s` how long one waits for its next exchange.

    At the limit an idle connection gives way to a new one, whatever its origin.
    """

    def __init__(self, *, limit: int = 4096, keep_idle_s: float = 4.0) -> None:
        self._limit = limit
        self._keep_idle_s = keep_idle_s
        # Dictionaries as ordered sets: the latest used one comes first, any one can leave.
        self._idle: dict[Origin, dict[Connection, None]] = {}
        self._busy: set[Connection] = set()
        self._connecting = 0

    @property
    def connections(self) -> int:
        """Open ones, busy or idle."""
        return len(self._busy) + sum(map(len, self._idle.values()))

    async def send(
        self, origin: Origin, message: bytes, *, connect_s: float, within_s: float, whole: bool = False
    ) -> Connection:
        """A connection whose answer has begun, or with `whole` is complete; give it back with `release`.

        Raises HttpError, or TimeoutError after `within_s`.  A connection that had been idle and breaks
        before the first byte is replaced by a new one, once.
        """
        connection = self._take(origin)
        if connection is not None:
            try:
                await self._exchange(connection, message, within_s, whole)
                return connection
            except ConnectionLost as error:
                if not error.untouched:
                    raise
        connection = await self._connected(origin, connect_s)
        await self._exchange(connection, message, within_s, whole)
        return connection

    def release(self, origin: Origin, connection: Connection) -> None:
        """The exchange is over, or nobody wants the rest of it: then the connection is closed."""
        self._busy.discard(connection)
        if not connection.release():
            return
        idle = self._idle.setdefault(origin, {})
        idle[connection] = None
        # What was needed at a peak would otherwise wait for ever behind the ones in use.
        longest = next(iter(idle))
        if connection.idle_since_s - longest.idle_since_s > self._keep_idle_s:
            del idle[longest]
            longest.close()

    async def aclose(self) -> None:
        """Close every connection, those with an exchange under way too."""
        everyone = [*self._busy, *(each for idle in self._idle.values() for each in idle)]
        self._busy.clear()
        self._idle.clear()
        for connection in everyone:
            connection.close()
        # The loop tells a transport of its end one turn later.
        await asyncio.sleep(0)

    async def _exchange(self, connection: Connection, message: bytes, within_s: float, whole: bool) -> None:
        self._busy.add(connection)
        try:
            await connection.exchange(message, within_s, whole=whole)
        except BaseException:
            self._busy.discard(connection)
            raise

    def _take(self, origin: Origin) -> Connection | None:
        """The latest used idle one that is young enough."""
        idle = self._idle.get(origin)
        if not idle:
            return None
        connection, _ = idle.popitem()
        if asyncio.get_running_loop().time() - connection.idle_since_s > self._keep_idle_s:
            # All others have waited even longer.
            stale = [connection, *idle]
            idle.clear()
            for each in stale:
                each.close()
            return None
        return None if connection.closed else connection

    async def _connected(self, origin: Origin, connect_s: float) -> Connection:
        if self.connections + self._connecting >= self._limit:
            self._make_room()
        loop = asyncio.get_running_loop()
        self._connecting += 1
        try:
            async with Within(connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, lambda ended: self._forget(origin, ended)), *origin
                )
        except TimeoutError:
            raise CannotConnect(f"{origin}: no connection within {connect_s:g} s.", late=True) from None
        except OSError as error:
            if error.errno in _OURS:
                raise PoolFull(f"No connection can be opened: {error.strerror}.") from None
            raise CannotConnect(f"{origin}: {error}") from None
        finally:
            self._connecting -= 1
        return connection

    def _make_room(self) -> None:
        """Close an idle connection; PoolFull where there is none."""
        idle = next(filter(None, self._idle.values()), None)
        if idle is None:
            raise PoolFull(f"All {self._limit} connections are busy.")
        longest = next(iter(idle))
        del idle[longest]
        longest.close()

    def _forget(self, origin: Origin, connection: Connection) -> None:
        """An idle connection ended by itself."""
        self._idle.get(origin, {}).pop(connection, None)


def message(
    method: str, origin: Origin, target: str, body: bytes, headers: Iterable[tuple[str, str]] = ()
) -> bytes:
    """A request as it travels.  `target` and `headers` must hold no line ends, `target` no space.

    Raises ValueError: what follows them would be read as another header, or as another request.
    """
    if " " in target:
        raise ValueError("A request's target holds a space.")
    lines = [f"{method} {target} HTTP/1.1\r\nhost: {origin}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in headers]
    if body or method != "GET":
        lines.append(f"content-length: {len(body)}\r\n")
    head = "".join(lines)
    if head.count("\n") != len(lines) + 1 or head.count("\r") != len(lines) + 1:
        raise ValueError("A request line or a header holds a line end.")
    return f"{head}\r\n".encode("latin-1") + body
