"""Curves of users, the ramp's judgement, percentiles, goodput, the launcher's decisions; without Locust."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from locustfiles.run import given, locust_line
from locustfiles.tgi_load.curves import DAY, Burst, Day
from locustfiles.tgi_load.ramp import Step, broken, over, sentence, step_of
from locustfiles.tgi_load.report import Slo, exit_code, figures, parts, percentile, run_seconds, text
from locustfiles.tgi_load.timing import Outcome

SLO = Slo(ttft_ms=500.0, tpot_ms=50.0)


def done(ttft_ms: float | None, tpot_ms: float | None = 20.0, name: str = "chat", **more: object) -> Outcome:
    facts = {"started_s": 10.0, "total_ms": 1000.0, "tokens": 5, **more}
    return Outcome(name, "done", ttft_ms=ttft_ms, tpot_ms=tpot_ms, **facts)  # type: ignore[arg-type]


def ended(kind: str) -> Outcome:
    return Outcome("chat", kind, 10.0, 30.0)


# Curves


def test_a_burst_comes_at_the_end_of_each_period() -> None:
    curve = Burst(base_users=2, users=40, period_s=60, length_s=10)
    seen = [curve.at(second) for second in range(121)]
    assert [second for second, users in enumerate(seen) if users == 40] == [*range(50, 60), *range(110, 120)]
    assert set(seen) == {2, 40}


def test_a_day_has_its_nights_and_its_afternoon_peak() -> None:
    curve = Day(users=100, length_s=240)
    hours = [curve.at(10 * hour) for hour in range(24)]
    assert hours[14] == max(hours) == 100
    assert (hours[0], hours[3], hours[9]) == (22, 10, 86)
    assert curve.at(95) == 91, "half past nine: between 86 and 96"
    assert curve.at(240 + 140) == 100
    assert curve.at(239.999) == 22, "midnight again"
    assert len(DAY) == 24
    assert Day(users=1, length_s=240).at(30) == 1


# Ramp


def step(
    done: int = 5, failed: int = 0, refused: int = 0, ttft: float | None = 300.0, s: float = 20.0
) -> Step:
    return Step(8, s, done, failed, refused, ttft)


@pytest.mark.parametrize(
    ("judged", "tolerate", "why"),
    [
        (step(), False, None),
        (step(ttft=500.0), False, None),
        (step(ttft=501.0), False, "TTFT p95 501 ms is above 500 ms"),
        (step(failed=1), True, "1 requests failed"),
        (step(refused=2), False, "2 requests were refused"),
        (step(refused=2), True, None),
        (step(done=0, ttft=None, s=60.0), True, "no request ended within 60 s"),
    ],
)
def test_a_step_breaks_by_failures_refusals_silence_or_late_first_tokens(
    judged: Step, tolerate: bool, why: str | None
) -> None:
    assert broken(judged, 500.0, tolerate) == why


def test_a_step_is_judged_at_its_end_and_waits_for_its_first_answer() -> None:
    assert not over(step(s=19.9), 20)
    assert over(step(s=20), 20)
    assert not over(step(done=0, s=59), 20)
    assert over(step(done=0, s=60), 20)
    assert over(step(done=0, failed=1, s=20), 20)


def test_the_ramp_says_where_it_broke() -> None:
    first = step_of(4, 20.0, [done(100.0), done(200.0)])
    last = step_of(6, 20.0, [done(700.0), ended("failed"), ended("refused")])
    assert (last.done, last.failed, last.refused, last.ttft_p95_ms) == (1, 1, 1, 700.0)
    assert sentence(last, "1 requests failed", first) == (
        "Broke at 6 users: 1 requests failed; the last step that held: "
        "4 users, 0.10 requests/s, TTFT p95 200 ms."
    )
    assert "no step held" in sentence(last, "1 requests failed", None)


# Report


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([7.0], 0.99, 7.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.5, 3.0),
        ([float(n) for n in range(1, 101)], 0.95, 95.0),
        ([float(n) for n in range(1, 101)], 0.99, 99.0),
        ([float(n) for n in range(1, 11)], 0.99, 10.0),
    ],
)
def test_percentiles_are_of_the_nearest_rank(
    values: Sequence[float], share: float, expected: float | None
) -> None:
    assert percentile(values, share) == expected


def test_goodput_counts_whole_answers_within_both_objectives() -> None:
    outcomes = [
        done(500.0, 50.0),
        done(501.0, 50.0),
        done(500.0, 51.0),
        done(100.0, None),
        done(None, None),
        ended("failed"),
        ended("refused"),
        ended("refused"),
    ]
    told = figures("all", outcomes, SLO, run_s=4.0)
    assert (told.done, told.failed, told.refused, told.good, told.tokens) == (5, 1, 2, 2, 25)
    report = told.to_json()
    assert report["goodput_per_s"] == 0.5
    assert report["goodput_share"] == 2 / 8
    assert report["requests_per_s"] == 1.25
    assert report["tokens_per_s"] == 6.25
    assert report["ttft_ms"] == {"p50": 500.0, "p95": 501.0, "p99": 501.0}
    assert report["tpot_ms"] == {"p50": 50.0, "p95": 51.0, "p99": 51.0}


@pytest.mark.parametrize(
    ("outcomes", "tolerate", "code"),
    [
        ([done(1.0)], False, 0),
        ([done(1.0), ended("failed")], True, 1),
        ([done(1.0), ended("refused")], False, 1),
        ([done(1.0), ended("refused")], True, 0),
        ([ended("refused")], True, 1),
        ([], True, 1),
    ],
)
def test_a_run_is_good_when_all_was_answered(outcomes: list[Outcome], tolerate: bool, code: int) -> None:
    assert exit_code(outcomes, tolerate) == code


def test_a_run_lasts_from_the_first_start_to_the_last_end() -> None:
    outcomes = [done(1.0, started_s=12.0, total_ms=500.0), done(1.0, started_s=10.0, total_ms=4000.0)]
    assert run_seconds(outcomes) == 4.0
    assert run_seconds([]) == 0.0


def test_the_summary_has_rows_by_name_and_by_route_and_a_run_without_requests_has_one() -> None:
    outcomes = [done(120.0), done(340.0, name="code", route="separated")]
    whole, groups = figures("all", outcomes, SLO, 2.0), parts(outcomes, SLO, 2.0)
    assert [group.name for group in groups] == ["chat", "code", "route separated"]
    page = text("http://here", whole, groups, SLO, ["Broke at 6 users."])
    assert "2 done, 0 failed, 0 refused" in page
    assert "1.00 requests/s, 100.0 % of those that ended" in page
    assert "Broke at 6 users." in page
    row = next(line for line in page.splitlines() if line.startswith("all"))
    assert row.split() == ["all", "2", "120", "340", "340", "20.0", "20.0", "20.0", "1000", "1000", "1000"]
    assert "nothing of those that ended" in text("http://here", figures("all", [], SLO, 0.0), [], SLO, [])


# The launcher


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ([], {}, False),
        (["--host", "http://x"], {}, True),
        (["--host=http://x"], {}, True),
        (["-H", "http://x"], {}, True),
        (["-Hhttp://x"], {}, True),
        (["--headless"], {}, False),
        ([], {"LOCUST_HOST": "http://x"}, True),
    ],
)
def test_an_option_is_given_in_any_of_its_forms(
    arguments: list[str], environment: dict[str, str], expected: bool
) -> None:
    assert given(arguments, "--host", environment) is expected


def test_locust_gets_defaults_for_what_was_not_given_and_what_was_given_stands_last() -> None:
    line = locust_line("code", False, "there", ["--users", "3"], {"LOCUST_RUN_TIME": "5s"})
    assert line[:3] == ["-m", "locust", "-f"]
    assert line[3].endswith("locustfiles/code_completion.py")
    assert line.count("--users") == 1
    assert "--run-time" not in line
    assert line[line.index("--spawn-rate") + 1] == "1"
    assert "--headless" in line
    assert line[line.index("--html") + 1] == "there/report.html"
    assert line[-2:] == ["--users", "3"]
    page = locust_line("mixed", True, "there", [], {})
    assert "--headless" not in page
    assert page[page.index("--web-host") + 1] == "127.0.0.1"
