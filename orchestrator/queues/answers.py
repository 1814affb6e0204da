"""What conductors answer one gateway: grants and refusals, in the order in which they came."""

from __future__ import annotations

import structlog

from orchestrator.core.ticket import Grant
from orchestrator.queues import calls, wire
from orchestrator.queues.calls import Timings
from orchestrator.queues.keys import Keys
from orchestrator.queues.resp import RespClient

log = structlog.get_logger()

READ_MOST = 512
"""Answers per read."""


class Answers:
    """A connection of its own, for it waits.  A read that failed takes nothing away."""

    def __init__(self, redis_url: str, keys: Keys, gateway: str, timings: Timings) -> None:
        self._client = RespClient(redis_url, deadline_s=timings.deadline_s)
        block_ms = max(1, calls.ms(timings.block_s))
        self._wait = ("XREAD", "COUNT", READ_MOST, "BLOCK", block_ms, "STREAMS", keys.grants(gateway))
        self._read_to = "0-0"

    async def read(self) -> list[Grant | wire.Refusal]:
        """Waits up to `block_s` for the first one; raises Unreachable."""
        found = await self._client.send(*self._wait, self._read_to)
        answers: list[Grant | wire.Refusal] = []
        for _, entries in found or ():
            for self._read_to, fields in entries:
                try:
                    answers.append(wire.answer(wire.body(fields)))
                except wire.WireError as error:
                    log.warning("answer_unreadable", error=str(error))
        return answers

    async def aclose(self) -> None:
        await self._client.aclose()
