"""One request's whole path, top to bottom: admit, ask for shards, put leg, wait, get leg, settle.

`Pipeline.serve` runs in a task of its own; cancelling it (the client left) closes whichever leg is
open and settles the request, exactly once, as every other ending does.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

import orjson
import structlog

from orchestrator import legs
from orchestrator.admission import Admission, GatewaySettings
from orchestrator.core import redress
from orchestrator.core.decision import capped
from orchestrator.core.passage import Passage
from orchestrator.core.redress import FirstToken, Json
from orchestrator.core.request import Event
from orchestrator.core.sse import comment
from orchestrator.core.ticket import Leg, Outcome
from orchestrator.errors import DeadlinePassed, GatewayError, Overloaded, Shed
from orchestrator.handover import Handover
from orchestrator.metrics import Metrics
from orchestrator.queues.protocol import RequestQueue
from orchestrator.run import Job, Out, Run, encoded
from orchestrator.settle import end_with_error, settle
from orchestrator.shards.client import IMPORT_HEADER, Answer, Headers, ShardClient, ShardStream
from tgi_patches.contract import GetTag, MissReason

log = structlog.get_logger()

_IMPORT = IMPORT_HEADER.encode()

LATE, LATE_S = 2.0, 1.0
"""A record that was expected in t seconds is waited for 2 t + 1 s: its owner may have left meanwhile."""
READ_WITHIN_S = 1.0
"""After this the decode shard, which has a slot free for the request, has read its record."""

_PASSED_ON = frozenset(
    {
        b"x-compute-type",
        b"x-compute-time",
        b"x-compute-characters",
        b"x-total-time",
        b"x-validation-time",
        b"x-queue-time",
        b"x-inference-time",
        b"x-time-per-token",
        b"x-prompt-tokens",
        b"x-generated-tokens",
    }
)
"""TGI's headers of a whole answer."""


class Pipeline:
    """Serves the requests of one gateway."""

    def __init__(
        self, settings: GatewaySettings, queue: RequestQueue, shards: ShardClient, metrics: Metrics
    ) -> None:
        self.settings = settings
        self.admission = Admission(settings, queue, shards)
        self.metrics = metrics
        self.open: dict[int, Run] = {}
        self._queue = queue
        self._shards = shards
        self._handover = Handover(settings.wait_timeout_s, shards, self.admission, metrics)

    async def serve(self, job: Job, out: Out) -> None:
        """Answer one request.

        Raises GatewayError while nothing was sent; afterwards an error is an event of the stream.
        """
        run = Run(job, out)
        self.open[id(run)] = run
        outcome, error = Outcome.FAILED, None
        try:
            await self._within_deadline(run)
            outcome = Outcome.DONE
        except GatewayError as caught:
            outcome, error = Outcome.REFUSED if run.granted is None else Outcome.FAILED, caught
            if isinstance(caught, Shed):
                self.metrics.shed()
            if not out.started:
                raise
            await end_with_error(run, caught)
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
            raise
        finally:
            del self.open[id(run)]
            settle(run, outcome, error, self._queue, self.metrics)

    async def _within_deadline(self, run: Run) -> None:
        timeout_s = self.settings.timeout_s(run.job.timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._serve(run)
        except TimeoutError:
            its_own = timeout_s < self.settings.request_timeout_s
            whose = "its own limit" if its_own else "the gateway allows"
            raise DeadlinePassed(f"The request took longer than {whose}.") from None

    async def _serve(self, run: Run) -> None:
        self.metrics.arrived()
        if len(self.open) > self.settings.max_open_requests:
            raise Overloaded("Model is overloaded")
        ticket = await self.admission.admit(run)
        run.enter("queue")
        with self.metrics.waiting():
            run.granted = grant = await self._queue.submit(ticket)
        run.step(Event.GRANTED)
        run.mode, run.degraded = self._queue.mode, self._queue.degraded is not None
        self.metrics.granted(grant)
        # What was granted is for all answers together.
        allowed = max(1, capped(grant.max_new_tokens, run.mode) // run.job.choices)
        if allowed < run.max_new_tokens:
            run.cap = run.max_new_tokens = allowed
            self.metrics.capped()
        if run.job.stream:
            await (self._split_stream(run) if grant.prefill is not None else self._one_stream(run))
            await self._end_stream(run)
        else:
            await (self._split_whole(run) if grant.prefill is not None else self._one_whole(run))

    # --- one shard: mixed, or from an earlier request's record ----------------------------------

    async def _one_stream(self, run: Run) -> None:
        tag = await self._shared_tag(run)
        run.step(Event.GET_SENT)
        run.enter("decode_wait" if tag else "prefill")
        # No name for the body: a stream would hold it to its end.
        async with self._stream(run, run.grant.decode, legs.one_body(run, tag)) as events:
            self._note_import(run, events.headers)
            event = await anext(events, None)
            if event is None:
                raise legs.cut_off(events.shard)
            told = str(tag or "")
            passage = legs.passage_of(run, events.shard, event, told)
            await run.send_first(redress.relayed(run.job.dialect, event, told, run.model))
            run.generated_tokens = 1
            run.enter("decode")
            await self._relay(run, events, passage)

    async def _one_whole(self, run: Run) -> None:
        tag = await self._shared_tag(run)
        run.step(Event.GET_SENT)
        run.enter("decode")
        answer = await self._post(run, run.grant.decode, legs.one_body(run, tag))
        self._note_import(run, answer.headers)
        await self._send_whole(run, answer, legs.untagged(run, answer, tag))

    async def _shared_tag(self, run: Run) -> GetTag | None:
        """Names the record of a shared grant, once it is there or will not come; None for a mixed one.

        The tag forces no first token: that is this request's own, by its own sampling.
        """
        if run.grant.shared is None:
            return None
        left_s = self.settings.timeout_s(run.job.timeout_s) - (run.clock() - run.arrived_s)
        # A miss costs a whole prefill, for which there has to be time.
        within_s = min(self.settings.shared_wait_s, left_s / 2)
        expected_s = run.grant.predicted.get("record")
        if expected_s is not None:
            within_s = min(within_s, LATE * expected_s + LATE_S)
        await self._handover.shared(run, within_s)
        return legs.get_tag(run, None)

    # --- separated, streaming -------------------------------------------------------------------

    async def _split_stream(self, run: Run) -> None:
        first = await self._put_stream(run)
        if first.ended:
            return
        reply = await self._handover.published(run)
        token_id = first.token_id if reply is None or first.token_id is not None else reply.first_token_id
        await self._get_stream(run, first, token_id)

    async def _put_stream(self, run: Run) -> FirstToken:
        """The first token, sent to the client as soon as it is there."""
        run.step(Event.PUT_SENT)
        run.enter("prefill")
        job = run.job
        tag = redress.put_tag(job.dialect, job.raw, run.handle, pinned=run.grant.pinned)
        body = redress.put_body(job.dialect, job.raw, tag, run.seed)
        async with self._stream(run, run.prefill, body) as events:
            before, payload = await legs.until_token(run, events)
            first = redress.first_token(
                job.dialect,
                payload,
                max_new_tokens=run.max_new_tokens,
                wants_details=job.parameters.details,
                model=run.model,
            )
            ahead = [redress.relayed(job.dialect, event, str(tag), run.model) for event in before]
            await run.send_first(b"".join([*ahead, encoded(run.job, first.event)]))
            run.generated_tokens = 1
            if first.ended:
                await self._relay(run, events, Passage(job.dialect, tag=str(tag), model=run.model, ends=0))
            else:
                run.enter("relay")
                await self._drain(run, events)
        return first

    async def _drain(self, run: Run, events: ShardStream) -> None:
        """Read the put leg to its end, so that its connection serves again; nothing depends on it."""
        try:
            await events.skip(self.settings.wait_timeout_s)
        except GatewayError as error:
            log.warning(
                "put_leg_cut_off", shard=events.shard, request_id=run.job.request_id, error=str(error)
            )

    async def _get_stream(self, run: Run, first: FirstToken, token_id: int | None) -> None:
        """Everything after the first token, from the decode shard."""
        run.step(Event.PUBLISHED)
        tag = legs.get_tag(run, token_id)
        run.step(Event.GET_SENT)
        run.enter("decode_wait")
        async with self._stream(run, run.grant.decode, legs.get_body(run, tag)) as events:
            self._note_import(run, events.headers)
            event, payload = await legs.redone(run, events, first)
            self._queue.relayed(run.relayed())
            run.enter("decode")
            passage = legs.passage_of(run, events.shard, event, str(tag))
            if passage.ended:
                # The decode shard found an end that the prefill shard did not see: the client has
                # the token, but not yet that it was the last.
                end = redress.only_the_end(run.job.dialect, payload, run.model)
                await run.out.send(encoded(run.job, end))
            await self._relay(run, events, passage)

    # --- separated, whole answers ---------------------------------------------------------------

    async def _split_whole(self, run: Run) -> None:
        job = run.job
        run.step(Event.PUT_SENT)
        run.enter("prefill")
        put_tag = redress.put_tag(job.dialect, job.raw, run.handle, pinned=run.grant.pinned)
        put = await self._post(run, run.prefill, redress.put_body(job.dialect, job.raw, put_tag, run.seed))
        run.first_token_s = run.wall()
        reason = redress.finish_reason(job.dialect, put.json())
        ended = redress.ended_at_first(reason, run.max_new_tokens)
        reply = None if ended else await self._handover.published(run)
        if ended or (reply is not None and reply.ended):
            answer = redress.ended_answer(
                job.dialect, put.json(), wants_details=job.parameters.details, model=run.model
            )
            await self._send_whole(run, put, orjson.dumps(answer))
            return
        run.step(Event.PUBLISHED)
        tag = legs.get_tag(run, None if reply is None else reply.first_token_id)
        run.step(Event.GET_SENT)
        run.enter("decode")
        # Nothing tells when a whole answer's record has been read.
        read = asyncio.get_running_loop().call_later(
            READ_WITHIN_S, lambda: self._queue.relayed(run.relayed())
        )
        try:
            get = await self._post(run, run.grant.decode, legs.get_body(run, tag))
        finally:
            read.cancel()
        self._note_import(run, get.headers)
        await self._send_whole(run, get, legs.untagged(run, get, tag))

    # --- common ---------------------------------------------------------------------------------

    def _stream(self, run: Run, leg: Leg, body: Json) -> AbstractAsyncContextManager[ShardStream]:
        job = run.job
        return self._shards.stream(leg, job.path, orjson.dumps(body), request_id=job.request_id)

    async def _post(self, run: Run, leg: Leg, body: Json) -> Answer:
        job = run.job
        return await self._shards.post(
            leg,
            job.path,
            orjson.dumps(body),
            self.settings.request_timeout_s,
            request_id=job.request_id,
        )

    async def _relay(self, run: Run, events: ShardStream, passage: Passage) -> None:
        """The rest of a leg.  Raises ShardLost when it stops before the answer is complete."""
        try:
            await events.relay(passage, run.out.push)
        finally:
            run.generated_tokens += passage.tokens
        if not passage.ended:
            raise legs.cut_off(events.shard)

    async def _send_whole(self, run: Run, answer: Answer, body: bytes) -> None:
        """One JSON answer, with TGI's own headers and ours."""
        run.enter("")
        run.step(Event.ENDED)
        self._note_counts(run, answer)
        headers = run.headers()
        if run.job.debug:
            headers["server-timing"] = run.timing()
        passed = [pair for pair in answer.headers.items() if pair[0] in _PASSED_ON]
        await run.out.whole(b"[" + body + b"]" if run.job.array else body, headers, passed)

    async def _end_stream(self, run: Run) -> None:
        run.enter("")
        run.step(Event.ENDED)
        if run.job.debug:
            imported = f" import={run.import_result}" if run.import_result else ""
            served = f"route={run.grant.choice} reason={run.grant.reason}{imported}"
            predicted = f" predicted {told}" if (told := run.predicted()) else ""
            await run.out.send(comment(f"orchestrator {served} {run.timing()}{predicted}"))
        await run.out.finish()

    def _note_counts(self, run: Run, answer: Answer) -> None:
        """Prompt and output lengths, as far as the shard told them."""
        told = answer.headers.get(b"x-prompt-tokens", b"")
        if told.isdigit():
            counted = int(told)
            if counted != run.prompt_tokens:
                run.prompt_tokens = counted
                self.admission.learn(run.job, counted)
        told = answer.headers.get(b"x-generated-tokens", b"")
        if told.isdigit():
            run.generated_tokens = int(told)
        else:
            run.generated_tokens = redress.generated_tokens(run.job.dialect, answer.json()) or 0

    def _note_import(self, run: Run, headers: Headers) -> None:
        said = headers.get(_IMPORT)
        told = None if said is None else said.decode("latin-1")
        # What did not come is all that the decode shard can say of a record that a pull did not bring.
        run.import_result = run.pull_miss or told if told == MissReason.MISSING else told
        if run.import_result is not None:
            self.metrics.imported(run.import_result)
