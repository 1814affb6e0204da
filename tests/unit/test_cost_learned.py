"""A pair of shards in virtual time, known to the book by its events alone, is learned as it is."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from itertools import count

import pytest

from orchestrator.core.cost import DecodeCost, PrefillCost
from orchestrator.core.costbook import CostBook
from orchestrator.core.ticket import Choice, Completion, Grant, Leg, Outcome, Relayed, Ticket
from tests.unit.test_cost_book import view
from tgi_patches.contract import Role

PREFILL, DECODE = PrefillCost(0.010, 1e-4, 1e-8), DecodeCost(0.015, 4e-7, 8e-4)
BATCH_MOST = 8
RELAY_S = 0.004
SKEW_S = 500.0
"""The gateways' clock is ahead of the conductor's by this."""


@dataclass(slots=True)
class Request:
    handle: str
    prompt: int
    tokens: int
    sent_s: float
    streams: bool
    first_s: float = 0.0
    joined_s: float = 0.0
    made: int = 0


@dataclass(slots=True)
class Pair:
    """One prefill and one decode shard, each serving first come, first served, with events of both."""

    rng: random.Random
    book: CostBook = field(default_factory=CostBook)
    events: list[tuple[float, int, str, Request]] = field(default_factory=list)
    """A heap: time, order, name."""
    order: count[int] = field(default_factory=count)

    def at(self, when_s: float, name: str, request: Request) -> None:
        heapq.heappush(self.events, (when_s, next(self.order), name, request))

    def noisy(self, seconds: float) -> float:
        return seconds * self.rng.lognormvariate(0, 0.05)

    def run(self, requests: list[Request]) -> None:
        self.prefill(requests)
        self.decode(requests)
        for shard, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            self.book.of(view(shard, role))
        while self.events:
            now_s, _, name, request = heapq.heappop(self.events)
            self.tell(name, request, now_s)

    def prefill(self, requests: list[Request]) -> None:
        free_s, waiting = 0.0, list(requests)
        while waiting:
            begun_s = max(free_s, waiting[0].sent_s)
            batch = [one for one in waiting if one.sent_s <= begun_s][:BATCH_MOST]
            del waiting[: len(batch)]
            free_s = begun_s + self.noisy(PREFILL.batch_s([one.prompt for one in batch]))
            for one in batch:
                # The gateway reads them one after the other.
                one.first_s = free_s + self.rng.uniform(0, 0.0003)
                self.at(one.sent_s - 0.002, "granted", one)

    def decode(self, requests: list[Request]) -> None:
        coming = sorted(requests, key=lambda one: one.first_s)
        running: list[Request] = []
        now_s = 0.0
        while coming or running:
            if not running:
                now_s = max(now_s, coming[0].first_s + RELAY_S)
            while coming and coming[0].first_s + RELAY_S <= now_s:
                running.append(coming.pop(0))
            context = sum(one.prompt + one.made for one in running)
            now_s += self.noisy(DECODE.step_s(len(running), context))
            for one in running:
                one.made += 1
                if one.made == 1:  # the last prompt token, redone
                    one.joined_s = now_s
                    self.at(now_s if one.streams else now_s + 1.0, "relayed", one)
                elif one.made == one.tokens:
                    self.at(now_s + self.rng.uniform(0, 0.001), "ended", one)
            running = [one for one in running if one.made < one.tokens]

    def tell(self, name: str, one: Request, now_s: float) -> None:
        if name == "granted":
            legs = Leg("d0", 1, "http://d0"), Leg("p0", 1, "http://p0")
            grant = Grant(one.handle, Choice.SEPARATED, "pair", *legs, 160, one.prompt * 10, one.tokens)
            ticket = Ticket(one.handle, "g.1", one.prompt, one.tokens, now_s, now_s + 300)
            self.book.granted(ticket, grant, now_s)
        elif name == "relayed":
            first_s, prefill_s = one.first_s + SKEW_S, one.first_s - one.sent_s
            self.book.relayed(Relayed(one.handle, first_s, prefill_s, RELAY_S, one.prompt), now_s)
        else:
            phases_s = {"queue": 0.002, "prefill": one.first_s - one.sent_s, "relay": RELAY_S}
            waited_s = one.joined_s - one.first_s - RELAY_S
            if one.streams:
                phases_s |= {"decode_wait": waited_s, "decode": now_s - one.joined_s}
            else:
                phases_s["decode"] = now_s - one.joined_s + waited_s
            first_s = one.first_s + SKEW_S
            done = Completion(one.handle, Outcome.DONE, phases_s, one.prompt, one.tokens, True, first_s)
            self.book.ended(done, now_s)


@pytest.mark.parametrize("streams", [1.0, 0.5, 0.0])
def test_a_pair_under_changing_load_is_learned_from_its_requests(streams: float) -> None:
    """Quiet and busy spells, prompts of 16 to 2048 tokens; streams, whole answers, or both."""
    rng, now_s = random.Random(7), 0.0
    requests: list[Request] = []
    for i in range(2500):
        rate_per_s = 2.0 if (i // 100) % 2 else 14.0
        now_s += rng.expovariate(rate_per_s)
        prompt, tokens = int(2 ** rng.uniform(4, 11)), rng.randrange(10, 120)
        requests.append(Request(str(i), prompt, tokens, now_s, rng.random() < streams))
    pair = Pair(rng)
    pair.run(requests)
    learned, decoded = pair.book.of(view("p0")), pair.book.of(view("d0", Role.DECODE))
    assert learned is not None
    assert learned.prefill is not None
    assert decoded is not None
    assert decoded.decode is not None
    assert decoded.relay is not None
    for prompt in (16, 128, 512, 2048):
        assert learned.prefill.alone_s(prompt) == pytest.approx(PREFILL.alone_s(prompt), rel=0.1), prompt
    for batch, context in ((1, 200), (4, 2000), (16, 8000)):
        expected = DECODE.step_s(batch, context)
        assert decoded.decode.step_s(batch, context) == pytest.approx(expected, rel=0.12), batch
    assert decoded.relay.seconds(2000) == pytest.approx(RELAY_S, rel=0.05)
    requests_each, _ = pair.book.batches("p0") or (0.0, 0.0)
    assert 1.0 <= requests_each < BATCH_MOST
