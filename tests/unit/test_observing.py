"""From events to samples: which first tokens were one batch, who decoded together, what a relay took."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.batches import HOLD_S, PrefillBatch
from orchestrator.core.lives import DecodeSample
from orchestrator.core.observing import Observer, RelaySample, Sample
from orchestrator.core.ticket import (
    Choice,
    Completion,
    Grant,
    Leg,
    Outcome,
    Relayed,
    SharedRecord,
    Ticket,
)

WALL_S = 1_000_000.0
"""The gateways' clock has nothing to do with the conductor's, which begins at 0 here."""


def ticket(handle: str, prompt: int = 100, new: int = 50) -> Ticket:
    return Ticket(handle, "g.1", prompt, new, created_s=0.0, deadline_s=60.0)


def leg(shard: str, epoch: int = 1) -> Leg:
    return Leg(shard, epoch, f"http://{shard}")


def separated(handle: str, prefill: str = "p0", decode: str = "d0", **changes: Any) -> Grant:
    values: dict[str, Any] = {
        "handle": handle,
        "choice": Choice.SEPARATED,
        "reason": "pair",
        "decode": leg(decode),
        "prefill": leg(prefill),
        "kv_tokens": 160,
        "record_bytes": 1000,
        "max_new_tokens": 50,
    }
    return Grant(**values | changes)


def mixed(handle: str, shard: str = "m0", new: int = 50) -> Grant:
    return Grant(handle, Choice.MIXED, "no_pair", leg(shard), None, 160, 0, new)


def relayed(handle: str, first_s: float, prefill_s: float, tokens: int = 100) -> Relayed:
    return Relayed(handle, WALL_S + first_s, prefill_s, 0.01, tokens)


def done(handle: str, generated: int = 1, first_s: float = 0.0, **phases_s: float) -> Completion:
    return Completion(
        handle,
        Outcome.DONE,
        phases_s,
        prompt_tokens=100,
        generated_tokens=generated,
        imported=True if "decode_wait" in phases_s else None,
        first_token_s=WALL_S + first_s if first_s else 0.0,
    )


class Bench:
    """An observer and the samples that it has given so far, by kind."""

    def __init__(self) -> None:
        self.observer = Observer()
        self.samples: list[tuple[str, int, Sample]] = []

    def grant(self, grant: Grant, now_s: float, prompt: int = 100) -> None:
        self.observer.granted(ticket(grant.handle, prompt, grant.max_new_tokens), grant, now_s)

    def relayed(self, event: Relayed, now_s: float) -> None:
        self.observer.relayed(event, now_s)
        self.samples += self.observer.take()

    def ended(self, event: Completion, now_s: float) -> None:
        self.observer.ended(event, now_s)
        self.samples += self.observer.take()

    def prefills(self, shard: str = "p0") -> list[PrefillBatch]:
        return [one for name, _, one in self.samples if name == shard and isinstance(one, PrefillBatch)]

    def decodes(self, shard: str = "d0") -> list[DecodeSample]:
        return [one for name, _, one in self.samples if name == shard and isinstance(one, DecodeSample)]

    def relays(self) -> list[RelaySample]:
        return [one for _, _, one in self.samples if isinstance(one, RelaySample)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def measured(requests: int, tokens: int, squares: int, seconds: float) -> PrefillBatch:
    return PrefillBatch(requests, tokens, squares, pytest.approx(seconds, abs=1e-6))


# --- prefill batches ----------------------------------------------------------------------------


def test_first_tokens_at_one_instant_were_one_batch(bench: Bench) -> None:
    """Sent at 0 and 0.02, first tokens at 0.100 and 0.102: from the earliest put to the first of them."""
    bench.grant(separated("a"), 0.0)
    bench.grant(separated("b"), 0.02)
    bench.relayed(relayed("a", 0.100, 0.100, 100), 0.11)
    assert bench.prefills() == []  # `b` may have been in it
    bench.relayed(relayed("b", 0.102, 0.082, 300), 0.12)
    assert bench.prefills() == [measured(2, 400, 100**2 + 300**2, 0.100)]


def test_a_batch_begins_when_the_one_before_it_ends(bench: Bench) -> None:
    """Both sent at 0; first tokens at 0.1 and 0.25: the second batch took 0.15."""
    bench.grant(separated("a"), 0.0)
    bench.grant(separated("b"), 0.0)
    bench.relayed(relayed("a", 0.100, 0.100), 0.11)
    bench.relayed(relayed("b", 0.250, 0.250), 0.26)
    assert bench.prefills() == [measured(1, 100, 10_000, 0.1), measured(1, 100, 10_000, 0.15)]


def test_a_batch_on_an_idle_shard_begins_with_its_first_put(bench: Bench) -> None:
    bench.grant(separated("a"), 0.0)
    bench.relayed(relayed("a", 0.1, 0.1), 0.11)
    bench.grant(separated("b"), 5.0)
    bench.relayed(relayed("b", 5.3, 0.2), 5.31)
    assert bench.prefills() == [measured(1, 100, 10_000, 0.1), measured(1, 100, 10_000, 0.2)]


def test_what_was_sent_after_a_first_token_is_of_another_batch_however_close(bench: Bench) -> None:
    """2 ms a prefill, one after the other by one client: their first tokens are 3 ms apart."""
    bench.grant(separated("a"), 0.0)
    bench.grant(separated("b"), 0.003)
    bench.relayed(relayed("a", 0.002, 0.002), 0.0045)  # told of late
    bench.relayed(relayed("b", 0.005, 0.0019), 0.005)
    assert bench.prefills() == [measured(1, 100, 10_000, 0.002), measured(1, 100, 10_000, 0.0019)]


def test_events_of_two_shards_do_not_mix_and_may_come_in_any_order(bench: Bench) -> None:
    """On p0 a batch of two ends at 0.1 and one of one at 0.3; on p1 one of three at 0.1."""
    grants = {"a": "p0", "b": "p0", "c": "p0", "x": "p1", "y": "p1", "z": "p1"}
    for handle, shard in grants.items():
        bench.grant(separated(handle, prefill=shard), 0.0)
    told = {"a": (0.1, 10), "b": (0.101, 20), "c": (0.3, 30), "x": (0.1, 40), "y": (0.1, 50), "z": (0.1, 60)}
    for handle in ("z", "c", "b", "y", "a", "x"):
        first_s, tokens = told[handle]
        bench.relayed(relayed(handle, first_s, first_s, tokens), 0.5)
    assert bench.prefills("p0") == [measured(2, 30, 500, 0.1), measured(1, 30, 900, 0.2)]
    assert bench.prefills("p1") == [measured(3, 150, 1600 + 2500 + 3600, 0.1)]
    requests, tokens = bench.observer.batches("p0", 1) or (0.0, 0.0)
    assert 1.8 < requests < 2.0
    assert tokens == pytest.approx(30)
    assert bench.observer.batches("p1", 1) == (3.0, 150.0)
    assert bench.observer.batches("p0", 2) is None


def test_a_request_that_says_nothing_of_its_prefill_gives_no_wrong_sample(bench: Bench) -> None:
    """Cancelled before its first token: it may or may not have been in the batch."""
    for handle in ("a", "b"):
        bench.grant(separated(handle), 0.0)
    bench.relayed(relayed("a", 0.1, 0.1), 0.11)
    bench.ended(Completion("b", Outcome.CANCELLED, {"prefill": 0.05}), 0.12)
    assert bench.prefills() == []
    # What was sent when that was over is measured again.
    bench.grant(separated("c"), 1.0)
    bench.relayed(relayed("c", 1.2, 0.2), 1.21)
    assert bench.prefills() == [measured(1, 100, 10_000, 0.2)]


def test_a_request_that_is_never_heard_of_holds_batches_up_for_a_while_only(bench: Bench) -> None:
    bench.grant(separated("lost"), 0.0)
    bench.grant(separated("a"), 0.0)
    bench.relayed(relayed("a", 0.1, 0.1), 0.11)
    bench.grant(separated("b"), 1.0)
    bench.relayed(relayed("b", 1.1, 0.1), 1.11)
    assert bench.prefills() == []
    late_s = 2 * HOLD_S
    bench.grant(separated("c"), late_s)
    bench.relayed(relayed("c", late_s + 0.2, 0.2), late_s + 0.21)
    bench.grant(separated("d"), late_s + 1)
    bench.relayed(relayed("d", late_s + 1.3, 0.3), late_s + 1.31)
    # `a` and `b` may have shared the shard with what was lost, `c` was granted before it was given up.
    assert bench.prefills() == [measured(1, 100, 10_000, 0.3)]


def test_a_completion_tells_of_a_request_that_ended_at_its_first_token(bench: Bench) -> None:
    bench.grant(separated("a"), 0.0)
    bench.ended(done("a", 1, 0.1, queue=0.01, prefill=0.1), 0.12)
    assert bench.prefills() == [measured(1, 100, 10_000, 0.1)]
    assert bench.decodes() == []


def test_a_completion_does_not_count_again_what_was_relayed(bench: Bench) -> None:
    bench.grant(separated("a"), 0.0)
    bench.relayed(relayed("a", 0.1, 0.1), 0.11)
    bench.ended(done("a", 20, 0.1, prefill=0.1, relay=0.01, decode_wait=0.02, decode=1.0), 1.2)
    assert len(bench.prefills()) == 1


@pytest.mark.parametrize("phases_s", [{"prefill": 0.1, "decode": 0.001}, {"decode": 0.1}])
def test_a_request_of_one_token_is_all_prefill(bench: Bench, phases_s: dict[str, float]) -> None:
    """Streamed, and as a whole answer, which has one phase."""
    bench.grant(mixed("a", shard="p0", new=1), 0.0)
    bench.ended(done("a", 1, 0.1, **phases_s), 0.12)
    assert bench.prefills() == [measured(1, 100, 10_000, 0.1)]


def test_a_batch_beside_requests_that_decode_there_is_no_sample(bench: Bench) -> None:
    bench.grant(mixed("decoding", shard="p0"), 0.0)
    bench.grant(separated("a"), 0.1)
    bench.relayed(relayed("a", 0.3, 0.2), 0.31)
    assert bench.prefills() == []
    bench.ended(done("decoding", 50, 0.05, prefill=0.05, decode=2.0), 2.0)
    bench.grant(separated("b"), 3.0)
    bench.relayed(relayed("b", 3.1, 0.1), 3.11)
    assert bench.prefills()[-1] == measured(1, 100, 10_000, 0.1)
    # `decoding` was alone for its 0.05 s: that one counts, `a` does not.
    assert [one.seconds for one in bench.prefills()] == [0.05, pytest.approx(0.1)]


def test_a_mixed_prefill_counts_where_nothing_else_ran(bench: Bench) -> None:
    bench.grant(mixed("alone"), 0.0)
    bench.grant(mixed("joined_later"), 1.0)
    bench.ended(done("alone", 50, 0.2, prefill=0.2, decode=2.0), 2.2)
    bench.ended(done("joined_later", 50, 1.5, prefill=0.5, decode=2.0), 3.5)
    assert bench.prefills("m0") == [PrefillBatch(1, 100, 10_000, 0.2)]


def test_a_mixed_prefill_that_was_joined_meanwhile_does_not_count(bench: Bench) -> None:
    bench.grant(mixed("a"), 0.0)
    bench.grant(mixed("b"), 0.1)
    bench.ended(done("a", 50, 0.4, prefill=0.4, decode=2.0), 2.4)
    bench.ended(done("b", 50, 0.4, prefill=0.3, decode=2.0), 2.4)
    assert bench.prefills("m0") == []


@pytest.mark.parametrize("new", [1, 50])
def test_a_record_that_was_there_already_is_no_prefill(bench: Bench, new: int) -> None:
    shared = separated("a", prefill="p0", reason="shared", record_bytes=0, max_new_tokens=new)
    shared.prefill, shared.shared = None, SharedRecord("owner", leg("p0"))
    bench.grant(shared, 0.0)
    bench.relayed(relayed("a", 0.1, 0.1), 0.11)
    bench.ended(done("a", new, 0.1, prefill=0.05, decode_wait=0.05, decode=2.0), 2.11)
    assert bench.prefills("p0") == []
    assert bench.prefills("d0") == []


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_batches_are_found_whatever_the_order_in_which_they_are_told_of(seed: int, count: int) -> None:
    """A shard that takes up to 4 waiting requests at a time; each is told of 0 to 2 s after its token."""
    rng = random.Random(seed)
    sent = sorted(rng.uniform(0, 5) for _ in range(count))
    tokens = [rng.randrange(1, 500) for _ in range(count)]
    expected: list[PrefillBatch] = []
    events: list[tuple[float, int, str, int, float]] = []
    free_s, taken = 0.0, 0
    while taken < count:
        begun_s = max(free_s, sent[taken])
        batch = [i for i in range(taken, count) if sent[i] <= begun_s][:4]
        free_s = begun_s + 0.05 + 1e-4 * sum(tokens[i] for i in batch)
        for i in batch:
            events.append((free_s + rng.uniform(0, 2), 1, "told", i, free_s))
        taken += len(batch)
        lengths = [tokens[i] for i in batch]
        expected.append(measured(len(batch), sum(lengths), sum(n * n for n in lengths), free_s - begun_s))
    events += [(at_s, 0, "granted", i, 0.0) for i, at_s in enumerate(sent)]
    bench = Bench()
    for now_s, _, kind, i, first_s in sorted(events):
        if kind == "granted":
            bench.grant(separated(str(i)), now_s)
        else:
            bench.relayed(relayed(str(i), first_s, first_s - sent[i], tokens[i]), now_s)
    assert bench.prefills() == expected


# --- decode -------------------------------------------------------------------------------------


def decode(bench: Bench, handle: str, begun_s: float) -> None:
    """A streamed request on d0 whose record is imported at `begun_s`."""
    bench.grant(separated(handle), begun_s)
    bench.relayed(relayed(handle, begun_s, 0.1), begun_s)


def test_a_request_alone_has_a_batch_of_one_and_its_mean_context(bench: Bench) -> None:
    """21 tokens in 2 s after the one that was redone: 20 steps, 100 + 21/2 tokens of context."""
    decode(bench, "a", 10.0)
    bench.ended(done("a", 21, 10.0, prefill=0.1, relay=0.01, decode_wait=0.02, decode=2.0), 12.0)
    assert bench.decodes() == []  # others may still be told of
    decode(bench, "b", 14.0)
    bench.ended(done("b", 1, 14.0, prefill=0.1), 14.0)
    (sample,) = bench.decodes()
    assert (sample.steps, sample.seconds, sample.batch) == (20, pytest.approx(2.0), pytest.approx(1.0))
    assert sample.context_tokens == pytest.approx(110.5)
    assert sample.prefills == 0


def test_the_mean_batch_counts_everybody_for_as_long_as_they_were_there(bench: Bench) -> None:
    """a: 10..14.  b: 12..13 within it.  c: 13..., still running.  Mean batch of a: 1 + 1/4 + 1/4."""
    decode(bench, "a", 10.0)
    decode(bench, "b", 12.0)
    bench.ended(done("b", 11, 12.0, prefill=0.1, relay=0.01, decode_wait=0.02, decode=1.0), 13.0)
    decode(bench, "c", 13.0)
    bench.ended(done("a", 41, 10.0, prefill=0.1, relay=0.01, decode_wait=0.02, decode=4.0), 14.0)
    decode(bench, "later", 16.0)
    bench.ended(done("later", 1, 16.0, prefill=0.1), 16.0)
    samples = {one.steps: one for one in bench.decodes()}
    assert samples[40].batch == pytest.approx(1.5)
    # a: 100 + 20.5 on average; b: a quarter of 100 + 5.5; c: a quarter of 100 + half a second at a's pace.
    assert samples[40].context_tokens == pytest.approx(120.5 + 105.5 / 4 + 105 / 4, abs=0.1)
    assert samples[10].batch == pytest.approx(2.0)


def test_whole_answers_that_are_told_of_at_their_end_only_still_count(bench: Bench) -> None:
    """Two at once for 1 s; neither is known to run before it is over."""
    for handle in ("a", "b"):
        bench.grant(separated(handle), 9.9)
    for handle in ("a", "b"):
        whole = Completion(
            handle, Outcome.DONE, {"prefill": 0.1, "relay": 0.01, "decode": 1.0}, 100, 20, True, WALL_S
        )
        bench.ended(whole, 11.0)
    bench.grant(separated("c"), 14.0)
    bench.ended(done("c", 1, 14.0, prefill=0.1), 14.1)
    assert [one.batch for one in bench.decodes()] == [pytest.approx(2.0)]
    assert bench.decodes()[0].steps == 20  # the last prompt token is redone in it


def test_prefills_of_others_on_a_mixed_shard_are_told_apart(bench: Bench) -> None:
    """a decodes 10..14; b's prefill of 100 tokens ends at 12, c's began before a did."""
    bench.grant(mixed("c"), 8.0)
    bench.grant(mixed("a"), 9.5)
    bench.grant(mixed("b"), 11.8)
    bench.ended(done("c", 31, 9.0, prefill=0.2, decode=4.0), 13.0)
    bench.ended(done("a", 41, 10.0, prefill=0.5, decode=4.0), 14.0)
    bench.ended(done("b", 31, 12.0, prefill=0.2, decode=3.0), 15.0)
    bench.grant(mixed("d"), 16.0)
    bench.ended(done("d", 1, 16.0, prefill=0.1), 16.1)
    samples = {one.steps: one for one in bench.decodes("m0")}
    assert (samples[40].prefills, samples[40].prefill_tokens, samples[40].prefill_squares) == (1, 100, 10_000)


def test_a_whole_mixed_answer_gives_no_steps(bench: Bench) -> None:
    """Its one phase holds the prefill as well."""
    bench.grant(mixed("a"), 0.0)
    bench.ended(done("a", 50, 0.0, decode=2.0), 2.0)
    bench.grant(mixed("b"), 5.0)
    bench.ended(done("b", 50, 0.0, decode=2.0), 7.0)
    assert bench.decodes("m0") == []
    assert bench.prefills("m0") == []


def test_a_request_that_broke_off_gives_no_sample_but_was_there(bench: Bench) -> None:
    decode(bench, "a", 10.0)
    decode(bench, "gone", 10.0)
    gone = done("gone", 11, 10.0, prefill=0.1, relay=0.01, decode_wait=0.02, decode=2.0)
    gone.outcome = Outcome.CANCELLED
    bench.ended(gone, 12.0)
    bench.ended(done("a", 21, 10.0, prefill=0.1, relay=0.01, decode_wait=0.02, decode=2.0), 12.0)
    decode(bench, "b", 14.0)
    bench.ended(done("b", 1, 14.0, prefill=0.1), 14.0)
    assert [(one.steps, one.batch) for one in bench.decodes()] == [(20, pytest.approx(2.0))]


# --- relays, and what is gone -------------------------------------------------------------------


@pytest.mark.parametrize("pull", ["", "host:1"])
def test_a_relay_is_measured_with_the_exact_size_of_its_record(bench: Bench, pull: str) -> None:
    """The grant reserved 1000 bytes for an estimate of 125 tokens; the prompt had 100."""
    bench.grant(separated("a", pull=pull), 0.0, prompt=125)
    bench.ended(done("a", 5, 0.1, prefill=0.1, relay=0.02, decode_wait=0.02, decode=0.5), 1.0)
    assert bench.relays() == [RelaySample(pytest.approx(800.0), 0.02, pulled=bool(pull))]
    assert [shard for shard, _, one in bench.samples if isinstance(one, RelaySample)] == ["d0"]


def test_a_record_that_was_not_used_is_no_relay(bench: Bench) -> None:
    bench.grant(separated("a"), 0.0)
    missed = done("a", 5, 0.1, prefill=0.1, relay=5.0, decode_wait=0.5, decode=0.5)
    missed.imported = False
    bench.ended(missed, 7.0)
    assert bench.relays() == []


def test_what_ran_on_a_lost_shard_is_forgotten_and_does_not_bring_it_back(bench: Bench) -> None:
    bench.grant(separated("a"), 0.0)
    bench.observer.lost("p0", 1)
    bench.relayed(relayed("a", 0.1, 0.1), 0.11)
    bench.ended(done("a", 1, 0.1, prefill=0.1), 0.2)
    assert bench.prefills() == []
    assert ("p0", 1) not in bench.observer._shards
    bench.ended(done("never granted", 5, 0.1, decode=1.0), 0.2)
    bench.relayed(relayed("never granted", 0.1, 0.1), 0.2)


def test_a_request_that_is_granted_again_counts_where_it_runs_now(bench: Bench) -> None:
    bench.grant(separated("a", prefill="p0"), 0.0)
    bench.grant(separated("a", prefill="p1"), 1.0)
    bench.relayed(relayed("a", 1.1, 0.1), 1.11)
    assert bench.prefills("p0") == []
    assert bench.prefills("p1") == [measured(1, 100, 10_000, 0.1)]
    # What was left behind on p0 holds nobody up.
    bench.grant(separated("b", prefill="p0"), 2.0)
    bench.relayed(relayed("b", 2.2, 0.2), 2.21)
    assert bench.prefills("p0") == [measured(1, 100, 10_000, 0.2)]


def test_memory_stays_flat_over_many_requests(bench: Bench) -> None:
    for i in range(3000):
        now_s = i * 0.01
        bench.grant(separated(f"{i}"), now_s)
        bench.relayed(relayed(f"{i}", now_s + 0.005, 0.005), now_s + 0.006)
        end = done(f"{i}", 20, now_s, prefill=0.005, relay=0.001, decode_wait=0.001, decode=0.5)
        bench.ended(end, now_s + 0.5)
    shard = bench.observer._shards["d0", 1]
    assert bench.observer._requests == {}
    assert len(shard.lives._open) == 0
    assert len(shard.lives._past) <= 512
    assert len(shard.lives._waiting) < 20
    assert bench.observer._shards["p0", 1].batches._told == []
