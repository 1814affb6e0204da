"""Workload, verdicts, and what is made of measurements."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.bench.scheduler import break_even, burst, lengths
from orchestrator.bench.scheduler.break_even import Case, Outcome, Seen
from orchestrator.bench.scheduler.conductor_cost import growth_bytes
from orchestrator.bench.scheduler.engine import Batch
from orchestrator.bench.scheduler.fleet import COSTS, read_costs
from orchestrator.bench.scheduler.live import Answer, Background, predictions
from orchestrator.bench.scheduler.parts import Part, Verdict
from orchestrator.bench.scheduler.report import show
from orchestrator.bench.scheduler.run import Wanted
from orchestrator.bench.scheduler.served import Result, Served
from orchestrator.bench.scheduler.workload import (
    ANSWERS,
    PROMPTS,
    Arrival,
    Burst,
    LogNormal,
    capacity_per_s,
    steady,
)
from orchestrator.core.cost import DecodeCost, PrefillCost
from orchestrator.core.ticket import Ticket
from orchestrator.errors import ConfigError

# --- workload -----------------------------------------------------------------------------------


def test_one_prompt_in_twenty_is_longer_than_4096_tokens() -> None:
    arrivals = list(steady(1.0, PROMPTS, ANSWERS, seed=3, count=20_000))
    share = sum(one.prompt_tokens > 4096 for one in arrivals) / len(arrivals)
    assert share == pytest.approx(0.05, abs=0.005)  # three standard errors


def test_arrivals_come_at_their_rate_and_have_nothing_in_common() -> None:
    arrivals = list(steady(4.0, PROMPTS, ANSWERS, seed=3, count=10_000))
    assert arrivals[-1].at_s == pytest.approx(10_000 / 4.0, rel=0.05)
    assert len({one.text for one in arrivals}) == len({one.simhash for one in arrivals}) == 10_000


def test_capacity_counts_the_fixed_part_once_for_a_full_group() -> None:
    cost = PrefillCost(0.100, 0.001, 0.0)
    # L_m: n / (0.1 + 0.001 n) is 90 % of 1000 tokens/s at 900 tokens.
    constant = LogNormal(90, 0.0, 1, 16_384)
    assert capacity_per_s(cost, constant, draws=10) == pytest.approx(1 / (0.090 + 0.100 * 90 / 900), rel=0.01)
    long = LogNormal(2000, 0.0, 1, 16_384)
    assert capacity_per_s(cost, long, draws=10) == pytest.approx(1 / (2.0 + 0.1))


def test_a_burst_asks_for_each_text_within_its_second() -> None:
    arrivals = Burst(at_s=20.0).arrivals(ANSWERS, seed=1)
    assert len(arrivals) == 100
    assert all(20.0 <= one.at_s < 21.0 and one.kind == "burst" for one in arrivals)
    assert [one.at_s for one in arrivals] == sorted(one.at_s for one in arrivals)
    marks = {one.text: (one.simhash, one.prompt_tokens) for one in arrivals}
    assert sorted(tokens for _, tokens in marks.values()) == [1180, 1184, 1192]
    hashes = [mark for mark, _ in marks.values()]
    assert max((one ^ two).bit_count() for one in hashes for two in hashes) <= 4
    assert len(set(hashes)) == 3


# --- parts --------------------------------------------------------------------------------------


def _served(prompt: int, ttft_s: float) -> Served:
    arrival = Arrival(1000.0, prompt, 11, "t", 1)
    one = Served(arrival, Ticket("h", "g.1", prompt, 11, 0.0, 1.0))
    one.first_s, one.started_s, one.done_s = 1000.0 + ttft_s, 1000.0 + ttft_s / 2, 1000.0 + ttft_s + 1.0
    return one


def test_lengths_are_summed_up_by_class_and_without_the_warm_up() -> None:
    warm_up = [_served(100, 99.0)]
    counted = [_served(1023, 1.0), _served(1024, 2.0), _served(4096, 3.0), *[_served(4097, 4.0)] * 6]
    figures = lengths.summed([Result([*warm_up, *counted], [Batch(2, 30), Batch(1, 10)], 5.0)])
    assert figures.ttft_p99_s == {"<1k": 1.0, "1-4k": 3.0, ">4k": 4.0}
    assert figures.ttft_p50_s["1-4k"] == 2.0
    assert figures.tpot_p99_s == pytest.approx(0.1)
    assert (figures.batch_tokens, figures.batch_prompts, figures.answers_per_s) == (20, 1.5, 2.0)
    assert (figures.longest_wait_s, figures.unserved) == (2.0, 0)


def test_the_burst_part_counts_the_prefills_of_each_policy() -> None:
    part = burst.measure(burst.Plan(seeds=(1,), until_s=30.0, watched_s=5.0))
    first_come, ours = (row["prefills"] for row in part.rows if row["burst"] == "yes")
    assert first_come == 100
    assert part.verdicts[0].value == ours
    assert 3 <= float(ours or 0) < 50  # no text without one, and most requests share
    assert all(row["unserved"] == 0 for row in part.rows)
    assert [verdict.limit for verdict in part.verdicts] == [3, 1.2, 1.2]


def test_the_lengths_part_judges_each_fleet_against_first_come_on_the_same_requests() -> None:
    part = lengths.measure(lengths.Plan(requests=300, seeds=(1,), fleets=((1, 1), (2, 2))))
    assert [row["policy"] for row in part.rows if row["shards"] == "2+2"] == ["first come", "by length"]
    first, ours = (row for row in part.rows if row["shards"] == "2+2")
    assert first["<1k ratio"] == 1.0
    ratio = next(
        verdict for verdict in part.verdicts if verdict.what.startswith("2+2: p99 TTFT of prompts <1k")
    )
    assert ratio.value == pytest.approx(float(ours["<1k p99"] or 0) / float(first["<1k p99"] or 1), rel=0.01)
    json.dumps(part.to_dict())


def test_a_verdict_is_met_up_to_its_limit_and_open_without_a_value() -> None:
    assert Verdict("a", 0.6, 0.6).met is True
    assert Verdict("a", 0.61, 0.6).met is False
    assert Verdict("a", 8000, 8000, at_least=True).met is True
    assert Verdict("a", 7999, 8000, at_least=True).met is False
    assert Verdict("a", None, 1).met is None


def test_growth_is_the_slope_of_memory_over_tickets() -> None:
    assert growth_bytes([(0, 50), (50_000, 60), (100_000, 70)]) == pytest.approx(20)
    assert growth_bytes([(0, 50), (100_000, 80), (200_000, 50)]) == pytest.approx(0)
    assert growth_bytes([(7, 50)]) == 0


def test_an_unknown_part_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no part 'speed': choose from queue, conductor"):
        Wanted(parts=("queue", "speed"))


@pytest.mark.parametrize("columns", [3, 12])
def test_a_part_is_shown_with_all_its_figures_and_verdicts(columns: int) -> None:
    rows = [
        {"name": f"row {number}"} | {f"f{i}": 100.0 * number + i for i in range(columns)}
        for number in range(6)
    ]
    part = Part("lengths", "title", rows, [Verdict("limit of it", 2.0, 1.0)], notes=("A note.",))
    out = io.StringIO()
    show(part, Console(file=out, width=120))
    text = out.getvalue()
    assert all(f"row {number}" in text for number in range(6))
    assert all(words in text for words in ("limit of it", "at most 1", "NO", "A note."))
    assert f"{500 + columns - 1}" in text


# --- a saved cost file --------------------------------------------------------------------------


def test_costs_are_found_in_a_saved_file_whatever_stands_around_them(tmp_path: Path) -> None:
    prefill = {"fixed_s": 0.1, "per_token_s": 0.002, "per_square_s": 1e-7}
    decode = {"fixed_s": 0.03, "per_context_s": 1e-6, "per_sequence_s": 0.001}
    shards = [{"shard": "p", "costs": {"prefill": prefill, "decode": None}}, {"costs": {"decode": decode}}]
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"version": 1, "shards": shards}))
    costs = read_costs(path)
    assert costs.prefill == PrefillCost(0.1, 0.002, 1e-7)
    assert costs.decode == DecodeCost(0.03, 1e-6, 0.001)
    assert costs.relay == COSTS.relay


@pytest.mark.parametrize("text", ["{", "[]", '{"prefill": {"fixed_s": 1}}'])
def test_a_file_without_costs_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="cost file"):
        read_costs(path)


# --- break-even ---------------------------------------------------------------------------------


def test_predictions_are_read_from_the_header() -> None:
    assert predictions("separated=0.412 mixed=0.388") == {"separated": 0.412, "mixed": 0.388}
    assert predictions("") == {}


def test_harm_is_what_all_streams_lost_together() -> None:
    # 0.1 s between tokens; from 1.0 on one stream stands still for 0.5 s, the other for 0.3 s.
    background = Background([[0.8, 0.9, 1.0, 1.5, 1.6], [0.85, 0.95, 1.25, 1.35, 1.45]])
    assert background.quiet_gap_s(0.8, 1.0) == pytest.approx(0.1)
    assert background.longest_gap_s(1.0, 1.6) == pytest.approx(0.5)
    assert background.harm_s(1.0, 1.6, 0.1) == pytest.approx(0.4 + 0.2)
    assert Background().harm_s(1.0, 1.6, 0.0) == 0.0


def _seen(route: str, took_s: float, harm_s: float = 0.0, predicted: dict[str, float] | None = None) -> Seen:
    return Seen(
        Answer(1.0, (1.0 + took_s / 2, 1.0 + took_s), route, "break_even", predicted or {}), harm_s, 0.2
    )


@pytest.mark.parametrize(
    ("mixed_s", "harm_s", "right"), [(0.8, 0.0, False), (0.8, 0.5, True), (0.95, 0.0, True), (1.2, 0.0, True)]
)
def test_a_choice_is_right_when_it_costs_less_with_its_harm_or_about_as_much(
    mixed_s: float, harm_s: float, right: bool
) -> None:
    outcome = Outcome(
        Case("c", 10, 10),
        {
            "separated": [_seen("separated", 1.0)],
            "mixed": [_seen("mixed", mixed_s, harm_s)],
            "auto": [_seen("separated", 1.0, predicted={"mixed": 0.7})],
        },
    )
    assert outcome.right() is right
    row = outcome.row()
    assert (row["chose"], row["mixed foreseen"], row["separated foreseen"]) == ("separated", 700, None)
    assert (row["mixed took"], row["mixed harm"]) == (round(mixed_s * 1e3), round(harm_s * 1e3))


def test_the_typical_requests_are_eight_short_and_long_alone_and_beside_others() -> None:
    cases = break_even.CASES
    assert len(cases) == 8
    assert {case.background > 0 for case in cases} == {True, False}
    assert math.isclose(
        max(case.prompt_tokens for case in cases) / min(c.prompt_tokens for c in cases), 33, rel_tol=0.1
    )
