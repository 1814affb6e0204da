"""What a leg is sent and what is read of its answer, for one request on its way."""

from __future__ import annotations

from typing import Any

from orchestrator.core import redress
from orchestrator.core.passage import Passage
from orchestrator.core.redress import FirstToken, Json
from orchestrator.core.sse import Event as StreamEvent
from orchestrator.errors import GenerationFailed, ShardLost
from orchestrator.run import Run
from orchestrator.shards.client import Answer, ShardStream, payload_of
from tgi_patches.contract import GetTag


def get_tag(run: Run, token_id: int | None) -> GetTag:
    """Names the record, or the copy of it that was pulled, and the first token that the client has."""
    job, record = run.job, run.record
    shard, epoch = run.source or (record.owner.shard, record.owner.epoch)
    return redress.get_tag(
        job.dialect, job.raw, handle=record.handle, shard=shard, epoch=epoch, first=token_id
    )


def get_body(run: Run, tag: GetTag) -> dict[str, Any]:
    """For the decode shard of a separated grant."""
    return redress.get_body(run.job.dialect, run.job.raw, tag, run.seed, run.cap)


def one_body(run: Run, tag: GetTag | None) -> Json:
    """For the only shard of a grant, with or without a record that it answers from."""
    if tag is not None:
        return get_body(run, tag)
    return redress.whole_body(run.job.dialect, run.job.raw, run.cap)


def untagged(run: Run, answer: Answer, tag: GetTag | None) -> bytes:
    """A whole answer as its client gets it."""
    if tag is None:
        return answer.body
    return redress.relayed_answer(run.job.dialect, answer.body, str(tag), run.model)


async def until_token(run: Run, events: ShardStream) -> tuple[list[StreamEvent], dict[str, Any]]:
    """A leg's first token event, and the events before it (a chat may name its role first)."""
    before: list[StreamEvent] = []
    async for event in events:
        payload = payload_of(events.shard, event)
        if redress.is_token(run.job.dialect, payload):
            return before, payload
        before.append(event)
    raise cut_off(events.shard)


async def redone(run: Run, events: ShardStream, first: FirstToken) -> tuple[StreamEvent, dict[str, Any]]:
    """The get leg's first token, which the client has already: it must be the same one."""
    async for event in events:
        payload = payload_of(events.shard, event)
        if not redress.is_token(run.job.dialect, payload):
            continue
        if not redress.same_token(run.job.dialect, payload, first):
            raise GenerationFailed(f"Shard {events.shard} went on from another first token.")
        return event, payload
    raise cut_off(events.shard)


def passage_of(run: Run, shard: str, event: StreamEvent, tag: str = "") -> Passage:
    """For the rest of a stream whose first event is this one."""
    passage = Passage(run.job.dialect, tag=tag, model=run.model, ends=run.job.choices)
    try:
        passage.ends(event.data or b"")
    except ValueError:
        raise ShardLost(f"Shard {shard} sent an event that cannot be read.") from None
    return passage


def cut_off(shard: str) -> ShardLost:
    return ShardLost(f"Shard {shard} stopped before the answer was complete.")
