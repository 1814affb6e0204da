"""What a worker counts, and that all workers together tell one sum that never falls."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.core.decision import Mode
from orchestrator.core.ticket import Choice, Grant, Leg, Outcome
from orchestrator.errors import ConfigError
from orchestrator.metrics import Metrics
from orchestrator.metrics.folder import SnapshotFolder
from orchestrator.metrics.tally import Distribution, Tally


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample of the text by name and labels, as Prometheus would write them."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def of_nobody(folder: Path | None = None, worker: int = 0) -> Metrics:
    return Metrics(tuple, lambda: Mode(level=2), folder, worker)


def ended(metrics: Metrics, outcome: Outcome = Outcome.DONE, **changes: object) -> None:
    """A request of 4 s, 1 s of it in the queue, first token after 2 s, then 4 more tokens."""
    told: dict[str, object] = {
        "error_type": None,
        "phases_s": {"queue": 1.0, "decode": 2.0},
        "total_s": 4.0,
        "ttft_s": 2.0,
        "prompt_tokens": 100,
        "generated_tokens": 5,
    }
    metrics.ended("chat", outcome, **(told | changes))  # type: ignore[arg-type]


def test_a_request_that_was_answered_is_counted_under_our_names_and_under_tgis() -> None:
    metrics = of_nobody()
    metrics.arrived()
    ended(metrics, max_new_tokens=8, validation_s=0.004)
    told = samples(metrics)
    assert told["orchestrator_requests_total{outcome=done,route=chat}"] == 1.0
    assert told["orchestrator_tokens_total{kind=prompt}"] == 100.0
    assert told["orchestrator_tokens_total{kind=generated}"] == 5.0
    assert told["tgi_request_count{}"] == told["tgi_request_success{}"] == 1.0
    assert told["orchestrator_phase_seconds_sum{phase=decode}"] == 2.0
    assert told["orchestrator_ttft_seconds_sum{}"] == 2.0
    assert told["orchestrator_tpot_seconds_sum{}"] == 0.5
    assert told["tgi_request_duration_sum{}"] == 4.0
    assert told["tgi_request_queue_duration_sum{}"] == 1.0
    assert told["tgi_request_inference_duration_sum{}"] == 3.0
    assert told["tgi_request_validation_duration_sum{}"] == 0.004
    assert told["tgi_request_mean_time_per_token_duration_sum{}"] == 0.5
    assert told["tgi_request_input_length_sum{}"] == 100.0
    assert told["tgi_request_max_new_tokens_sum{}"] == 8.0
    assert told["tgi_request_generated_tokens_sum{}"] == 5.0
    assert told["orchestrator_mode{}"] == 2.0
    assert told["orchestrator_workers{}"] == 1.0
    metrics.open_here = lambda: 7
    assert samples(metrics)["orchestrator_open_requests{}"] == 7.0


def test_what_the_mode_does_to_requests_is_counted_apart() -> None:
    metrics = of_nobody()
    told = samples(metrics)
    assert (told["orchestrator_capped_total{}"], told["orchestrator_shed_total{}"]) == (0.0, 0.0)
    metrics.capped()
    metrics.capped()
    metrics.shed()
    told = samples(metrics)
    assert (told["orchestrator_capped_total{}"], told["orchestrator_shed_total{}"]) == (2.0, 1.0)
    assert (metrics.counters()["capped"], metrics.counters()["shed"]) == ({"": 2.0}, {"": 1.0})


def test_whether_redis_answers_is_asked_at_each_scrape() -> None:
    metrics = of_nobody()
    assert samples(metrics)["orchestrator_redis_up{}"] == 1.0
    up = [False, True]
    metrics.redis_up = lambda: up.pop(0)
    assert [samples(metrics)["orchestrator_redis_up{}"] for _ in range(2)] == [0.0, 1.0]


def test_buckets_are_cumulative_and_their_bounds_inclusive() -> None:
    metrics = of_nobody()
    for total_s in (0.5, 0.5, 0.51, 1000.0):
        ended(metrics, total_s=total_s, ttft_s=None)
    told = samples(metrics)
    buckets = {le: told[f"tgi_request_duration_bucket{{le={le}}}"] for le in ("0.25", "0.5", "1.0", "+Inf")}
    assert buckets == {"0.25": 0.0, "0.5": 2.0, "1.0": 3.0, "+Inf": 4.0}
    assert told["tgi_request_duration_count{}"] == 4.0


def test_values_that_were_folded_before_are_kept() -> None:
    one = Distribution((1.0, 2.0))
    for value in (3.0, 1.0):
        one.observe(value)
    one.fold()
    one.observe(2.0)
    one.fold()
    assert (one.counts, one.sum) == ([1, 1, 1], 6.0)


def test_a_gateway_that_nobody_scrapes_keeps_no_list_of_its_requests() -> None:
    metrics = of_nobody()
    for _ in range(1000):
        ended(metrics)
    waiting = metrics._own.histograms["orchestrator_ttft_seconds"][()]._fresh
    assert len(waiting) < 256
    assert samples(metrics)["orchestrator_ttft_seconds_count{}"] == 1000.0


def test_refusals_and_failures_count_no_answer() -> None:
    metrics = of_nobody()
    metrics.unparsed("generate", "validation")
    ended(metrics, Outcome.FAILED, error_type="generation")
    told = samples(metrics)
    assert told["orchestrator_requests_total{outcome=refused,route=generate}"] == 1.0
    assert told["orchestrator_requests_total{outcome=failed,route=chat}"] == 1.0
    assert told["tgi_request_failure{err=validation}"] == told["tgi_request_failure{err=generation}"] == 1.0
    assert told["tgi_request_success{}"] == told["tgi_request_duration_count{}"] == 0.0


def test_a_named_key_has_its_requests_and_all_tokens_that_shards_worked_for() -> None:
    metrics = of_nobody()
    ended(metrics, key_name="anna")
    ended(metrics, Outcome.CANCELLED, key_name="anna", generated_tokens=2)
    ended(metrics, Outcome.REFUSED, key_name="anna", generated_tokens=0)
    ended(metrics)
    told = samples(metrics)
    of_key = {name: value for name, value in told.items() if "key=" in name}
    assert of_key == {
        "orchestrator_key_requests_total{key=anna,outcome=done}": 1.0,
        "orchestrator_key_requests_total{key=anna,outcome=cancelled}": 1.0,
        "orchestrator_key_requests_total{key=anna,outcome=refused}": 1.0,
        "orchestrator_key_tokens_total{key=anna,kind=prompt}": 200.0,
        "orchestrator_key_tokens_total{key=anna,kind=generated}": 7.0,
    }


def test_grants_records_and_pulls_are_counted_by_what_became_of_them() -> None:
    metrics = of_nobody()
    metrics.granted(Grant("h", Choice.SEPARATED, "pair", Leg("d0", 1, "u"), None, 1, 0, 1))
    metrics.imported("hit")
    metrics.pulled("ok", 0.25, 4096)
    metrics.pulled("timeout", 5.0, 0)
    assert metrics.counters() == {
        "requests": {},
        "tokens": {},
        "kv_imports": {"hit": 1.0},
        "kv_pulls": {"ok": 1.0, "timeout": 1.0},
        "kv_pulled_bytes": {"": 4096.0},
        "routing": {"separated,pair": 1.0},
        "capped": {"": 0.0},
        "shed": {"": 0.0},
        "key_requests": {},
        "key_tokens": {},
    }
    assert samples(metrics)["orchestrator_kv_pull_seconds_sum{}"] == 5.25


def test_every_worker_tells_the_sum_of_all_and_what_waits_now(tmp_path: Path) -> None:
    first, second = of_nobody(tmp_path, 0), of_nobody(tmp_path, 1)
    ended(first)
    ended(second, phases_s={"prefill": 3.0})
    first.open_here, second.open_here = (lambda: 4), (lambda: 5)
    with first.waiting(), first.waiting(), second.waiting():
        first.save()
        told = samples(second)
        second.save()
        assert samples(first) == told
    assert told["orchestrator_requests_total{outcome=done,route=chat}"] == 2.0
    assert told["orchestrator_phase_seconds_sum{phase=decode}"] == 2.0
    assert told["orchestrator_phase_seconds_sum{phase=prefill}"] == 3.0
    assert told["orchestrator_ttft_seconds_bucket{le=2.5}"] == 2.0
    assert told["tgi_queue_size{}"] == 3.0
    assert told["orchestrator_open_requests{}"] == first.open_requests() == 9.0
    assert told["orchestrator_workers{}"] == 2.0
    for metrics in (first, second):
        metrics.close()


def test_what_one_worker_told_no_other_one_takes_back(tmp_path: Path) -> None:
    first, second = of_nobody(tmp_path, 0), of_nobody(tmp_path, 1)
    second.save()
    ended(first)
    told = samples(first)["orchestrator_requests_total{outcome=done,route=chat}"]
    assert samples(second)["orchestrator_requests_total{outcome=done,route=chat}"] == told == 1.0
    for metrics in (first, second):
        metrics.close()


def test_a_successor_goes_on_from_what_its_predecessor_saved_but_nothing_waits_any_more(
    tmp_path: Path,
) -> None:
    killed, other = of_nobody(tmp_path, 0), of_nobody(tmp_path, 1)
    killed.open_here = lambda: 3
    ended(killed)
    with killed.waiting():
        killed.save()
    assert killed._folder is not None
    killed._folder.close()  # as the kernel does
    told = samples(other)
    assert told["orchestrator_requests_total{outcome=done,route=chat}"] == 1.0
    assert (told["tgi_queue_size{}"], told["orchestrator_workers{}"]) == (0.0, 1.0)
    assert other.open_requests() == 0
    successor = of_nobody(tmp_path, 0)
    assert successor.queued == 0
    ended(successor)
    successor.save()
    for metrics in (successor, other):
        told = samples(metrics)
        assert told["orchestrator_requests_total{outcome=done,route=chat}"] == 2.0
        assert told["orchestrator_workers{}"] == 2.0
    for metrics in (successor, other):
        metrics.close()


def test_a_number_that_a_living_worker_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.metrics.folder.TAKE_LIMIT_S", 0.0)
    first = SnapshotFolder(tmp_path, 3)
    with pytest.raises(ConfigError, match=r"^Worker 3 of .* runs already\.$"):
        SnapshotFolder(tmp_path, 3)
    first.close()
    SnapshotFolder(tmp_path, 3).close()


def test_a_snapshot_that_is_late_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path, 0)
    folder.write(2, b"newer")
    late = threading.Thread(target=folder.write, args=(1, b"older"))
    late.start()
    late.join()
    assert folder.inherited() == b"newer"
    folder.close()


def test_a_damaged_snapshot_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "worker-1.json").write_bytes(b'{"counters": {"orchestrator_tokens": [["prompt"]]}')
    metrics = of_nobody(tmp_path, 0)
    ended(metrics)
    assert samples(metrics)["orchestrator_requests_total{outcome=done,route=chat}"] == 1.0
    metrics.close()


def test_a_folder_that_cannot_be_written_costs_the_sum_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    metrics = of_nobody(folder, 0)
    (folder / "worker-0.lock").unlink()
    folder.rmdir()
    ended(metrics)
    assert samples(metrics)["orchestrator_requests_total{outcome=done,route=chat}"] == 1.0
    metrics.close()


def test_tallies_survive_their_journey_whole() -> None:
    tally = Tally()
    tally.counters["orchestrator_routing"]["mixed", "no,link"] += 3
    tally.histograms["orchestrator_phase_seconds"]["decode",].observe(0.3)
    again = Tally()
    for lives in (True, False):
        again.add(tally.to_json(), lives=lives)
    assert again.counters["orchestrator_routing"]["mixed", "no,link"] == 6.0
    one = again.histograms["orchestrator_phase_seconds"]["decode",]
    assert (sum(one.counts), one.sum) == (2, 0.6)
