"""The scheduling loop of TGI v3's router, first in first out.

    wait for a batch -> prefill -> [ maybe prefill a joining batch -> decode all ] until nothing runs

A prefill stalls every running decode; that is what phase separation is measured against.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from itertools import count

import structlog

from orchestrator.errors import GenerationFailed, Overloaded

from .blocks import BlockAllocator
from .seam import Batch, CachedBatch, Generation, Request, ShardModel

log = structlog.get_logger(__name__)

_WAITING_SERVED_RATIO = 0.3
_MAX_WAITING_STEPS = 20


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of a batch, in tokens and requests."""

    max_batch_prefill_tokens: int
    max_batch_size: int
    max_concurrent_requests: int


@dataclass(slots=True)
class Timing:
    """When a request was queued and taken into a batch; monotonic seconds."""

    queued_s: float = 0.0
    started_s: float = 0.0


@dataclass(slots=True)
class Entry:
    """A request inside the loop.  `request.slots` is empty until its blocks are allocated."""

    request: Request
    timing: Timing
    steps: asyncio.Queue[Generation | Exception] = field(default_factory=asyncio.Queue)
    blocks: tuple[int, ...] = ()
    closed: bool = False
    """The reader left; the loop drops the request after the running step."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.input_ids)

    @property
    def total_tokens(self) -> int:
        """KV positions the request may fill; the last token's KV is never written."""
        return self.prompt_tokens + self.request.stopping.max_new_tokens - 1


class Loop:
    """Owns waiting and running requests of one model.  Run `run()` as a task; feed it by `generate`."""

    def __init__(self, model: ShardModel, allocator: BlockAllocator, budgets: Budgets) -> None:
        self._model = model
        self._allocator = allocator
        self._budgets = budgets
        self._waiting: deque[Entry] = deque()
        self._running: dict[int, Entry] = {}
        self._arrived = asyncio.Event()
        self._request_ids = count(1)
        self._batch_ids = count(1)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def kv_tokens_used(self) -> int:
        return self._allocator.used_tokens

    async def generate(self, request: Request, timing: Timing | None = None) -> AsyncGenerator[Generation]:
        """One Generation a token.  Closing the iterator cancels the request within one step."""
        if self.waiting + self.running >= self._budgets.max_concurrent_requests:
            raise Overloaded("Model is overloaded")
        entry = Entry(replace(request, id=next(self._request_ids)), timing or Timing())
        entry.timing.queued_s = time.monotonic()
        self._waiting.append(entry)
        self._arrived.set()
        try:
            while True:
                step = await entry.steps.get()
                if isinstance(step, Exception):
                    raise step
                yield step
                if step.generated_text is not None:
                    return
        finally:
            entry.closed = True
            self._arrived.set()

    async def warmup(self) -> None:
        await self._model.warmup()

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while (batch := self._next_batch(0, self._budgets.max_batch_size)) is not None:
                await self._serve(batch)

    # --- one busy period ---

    async def _serve(self, batch: Batch) -> None:
        try:
            cached = await self._prefill(batch)
            steps_since_prefill = 1
            while cached is not None:
                running = [cached]
                joining = self._joining(len(cached.request_ids), steps_since_prefill)
                if joining is not None:
                    joined = await self._prefill(joining)
                    steps_since_prefill = 1
                    if joined is not None:
                        running.append(joined)
                cached = await self._decode(running)
                steps_since_prefill += 1
        except Exception as error:
            log.exception("step_failed", requests=len(self._running))
            await self._model.clear_cache()
            self._fail_all(error)

    def _joining(self, running: int, steps: int) -> Batch | None:
        patient = steps < _MAX_WAITING_STEPS
        smallest = int(running * _WAITING_SERVED_RATIO) if patient else 0
        return self._next_batch(smallest, self._budgets.max_batch_size - running)

    async def _prefill(self, batch: Batch) -> CachedBatch | None:
        generations, cached = await self._model.prefill(batch)
        self._deliver(generations)
        return await self._filtered(cached)

    async def _decode(self, batches: list[CachedBatch]) -> CachedBatch | None:
        generations, cached = await self._model.decode(batches)
        self._deliver(generations)
        return await self._filtered(cached)

    def _deliver(self, generations: list[Generation]) -> None:
        for generation in generations:
            entry = self._running[generation.request_id]
            entry.steps.put_nowait(generation)
            if generation.generated_text is not None:
                self._drop(entry)

    async def _filtered(self, cached: CachedBatch | None) -> CachedBatch | None:
        """Drop the requests whose reader left."""
        if cached is None:
            return None
        left = [i for i in cached.request_ids if self._running[i].closed]
        if not left:
            return cached
        for request_id in left:
            self._drop(self._running[request_id])
        kept = tuple(i for i in cached.request_ids if i not in left)
        if not kept:
            await self._model.clear_cache(cached.id)
            return None
        return await self._model.filter_batch(cached.id, kept)

    # --- requests in and out ---

    def _next_batch(self, smallest: int, largest: int) -> Batch | None:
        """The oldest waiting requests that fit the budgets; None if fewer than `smallest` do."""
        self._waiting = deque(entry for entry in self._waiting if not entry.closed)
        if not self._waiting or len(self._waiting) < smallest:
            return None
        taken: list[Entry] = []
        prefill_tokens = 0
        while self._waiting and len(taken) < largest:
            entry = self._waiting[0]
            prefill_tokens += entry.prompt_tokens
            if taken and prefill_tokens > self._budgets.max_batch_prefill_tokens:
                break
            blocks = self._allocator.allocate(entry.total_tokens)
            if blocks is None:
                break
            self._waiting.popleft()
            entry.blocks = blocks
            entry.timing.started_s = time.monotonic()
            slots = self._allocator.slots(blocks, entry.total_tokens)
            entry.request = replace(entry.request, slots=slots)
            taken.append(entry)
        if not taken:
            return None
        self._running.update((entry.request.id, entry) for entry in taken)
        return Batch(next(self._batch_ids), tuple(entry.request for entry in taken))

    def _drop(self, entry: Entry) -> None:
        del self._running[entry.request.id]
        self._allocator.free(entry.blocks)

    def _fail_all(self, error: Exception) -> None:
        for entry in list(self._running.values()):
            entry.steps.put_nowait(
                GenerationFailed(f"Request failed during generation: {type(error).__name__}")
            )
            self._drop(entry)
