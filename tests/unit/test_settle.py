"""The counters that hear of a request's end."""

from __future__ import annotations

import pytest

from orchestrator.core.ticket import Outcome
from orchestrator.metrics import Metrics


def ended(metrics: Metrics, outcome: Outcome, **changes: object) -> None:
    values: dict[str, object] = {
        "error_type": None,
        "phases_s": {"queue": 0.5, "prefill": 1.0},
        "total_s": 4.0,
        "ttft_s": 1.0,
        "prompt_tokens": 10,
        "generated_tokens": 7,
    }
    metrics.ended("generate", outcome, **values | changes)  # type: ignore[arg-type]


def test_tpot_is_the_mean_after_the_first_token() -> None:
    metrics = Metrics(tuple)
    ended(metrics, Outcome.DONE)
    lines = metrics.render().decode().splitlines()
    # (4 s - 1 s) over the 6 tokens after the first.
    assert "orchestrator_tpot_seconds_sum 0.5" in lines
    assert "orchestrator_ttft_seconds_sum 1.0" in lines
    assert 'orchestrator_phase_seconds_sum{phase="prefill"} 1.0' in lines
    assert 'orchestrator_tokens_total{kind="generated"} 7.0' in lines


def test_one_token_has_no_tpot() -> None:
    metrics = Metrics(tuple)
    ended(metrics, Outcome.DONE, generated_tokens=1)
    assert "orchestrator_tpot_seconds_count 0.0" in metrics.render().decode()


def test_tgis_counters_have_tgis_names() -> None:
    metrics = Metrics(tuple)
    metrics.arrived()
    ended(metrics, Outcome.DONE)
    metrics.unparsed("chat", "validation")
    lines = metrics.render().decode().splitlines()
    assert "tgi_request_count 2.0" in lines
    assert "tgi_request_success 1.0" in lines
    assert 'tgi_request_failure{err="validation"} 1.0' in lines
    assert "tgi_queue_size 0.0" in lines


def test_failed_request_counts_no_tokens() -> None:
    metrics = Metrics(tuple)
    ended(metrics, Outcome.FAILED, error_type="generation")
    counters = metrics.counters()
    assert counters["requests"] == {"generate,failed": 1.0}
    assert counters["tokens"] == {}


def test_two_registries_share_nothing() -> None:
    one, other = Metrics(tuple), Metrics(tuple)
    one.imported("hit")
    assert one.counters()["kv_imports"] == {"hit": 1.0}
    assert other.counters()["kv_imports"] == {}


def test_waiting_requests_are_counted_while_they_wait() -> None:
    metrics = Metrics(tuple)
    with metrics.waiting():
        assert "tgi_queue_size 1.0" in metrics.render().decode()
    assert "tgi_queue_size 0.0" in metrics.render().decode()


def test_request_that_fails_while_it_waits_is_not_counted_for_ever() -> None:
    metrics = Metrics(tuple)

    def fail_while_waiting() -> None:
        with metrics.waiting():
            raise ValueError

    with pytest.raises(ValueError):
        fail_while_waiting()
    assert metrics.queued == 0
