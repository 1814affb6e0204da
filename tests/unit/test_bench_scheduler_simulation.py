"""The simulator: sums of costs, queueing theory, and nothing lost."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.bench.scheduler.fleet import BYTES_PER_TOKEN, Fleet
from orchestrator.bench.scheduler.policies import FirstCome, SchedulingPolicy
from orchestrator.bench.scheduler.served import START_S, Result
from orchestrator.bench.scheduler.simulation import Delays, Simulation
from orchestrator.bench.scheduler.workload import Arrival
from orchestrator.core.cost import Costs, DecodeCost, PrefillCost, RelayCost
from orchestrator.core.decision import Mode, Refuse
from orchestrator.core.hot_prompts import HotPrompts
from orchestrator.core.scheduling import Scheduler
from orchestrator.core.ticket import Choice, Grant, Leg, ShardView, SharedRecord, Ticket

COSTS = Costs(
    prefill=PrefillCost(0.010, 0.0001, 0.0),
    decode=DecodeCost(0.020, 0.0, 0.001),
    relay=RelayCost(latency_s=0.003, bytes_per_s=BYTES_PER_TOKEN * 1e4),
)
"""A copy takes 0.1 ms a token."""
DELAYS = Delays(queue_s=0.001, grant_s=0.002, call_s=0.004)
AT_ONCE = Delays(queue_s=0.0, grant_s=0.0, call_s=0.0)


def arrival(at_s: float, prompt: int = 100, answer: int = 3, text: str = "") -> Arrival:
    return Arrival(at_s, prompt, answer, text or f"text {at_s} {prompt}", simhash=1)


def simulated(
    arrivals: Sequence[Arrival],
    policy: SchedulingPolicy | None = None,
    *,
    fleet: Fleet | None = None,
    delays: Delays = DELAYS,
) -> Result:
    return Simulation(fleet or Fleet(1, 1, COSTS, told=False), policy or FirstCome(), arrivals, delays).run()


class Always(FirstCome):
    """Grants that a test wrote, by the order of arrival."""

    def __init__(self, *grants: Mapping[str, object]) -> None:
        super().__init__()
        self._grants = list(grants)

    def decide(
        self, shards: Sequence[ShardView], mode: Mode, now_s: float
    ) -> Iterator[tuple[Ticket, Grant | Refuse]]:
        base = {
            choice.decode.shard: choice
            for _, choice in super().decide(shards, mode, now_s)
            if isinstance(choice, Grant)
        }
        for ticket in list(self._waiting.values()):
            (plain,) = base.values()
            yield ticket, replace(plain, handle=ticket.handle, **self._grants.pop(0))  # type: ignore[arg-type]


def test_a_lone_request_has_its_first_token_after_the_sum_of_its_costs() -> None:
    (one,) = simulated([arrival(5.0)]).served
    assert one.ttft_s == pytest.approx(0.001 + 0.002 + 0.004 + 0.010 + 0.010)


def test_a_lone_request_ends_after_relay_import_and_its_steps() -> None:
    (one,) = simulated([arrival(5.0)]).served
    relay_s = 0.003 + 0.004  # latency, then the call of the get leg
    import_s = 0.010 + 0.021  # copy, and a forward that redoes the first token
    assert one.done_s - one.first_s == pytest.approx(relay_s + import_s + 2 * 0.021)
    assert one.phases_s() == pytest.approx(
        {"queue": 0.003, "prefill": 0.024, "relay": 0.003, "decode_wait": 0.035, "decode": 0.042}
    )


def test_a_request_of_one_token_never_reaches_a_decode_shard() -> None:
    (one,) = simulated([arrival(0.0, answer=1)]).served
    assert one.done_s == one.first_s
    assert math.isnan(one.get_s)


def test_a_mixed_request_is_served_by_one_shard() -> None:
    mixed = {"choice": Choice.MIXED, "prefill": None, "record_bytes": 0}
    (one,) = simulated([arrival(0.0)], Always(mixed)).served
    assert one.ttft_s == pytest.approx(0.007 + 0.020)
    assert one.done_s - one.first_s == pytest.approx(2 * 0.021)
    assert one.prefilled


def test_a_shared_request_waits_for_the_record_and_computes_no_prompt() -> None:
    owner = Leg("prefill-0", 1, "http://prefill-0")
    shared = {"prefill": None, "record_bytes": 0, "shared": SharedRecord(f"{0:032x}", owner)}
    result = simulated([arrival(0.0), arrival(0.0005)], Always({}, shared))
    first, heir = result.served
    assert (first.prefilled, heir.prefilled) == (True, False)
    assert [batch.prompts for batch in result.prefill_batches] == [1]
    # Both records are read in one step of the decode shard: two copies and a forward of two rows.
    assert heir.first_s == pytest.approx(first.published_s + 0.004 + 0.020 + 0.020 + 0.002)
    assert result.left == 0


def test_a_shared_request_that_comes_late_starts_at_once() -> None:
    owner = Leg("prefill-0", 1, "http://prefill-0")
    shared = {"prefill": None, "record_bytes": 0, "shared": SharedRecord(f"{0:032x}", owner)}
    result = simulated([arrival(0.0), arrival(10.0)], Always({}, shared))
    assert result.served[1].ttft_s == pytest.approx(0.007 + 0.010 + 0.021)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_equal_prompts_without_batches_wait_as_in_an_m_d_1_queue(load: float) -> None:
    tokens, took_s = 400, 0.050
    chance = random.Random(11)
    at_s, arrivals = 0.0, []
    for _ in range(20_000):
        at_s += chance.expovariate(load / took_s)
        arrivals.append(arrival(at_s, tokens, answer=1))
    fleet = Fleet(1, 1, COSTS, prefill_budget_tokens=tokens, told=False)
    result = simulated(arrivals, fleet=fleet, delays=AT_ONCE)
    rate = load / took_s
    expected_s = took_s + rate * took_s**2 / (2 * (1 - rate * took_s))
    assert fmean(one.ttft_s for one in result.served) == pytest.approx(expected_s, rel=0.05)


class Patient(FirstCome):
    """Decides nothing before a time."""

    def decide(
        self, shards: Sequence[ShardView], mode: Mode, now_s: float
    ) -> Iterator[tuple[Ticket, Grant | Refuse]]:
        return super().decide(shards, mode, now_s) if now_s > START_S + 3 else iter(())


def test_what_waits_is_looked_at_again_though_nothing_happens() -> None:
    (one,) = simulated([arrival(1.0)], Patient()).served
    assert one.granted_s - START_S == pytest.approx(3.0, abs=2 * DELAYS.tick_s)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 6000), st.integers(1, 40), st.integers(0, 4)), max_size=40
    ),
    st.sampled_from(["first come", "production", "hot"]),
    st.integers(1, 2),
)
def test_every_request_is_served_once_and_nothing_stays_reserved(
    drawn: list[tuple[float, int, int, int]], name: str, decodes: int
) -> None:
    makers = {"first come": FirstCome, "production": Scheduler, "hot": lambda: Scheduler(hot=HotPrompts())}
    # A text has one length: identical prompts are identical.
    lengths = {text: prompt for _, prompt, _, text in drawn}
    arrivals = [
        Arrival(at_s, lengths[text], answer, f"text {text}", simhash=1 + text)
        for at_s, _, answer, text in sorted(drawn)
    ]
    result = simulated(arrivals, makers[name](), fleet=Fleet(2, decodes, COSTS, told=name != "first come"))
    assert result.left == 0
    assert all(one.done_s >= one.first_s >= one.arrival.at_s for one in result.served)
    assert len(result.served) == len(arrivals)
    computed = sum(one.arrival.prompt_tokens for one in result.served if one.prefilled)
    assert sum(batch.tokens for batch in result.prefill_batches) == computed


def test_the_same_requests_give_the_same_times() -> None:
    arrivals = [arrival(0.01 * number, 50 + number) for number in range(50)]
    first, second = (simulated(arrivals, Scheduler()) for _ in range(2))
    assert [one.done_s for one in first.served] == [one.done_s for one in second.served]
