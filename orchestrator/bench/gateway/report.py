"""The report for people: one table of figures, one of targets, and what was not there."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from orchestrator.bench.gateway.run import Report
from orchestrator.bench.gateway.subjects import KINDS
from orchestrator.bench.gateway.targets import Verdict, judge

ROWS = {
    "event_us": "CPU per event, us",
    "event_with_opening_us": "  with the opening",
    "events_per_read": "  events per read",
    "flood_event_us": "flood: per event, us",
    "flood_events_per_read": "  events per read",
    "request_us": "CPU per request, us",
    "redis_us": "  Redis, apart",
    "conductor_us": "  conductor, apart",
    "added_ttft_p50_ms": "added TTFT p50, ms",
    "added_ttft_p99_ms": "  p99",
    "open_at_once": "streams open at once",
    "rss_per_stream_kb": "  kB per stream",
}


def show(report: Report, console: Console) -> None:
    said = report.conditions
    console.print(
        f"Gateway on one core, {said['plan']['route']}, medians of {said['rounds']} rounds", style="bold"
    )
    console.print(_figures(report))
    asked = [verdict for verdict in judge(report.medians) if _ours_has(report, verdict)]
    if asked:
        console.print(_targets(asked))
    for name, versions in report.versions.items():
        kind = KINDS[name]
        console.print(f"{name}: {kind.title}; asks the shards: {kind.calls}; {versions}", highlight=False)
    for name, how in report.missing.items():
        console.print(f"{name} was left out, {KINDS[name].title} is not installed: {how}.", highlight=False)
    for name, failures in report.failures.items():
        for failure in failures:
            console.print(f"{name} failed in {failure}", style="red", highlight=False, markup=False)


def _figures(report: Report) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for name in report.versions:
        table.add_column(name, justify="right", no_wrap=True)
    figures = dict.fromkeys(figure for medians in report.medians.values() for figure in medians)
    pooled = {figure: _pool_title(figure) for figure in figures if figure.startswith(("busy_", "idle_"))}
    for figure, title in (ROWS | pooled).items():
        if figure in figures:
            cells = (_cell(report.medians[name].get(figure)) for name in report.versions)
            table.add_row(title, *cells)
    return table


def _targets(verdicts: list[Verdict]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("target", "against"):
        table.add_column(column, no_wrap=True)
    for column in ("measured", "at most", "met"):
        table.add_column(column, justify="right", no_wrap=True)
    for verdict in verdicts:
        target = verdict.target
        met = {None: "-", True: "yes", False: "NO"}[verdict.met]
        measured = "-" if verdict.value is None else f"{verdict.value:.2f}"
        table.add_row(target.what, target.peer, measured, f"{target.limit:g}", met)
    return table


def _ours_has(report: Report, verdict: Verdict) -> bool:
    """A target whose peer is missing is shown; one of another measure is not."""
    return verdict.target.figure in report.medians.get(verdict.target.subject, {})


def _pool_title(figure: str) -> str:
    kind, count, _ = figure.split("_")
    return f"{kind}, {count} pooled, us"


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
