"""Hooks for CausalLM and its batch: a padded cache without slots, whole prompts, one step a prefill.

from_pb          take the handles, look records up; a batch in which all were found gets their cache
generate_token   a batch with finds and others is run as two and joined
forward          the cache is noted for the export, the last position of imports is repaired
chooser, top n   a put leg's first token is noted, a get leg's is forced where its handle names one

The continuation of a long answer (pieces.py) is prefilled as stock TGI does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tgi_patches.contract import BridgeMiss, GetTag, MissReason, PutTag, Tag
from tgi_patches.heads import Share
from tgi_patches.hooks import first_token
from tgi_patches.hooks.identity import KVShape, name_of
from tgi_patches.hooks.overlay import Overlay
from tgi_patches.hooks.rows import Row, Rows, attach, drop, rows_of
from tgi_patches.hooks.steps import StepHooks
from tgi_patches.hooks.wrap import wrap
from tgi_patches.kv import padded
from tgi_patches.pieces import Begun
from tgi_patches.relay import Outgoing

_OTHERS = "_tgi_orchestrator_others"


@dataclass(slots=True)
class Step:
    """One first step of a batch with handles."""

    batch: Any
    rows: Rows
    cache: Any = None
    """What the forward returned."""

    def indexed(self) -> list[tuple[int, Row]]:
        requests = enumerate(self.batch.requests)
        return [(i, self.rows[request.id]) for i, request in requests if request.id in self.rows]

    def put_of(self, criteria: Any) -> Row | None:
        """The put leg whose stop rule this is."""
        for index, row in self.indexed():
            if self.batch.stopping_criterias[index] is criteria and isinstance(row.tag, PutTag):
                return row
        return None


class CausalHooks(StepHooks[Step]):
    """One model's."""

    def __init__(self, overlay: Overlay) -> None:
        super().__init__(overlay)
        self._shape: padded.RowShape | None = None
        self._cache_class: Any = None
        self._begun = Begun()

    def install(self, module: Any, tokens: Any) -> None:
        """`module` is TGI's causal_lm, where it looks `batch_top_tokens` up by name; utils.tokens."""
        wrap(module.CausalLMBatch, "from_pb", self.from_pb)
        wrap(module.CausalLM, "forward", self.forward)
        wrap(module.CausalLM, "generate_token", self.generate_token)
        wrap(tokens.NextTokenChooser, "__call__", self.choose)
        wrap(tokens.StoppingCriteria, "__call__", self.stop)
        self._limit_reached = tokens.FinishReason.FINISH_REASON_LENGTH
        wrap(module, "batch_top_tokens", self.top_tokens)

    def forget(self) -> None:
        """Nothing of a cache is kept between steps."""

    def arm(self, model: Any) -> KVShape:  # noqa: ARG002
        """Use what the warmup's forward showed.  Raises BridgeMiss LAYOUT where it showed nothing known."""
        shape = self._shape
        if shape is None:
            raise BridgeMiss(MissReason.LAYOUT, "the model's cache has an unknown form")
        return KVShape(
            layers=shape.planes // 2,
            kv_heads=shape.heads,
            head_dim=shape.dim,
            dtype=name_of(shape.dtype),
            bytes_per_token=shape.bytes_per_token,
            tokens=0,
        )

    # --- hooks ---

    def from_pb(self, original: Callable[..., Any], cls: Any, pb: Any, *rest: Any, **more: Any) -> Any:
        nobody: dict[int, Tag] = {}
        tags = self._overlay.shielded(lambda: self._tags(pb), nobody)
        batch = original(cls, pb, *rest, **more)
        if not tags:
            return batch
        make = partial(original, cls)
        rows = {id_: Row(tag) for id_, tag in tags.items()}
        return self._overlay.shielded(lambda: self._arrived(batch, rows, pb, make, rest, more), batch)

    def generate_token(self, original: Callable[..., Any], model: Any, batch: Any) -> Any:
        others = vars(batch).pop(_OTHERS, None)  # once: TGI goes on with the same batch object
        if others is None:
            return self._generate(original, model, batch)
        generations, left, timings = self._generate(original, model, batch)
        more, others_left, others_timings = self._generate(original, model, others)
        remaining = [part for part in (left, others_left) if part is not None]
        both = type(batch).concatenate(remaining) if len(remaining) == 2 else (remaining or [None])[0]
        return generations + more, both, tuple(a + b for a, b in zip(timings, others_timings, strict=True))

    def forward(
        self,
        original: Callable[..., Any],
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        position_ids: Any,
        past_key_values: Any = None,
    ) -> Any:
        past = self._overlay.shielded(lambda: self._as_cache(past_key_values), past_key_values)
        result = original(model, input_ids, attention_mask, position_ids, past)
        self._overlay.shielded(lambda: self._forwarded(result[2]), None)
        return result

    def choose(self, original: Callable[..., Any], chooser: Any, *args: Any, **kwargs: Any) -> Any:
        next_id, logprobs = original(chooser, *args, **kwargs)
        step = self._step
        if step is not None:
            self._overlay.shielded(lambda: _settle(step, chooser, next_id, logprobs), None)
        return next_id, logprobs

    # --- arriving ---

    def _tags(self, pb: Any) -> dict[int, Tag]:
        take = self._overlay.take_tag
        tags = {r.id: self._overlay.shielded(partial(take, r), None) for r in pb.requests}
        return {id_: tag for id_, tag in tags.items() if tag is not None and self._overlay.armed}

    def _arrived(
        self, batch: Any, rows: Rows, pb: Any, make: Callable[..., Any], rest: Any, more: Any
    ) -> Any:
        """The batch to run: as it is, with an imported cache, or the finds with the others in tow."""
        attach(batch, rows)
        for index, request in enumerate(batch.requests):
            row = rows.get(request.id)
            if row is not None and isinstance(row.tag, GetTag):
                self._look_up(row, row.tag, request, _prompt(batch, index))
        self._overlay.flush()
        found = [request for request in pb.requests if _found(rows.get(request.id))]
        if not found:
            return batch
        others = [request for request in pb.requests if not _found(rows.get(request.id))]
        hits = make(_part(pb, found), *rest, **more) if others else batch
        self._give_cache(hits, rows)
        attach(hits, {request.id: rows[request.id] for request in found})
        if others:
            rest_of_them = make(_part(pb, others), *rest, **more)
            attach(rest_of_them, {r.id: rows[r.id] for r in others if r.id in rows})
            setattr(hits, _OTHERS, rest_of_them)
        return hits

    def _look_up(self, row: Row, tag: GetTag, request: Any, token_ids: Sequence[int]) -> None:
        relay = self._overlay.relay
        if self._begun.continues(tag.handle, token_ids):
            row.tag = replace(tag, first_token_id=None)  # that token began the answer, long ago
            detail = "this model class goes on with long answers by a prefill"
            result = relay.not_got(tag, MissReason.UNSUPPORTED, detail, len(token_ids))
        elif request.prefill_logprobs:
            result = self._refused(tag, len(token_ids))
        else:
            row.imported, result = relay.get(tag, token_ids, partial(self._inbox, len(token_ids)))
        self._overlay.imported(request.id, result)

    def _inbox(self, tokens: int, share: Share) -> padded.PaddedInbox:
        assert self._shape is not None
        if not share.whole:
            raise BridgeMiss(MissReason.LAYOUT, "a padded cache takes no part of the heads")
        return padded.PaddedInbox(self._shape, tokens)

    @staticmethod
    def _give_cache(batch: Any, rows: Rows) -> None:
        """Let TGI think that all but the last token was computed before."""
        inboxes = [_inbox_of(rows[request.id]) for request in batch.requests]
        batch.past_key_values = padded.joined(inboxes, batch.input_ids.device)
        batch.input_ids = batch.input_ids[:, -1:]
        batch.position_ids = batch.position_ids[:, -1:]

    # --- a step ---

    def _generate(self, original: Callable[..., Any], model: Any, batch: Any) -> Any:
        rows = rows_of(batch)
        if not rows:
            return original(model, batch)
        self._step = step = Step(batch, dict(rows))
        try:
            result = original(model, batch)
        except Exception:
            self._overlay.shielded(lambda: self._step_failed(rows), None)
            raise
        finally:
            self._step = None
        for index, row in step.indexed():
            if isinstance(row.tag, PutTag):
                self._overlay.shielded(partial(self._export, step, index, row.tag, row), None)
        drop(batch, list(rows))
        self._overlay.flush()
        return result

    def _as_cache(self, past: Any) -> Any:
        """Models that answer with a cache object refuse the lists that TGI makes when batches change."""
        if self._cache_class is None or not isinstance(past, (list, tuple)):
            return past
        return self._cache_class.from_legacy_cache(tuple(tuple(pair) for pair in past))

    def _forwarded(self, past: Any) -> None:
        if hasattr(type(past), "from_legacy_cache"):
            self._cache_class = type(past)
        if self._shape is None:
            self._shape = _shape_of(past)
        step = self._step
        if step is None:
            return
        step.cache = past
        layers = _layers(past)
        for index, row in step.indexed():
            if row.imported is not None:
                _inbox_of(row).aim(layers, index)
                row.imported.repair()

    def _export(self, step: Step, index: int, tag: PutTag, row: Row) -> None:
        prompt = _prompt(step.batch, index)[:-1]  # TGI has appended the first token already

        def outgoing() -> Outgoing:
            first = row.first()
            return Outgoing(padded.outbox(_layers(step.cache), index, len(prompt)), first, row.ended)

        self._overlay.relay.put(tag, prompt, outgoing)


def _found(row: Row | None) -> bool:
    return row is not None and row.imported is not None


def _inbox_of(row: Row) -> padded.PaddedInbox:
    assert row.imported is not None
    (inbox,) = row.imported.inboxes
    assert isinstance(inbox, padded.PaddedInbox)
    return inbox


def _part(pb: Any, requests: Sequence[Any]) -> Any:
    """A message of some of its requests, tokenized as in the whole: TGI cuts all at the longest limit."""
    part = type(pb)()
    part.CopyFrom(pb)
    del part.requests[:]
    part.requests.extend(requests)
    part.size = len(requests)
    longest = max(request.truncate for request in pb.requests)
    for request in part.requests:
        request.truncate = longest
    return part


def _prompt(batch: Any, index: int) -> list[int]:
    """The request's token ids so far, without the padding in front."""
    tokens: list[int] = batch.all_input_ids[index].view(-1).tolist()
    return tokens[-batch.input_lengths[index] :]


def _layers(past: Any) -> padded.Layers:
    return [(past[i][0], past[i][1]) for i in range(len(past))]


def _shape_of(past: Any) -> padded.RowShape | None:
    """None unless every plane is `[batch, heads, length, dim]` of one kind."""
    if not hasattr(past, "__len__") or not hasattr(past, "__getitem__"):
        return None
    tensors = [tensor for pair in _layers(past) for tensor in pair]
    kinds = {(tensor.dim(), tensor.shape[1], tensor.shape[-1], tensor.dtype) for tensor in tensors}
    if len(kinds) != 1 or tensors[0].dim() != 4:
        return None
    first = tensors[0]
    return padded.RowShape(len(tensors), first.shape[1], first.shape[3], first.dtype)


def _settle(step: Step, chooser: Any, next_id: Any, logprobs: Any) -> None:
    """`next_id` [1, 1] and `logprobs` [1, vocab] of the row whose chooser this is."""
    for index, row in step.indexed():
        if step.batch.next_token_choosers[index] is not chooser:
            continue
        if isinstance(row.tag, PutTag):
            row.sampled = (int(next_id), float(logprobs[-1, int(next_id)]))
        elif (first := first_token.forced(row, logprobs[-1])) is not None:
            next_id[0, 0], logprobs[-1, first[0]] = first
