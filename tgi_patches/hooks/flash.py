"""Hooks for FlashCausalLM and its batch: paged KV, chunked prefill, several requests a step.

from_tokenized   take the handle; a get leg's KV goes into its slots, its prompt becomes one token
generate_token   around it: which rows complete their prompt in this step
chooser          a put leg's first token is noted, a get leg's is forced where its handle names one
generate_token   after it: put legs are exported, the last slot of get legs is repaired
filter, concatenate   rows of half-done prompts go along

A long answer, see pieces.py: when a get leg reaches the limit at which TGI's router will continue it, its
KV is exported to this server's own ring, and the continuation imports what its prompt has in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tgi_patches.bridge import Planes
from tgi_patches.contract import BridgeMiss, GetTag, MissReason, PutTag
from tgi_patches.device.path import DevicePath
from tgi_patches.device.pool import DevicePool
from tgi_patches.heads import Share
from tgi_patches.hooks import first_token
from tgi_patches.hooks.identity import KVShape, name_of
from tgi_patches.hooks.overlay import Overlay
from tgi_patches.hooks.rows import Row, Rows, attach, carry, drop, rows_of
from tgi_patches.hooks.steps import StepHooks
from tgi_patches.hooks.wrap import wrap
from tgi_patches.kv import Inbox
from tgi_patches.kv.staged import StagedPool
from tgi_patches.pieces import PIECE_TOKENS, Begun
from tgi_patches.relay import Done, Imported, Outgoing, Reserve


@dataclass(frozen=True, slots=True)
class Completing:
    """Row `index` of the batch gets its first token in this step."""

    index: int
    request_id: int
    row: Row


@dataclass(frozen=True, slots=True)
class Step:
    """One call of generate_token in which prompts with a handle complete."""

    chooser: Any
    rows: tuple[Completing, ...]
    puts: dict[int, Row]
    """By the identity of their stop rules."""

    def indexed(self) -> list[tuple[int, Row]]:
        return [(done.index, done.row) for done in self.rows]

    def put_of(self, criteria: Any) -> Row | None:
        return self.puts.get(id(criteria))


class FlashHooks(StepHooks[Step]):
    """`heads_first`: see StagedPool; `request_logprobs`: TGI was told to compute prompt logprobs."""

    def __init__(
        self,
        overlay: Overlay,
        *,
        heads_first: bool,
        request_logprobs: bool,
        path: DevicePath | None = None,
    ) -> None:
        super().__init__(overlay)
        self._path = path
        self._heads_first = heads_first
        self._request_logprobs = request_logprobs
        self._model: Any = None
        self._pool: StagedPool | None = None
        self._pool_of: Any = None
        self._begun = Begun()

    def install(self, module: Any, tokens: Any) -> None:
        """`module` is TGI's flash_causal_lm, where it looks `batch_top_tokens` up by name; utils.tokens."""
        batch_class = module.FlashCausalLMBatch
        wrap(batch_class, "from_tokenized", self.from_tokenized)
        wrap(batch_class, "filter", self.filter)
        wrap(batch_class, "concatenate", self.concatenate)
        wrap(module.FlashCausalLM, "generate_token", self.generate_token)
        wrap(tokens.HeterogeneousNextTokenChooser, "__call__", self.choose)
        wrap(tokens.StoppingCriteria, "__call__", self.stop)
        self._limit_reached = tokens.FinishReason.FINISH_REASON_LENGTH
        wrap(module, "batch_top_tokens", self.top_tokens)

    def forget(self) -> None:
        """Let go of the cache: a warmup measures what is free once its own is gone."""
        self._pool = self._pool_of = None
        if self._path is not None:
            self._overlay.shielded(self._path.forget, None)

    def arm(self, model: Any) -> KVShape:
        """Look at the cache that Warmup made.  Raises BridgeMiss LAYOUT for one of an unknown shape."""
        self._model = model
        key, value = model.kv_cache[0].kv_cache
        heads_at = 1 if self._heads_first else 2
        for pool in (key, value):
            if pool.dim() != 4 or pool.shape[heads_at] != model.num_kv_heads:
                raise BridgeMiss(MissReason.LAYOUT, f"a KV cache of shape {tuple(pool.shape)} is unknown")
        tokens_at = 3 - heads_at
        per_token = sum(
            pool.element_size() * pool.shape[1] * pool.shape[2] * pool.shape[3] // pool.shape[tokens_at]
            for cache in model.kv_cache
            for pool in cache.kv_cache
        )
        return KVShape(
            layers=len(model.kv_cache),
            kv_heads=model.num_kv_heads,
            head_dim=key.shape[3],
            dtype=name_of(key.dtype),
            bytes_per_token=per_token,
            tokens=key.shape[0] * key.shape[tokens_at],
        )

    # --- hooks ---

    def from_tokenized(
        self, original: Callable[..., Any], cls: Any, pb: Any, tokenizer: Any, ids: Any, *rest: Any
    ) -> Any:
        rows: Rows = {}
        for request, token_ids in zip(pb.requests, ids, strict=False):
            self._overlay.shielded(partial(self._arrived, rows, request, token_ids), None)
        if rows:
            self._overlay.flush()
        batch = original(cls, pb, tokenizer, ids, *rest)
        attach(batch, rows)
        return batch

    def filter(self, original: Callable[..., Any], batch: Any, request_ids: Any) -> Any:
        kept = original(batch, request_ids)
        if kept is not batch:
            self._overlay.shielded(lambda: carry([batch], kept), None)
        return kept

    def concatenate(self, original: Callable[..., Any], cls: Any, batches: Any) -> Any:
        joined = original(cls, batches)
        self._overlay.shielded(lambda: carry(batches, joined), None)
        return joined

    def generate_token(self, original: Callable[..., Any], model: Any, batch: Any) -> Any:
        if self._path is not None:
            self._overlay.shielded(self._path.poll, None)
        if not rows_of(batch):
            return original(model, batch)
        step = self._overlay.shielded(lambda: self._completing(batch), None)
        self._step = step
        try:
            result = original(model, batch)
        except Exception:
            self._overlay.shielded(lambda: self._step_failed(rows_of(batch)), None)
            raise
        finally:
            self._step = None
        if step is not None:
            for done in step.rows:
                self._overlay.shielded(partial(self._completed, batch, done), None)
            drop(batch, [done.request_id for done in step.rows if not done.row.piece])
            self._overlay.flush()
        self._overlay.shielded(lambda: self._keep_pieces(batch), None)
        return result

    def choose(self, original: Callable[..., Any], chooser: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._step
        if step is None or step.chooser is not chooser:
            return original(chooser, *args, **kwargs)
        for done in step.rows:
            self._overlay.shielded(partial(first_token.rewind, chooser, done.index), None)
        chosen = original(chooser, *args, **kwargs)
        for done in step.rows:
            settle = partial(first_token.settle, done.row, done.index, *chosen[:3])
            self._overlay.shielded(settle, None)
        return chosen

    # --- arriving ---

    def _arrived(self, rows: Rows, request: Any, token_ids: Sequence[int]) -> None:
        """The row is there before anything is imported: what has an import is repaired whatever follows."""
        tag = self._overlay.take_tag(request)
        if tag is None or not self._overlay.armed:
            return
        row = rows[request.id] = Row(tag)
        if isinstance(tag, GetTag):
            continues = self._begun.continues(tag.handle, token_ids)
            if continues:
                row.tag = replace(tag, first_token_id=None)  # that token began the answer, long ago
            row.piece = self._overlay.relay.keeps and _may_continue(request)
            row.imported, result = self._got(tag, request, token_ids, continues=continues)
            self._overlay.imported(request.id, result)
            if row.imported is not None:
                _shorten(request, len(token_ids), row.imported.cached_tokens)

    def _got(
        self, tag: GetTag, request: Any, token_ids: Sequence[int], *, continues: bool
    ) -> tuple[Imported | None, str]:
        if self._request_logprobs and request.prefill_logprobs:
            return None, self._refused(tag, len(token_ids))
        slots = partial(_slots, request)

        def inbox(share: Share) -> Inbox:
            return self._paged().inbox(slots(len(token_ids)), request.cache_len, share)

        def prefix(tokens: int) -> Inbox:
            return self._paged().inbox(slots(tokens), min(request.cache_len, tokens))

        if continues:
            return self._overlay.relay.resume(tag, token_ids, prefix)
        return self._overlay.relay.get(tag, token_ids, inbox)

    # --- a step ---

    def _completing(self, batch: Any) -> Step | None:
        rows = rows_of(batch)
        found = tuple(
            Completing(i, request.id, rows[request.id])
            for i, request in enumerate(batch.requests)
            if request.id in rows and batch.prefilling_mask[i] and _completes(batch, i)
        )
        puts = {
            id(batch.stopping_criterias[done.index]): done.row
            for done in found
            if isinstance(done.row.tag, PutTag)
        }
        return Step(batch.next_token_chooser, found, puts) if found else None

    def _completed(self, batch: Any, done: Completing) -> None:
        if done.row.imported is not None:
            done.row.imported.repair()
        if isinstance(done.row.tag, PutTag):
            self._export(batch, done.index, done.row.tag, done.row)

    def _export(self, batch: Any, index: int, tag: PutTag, row: Row) -> None:
        prompt_tokens = batch.prompt_lengths[index]
        token_ids = batch.all_input_ids[index][:prompt_tokens]
        if (path := self._path) is not None:

            def start(reserve: Reserve, done: Done) -> None:
                path.export(
                    self._on_device(path), _slots(batch.requests[index], prompt_tokens), reserve, done
                )

            self._overlay.relay.put_later(tag, token_ids, lambda: (row.first(), row.ended), start)
            return

        def outgoing() -> Outgoing:
            first = row.first()
            planes = self._paged().outbox(_slots(batch.requests[index], prompt_tokens))
            return Outgoing(planes, first, row.ended)

        self._overlay.relay.put(tag, token_ids, outgoing)

    def _keep_pieces(self, batch: Any) -> None:
        """Export what has reached the limit of a piece, before the router frees its blocks."""
        rows = rows_of(batch)
        if not any(row.piece for row in rows.values()):
            return
        for index, request in enumerate(batch.requests):
            row = rows.get(request.id)
            if row is None or not row.piece or not isinstance(row.tag, GetTag):
                continue
            criteria = batch.stopping_criterias[index]
            if criteria.current_tokens >= criteria.max_new_tokens:
                self._overlay.relay.keep(row.tag, *self._reached(batch, index))
                drop(batch, [request.id])
                self._overlay.flush()

    def _reached(self, batch: Any, index: int) -> tuple[list[int], Callable[[], Planes]]:
        """Token ids of all that has KV, which the newest token has not, and that KV."""
        token_ids = list(batch.all_input_ids[index][:-1])
        request = batch.requests[index]
        return token_ids, lambda: self._paged().outbox(_slots(request, len(token_ids)))

    def _paged(self) -> StagedPool | DevicePool:
        """TGI makes its cache anew in Warmup: never trust an older one."""
        if self._path is not None:
            return self._on_device(self._path)
        cache = self._model.kv_cache
        if self._pool is None or self._pool_of is not cache:
            self._pool = StagedPool([layer.kv_cache for layer in cache], heads_first=self._heads_first)
            self._pool_of = cache
        return self._pool

    def _on_device(self, path: DevicePath) -> DevicePool:
        cache = self._model.kv_cache
        return path.pool(cache, lambda: [layer.kv_cache for layer in cache])


def _shorten(request: Any, prompt_tokens: int, cached_tokens: int) -> None:
    """So many leading tokens are in the request's slots: only the others are left to compute."""
    request.cache_len = max(request.cache_len, cached_tokens)
    if request.HasField("chunk_len"):
        request.chunk_len = min(request.chunk_len, prompt_tokens - request.cache_len)


def _may_continue(request: Any) -> bool:
    """TGI's router asks for no more tokens at a time, and for fewer only where fewer are wanted."""
    return bool(request.stopping_parameters.max_new_tokens == PIECE_TOKENS)


def _completes(batch: Any, index: int) -> bool:
    reached = batch.cache_lengths[index] + batch.input_lengths[index]
    return bool(reached >= batch.prompt_lengths[index])


def _slots(request: Any, prompt_tokens: int) -> list[int]:
    """Slot of each position of the prompt.  Raises BridgeMiss LAYOUT where the router gave too few."""
    slots = list(request.slots[:prompt_tokens])
    if len(slots) < prompt_tokens:
        raise BridgeMiss(MissReason.LAYOUT, f"{len(slots)} slots for {prompt_tokens} tokens")
    return slots
