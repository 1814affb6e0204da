"""Takes connections from sockets that several workers take from, one at a time and in turn.

uvicorn's own server, which asyncio starts, accepts whatever waits: the quickest worker then gets
nearly all of a burst, and the others idle for as long as those connections live.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable

import structlog
import uvicorn

from orchestrator.deployment.shares import CLOSED, Shares

log = structlog.get_logger(__name__)

ALONE_BATCH = 64
"""Connections that a gateway of one worker takes at once."""
YIELD_S = 0.002
"""How long a connection waits at most for a worker with fewer; then whoever saw it takes it."""
PAUSE_S = 1.0
"""When there are no more descriptors."""
HANDSHAKE_LIMIT_S = 10.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Turns:
    """Whose turn it is among the workers; alone, it is always ours."""

    def __init__(self, shares: Shares | None, worker: int) -> None:
        self._shares = shares
        self._worker = worker

    @property
    def batch(self) -> int:
        return ALONE_BATCH if self._shares is None else 1

    def ours(self, connections: int) -> bool:
        """Tells the others how many we hold; True when nobody has fewer."""
        if self._shares is None:
            return True
        self._shares.put(self._worker, connections)
        return self._shares.turn_of(self._worker)

    def close(self) -> None:
        """From now on it is never ours."""
        if self._shares is not None:
            self._shares.put(self._worker, CLOSED)


class Acceptor:
    """One listening socket; has the methods of `asyncio.Server` that uvicorn calls."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        turns: Turns,
        connections: Callable[[], int],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._protocol = protocol
        self._context = context
        self._turns = turns
        self._connections = connections
        self._opening: set[asyncio.Task[None]] = set()
        self._later: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._watch()

    @property
    def opening(self) -> int:
        """Connections that were taken and have no protocol yet."""
        return len(self._opening)

    def close(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        if self._later is not None:
            self._later.cancel()
        self._turns.close()
        self._listener.close()

    async def wait_closed(self) -> None:
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _watch(self) -> None:
        self._later = None
        self._loop.add_reader(self._listener.fileno(), self._one_waits)

    def _one_waits(self) -> None:
        if self._turns.ours(self._connections()):
            self._take(self._turns.batch)
        else:
            self._pause(YIELD_S, self._nobody_came)

    def _nobody_came(self) -> None:
        """A worker with fewer is busy, or has just died."""
        self._watch()
        self._take(1)

    def _take(self, most: int) -> None:
        for _ in range(most):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                log.error("cannot_accept", error=error.strerror)
                self._pause(PAUSE_S, self._watch)
                return
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _pause(self, pause_s: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._later = self._loop.call_later(pause_s, then)

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        limit_s = None if self._context is None else HANDSHAKE_LIMIT_S
        try:
            await self._loop.connect_accepted_socket(
                self._protocol, connection, ssl=self._context, ssl_handshake_timeout=limit_s
            )
        except OSError as error:
            # Also of TLS: a client that speaks something else, or went away.
            connection.close()
            log.debug("connection_failed", error=str(error))


class WorkerServer(uvicorn.Server):
    """uvicorn, with our way to take connections; signals are left to whoever runs it."""

    def __init__(self, config: uvicorn.Config, listeners: tuple[socket.socket, ...], turns: Turns) -> None:
        super().__init__(config)
        self._listeners = listeners
        self._turns = turns
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - ours
        await super().startup(sockets=[])
        for listener in self._listeners:
            self._acceptors.append(
                Acceptor(listener, self._new_protocol, self.config.ssl, self._turns, self._held)
            )
        self.servers.extend(self._acceptors)  # type: ignore[arg-type]  # they do what it asks of a server

    def stop(self) -> None:
        """Drain: answers under way are finished, within the limit of the configuration."""
        self.should_exit = True

    def interrupt(self) -> None:
        """The same, and at once when it is asked for a second time."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    def _held(self) -> int:
        return len(self.server_state.connections) + sum(each.opening for each in self._acceptors)

    def _new_protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made
