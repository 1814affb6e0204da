"""The way to Redis for scripts: loaded on every new connection, called in the order in which they are sent.

Every script may be repeated after a lost answer, so each call has one retry.  Calls do not wait for each
other: what is sent in one turn of the loop leaves together, and Redis answers in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.errors import ConfigError, Unreachable
from orchestrator.queues.address import Command
from orchestrator.queues.calls import Call, Timings
from orchestrator.queues.keys import Keys
from orchestrator.queues.resp import ATTEMPTS, Refused, RespClient, Say
from orchestrator.queues.scripts import ALL, ENTER, SCHEMA_VERSION

BATCH = 64
"""Own decisions per pass: their replies are awaited together, so all must fit into the deadline."""

PASSING = ("LOADING", "BUSY", "MASTERDOWN", "ERR max number of clients")
"""How error replies begin that say nothing of what this Redis can do."""


def unless_cancelled() -> None:
    """At the top of an endless loop: raises CancelledError if this task was told to end and did not hear.

    Up to Python 3.11 a foreign `asyncio.wait_for` can swallow a cancellation that comes as it ends.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class ScriptRunner:
    """Runs scripts in order over one connection.  Other commands may go between them, through `client`."""

    def __init__(self, redis_url: str, keys: Keys, timings: Timings) -> None:
        self.client = RespClient(redis_url, deadline_s=timings.deadline_s, greet=self._enter)
        self._keys = keys

    async def start(self) -> None:
        """Raises Unreachable, and ConfigError when another version lives here or Redis is too old."""
        await self.client.open()

    async def aclose(self) -> None:
        await self.client.aclose()

    def send(self, call: Call, *, attempts: int = ATTEMPTS) -> asyncio.Future[Any]:
        """Queue a call.  It is sent even if nobody waits for its reply; the future may raise Unreachable.

        A call that tells what the caller holds must be built when it is queued: built later, it would run
        ahead of the calls that stand behind it.
        """
        command = ("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)
        return self.client.send(*command, attempts=attempts)

    async def tell(self, build: Callable[[], Call]) -> Any:
        """The reply to a call that tells all that the caller holds, built anew for its second attempt.

        What was sent behind the first one may have been done, and would be undone if that were repeated.
        """
        try:
            return await self.send(build(), attempts=1)
        except Unreachable:
            return await self.send(build(), attempts=1)

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        """Replies in order, in one round trip; raises the first error."""
        replies = [self.send(call) for call in calls]
        return [await reply for reply in replies]

    async def _enter(self, say: Say) -> None:
        """Load all scripts and check the schema: a Redis that came up empty knows neither."""
        load: list[Command] = [("SCRIPT", "LOAD", script.text) for script in ALL]
        enter = ("EVALSHA", ENTER.sha, 2, self._keys.schema, self._keys.born, SCHEMA_VERSION)
        try:
            *_, found = await say([*load, enter])
        except Refused as error:
            if error.reply.startswith(PASSING):
                raise
            reason = error.reply.rstrip(".")
            raise ConfigError(f"This Redis, which must be 6.2 or later, cannot be used: {reason}.") from None
        if found != SCHEMA_VERSION:
            raise ConfigError(
                f"Redis holds deployment {self._keys.deployment!r} in schema {found} and this version needs "
                f"{SCHEMA_VERSION}: stop the other version, or choose another deployment name."
            )
