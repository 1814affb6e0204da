"""The scheduling loop of TGI v3's router, first in first out, with or without chunked prefill.

    wait for a batch -> prefill -> [ maybe prefill a joining batch -> decode all ] until nothing runs

Without chunks a prefill stalls every running decode; with them the running batch steps along.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from itertools import count

import structlog

from orchestrator.errors import GenerationFailed, Overloaded, ShardError
from tgi_patches.contract import GetTag, parse_tag

from .blocks import Allocator
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
    chunked: bool = False
    """Split prompts at the prefill budget and let running requests step along."""
    lookahead_tokens: int = 0
    """KV positions that a request needs beyond its last token."""


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
    prefilled: bool = False

    @property
    def total_tokens(self) -> int:
        """KV positions the request may fill; the last token's KV is never written."""
        return len(self.request.input_ids) + self.request.stopping.max_new_tokens - 1


class Loop:
    """Owns waiting and running requests of one model.  Run `run()` as a task; feed it by `generate`."""

    def __init__(self, model: ShardModel, allocator: Allocator, budgets: Budgets) -> None:
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
        """Tokens of the blocks that requests own."""
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
        """Serve until cancelled.  Raises ShardError once the model is gone; nobody is left waiting then."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while (batch := self._next_batch(0, self._budgets.max_batch_size, 0)) is not None:
                await self._serve(batch)

    # --- one busy period ---

    async def _serve(self, batch: Batch) -> None:
        try:
            cached = await self._prefill(batch)
            steps_since_prefill = 1
            while cached is not None:
                joining = self._joining(cached, steps_since_prefill)
                running: list[CachedBatch | None] = [cached]
                if joining is not None:
                    steps_since_prefill = 1
                    if self._budgets.chunked:
                        running = [await self._prefill(joining, cached)]
                    else:
                        running.append(await self._prefill(joining))
                cached = await self._decode([part for part in running if part is not None])
                steps_since_prefill += 1
        except Exception as error:
            log.exception("step_failed", requests=len(self._running))
            self._fail_running(error)
            if isinstance(error, ShardError):
                self._fail_waiting(error)
                raise
            await self._model.clear_cache()

    def _joining(self, cached: CachedBatch, steps: int) -> Batch | None:
        running = len(cached.request_ids)
        room = self._budgets.max_batch_size - running
        if self._budgets.chunked:
            return self._next_batch(0, room, cached.current_tokens)
        patient = steps < _MAX_WAITING_STEPS
        return self._next_batch(int(running * _WAITING_SERVED_RATIO) if patient else 0, room, 0)

    async def _prefill(self, batch: Batch, cached: CachedBatch | None = None) -> CachedBatch | None:
        generations, cached = await self._model.prefill(batch, cached)
        self._deliver(generations)
        self._drop_given_up(batch, cached)
        return await self._filtered(cached)

    async def _decode(self, batches: list[CachedBatch]) -> CachedBatch | None:
        if not batches:
            return None
        generations, cached = await self._model.decode(batches)
        self._deliver(generations)
        return await self._filtered(cached)

    def _deliver(self, generations: list[Generation]) -> None:
        for generation in generations:
            entry = self._running[generation.request_id]
            if not entry.prefilled:
                entry.prefilled = True
                self._allocator.computed(entry.blocks, entry.request.input_ids)
            entry.steps.put_nowait(generation)
            if generation.generated_text is not None:
                self._drop(entry)

    def _drop_given_up(self, batch: Batch, cached: CachedBatch | None) -> None:
        """Requests that a model left out because nobody reads them."""
        kept = () if cached is None else cached.request_ids
        for request in batch.requests:
            if request.id in self._running and request.id not in kept:
                self._drop(self._running[request.id])

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

    def _next_batch(self, smallest: int, largest: int, tokens_taken: int) -> Batch | None:
        """The oldest waiting requests that fit; None if fewer than `smallest` wait.

        `tokens_taken` of the prefill budget are the running batch's.
        """
        self._waiting = deque(entry for entry in self._waiting if not entry.closed)
        if not self._waiting or len(self._waiting) < smallest:
            return None
        budget = self._budgets.max_batch_prefill_tokens - tokens_taken
        taken: list[Entry] = []
        while self._waiting and len(taken) < largest:
            prompt_tokens = len(self._waiting[0].request.input_ids)
            chunk = min(prompt_tokens, budget) if self._budgets.chunked else prompt_tokens
            if chunk <= 0 or (chunk > budget and taken) or not self._take(self._waiting[0], chunk):
                break
            taken.append(self._waiting.popleft())
            budget -= chunk
        if not taken:
            return None
        self._running.update((entry.request.id, entry) for entry in taken)
        requests = tuple(entry.request for entry in taken)
        return Batch(next(self._batch_ids), requests, lambda: not all(entry.closed for entry in taken))

    def _take(self, entry: Entry, chunk: int) -> bool:
        """Give the request its blocks; False where too few are free."""
        request = entry.request
        tokens = entry.total_tokens + self._budgets.lookahead_tokens
        allocation = self._allocator.allocate(tokens, _shareable(request))
        if allocation is None:
            return False
        entry.blocks = allocation.blocks
        entry.timing.started_s = time.monotonic()
        entry.request = replace(
            request,
            slots=self._allocator.slots(allocation.blocks, tokens),
            cache_len=allocation.cached_tokens,
            chunk_len=chunk if chunk < len(request.input_ids) else 0,
        )
        return True

    def _drop(self, entry: Entry) -> None:
        del self._running[entry.request.id]
        self._allocator.free(entry.blocks)

    def _fail_running(self, error: Exception) -> None:
        for entry in list(self._running.values()):
            entry.steps.put_nowait(_failure(error))
            self._drop(entry)

    def _fail_waiting(self, error: Exception) -> None:
        for entry in self._waiting:
            entry.steps.put_nowait(_failure(error))
        self._waiting.clear()


def _failure(error: Exception) -> GenerationFailed:
    """For one reader.  A model's own sentence is passed on; other errors may tell of prompts."""
    own = isinstance(error, (GenerationFailed, ShardError))
    return GenerationFailed(f"Request failed during generation: {error if own else type(error).__name__}")


def _shareable(request: Request) -> tuple[int, ...]:
    """The prompt whose prefix may come from others' blocks.

    An import writes the whole prompt, and log probabilities need every token computed: neither shares.
    """
    imports = isinstance(parse_tag(request.adapter_id), GetTag)
    return () if imports or request.prefill_logprobs else request.input_ids
