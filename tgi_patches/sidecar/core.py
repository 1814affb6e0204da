"""Two verbs of a sidecar, whatever engine it stands beside: `status` and `wait`.

The shard's engine reports what it published or failed to, from any thread; requests wait on the event
loop of the HTTP server.  A waiter is woken, it never polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Protocol

from tgi_patches.bridge import Record
from tgi_patches.contract import PROTOCOL_VERSION, BridgeMiss, MissReason, StatusReply, WaitReply

FAILURES_KEPT = 1024
WAIT_LIMIT_S = 60.0


class OwnRecords(Protocol):
    """Where a shard's own records are looked up; every Bridge is one."""

    def own_lookup(self, handle: str) -> Record:
        """The record, once all of it can be read.  Raises BridgeMiss."""


class Sidecar:
    """One shard's.  `describe` makes its status; `records` are the shard's own.

    Failures are remembered for `keep_s` (the records' time to live), at most FAILURES_KEPT of them.
    """

    def __init__(
        self,
        describe: Callable[[], StatusReply],
        records: OwnRecords,
        keep_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._describe = describe
        self._records = records
        self._keep_s = keep_s
        self._clock = clock
        self._lock = threading.Lock()
        self._waiters: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._failures: OrderedDict[str, tuple[MissReason, float]] = OrderedDict()

    def status(self) -> StatusReply:
        """What the shard is, holds and has counted."""
        return self._describe()

    async def wait(self, handle: str, timeout_s: float) -> WaitReply:
        """The first token of a record as soon as it is published, or why there is none.

        Answers at once for what has already happened, and after `timeout_s` (at most WAIT_LIMIT_S)
        with `missing`.
        """
        woken = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiters[handle].add(woken)
        try:
            reply = self._answer(handle)
            if reply.found or reply.reason != MissReason.MISSING:
                return reply
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(0.0, timeout_s), WAIT_LIMIT_S)):
                    await woken
            return self._answer(handle)
        finally:
            self._leave(handle, woken)

    @property
    def waiting(self) -> int:
        """How many wait now."""
        with self._lock:
            return sum(len(waiters) for waiters in self._waiters.values())

    @property
    def remembered(self) -> int:
        """Failures kept now."""
        with self._lock:
            return len(self._failures)

    def published(self, handle: str) -> None:
        """From any thread: the record of `handle` can be looked up now."""
        with self._lock:
            self._failures.pop(handle, None)
        self._wake(handle)

    def failed(self, handle: str, reason: MissReason) -> None:
        """From any thread: no record of `handle` will come."""
        with self._lock:
            self._failures[handle] = (reason, self._clock() + self._keep_s)
            self._failures.move_to_end(handle)
            self._forget_old()
        self._wake(handle)

    def _answer(self, handle: str) -> WaitReply:
        try:
            record = self._records.own_lookup(handle)
        except BridgeMiss as miss:
            reason = self._failure(handle) or miss.reason
            return WaitReply(PROTOCOL_VERSION, handle, found=False, reason=reason)
        return WaitReply(
            PROTOCOL_VERSION,
            handle,
            found=True,
            first_token_id=record.first.id,
            ended=record.ended,
            kv_bytes=record.kv_bytes,
            prompt_tokens=len(record.token_ids),
        )

    def _failure(self, handle: str) -> MissReason | None:
        with self._lock:
            self._forget_old()
            reason, _ = self._failures.get(handle, (None, 0.0))
            return reason

    def _forget_old(self) -> None:
        """Failures in order of their time; called with the lock held."""
        now = self._clock()
        while self._failures:
            _, until = next(iter(self._failures.values()))
            if until > now and len(self._failures) <= FAILURES_KEPT:
                return
            self._failures.popitem(last=False)

    def _wake(self, handle: str) -> None:
        with self._lock:
            waiters = self._waiters.pop(handle, ())
        for waiter in waiters:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                waiter.get_loop().call_soon_threadsafe(_resolve, waiter)

    def _leave(self, handle: str, waiter: asyncio.Future[None]) -> None:
        with self._lock:
            waiting = self._waiters.get(handle)
            if waiting is not None:
                waiting.discard(waiter)
                if not waiting:
                    del self._waiters[handle]


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
