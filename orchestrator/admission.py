"""What happens to a request before it asks for shards: the whole of TGI's validation, and its size.

A prompt that cannot break a limit is only estimated; near a limit a shard counts it exactly.
Nothing is reserved for a request that is refused here.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

import orjson
import structlog

from orchestrator.access.keys import PRIORITIES
from orchestrator.core import prompt
from orchestrator.core.estimate import Estimator
from orchestrator.core.fingerprint import identity, simhash
from orchestrator.core.redress import Dialect
from orchestrator.core.shard import ShardState
from orchestrator.core.ticket import Leg, ShardView, Ticket
from orchestrator.core.validation import (
    ValidParameters,
    check_batch,
    check_lengths,
    surely_fits,
    validate_parameters,
)
from orchestrator.errors import DeadlinePassed, ShardLost, Shed, Unavailable
from orchestrator.queues.protocol import RequestQueue
from orchestrator.run import Job, Run
from orchestrator.shards.client import Answer, ShardClient
from tgi_patches.contract import Limits, new_handle

log = structlog.get_logger()

_TRIES = 3


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """What one gateway is told; seconds, tokens, counts."""

    limits: Limits
    """Used until a shard has told its own."""
    model_name: str = ""
    """What clients see as the model; empty: what the shards say."""
    request_timeout_s: float = 300.0
    wait_timeout_s: float = 5.0
    """How long the get leg is held back for the record."""
    shared_wait_s: float = 30.0
    """The same for another request's record, whose prefill may not even have begun; half of what is left
    of the request's time at most."""
    count_timeout_s: float = 15.0
    """For a shard that counts a prompt's tokens."""
    keep_alive_s: float = 15.0
    """Silence on a stream after which a comment is sent."""
    max_open_requests: int = 1024
    """Requests in this gateway, waiting ones included; above it: 429."""
    body_timeout_s: float = 30.0
    """For a client to send a request's body."""
    admin_port: int | None = None
    """Where administration and metrics have an address of their own: its port."""

    def timeout_s(self, own_s: float | None) -> float:
        """For a whole request whose caller asks for `own_s`: the gateway's own holds as well."""
        return self.request_timeout_s if own_s is None else min(own_s, self.request_timeout_s)


class Admission:
    """Turns a parsed request into a ticket, or refuses it as TGI would."""

    def __init__(self, settings: GatewaySettings, queue: RequestQueue, shards: ShardClient) -> None:
        self._settings = settings
        self._queue = queue
        self._shards = shards
        self._estimator = Estimator()
        self._table: tuple[ShardView, ...] | None = None
        self._limits = settings.limits

    def limits(self) -> Limits:
        """The tightest of the known shards' limits: any of them may serve the request."""
        shards = self._queue.shards()
        if shards is not self._table:
            known = [view.limits for view in shards if view.state != ShardState.DEAD]
            self._limits = min(known, key=lambda each: each.max_total_tokens, default=self._settings.limits)
            self._table = shards
        return self._limits

    def model_name(self) -> str:
        """What a chat that names no model is answered with."""
        return self._settings.model_name or next(
            (view.fingerprint.model for view in self._queue.shards()), "tgi"
        )

    async def admit(self, run: Run) -> Ticket:
        """The request's ticket.  Raises Shed, InvalidRequest, or Unavailable when nobody can count."""
        job, limits = run.job, self.limits()
        shed_below = self._queue.mode.shed_below
        if shed_below is not None and job.priority < shed_below:
            raise Shed(next((name for name, number in PRIORITIES.items() if number == shed_below), "higher"))
        check_batch(job.choices, limits)
        valid = validate_parameters(job.parameters, limits, inputs=job.inputs, stream=job.stream)
        run.prompt_tokens = await self._prompt_tokens(job, valid, limits)
        run.max_new_tokens = check_lengths(run.prompt_tokens, valid.max_new_tokens, limits)
        named = job.model is not None and job.model != "tgi"
        run.model = job.model if named and job.model is not None else self.model_name()
        if job.splittable and valid.do_sample and valid.seed is None:
            run.seed = secrets.randbits(63)
        run.handle = new_handle()
        words = prompt.text(job.dialect, job.raw) if job.splittable else ""
        now_s = time.time()
        return Ticket(
            handle=run.handle,
            gateway=self._queue.gateway,
            prompt_tokens=run.prompt_tokens * job.choices,
            max_new_tokens=run.max_new_tokens * job.choices,
            created_s=now_s,
            deadline_s=now_s + self._settings.timeout_s(job.timeout_s),
            splittable=job.splittable,
            priority=job.priority,
            model=self.model_name(),
            prompt_hash=identity(prompt.parts(job.dialect, job.raw)) if job.splittable else "",
            simhash=simhash(words),
            prefix=prompt.prefix(job.dialect, job.raw, words),
            choice=job.choice,
        )

    def may_answer(self, leg: Leg) -> bool:
        """Nobody knows that the incarnation which `leg` names is gone."""
        return any(
            view.shard == leg.shard and view.epoch == leg.epoch and view.state != ShardState.DEAD
            for view in self._queue.shards()
        )

    def learn(self, job: Job, prompt_tokens: int) -> None:
        """A shard has counted this prompt."""
        if prompt_tokens > 0 and job.choices == 1 and job.parameters.truncate is None:
            self._estimator = self._estimator.observe(job.size, prompt_tokens)

    def ready(self) -> list[Leg]:
        """The shards that may be asked anything now, the least busy one first."""
        views = [view for view in self._queue.shards() if view.state == ShardState.READY]
        views.sort(key=lambda view: view.reserved_slots + view.outstanding_records)
        return [Leg(view.shard, view.epoch, view.url) for view in views]

    async def ask_any(self, path: str, body: bytes | None = None, request_id: str = "") -> Answer:
        """The answer of the first ready shard that gives one; Unavailable when none does."""
        for leg in self.ready()[:_TRIES]:
            try:
                if body is None:
                    return await self._shards.get(leg, path)
                timeout_s = self._settings.count_timeout_s
                return await self._shards.post(leg, path, body, timeout_s, request_id=request_id)
            except (ShardLost, DeadlinePassed) as error:
                log.warning(
                    "shard_does_not_answer",
                    shard=leg.shard,
                    path=path,
                    request_id=request_id or None,
                    error=str(error),
                )
        raise Unavailable("No shard is ready to serve the request.")

    async def _prompt_tokens(self, job: Job, valid: ValidParameters, limits: Limits) -> int:
        def kept(tokens: int) -> int:
            return tokens if valid.truncate is None else min(tokens, valid.truncate)

        if surely_fits(kept(job.size.upper_bound), valid.max_new_tokens, limits):
            return kept(self._estimator.estimate(job.size))
        exact = await self._count(job)
        self.learn(job, exact)
        return kept(exact)

    async def _count(self, job: Job) -> int:
        """The exact number of prompt tokens."""
        if job.dialect is Dialect.CHAT:
            answer = await self.ask_any("/chat_tokenize", orjson.dumps(dict(job.raw)), job.request_id)
            return len(answer.json()["tokenize_response"])
        answer = await self.ask_any("/tokenize", orjson.dumps({"inputs": job.inputs}), job.request_id)
        return len(answer.json())
