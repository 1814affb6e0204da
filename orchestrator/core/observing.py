"""From what happens to requests to what shards were measured to take: prefill batches, steps, relays.

    granted -> [relayed: the record is imported, soon after the first token] -> ended

`relayed` is missing for mixed requests and for those that ended at their first token, may come a second
late for whole answers, and is missing with a gateway that died; `ended` has everything again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from orchestrator.core.batches import Batches, PrefillBatch
from orchestrator.core.lives import DecodeSample, Life, Lives
from orchestrator.core.ticket import Completion, Grant, Leg, Outcome, Relayed, Ticket

REQUESTS_MOST = 65_536
INCARNATIONS_MOST = 1024
GRANT_SLACK_S = 0.01
"""Until a gateway has its grant and sends the body."""
GRACE_S = 5.0
"""Beyond a request's deadline, for the word of its end."""


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class RelaySample:
    """A record that a decode shard has imported."""

    kv_bytes: float
    seconds: float
    pulled: bool
    """From another host."""


Sample = PrefillBatch | DecodeSample | RelaySample


@dataclass(slots=True)
class _Shard:
    """What is watched of one incarnation."""

    batches: Batches = field(default_factory=Batches)
    lives: Lives = field(default_factory=Lives)
    alone: _Request | None = None
    """The request that found it idle, as long as nobody joined."""

    def joined(self, now_s: float) -> None:
        """Another request is there."""
        if self.alone is not None:
            self.alone.joined_s, self.alone = now_s, None


@dataclass(slots=True)
class _Request:
    ticket: Ticket
    grant: Grant
    granted_s: float
    joined_s: float | None = None
    """When the next request was sent to the shard that it had found idle."""
    found_idle: bool = False

    @property
    def prefill_here(self) -> Leg | None:
        """The shard that does nothing but prefill for it; None for one that also decodes, or only."""
        grant = self.grant
        if grant.shared is not None:
            return None
        return grant.decode if grant.prefill is None and grant.max_new_tokens == 1 else grant.prefill


class Observer:
    """Of all shards.  `now_s` is one clock's; first tokens are the gateways' wall clock."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._shards: dict[tuple[str, int], _Shard] = {}
        self._samples: list[tuple[str, int, Sample]] = []

    def take(self) -> Sequence[tuple[str, int, Sample]]:
        """Shard, epoch and sample of all that was measured since the last call."""
        if not self._samples:
            return ()
        taken, self._samples = self._samples, []
        return taken

    def batches(self, shard: str, epoch: int) -> tuple[float, float] | None:
        """Requests and tokens of a prefill batch there, the recent mean."""
        watched = self._shards.get((shard, epoch))
        return None if watched is None else watched.batches.mean

    def lost(self, shard: str, epoch: int) -> None:
        """An incarnation is gone, with whatever ran on it."""
        self._shards.pop((shard, epoch), None)

    # --- events ---------------------------------------------------------------------------------

    def granted(self, ticket: Ticket, grant: Grant, now_s: float) -> None:
        """A decision was committed."""
        self._forget(ticket.handle)
        request = self._requests[ticket.handle] = _Request(ticket, grant, now_s)
        if len(self._requests) > REQUESTS_MOST:
            self._forget(next(iter(self._requests)))
        self._of(grant.decode)
        prefill = request.prefill_here
        if prefill is not None:
            shard = self._of(prefill)
            shard.joined(now_s)
            shard.batches.sent(ticket.handle)
        elif grant.shared is None:
            self._mixed(request, now_s)

    def relayed(self, relayed: Relayed, now_s: float) -> None:
        """A record was imported: the first token is known, and the decode has begun."""
        request = self._requests.get(relayed.handle)
        if request is None:
            return
        prompt_tokens = relayed.prompt_tokens or request.ticket.prompt_tokens
        prefill = request.grant.prefill
        if prefill is not None and relayed.first_token_s > 0:
            at = relayed.first_token_s
            batches = self._known(prefill).batches
            batches.first_token(relayed.handle, at, relayed.prefill_s, prompt_tokens, now_s)
            self._add(prefill, batches.complete(now_s))
        decode = self._known(request.grant.decode)
        decode.joined(now_s)
        decode.lives.begin(relayed.handle, Life(now_s, prompt_tokens, give_up_s=_give_up_s(request, now_s)))

    def ended(self, completion: Completion, now_s: float) -> None:
        """A request is over."""
        request = self._requests.pop(completion.handle, None)
        if request is None:
            return
        prefill = request.prefill_here
        if prefill is not None:
            self._first_token(prefill, request, completion, now_s)
        decode = request.grant.decode
        self._decoded(request, completion, now_s)
        if prefill is None and request.grant.shared is None:
            self._alone(request, completion)
            self._known(decode).batches.unheard(completion.handle)
        self._relay(request, completion)

    # --- what they mean -------------------------------------------------------------------------

    def _mixed(self, request: _Request, now_s: float) -> None:
        handle, ticket = request.ticket.handle, request.ticket
        leg = request.grant.decode
        shard = self._of(leg)
        shard.joined(now_s)
        if shard.batches.idle and shard.lives.idle:
            shard.alone, request.found_idle = request, True
        shard.batches.decodes(handle)
        tokens = ticket.prompt_tokens
        shard.lives.begin(handle, Life(now_s, tokens, tokens, give_up_s=_give_up_s(request, now_s)))

    def _first_token(self, leg: Leg, request: _Request, completion: Completion, now_s: float) -> None:
        """Where `relayed` has not said it before: the request ended at its first token, or broke off."""
        phases = completion.phases_s
        # A whole answer of one token has a single phase.
        prefill_s = phases.get("prefill") or (phases.get("decode") if request.grant.prefill is None else None)
        batches = self._known(leg).batches
        if completion.first_token_s > 0 and prefill_s:
            tokens = completion.prompt_tokens or request.ticket.prompt_tokens
            batches.first_token(completion.handle, completion.first_token_s, prefill_s, tokens, now_s)
        else:
            batches.unheard(completion.handle)
        self._add(leg, batches.complete(now_s))

    def _decoded(self, request: _Request, completion: Completion, now_s: float) -> None:
        leg, decode_s = request.grant.decode, completion.phases_s.get("decode", 0.0)
        lives = self._known(leg).lives
        if decode_s > 0 and completion.generated_tokens > 1:
            separated = request.grant.prefill is not None or request.grant.shared is not None
            prompt_tokens = completion.prompt_tokens or request.ticket.prompt_tokens
            computed = prompt_tokens if not separated or completion.imported is False else 0
            life = Life(now_s - decode_s, prompt_tokens, computed, now_s, completion.generated_tokens)
            lives.end(completion.handle, life, _steps(completion, separated))
        else:
            lives.drop(completion.handle)
        self._add(leg, lives.samples(now_s))

    def _alone(self, request: _Request, completion: Completion) -> None:
        """The prefill of a mixed request is a measurement where nothing else ran on its shard."""
        prefill_s = completion.phases_s.get("prefill", 0.0)
        leg = request.grant.decode
        shard = self._known(leg)
        if shard.alone is request:
            shard.alone = None
        undisturbed = request.joined_s is None or (
            request.joined_s - request.granted_s > prefill_s * 1.2 + GRANT_SLACK_S
        )
        if request.found_idle and undisturbed and prefill_s > 0 and completion.first_token_s > 0:
            tokens = completion.prompt_tokens or request.ticket.prompt_tokens
            self._add(leg, (PrefillBatch(1, tokens, tokens * tokens, prefill_s),))

    def _relay(self, request: _Request, completion: Completion) -> None:
        grant, seconds = request.grant, completion.phases_s.get("relay", 0.0)
        imported = completion.outcome is Outcome.DONE and completion.imported is not False
        if grant.prefill is None or seconds <= 0 or not imported:
            return
        # The grant has the bytes of the estimate.
        tokens = completion.prompt_tokens or request.ticket.prompt_tokens
        kv_bytes = grant.record_bytes * tokens / max(request.ticket.prompt_tokens, 1)
        self._add(grant.decode, (RelaySample(kv_bytes, seconds, pulled=bool(grant.pull)),))

    def _add(self, leg: Leg, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self._samples.append((leg.shard, leg.epoch, sample))

    def _of(self, leg: Leg) -> _Shard:
        where = (leg.shard, leg.epoch)
        shard = self._shards.get(where)
        if shard is None:
            shard = self._shards[where] = _Shard()
            if len(self._shards) > INCARNATIONS_MOST:
                del self._shards[next(iter(self._shards))]
        return shard

    def _known(self, leg: Leg) -> _Shard:
        """For what follows a grant: where the incarnation is gone by then, it does not come back."""
        return self._shards.get((leg.shard, leg.epoch)) or _Shard()

    def _forget(self, handle: str) -> None:
        """Granted anew, or too many: nothing more will be heard of the earlier grant."""
        request = self._requests.pop(handle, None)
        if request is not None:
            for leg in filter(None, (request.grant.prefill, request.grant.decode)):
                shard = self._known(leg)
                shard.batches.unheard(handle)
                shard.lives.drop(handle)


def _steps(completion: Completion, separated: bool) -> int:
    """Steps within the phase `decode`; 0 where a prefill is in it too, or the request broke off."""
    if completion.outcome is not Outcome.DONE:
        return 0
    streamed = "decode_wait" in completion.phases_s if separated else "prefill" in completion.phases_s
    if streamed:
        return completion.generated_tokens - 1
    # A whole answer's get leg redoes the last prompt token as its first step.
    return completion.generated_tokens if separated and completion.imported is not False else 0


def _give_up_s(request: _Request, now_s: float) -> float:
    ticket = request.ticket
    return now_s + max(0.0, ticket.deadline_s - ticket.created_s) + GRACE_S
