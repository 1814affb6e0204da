"""Requests through gateway, conductor and shards in virtual time, decided by the policy of production.

ticket -> decided -> prefill leg -> record published -> decode leg -> completion
                 |-> mixed: one leg on a decode shard
                 `-> shared: the decode leg alone, once the other request's record is published
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from orchestrator.bench.scheduler.clock import Clock
from orchestrator.bench.scheduler.engine import Engine, Work
from orchestrator.bench.scheduler.fleet import BYTES_PER_TOKEN, Fleet
from orchestrator.bench.scheduler.policies import SchedulingPolicy
from orchestrator.bench.scheduler.served import START_S, Result, Served
from orchestrator.bench.scheduler.workload import Arrival
from orchestrator.core.decision import Mode, Refuse
from orchestrator.core.pending import Place
from orchestrator.core.routing import release, reserve
from orchestrator.core.ticket import (
    Choice,
    Completion,
    Grant,
    Leg,
    Outcome,
    Relayed,
    ShardView,
    Ticket,
    relayed,
)

DEADLINE_S = 3600.0
MAX_NEW_TOKENS = 1024
"""What every request allows its answer, whose true length nobody knows before."""
NORMAL = Mode()


@dataclass(frozen=True, slots=True)
class Delays:
    """What lies between processes, in seconds; constant."""

    queue_s: float = 0.0005
    """From a gateway through Redis into the conductor."""
    grant_s: float = 0.0005
    call_s: float = 0.0005
    """A request to a shard, with the way back of its first token."""
    tick_s: float = 0.01
    """How often the conductor looks at what waits when nothing happens."""


@dataclass(slots=True)
class _Conductor:
    """Undecided tickets and the books."""

    policy: SchedulingPolicy
    views: tuple[ShardView, ...]
    held: dict[str, Grant] = field(default_factory=dict)
    undecided: int = 0
    peak: int = 0

    def book(self, grant: Grant) -> None:
        self.held[grant.handle] = grant
        self.views = reserve(self.views, grant)

    def relayed(self, handle: str) -> None:
        """The prefill shard's part is free."""
        held = self.held[handle]
        rest = relayed(held)
        self.views = reserve(release(self.views, held), rest)
        self.held[handle] = rest

    def ended(self, handle: str) -> None:
        self.views = release(self.views, self.held.pop(handle))


class Simulation:
    """One run.  The policy is used up by it."""

    def __init__(
        self,
        fleet: Fleet,
        policy: SchedulingPolicy,
        arrivals: Iterable[Arrival],
        delays: Delays | None = None,
    ) -> None:
        self._clock = Clock(START_S)
        self._fleet = fleet
        self._delays = delays or Delays()
        views = tuple(fleet.views())
        self._engines = {view.shard: Engine(self._clock, fleet.build(view.role)) for view in views}
        self._conductor = _Conductor(policy, views)
        self._served: dict[str, Served] = {}
        self._heirs: dict[str, list[Served]] = {}
        """By handle of a record that is not published yet: who waits for it."""
        self._ticking = False
        for number, arrival in enumerate(arrivals):
            self._add(number, arrival)

    def run(self) -> Result:
        """Until every request has ended."""
        self._clock.run(math.inf)
        served = list(self._served.values())
        batches = [batch for engine in self._engines.values() for batch in engine.batches]
        ended = [one.done_s for one in served if not math.isnan(one.done_s)]
        begun_s = min((one.arrival.at_s for one in served), default=START_S)
        took_s = max(ended, default=begun_s) - begun_s
        conductor = self._conductor
        left = conductor.undecided + len(conductor.held)
        return Result(served, batches, took_s, conductor.peak, left)

    # --- gateway to conductor -------------------------------------------------------------------

    def _add(self, number: int, arrival: Arrival) -> None:
        """Handles tell the order, which a policy must not need and a reader may."""
        at_s = START_S + arrival.at_s
        ticket = Ticket(
            f"{number:032x}",
            "gateway.1",
            arrival.prompt_tokens,
            MAX_NEW_TOKENS,
            created_s=at_s,
            deadline_s=at_s + DEADLINE_S,
            prompt_hash=arrival.text,
            simhash=arrival.simhash,
        )
        one = self._served[ticket.handle] = Served(replace(arrival, at_s=at_s), ticket)
        place = (round((at_s + self._delays.queue_s) * 1000), number)
        self._clock.at(at_s + self._delays.queue_s, lambda: self._queued(place, one))

    def _queued(self, place: Place, one: Served) -> None:
        conductor = self._conductor
        conductor.undecided += 1
        conductor.peak = max(conductor.peak, conductor.undecided)
        conductor.policy.add({place: one.ticket}, self._clock.now_s)
        self._decide()

    def _decide(self) -> None:
        """Decided on one snapshot, then committed, as the conductor does it."""
        conductor, now_s = self._conductor, self._clock.now_s
        if not conductor.undecided:
            return
        for ticket, decision in list(conductor.policy.decide(conductor.views, NORMAL, now_s)):
            conductor.undecided -= 1
            one = self._served[ticket.handle]
            if isinstance(decision, Refuse):
                conductor.policy.forget((ticket.handle,))
                one.refused = decision.reason
                continue
            conductor.policy.granted(ticket, decision, now_s)
            conductor.book(decision)
            one.grant = decision
            self._clock.after(self._delays.grant_s, lambda one=one: self._granted(one))  # type: ignore[misc]
        if conductor.undecided and not self._ticking:
            self._ticking = True
            self._clock.after(self._delays.tick_s, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._decide()

    def _tell(self, event: Callable[[], None]) -> None:
        """What the conductor hears from a gateway, and the pass that follows."""

        def heard() -> None:
            event()
            self._decide()

        self._clock.after(self._delays.queue_s, heard)

    # --- a request's legs -----------------------------------------------------------------------

    def _granted(self, one: Served) -> None:
        grant = _of(one)
        one.granted_s = one.put_s = self._clock.now_s
        if grant.shared is not None:
            owner = self._served[grant.shared.handle]
            if math.isnan(owner.published_s):
                self._heirs.setdefault(owner.ticket.handle, []).append(one)
            else:
                self._get(one)
        elif grant.prefill is None:
            self._send(grant.decode, self._whole(one))
        else:
            self._send(grant.prefill, self._put(one))

    def _send(self, leg: Leg, work: Work) -> None:
        engine = self._engines[leg.shard]
        self._clock.after(self._delays.call_s, lambda: engine.add(work))

    def _whole(self, one: Served) -> Work:
        """Mixed: prompt and answer on one shard."""
        arrival = one.arrival
        one.prefilled = True
        return Work(
            arrival.prompt_tokens,
            arrival.answer_tokens,
            first=lambda: self._first(one),
            ended=lambda: self._done(one),
            started=lambda: self._started(one),
        )

    def _put(self, one: Served) -> Work:
        one.prefilled = True
        return Work(
            one.arrival.prompt_tokens,
            1,
            first=lambda: self._first(one),
            ended=lambda: self._published(one),
            started=lambda: self._started(one),
        )

    def _published(self, one: Served) -> None:
        """The record can be read once the relay's latency has passed; its bytes are copied on import."""
        if one.arrival.answer_tokens == 1:
            self._done(one)
        self._clock.after(self._fleet.relay.latency_s, lambda: self._readable(one))

    def _readable(self, one: Served) -> None:
        one.published_s = self._clock.now_s
        if one.arrival.answer_tokens > 1:
            self._get(one)
        for heir in self._heirs.pop(one.ticket.handle, ()):
            self._get(heir)

    def _get(self, one: Served) -> None:
        """The whole answer again: its first token is redone there."""
        arrival = one.arrival
        one.get_s = self._clock.now_s
        work = Work(
            arrival.prompt_tokens,
            arrival.answer_tokens,
            first=lambda: self._imported(one),
            ended=lambda: self._done(one),
            import_s=arrival.prompt_tokens * BYTES_PER_TOKEN / self._fleet.relay.bytes_per_s,
            started=lambda: self._started(one),
        )
        self._send(_of(one).decode, work)

    def _started(self, one: Served) -> None:
        if math.isnan(one.started_s):
            one.started_s = self._clock.now_s

    def _first(self, one: Served) -> None:
        if math.isnan(one.first_s):
            one.first_s = self._clock.now_s

    def _imported(self, one: Served) -> None:
        self._first(one)
        one.imported_s = self._clock.now_s
        if _of(one).prefill is None:
            return  # nothing is held on a prefill shard: Redis does not pass it on
        phases = one.phases_s()
        told = Relayed(
            one.ticket.handle, one.first_s, phases["prefill"], phases["relay"], one.arrival.prompt_tokens
        )
        self._tell(lambda: self._hear_relayed(told))

    def _done(self, one: Served) -> None:
        one.done_s = self._clock.now_s
        completion = Completion(
            one.ticket.handle,
            Outcome.DONE,
            phases_s=one.phases_s(),
            prompt_tokens=one.arrival.prompt_tokens,
            generated_tokens=one.arrival.answer_tokens,
            imported=None if _of(one).choice is Choice.MIXED else True,
            first_token_s=one.first_s,
        )
        self._tell(lambda: self._hear_ended(completion))

    def _hear_relayed(self, told: Relayed) -> None:
        self._conductor.relayed(told.handle)
        self._conductor.policy.relayed(told, self._clock.now_s)

    def _hear_ended(self, completion: Completion) -> None:
        self._conductor.ended(completion.handle)
        self._conductor.policy.ended(completion, self._clock.now_s)


def _of(one: Served) -> Grant:
    assert one.grant is not None, "a leg without a grant"
    return one.grant
