"""The way to Redis: every call has a deadline and one retry, every foreign error is translated here.

`ScriptRunner` sends a batch of scripts as one pipeline.  `OrderedWriter` puts a queue before it: calls
that are made while a batch travels form the next one, and Redis sees them in the order they were made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from orchestrator.errors import ConfigError, Unreachable
from orchestrator.queues.calls import Call, Timings
from orchestrator.queues.scripts import ALL, ENTER, SCHEMA_VERSION, Keys

T = TypeVar("T")

BATCH = 64
"""Calls per pipeline: long enough to amortise a round trip, short enough for the deadline."""


def connect(redis: str | Redis, timings: Timings) -> Redis:
    """A client for `redis://host:port/0` or `unix:///path`; a given client must decode its replies."""
    if isinstance(redis, Redis):
        return redis
    try:
        return Redis.from_url(
            redis,
            decode_responses=True,
            protocol=2,
            socket_timeout=timings.deadline_s,
            socket_connect_timeout=timings.deadline_s,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise ConfigError(f"The Redis URL cannot be used: {error}") from None


def unless_cancelled() -> None:
    """At the top of an endless loop: raises CancelledError if this task was told to end and did not hear.

    Up to Python 3.11 a foreign `asyncio.wait_for` can swallow a cancellation that comes as it ends.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def answered(deadline_s: float, attempt: Callable[[], Awaitable[T]], *, attempts: int = 2) -> T:
    """The reply of a Redis call, tried at most `attempts` times; Unreachable when none came.

    Cancelling it works.  Without the check it may not: up to Python 3.11 `asyncio.wait_for`, with which
    redis-py sends, swallows a cancellation that comes as it ends, and the caller's loop would run for ever.
    """
    task = asyncio.current_task()
    assert task is not None
    cancelled_before = task.cancelling()
    for left in reversed(range(attempts)):
        try:
            async with asyncio.timeout(deadline_s):
                reply = await attempt()
        except (RedisConnectionError, RedisTimeoutError, OSError, TimeoutError) as error:
            if task.cancelling() > cancelled_before:
                raise asyncio.CancelledError from None
            if not left:
                detail = str(error) or f"no answer within {deadline_s:g} s"
                raise Unreachable(f"Redis does not answer: {detail.rstrip('.')}.") from None
        except ResponseError:
            raise
        except RedisError as error:
            raise Unreachable(f"Redis does not answer: {error}") from None
        else:
            if task.cancelling() > cancelled_before:
                raise asyncio.CancelledError
            return reply
    raise AssertionError("attempts is at least 1")


class ScriptRunner:
    """Runs batches of scripts, and loads them where Redis does not know them."""

    def __init__(self, client: Redis, keys: Keys, timings: Timings) -> None:
        self._client = client
        self._keys = keys
        self._deadline_s = timings.deadline_s

    async def enter(self) -> None:
        """Load all scripts and check the schema; ConfigError when another version lives here."""

        async def load() -> str:
            pipe = self._client.pipeline(transaction=False)
            for script in ALL:
                pipe.script_load(script.text)
            pipe.evalsha(ENTER.sha, 2, self._keys.schema, self._keys.born, SCHEMA_VERSION)
            return str((await pipe.execute())[-1])

        try:
            found = await answered(self._deadline_s, load)
        except ResponseError as error:
            raise ConfigError(f"This Redis cannot be used (6.2 or later is needed): {error}") from None
        if found != SCHEMA_VERSION:
            raise ConfigError(
                f"Redis holds deployment {self._keys.deployment!r} in schema {found} and this version needs "
                f"{SCHEMA_VERSION}: stop the other version, or choose another deployment name."
            )

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        """Replies in order, in one round trip; a failed script's place holds an Unreachable.

        Raises Unreachable when Redis does not answer at all.
        """
        replies = await answered(self._deadline_s, lambda: self._attempt(calls))
        unknown = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            await self.enter()
            again = await answered(self._deadline_s, lambda: self._attempt([calls[i] for i in unknown]))
            for i, reply in zip(unknown, again, strict=True):
                replies[i] = reply
        return [
            Unreachable(f"Redis refused a script: {reply}") if isinstance(reply, Exception) else reply
            for reply in replies
        ]

    async def one(self, call: Call) -> Any:
        """The reply of a single call; raises Unreachable."""
        (reply,) = await self.run([call])
        if isinstance(reply, Unreachable):
            raise reply
        return reply

    async def _attempt(self, calls: Sequence[Call]) -> list[Any]:
        pipe = self._client.pipeline(transaction=False)
        for call in calls:
            pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
        return list(await pipe.execute(raise_on_error=False))


class OrderedWriter:
    """One batch at a time; what arrives meanwhile is the next batch."""

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner = runner
        self._waiting: deque[tuple[Call, asyncio.Future[Any]]] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    def send(self, call: Call) -> asyncio.Future[Any]:
        """Queue a call.  It is sent even if nobody waits for its reply; the future may raise Unreachable.

        A call that tells what the caller holds must be built when it is queued: built later, it would run
        ahead of the calls that stand behind it.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        if self._closed:
            future.set_exception(Unreachable("The queue is closed."))
        else:
            self._waiting.append((call, future))
            self._wake.set()
        return future

    async def run(self) -> None:
        """Send until cancelled; then fail what is left."""
        try:
            while True:
                await self._wake.wait()
                unless_cancelled()
                self._wake.clear()
                while self._waiting:
                    await self._send_batch()
        finally:
            self._closed = True
            for _, future in self._waiting:
                _fail(future, Unreachable("The queue is closed."))
            self._waiting.clear()

    async def _send_batch(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        try:
            replies = await self._runner.run([call for call, _ in batch])
        except (Unreachable, ConfigError) as error:
            replies = [Unreachable(str(error))] * len(batch)
        except asyncio.CancelledError:
            self._waiting.extendleft(reversed(batch))
            raise
        for (_, future), reply in zip(batch, replies, strict=True):
            if isinstance(reply, Exception):
                _fail(future, reply)
            elif not future.done():
                future.set_result(reply)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark an error as seen: a call that nobody waits for may fail quietly, heartbeats make up for it."""
    if not future.cancelled():
        future.exception()
