"""The simulated shard against costs that are added up by hand."""

from __future__ import annotations

import math

import pytest

from orchestrator.bench.scheduler.clock import Clock
from orchestrator.bench.scheduler.engine import Build, Engine, Work
from orchestrator.core.cost import DecodeCost, PrefillCost

PREFILL = PrefillCost(fixed_s=1.0, per_token_s=0.01, per_square_s=0.0001)
DECODE = DecodeCost(fixed_s=0.5, per_context_s=0.001, per_sequence_s=0.02)


class Bench:
    """An engine and when each piece of work had its first and last token."""

    def __init__(self, budget_tokens: int, *, chunked: bool = False, slots: int = 256) -> None:
        self.clock = Clock()
        self.engine = Engine(self.clock, Build(PREFILL, DECODE, budget_tokens, slots, chunked))
        self.first_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}

    def add(
        self,
        name: str,
        prompt_tokens: int,
        tokens: int = 1,
        *,
        at_s: float = 0.0,
        import_s: float | None = None,
    ) -> None:
        def note(times: dict[str, float]) -> None:
            assert name not in times, "told once"
            times[name] = self.clock.now_s

        work = Work(
            prompt_tokens,
            tokens,
            first=lambda: note(self.first_s),
            ended=lambda: note(self.ended_s),
            import_s=import_s,
        )
        self.clock.at(at_s, lambda: self.engine.add(work))

    def run(self) -> None:
        self.clock.run(math.inf)


def test_a_prompt_alone_takes_what_the_cost_model_says() -> None:
    bench = Bench(4096)
    bench.add("one", 100)
    bench.run()
    assert bench.first_s["one"] == pytest.approx(1 + 1 + 1)  # 100 tokens and 10,000 squares
    assert bench.ended_s == bench.first_s


def test_what_waits_is_computed_together_in_order_up_to_the_budget() -> None:
    bench = Bench(250)
    for name in ("first", "second", "third", "fourth"):
        bench.add(name, 100, at_s=0.0 if name == "first" else 0.1)
    bench.run()
    together_s = 1 + 2 + 2
    assert bench.first_s["first"] == pytest.approx(3)
    assert bench.first_s["second"] == bench.first_s["third"] == pytest.approx(3 + together_s)
    assert bench.first_s["fourth"] == pytest.approx(3 + together_s + 3)
    assert [(batch.prompts, batch.tokens) for batch in bench.engine.batches] == [(1, 100), (2, 200), (1, 100)]


def test_what_arrives_at_the_same_moment_is_one_batch() -> None:
    bench = Bench(250)
    bench.add("a", 100)
    bench.add("b", 100)
    bench.run()
    assert bench.first_s["a"] == bench.first_s["b"] == pytest.approx(5)


def test_a_prompt_over_the_budget_goes_alone_and_keeps_its_turn() -> None:
    bench = Bench(250)
    for name, tokens in (("a", 10), ("long", 300), ("b", 10)):
        bench.add(name, tokens)
    bench.run()
    assert [batch.tokens for batch in bench.engine.batches] == [10, 300, 10]
    assert bench.first_s["a"] < bench.first_s["long"] < bench.first_s["b"]


def test_an_answer_of_n_tokens_takes_n_minus_1_steps_over_a_growing_context() -> None:
    bench = Bench(250)
    bench.add("one", 100, tokens=4)
    bench.run()
    steps_s = sum(0.5 + 0.001 * context + 0.02 for context in (100, 101, 102))
    assert bench.ended_s["one"] == pytest.approx(3 + steps_s)


def test_a_joining_prompt_stalls_the_running_ones_without_chunks() -> None:
    bench = Bench(250)
    bench.add("running", 100, tokens=3)
    bench.add("joining", 100, at_s=3.1)
    bench.run()
    # 3 s prefill, a step that was under way, the other's 3 s, the last step.
    steps_s = (0.5 + 0.1 + 0.02) + (0.5 + 0.101 + 0.02)
    assert bench.ended_s["running"] == pytest.approx(3 + steps_s + 3)


def test_the_first_batch_of_a_busy_period_is_joined_before_it_decodes() -> None:
    bench = Bench(100)
    bench.add("first", 100, tokens=2)
    bench.add("joining", 100, at_s=0.1)
    bench.run()
    assert bench.first_s["joining"] == pytest.approx(3 + 3)  # two prefills, no step between them


def test_a_sequence_that_ended_is_in_nobody_elses_context() -> None:
    bench = Bench(250)
    bench.add("short", 100, tokens=2)
    bench.add("long", 50, tokens=3)
    bench.run()
    prefill_s = 1 + 1.5 + 0.0001 * (100**2 + 50**2)
    steps_s = (0.5 + 0.150 + 0.04) + (0.5 + 0.051 + 0.02)
    assert bench.ended_s["long"] == pytest.approx(prefill_s + steps_s)


def test_few_waiting_ones_do_not_interrupt_a_large_batch() -> None:
    bench = Bench(1000)
    for number in range(10):
        bench.add(f"running {number}", 10, tokens=40)
    bench.add("joining", 10, at_s=2.5)
    bench.run()
    # 3 of 10 must wait, or 20 steps pass: 1.1 + 10 * 0.1 + ... is the prefill of the ten.
    prefill_s = 1 + 0.01 * 100 + 0.0001 * 10 * 100
    steps_s = sum(0.5 + 0.001 * (100 + 10 * step) + 0.2 for step in range(19))
    assert bench.first_s["joining"] == pytest.approx(prefill_s + steps_s + 1 + 0.1 + 0.01)


def test_chunks_cost_a_forward_each_and_the_squares_of_the_whole_prompt() -> None:
    bench = Bench(100, chunked=True)
    bench.add("long", 250)
    bench.run()
    assert bench.first_s["long"] == pytest.approx(3 * 1 + 2.5 + 0.0001 * 250**2)


def test_with_chunks_the_running_ones_step_along() -> None:
    bench = Bench(100, chunked=True)
    bench.add("running", 50, tokens=4)
    bench.add("long", 250, at_s=0.1)
    bench.run()
    # Each step computes 99 tokens beside the running row, whose forward pays the fixed part.
    first_s = 1 + 0.5 + 0.25
    squares = (99**2, 198**2 - 99**2, 250**2 - 198**2)
    steps_s = sum(
        (0.5 + 0.001 * (50 + number) + 0.02) + 0.01 * tokens + 0.0001 * squares[number]
        for number, tokens in enumerate((99, 99, 52))
    )
    assert bench.ended_s["running"] == pytest.approx(first_s + steps_s)
    assert bench.first_s["long"] == pytest.approx(first_s + steps_s)


def test_an_import_costs_its_copy_and_a_forward_of_one_token() -> None:
    bench = Bench(100, chunked=True)
    bench.add("record", 80, tokens=2, import_s=0.3)
    bench.run()
    assert bench.first_s["record"] == pytest.approx(0.3 + 0.5 + 0.08 + 0.02)
    assert bench.ended_s["record"] == pytest.approx(bench.first_s["record"] + 0.5 + 0.08 + 0.02)
    assert bench.engine.batches == []


def test_the_router_counts_an_imported_prompt_against_its_budget() -> None:
    bench = Bench(100, chunked=True)
    bench.add("a", 80, tokens=2, import_s=0.0)
    bench.add("b", 80, tokens=2, import_s=0.0)
    bench.add("c", 80, tokens=2, import_s=0.0)
    bench.run()
    assert bench.first_s["a"] == bench.first_s["b"]  # the last one that is begun may pass over it
    assert bench.first_s["c"] > bench.first_s["b"]


def test_no_more_than_its_slots_run_at_once() -> None:
    bench = Bench(1000, slots=2)
    for name in "abc":
        bench.add(name, 10, tokens=3)
    bench.run()
    assert bench.first_s["c"] >= max(bench.ended_s["a"], bench.ended_s["b"])
