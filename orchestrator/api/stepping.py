"""Coroutines driven without a task, where most end at once and a task would cost more than they do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from orchestrator.shards.http import Within

T = TypeVar("T")


def begun(work: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
    """Run `work` up to its first pause: None if there was none, else the rest, to be awaited."""
    try:
        pending = work.send(None)
    except StopIteration:
        return None
    return _Rest(work, pending)


async def promptly(work: Coroutine[Any, Any, T], within_s: float) -> T:
    """What `work` returns.  Only if it has to wait is there a deadline: TimeoutError."""
    try:
        pending = work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    async with Within(within_s):
        return await _Rest(work, pending)


class _Rest(Generic[T]):
    """A coroutine that waits for `pending`, a future; the awaiting task goes on in its place."""

    __slots__ = ("_pending", "_work")

    def __init__(self, work: Coroutine[Any, Any, T], pending: Any) -> None:
        self._work = work
        self._pending = pending

    def __await__(self) -> Generator[Any, Any, T]:
        pending = self._pending
        while True:
            thrown: BaseException | None = None
            try:
                yield pending
            except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the coroutine
                thrown = error
            try:
                pending = self._work.send(None) if thrown is None else self._work.throw(thrown)
            except StopIteration as end:
                result: T = end.value
                return result


class Departure:
    """Calls `left` as soon as ASGI's `receive` says that the client is gone; until `close`."""

    __slots__ = ("_closed", "_left", "_pending", "_receive", "_work")

    def __init__(self, receive: Callable[[], Awaitable[Any]], left: Callable[[], None]) -> None:
        self._receive = receive
        self._left = left
        self._closed = False
        self._work: Coroutine[Any, Any, Any] | None = None
        self._pending: asyncio.Future[Any] | None = None
        self._step()

    def close(self) -> None:
        self._closed = True
        if self._pending is not None:
            self._pending.remove_done_callback(self._step)
            self._pending = None
        if self._work is not None:
            self._work.close()
            self._work = None

    def _step(self, _: object = None) -> None:
        self._pending = None
        while not self._closed:
            if self._work is None:
                self._work = _coroutine(self._receive())
            try:
                pending = self._work.send(None)
            except StopIteration as end:
                self._work = None
                if end.value["type"] == "http.disconnect":
                    self._closed = True
                    self._left()
                continue
            if pending is None:
                asyncio.get_running_loop().call_soon(self._step)
                return
            # What a task would do with a future that a coroutine waits for.
            pending._asyncio_future_blocking = False
            pending.add_done_callback(self._step)
            self._pending = pending
            return


async def _coroutine(work: Awaitable[Any]) -> Any:
    return await work
