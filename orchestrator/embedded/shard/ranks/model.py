"""The seam over all ranks: every verb goes to the followers, then runs here, and must come out alike.

What fails on all ranks in the same way fails its batch, as in one process.  What one rank does alone
ends the shard: its KV is no longer what the others think it is.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from orchestrator.embedded.shard.loop import Loop
from orchestrator.embedded.shard.seam import Batch, CachedBatch, ModelInfo, always
from orchestrator.errors import ShardError

from .followers import Followers, cancelled
from .messages import Clear, Command, Decode, Done, Failed, Filter, Prefill, Reply, Warmup
from .part import Part, Stepped
from .records import Exports
from .verdict import disagreement, done, failed

SETTLE_S = 60.0
"""From the first rank that finished a step to the last: a copy of a record lies between them."""
FAILED_SETTLE_S = 5.0
"""The same where the first one failed, and the others may wait for it in vain."""


class RankedModel:
    """A ShardModel; `own` is rank 0."""

    def __init__(self, own: Part, followers: Followers, exports: Exports, ranks: int) -> None:
        self._own = own
        self._followers = followers
        self._exports = exports
        self._ranks = ranks

    async def info(self) -> ModelInfo:
        info = await self._own.model.info()
        return replace(info, kv_bytes_per_token=info.kv_bytes_per_token * self._ranks)

    async def warmup(self) -> None:
        await self._step(Warmup())

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> Stepped:
        if cached is None and not batch.wanted():
            return [], None
        # Asked once, before the first rank begins: a step that one rank abandoned would stop the others.
        return await self._step(Prefill(replace(batch, wanted=always), cached))

    async def decode(self, batches: list[CachedBatch]) -> Stepped:
        return await self._step(Decode(tuple(batches)))

    async def filter_batch(self, batch_id: int, request_ids: tuple[int, ...]) -> CachedBatch:
        _, cached = await self._step(Filter(batch_id, request_ids))
        assert cached is not None
        return cached

    async def clear_cache(self, batch_id: int | None = None) -> None:
        await self._step(Clear(batch_id))

    async def _step(self, command: Command) -> Stepped:
        """Raises what every rank raised, or ShardError."""
        self._followers.send(command)
        own = asyncio.create_task(self._run(command))
        others = self._followers.answering()
        try:
            await _settled([own, *others])
            stepped = own.result() if own.done() else None
            replies = [task.result() if task.done() else None for task in others]
            return self._agreed(stepped, replies)
        finally:
            await cancelled([own, *others])

    async def _run(self, command: Command) -> tuple[Reply, Stepped | Exception]:
        try:
            generations, running = await self._own.run(command)
        except Exception as error:  # noqa: BLE001 - raised again once the other ranks have told
            self._own.reports.taken()
            return failed(error), error
        return done(generations, running, self._own.reports.taken()), (generations, running)

    def _agreed(self, own: tuple[Reply, Stepped | Exception] | None, others: list[Reply | None]) -> Stepped:
        reply, result = (None, None) if own is None else own
        if (sentence := disagreement([reply, *others])) is not None:
            raise ShardError(sentence)
        if isinstance(result, Exception):
            raise result
        assert result is not None
        self._exports.settle([r.reported for r in (reply, *others) if isinstance(r, Done)])
        return result


async def _settled(tasks: list[asyncio.Task[Any]]) -> None:
    """Returns once all are done or the rest is late; at once where a process is gone."""
    finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    timeout_s = FAILED_SETTLE_S if any(_has_failed(task) for task in finished) else SETTLE_S
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)


def _has_failed(task: asyncio.Task[Any]) -> bool:
    if task.exception() is not None:
        return True
    result = task.result()
    return isinstance(result[0] if isinstance(result, tuple) else result, Failed)


async def serve(loop: Loop, followers: Followers) -> None:
    """The loop, as long as no follower ends.  Raises ShardError once one has."""
    serving = asyncio.create_task(loop.run())
    ended = asyncio.create_task(followers.ended())
    try:
        await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({serving}, timeout=FAILED_SETTLE_S)  # a running step fails, and tells its readers
        if serving.done():
            return await serving
        raise ended.result()
    finally:
        await cancelled([serving, ended])
