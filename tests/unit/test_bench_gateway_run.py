"""A whole run of the gateway benchmark, small: our gateway between real mock shards."""

from __future__ import annotations

import os
from io import StringIO

import psutil
from rich.console import Console

from orchestrator.bench.gateway.measure import Plan
from orchestrator.bench.gateway.report import show
from orchestrator.bench.gateway.run import run

TINY = Plan(streams=2, event_tokens=20, step_us=500, requests=8, ttft_requests=3)


def test_a_run_measures_what_was_asked_and_leaves_nothing_behind() -> None:
    cores, children = os.sched_getaffinity(0), psutil.Process().children(recursive=True)
    said: list[str] = []
    report = run(["ours"], ["event", "request"], 1, TINY, said.append)
    assert os.sched_getaffinity(0) == cores
    assert psutil.Process().children(recursive=True) == children
    assert report.failures == {}
    assert said == ["event: round 1", "request: round 1"]
    figures = report.medians["ours"]
    assert set(figures) == {"event_us", "event_with_opening_us", "events_per_read", "request_us"}
    # More than a system call, less than a tenth of a second.
    assert all(1 < figures[name] < 100_000 for name in figures if name.endswith("_us"))
    page = StringIO()
    show(report, Console(file=page, width=80))
    assert "CPU per relayed event" in page.getvalue()
    assert "asks the shards: put, wait, get" in page.getvalue()
    assert {target["met"] for target in report.to_dict()["targets"]} == {None}
