"""Did all ranks do the same?  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.embedded.shard.seam import CachedBatch, Generation
from orchestrator.errors import OrchestratorError

from .messages import Done, Failed, Reply, Reported

BROKEN = "GroupBroken"
"""A rank that says so is the victim of another."""


def done(generations: Sequence[Generation], running: CachedBatch | None, said: tuple[Reported, ...]) -> Done:
    chosen = tuple((generation.request_id, generation.token.id) for generation in generations)
    return Done(chosen, running, said)


def failed(error: Exception) -> Failed:
    ours = isinstance(error, OrchestratorError)
    return Failed(type(error).__name__, str(error), ours)


def disagreement(replies: Sequence[Reply | None]) -> str | None:
    """One sentence for what a rank did differently; None where all did, or failed to do, the same.

    By rank, from 0 on; None for a rank that had not answered when it should have.
    """
    failures = [(rank, reply) for rank, reply in enumerate(replies) if isinstance(reply, Failed)]
    if len(failures) == len(replies) and len({reply for _, reply in failures}) == 1:
        return None
    if failures:
        rank, cause = min(failures, key=lambda failure: (failure[1].kind == BROKEN, failure[0]))
        return f"Rank {rank} of this shard failed where others did not: {told(cause)}"
    for rank, reply in enumerate(replies):
        if reply is None:
            return f"Rank {rank} of this shard did not finish a step that others had finished."
        if _content(reply) != _content(replies[0]):
            return f"Rank {rank} of this shard took another step than rank 0."
    return None


def told(failure: Failed) -> str:
    """What may be shown of it."""
    return failure.text if failure.ours else f"{failure.kind}."


def _content(reply: Reply | None) -> object:
    assert isinstance(reply, Done)
    return reply.chosen, reply.running, tuple(handle for handle, _ in reply.reported)
