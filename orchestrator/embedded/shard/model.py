"""The transformers implementation of the seam: running batches over one paged KV pool.

All torch work runs in one worker thread, so the event loop stays free and rows never race.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TypeVar

import structlog
import torch
from torch import Tensor

from tgi_patches.bridge import FirstToken
from tgi_patches.contract import GetTag, PutTag, parse_tag
from tgi_patches.heads import Share
from tgi_patches.kv import Inbox
from tgi_patches.kv.in_place import PoolBytes
from tgi_patches.kv.staged import StagedPool
from tgi_patches.relay import Outgoing, Relay

from .attention import Abandoned, KVPool, consecutive_start
from .choose import Chooser
from .forward import Row, forward
from .loading import Loaded
from .matching import Matcher, Patterns
from .seam import (
    Batch,
    CachedBatch,
    FinishReason,
    GeneratedText,
    Generation,
    ModelInfo,
    Request,
    Sampling,
    Stopping,
    Token,
    always,
)
from .text import Detokenizer, StopRule

log = structlog.get_logger(__name__)
T = TypeVar("T")
_TOP_EXPORTED = 5


class TransformersModel:
    """`relay` is None for a shard without a bridge: tags are then plain adapters.

    `chunk_tokens` bounds the new tokens of a step that continues split prompts; 0: never split.
    """

    def __init__(
        self, loaded: Loaded, pool: KVPool, relay: Relay | None, *, threads: int, chunk_tokens: int = 0
    ) -> None:
        self.patterns = Patterns.of(loaded)
        self._loaded = loaded
        self._pool = pool
        self._relay = relay
        self._pool_bytes = PoolBytes(pool.layers)
        self._staged = StagedPool(pool.layers, heads_first=False)
        self._chunk_tokens = chunk_tokens
        self._batches: dict[int, list[Row]] = {}
        self._ids = count(1)
        self._special = frozenset(loaded.tokenizer.all_special_ids)
        self._thread = ThreadPoolExecutor(1, "model", initializer=torch.set_num_threads, initargs=(threads,))

    # --- the seam ---

    async def info(self) -> ModelInfo:
        return ModelInfo(
            model_type=self._loaded.model.config.model_type,
            dtype=str(self._loaded.dtype).removeprefix("torch."),
            vocab_size=self._loaded.model.config.vocab_size,
            kv_bytes_per_token=self._loaded.kv_bytes_per_token,
            kv_tokens=self._pool.tokens,
            max_position=self._loaded.max_position,
            block_size=self._pool.block_size,
            eos_token_ids=self._loaded.eos_token_ids,
        )

    async def warmup(self) -> None:
        await self._run(self._warmup)

    async def prefill(
        self, batch: Batch, cached: CachedBatch | None = None
    ) -> tuple[list[Generation], CachedBatch | None]:
        return await self._run(lambda: self._prefill(batch, cached))

    async def decode(self, batches: list[CachedBatch]) -> tuple[list[Generation], CachedBatch | None]:
        return await self._run(lambda: self._decode([b.id for b in batches]))

    async def filter_batch(self, batch_id: int, request_ids: tuple[int, ...]) -> CachedBatch:
        kept = frozenset(request_ids)
        rows = [row for row in self._batches[batch_id] if row.request.id in kept]
        return self._cached(batch_id, rows)

    async def clear_cache(self, batch_id: int | None = None) -> None:
        if batch_id is None:
            self._batches.clear()
        else:
            self._batches.pop(batch_id, None)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # --- steps, in the worker thread ---

    def _warmup(self) -> None:
        """One small prefill and decode: pages the weights in and proves that attention is ours."""
        ids = tuple([self._loaded.eos_token_ids[0] if self._loaded.eos_token_ids else 0] * 32)
        slots = tuple(range(33))
        request = Request(0, "", ids, Sampling(), Stopping(2, ignore_eos_token=True), slots)
        _, running = self._prefill(Batch(0, (request,)))
        if running is not None:
            self._decode([running.id])
        self._batches.clear()

    def _prefill(
        self, batch: Batch, cached: CachedBatch | None = None
    ) -> tuple[list[Generation], CachedBatch | None]:
        rows = [self._row(request) for request in batch.requests]
        for row in rows:
            if isinstance(row.tag, GetTag) and self._relay is not None:
                self._import(row, row.tag)
        chunks = [self._first_chunk(row) for row in rows]
        if cached is not None:
            joined = self._batches.pop(cached.id)
            chunks += self._next_chunks(joined)
            rows += joined
        try:
            return self._step(cached.id if cached else batch.id, rows, chunks, _wanted(batch, cached))
        except Abandoned:
            return [], None

    def _decode(self, batch_ids: Sequence[int]) -> tuple[list[Generation], CachedBatch | None]:
        rows = [row for batch_id in batch_ids for row in self._batches.pop(batch_id, [])]
        return self._step(batch_ids[0], rows, self._next_chunks(rows), always)

    def _first_chunk(self, row: Row) -> int:
        left = row.prompt_tokens - row.kv_tokens
        return min(left, row.request.chunk_len or left, row.chunk_limit)

    def _next_chunks(self, rows: list[Row]) -> list[int]:
        """New tokens of each row: one where it decodes; split prompts share what the budget leaves."""
        budget = self._chunk_tokens - sum(row.prefilled for row in rows)
        chunks = []
        for row in rows:
            chunk = 1 if row.prefilled else self._next_chunk(row, budget)
            budget -= 0 if row.prefilled else chunk
            chunks.append(chunk)
        return chunks

    def _next_chunk(self, row: Row, budget: int) -> int:
        left = row.prompt_tokens - row.kv_tokens
        allowed = max(1, budget) if self._chunk_tokens else left
        return min(left, allowed, row.chunk_limit)

    @torch.inference_mode()
    def _step(
        self, batch_id: int, rows: list[Row], chunks: list[int], wanted: Callable[[], bool]
    ) -> tuple[list[Generation], CachedBatch | None]:
        """One forward over `chunks[i]` new tokens of row i; rows whose prompt is complete get a token."""
        logits = forward(self._loaded, self._pool, rows, chunks, wanted)
        for row in rows:
            if row.imported is not None:
                row.imported.repair()
        ready = [i for i, row in enumerate(rows) if row.prefilled]
        generations = self._choose([rows[i] for i in ready], logits[ready]) if ready else []
        return generations, self._keep(batch_id, rows, generations)

    def _keep(self, batch_id: int, rows: list[Row], generations: list[Generation]) -> CachedBatch | None:
        done = {g.request_id for g in generations if g.generated_text is not None}
        running = [row for row in rows if row.request.id not in done]
        if not running:
            return None
        return self._cached(batch_id, running)

    def _cached(self, batch_id: int, rows: list[Row]) -> CachedBatch:
        self._batches[batch_id] = rows
        ids = tuple(row.request.id for row in rows)
        return CachedBatch(batch_id, ids, sum(self._next_chunks(rows)))

    def _row(self, request: Request) -> Row:
        tag = parse_tag(request.adapter_id) if self._relay is not None else None
        return Row(
            request=request,
            tag=tag,
            chooser=Chooser(request.sampling, self._matcher(request.sampling.grammar)),
            text=Detokenizer(self._loaded.tokenizer, request.input_ids),
            stop=StopRule(request.stopping, self._loaded.eos_token_ids, end_first=isinstance(tag, PutTag)),
            slots=torch.tensor(request.slots),
            first_slot=consecutive_start(request.slots),
            kv_tokens=request.cache_len,
        )

    def _matcher(self, pattern: str) -> Matcher | None:
        if not pattern:
            return None
        assert self.patterns is not None, "the service refuses grammars then"
        return self.patterns.matcher(pattern)

    def _import(self, row: Row, tag: GetTag) -> None:
        assert self._relay is not None
        prompt = row.request.input_ids
        slots = row.request.slots[: len(prompt)]
        row.imported, row.import_result = self._relay.get(
            tag, prompt, lambda share: self._inbox(slots, share)
        )
        if row.imported is not None:
            row.kv_tokens = len(prompt) - 1  # the last token is redone: it rebuilds all text state

    def _inbox(self, slots: Sequence[int], share: Share) -> Inbox:
        """A record of a shard that splits the model as this one does is read in place."""
        return self._pool_bytes.inbox(slots) if share.whole else self._staged.inbox(slots, share=share)

    def _choose(self, rows: list[Row], logits: Tensor) -> list[Generation]:
        logits = self._processed(rows, logits)
        logprobs = logits.log_softmax(-1)
        best = logits.argmax(-1).tolist()
        generations = []
        for i, row in enumerate(rows):
            picked = best[i] if not row.chooser.sampling.do_sample else row.chooser.pick(logits[i])
            generations.append(self._advance(row, picked, logprobs[i]))
        return generations

    def _processed(self, rows: list[Row], logits: Tensor) -> Tensor:
        if all(row.chooser.plain_greedy for row in rows):
            return logits
        return torch.stack([row.chooser.process(logits[i], row.text.ids) for i, row in enumerate(rows)])

    def _advance(self, row: Row, picked: int, logprobs: Tensor) -> Generation:
        """Take one token.  A put leg's first one is exported, a get leg's forced where its tag names one."""
        first_step = row.stop.tokens == 0
        top = _top(logprobs, max(row.request.top_n_tokens, _TOP_EXPORTED if first_step else 0))
        logprob = float(logprobs[picked])
        if first_step and isinstance(row.tag, GetTag) and row.tag.first_token_id is not None:
            picked = row.tag.first_token_id
            exported = None if row.imported is None else row.imported.first
            if exported is not None and exported.id == picked:
                logprob, top = exported.logprob, list(exported.top)
            else:
                logprob = float(logprobs[picked])
        if not row.chooser.advance(picked):
            log.warning("grammar_ended_early", tokens=row.stop.tokens)
        text = row.text.add(picked)
        finish = row.stop.step(picked, text)
        if first_step and isinstance(row.tag, PutTag) and self._relay is not None:
            ended = finish is not None and finish != "length"
            self._export(row, row.tag, FirstToken(picked, logprob, tuple(top)), ended=ended)
        row.imported = None
        return Generation(
            request_id=row.request.id,
            token=self._token(picked, logprob, text),
            top_tokens=tuple(self._token(t, lp, None) for t, lp in top[: row.request.top_n_tokens]),
            generated_text=self._ending(row, finish) if finish else None,
            prompt_logprobs=tuple(row.prompt_logprobs) if first_step else (),
            import_result=row.import_result if first_step else "",
        )

    def _export(self, row: Row, tag: PutTag, first: FirstToken, *, ended: bool) -> None:
        assert self._relay is not None
        prompt = row.request.input_ids
        slots = row.request.slots[: len(prompt)]
        self._relay.put(tag, prompt, lambda: Outgoing(self._pool_bytes.outbox(slots), first, ended))

    def _token(self, token_id: int, logprob: float, text: str | None) -> Token:
        if text is None:
            text = self._loaded.tokenizer.decode([token_id])
        return Token(token_id, text, logprob, token_id in self._special)

    def _ending(self, row: Row, reason: FinishReason) -> GeneratedText:
        seed = row.chooser.seed if row.chooser.sampling.do_sample else None
        return GeneratedText(row.text.generated_text(), row.stop.tokens, reason, seed)


def _wanted(batch: Batch, cached: CachedBatch | None) -> Callable[[], bool]:
    """A step that running requests take along is always wanted."""
    return batch.wanted if cached is None else always


def _top(logprobs: Tensor, n: int) -> list[tuple[int, float]]:
    """Fewer than `n` where fewer are possible."""
    if n == 0:
        return []
    values, ids = logprobs.topk(n)
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return [(token_id, logprob) for token_id, logprob in pairs if logprob > -math.inf]
