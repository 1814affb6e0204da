"""A puller's end of a connection: bytes go from the socket straight to where they are wanted.

A script is a generator that yields the memory to fill next and goes on once it is full; it returns
what it found or raises.  It runs in the loop's callback for the socket: no task, no copy, no queue,
and several reads for each turn of the loop, which costs as much as reading 100 KiB.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from tgi_patches.contract import BridgeMiss, MissReason

T = TypeVar("T")
Script = Generator[memoryview, None, T]

READS_AT_ONCE = 16
"""Then others have their turn."""


class Conversation:
    """Owns the connected, non-blocking `sock`.  Runs one script at a time; the sender waits meanwhile.

    A script ends with BridgeMiss LINK when the connection does or nothing arrives for `step_s`.
    """

    def __init__(self, sock: socket.socket, step_s: float) -> None:
        self._sock = sock
        self._step_s = step_s
        self._loop = asyncio.get_running_loop()

    async def run(self, script: Script[T], allowed: Callable[[], bool] | None = None) -> T:
        """What the script returns; BridgeMiss OVERWRITTEN as soon as `allowed` says no."""
        reading = _Reading(self._sock, script, allowed or _always, self._loop, self._step_s)
        fd = self._sock.fileno()
        self._loop.add_reader(fd, reading.on_readable)
        try:
            reading.on_readable()
            return await reading.done  # type: ignore[no-any-return]
        finally:
            self._loop.remove_reader(fd)
            reading.stop()

    async def send(self, data: bytes) -> None:
        """A small frame.  Raises BridgeMiss LINK."""
        try:
            async with asyncio.timeout(self._step_s):
                await self._loop.sock_sendall(self._sock, data)
        except (OSError, TimeoutError) as error:
            raise _broken(str(error) or f"nothing was taken for {self._step_s} s") from None

    def close(self) -> None:
        """At once."""
        self._sock.close()


class _Reading:
    """One script on its way."""

    __slots__ = ("_allowed", "_heard_s", "_loop", "_rest", "_script", "_sock", "_step_s", "_watch", "done")

    def __init__(
        self,
        sock: socket.socket,
        script: Script[Any],
        allowed: Callable[[], bool],
        loop: asyncio.AbstractEventLoop,
        step_s: float,
    ) -> None:
        self._sock = sock
        self._script = script
        self._allowed = allowed
        self._loop = loop
        self._step_s = step_s
        self._heard_s = loop.time()
        self._watch = loop.call_later(step_s, self._look)
        self._rest: memoryview | None = None
        """Of what the script wants: what is still to be filled."""
        self.done: asyncio.Future[Any] = loop.create_future()
        self._advance()

    def on_readable(self) -> None:
        """Read what there is; at most so much that others have their turn."""
        for _ in range(READS_AT_ONCE):
            rest = self._rest
            if rest is None:
                return
            if not self._allowed():
                self._fail(BridgeMiss(MissReason.OVERWRITTEN, "the ring went past it while it was filled"))
                return
            try:
                received = self._sock.recv_into(rest)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._fail(_broken(str(error)))
                return
            if not received:
                self._fail(_broken("the other side closed the connection"))
            elif received < len(rest):
                self._rest = rest[received:]
            else:
                self._advance()
            self._heard_s = self._loop.time()

    def stop(self) -> None:
        """Nothing is written any more."""
        self._watch.cancel()
        self._rest = None
        self._script.close()
        if self.done.done() and not self.done.cancelled():
            self.done.exception()  # whoever was cancelled does not come for it

    def _advance(self) -> None:
        """Let the script say what it wants next."""
        self._rest = None
        try:
            self._rest = next(self._script)
        except StopIteration as end:
            if not self.done.done():
                self.done.set_result(end.value)
        except Exception as fault:  # noqa: BLE001 - raised again where the script is awaited
            self._fail(fault)

    def _fail(self, fault: Exception) -> None:
        self._rest = None
        if not self.done.done():
            self.done.set_exception(fault)

    def _look(self) -> None:
        """Has anything arrived within the last step?"""
        due_s = self._heard_s + self._step_s
        if self._loop.time() >= due_s:
            self._fail(_broken(f"nothing arrived for {self._step_s} s"))
        else:
            self._watch = self._loop.call_at(due_s, self._look)


def _broken(why: str) -> BridgeMiss:
    return BridgeMiss(MissReason.LINK, why)


def _always() -> bool:
    return True
