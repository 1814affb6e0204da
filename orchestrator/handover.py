"""Between the legs: waits until the record is published, and has it pulled where hosts differ.

Whatever goes wrong here costs a local prefill on the decode shard, so nothing of it is an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import structlog

from orchestrator.admission import Admission
from orchestrator.errors import DeadlinePassed, GatewayError
from orchestrator.metrics import Metrics
from orchestrator.run import Run
from orchestrator.shards.client import ShardClient
from tgi_patches.contract import PROTOCOL_VERSION, MissReason, PullReply, PullRequest, WaitReply

log = structlog.get_logger()

_MISS_REASONS = frozenset(MissReason)
_AS_MISS: Mapping[str, str] = {"timeout": MissReason.LINK, "lost": MissReason.ERROR}
"""What became of a pull that ended without a word of the decode shard's sidecar."""


class Handover:
    """`timeout_s` is for the wait and the pull together, of a request's own record."""

    def __init__(self, timeout_s: float, shards: ShardClient, admission: Admission, metrics: Metrics) -> None:
        self._timeout_s = timeout_s
        self._shards = shards
        self._admission = admission
        self._metrics = metrics

    async def published(self, run: Run) -> WaitReply | None:
        """Its own record is where decode can read it, or will not come: either way the get leg may start."""
        run.enter("relay")
        end_s = time.monotonic() + self._timeout_s
        reply = await self._waited(run, self._timeout_s)
        # No get leg follows a whole answer that is complete with its first token.
        if reply is not None and reply.found and (run.job.stream or not reply.ended):
            await self._pull(run, end_s)
        return reply

    async def shared(self, run: Run, within_s: float) -> None:
        """The same for an earlier request's record, whose prefill may still run or wait for its turn.

        Asks in rounds, to notice the end of the shard that was to make it.
        """
        run.enter("relay")
        end_s = time.monotonic() + within_s
        for _ in range(math.ceil(within_s / self._timeout_s)):
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not self._admission.may_answer(run.record.owner):
                return
            reply = await self._waited(run, min(left_s, self._timeout_s))
            if reply is None or (not reply.found and reply.reason != MissReason.MISSING):
                return
            if reply.found:
                await self._pull(run, time.monotonic() + self._timeout_s)
                return

    async def _waited(self, run: Run, timeout_s: float) -> WaitReply | None:
        leg, handle = run.record.owner, run.record.handle
        try:
            reply = await self._shards.wait(leg, handle, timeout_s, request_id=run.job.request_id)
        except GatewayError as error:
            log.warning("wait_failed", shard=leg.shard, request_id=run.job.request_id, error=str(error))
            return None
        if reply.found and reply.prompt_tokens:
            run.prompt_tokens = reply.prompt_tokens
            self._admission.learn(run.job, reply.prompt_tokens)
        return reply

    async def _pull(self, run: Run, end_s: float) -> None:
        """Bring the record to the decode shard's host; without it that shard computes the prompt itself."""
        if not run.grant.pull:
            return
        begun_s = time.monotonic()
        result, reply = await self._asked_to_pull(run, end_s - begun_s)
        took_s = time.monotonic() - begun_s
        if reply is not None:
            run.source = (reply.shard, reply.epoch)
        else:
            leg = run.grant.decode
            run.pull_miss = _AS_MISS.get(result, result)
            log.warning(
                "pull_failed",
                shard=leg.shard,
                source=run.record.owner.shard,
                request_id=run.job.request_id,
                reason=result,
                took_s=took_s,
            )
        self._metrics.pulled(result, took_s, reply.kv_bytes if reply is not None else 0)

    async def _asked_to_pull(self, run: Run, timeout_s: float) -> tuple[str, PullReply | None]:
        """`ok` and where the record stands now, or why there is none."""
        if timeout_s <= 0:
            return "timeout", None
        record, address = run.record, run.grant.pull
        source = record.owner
        request = PullRequest(
            PROTOCOL_VERSION, record.handle, source.shard, source.epoch, address, timeout_s=timeout_s
        )
        try:
            reply = await self._shards.pull(run.grant.decode, request, request_id=run.job.request_id)
        except DeadlinePassed:
            return "timeout", None
        except GatewayError:
            return "lost", None
        if reply.found:
            return "ok", reply
        return reply.reason if reply.reason in _MISS_REASONS else MissReason.ERROR, None
