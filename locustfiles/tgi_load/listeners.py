"""Joins session, shapes and report to Locust's events."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import gevent
from locust import events
from locust.env import Environment
from locust.runners import LocalRunner, MasterRunner, Runner, WorkerRunner
from locust.stats import CSV_STATS_INTERVAL_SEC, RequestStats

from .checks import LoadError, weights
from .options import add_options
from .report import Figures, exit_code, figures, parts, percentile, run_seconds, text
from .session import TPOT, TTFT, Session
from .shapes import SHAPES
from .users import TgiUser

CSV_WRITE_S = 0.2
"""For writing all tables once."""
log = logging.getLogger(__name__)
LAG_PERIOD_S = 0.1
LAG_LIMIT_MS = 20.0
BAD_INPUT = 2

events.init_command_line_parser.add_listener(add_options)


@events.init.add_listener
def join(environment: Environment, runner: Runner, web_ui: Any, **_: Any) -> None:
    """Once per Locust process, before any user starts."""
    session = TgiUser.session = Session(environment)
    _total_of_requests_only(runner.stats)
    _weigh(environment, session)
    if isinstance(runner, LocalRunner) and web_ui is None:
        session.begin()
        if session.trouble:
            log.error(session.trouble)
            sys.exit(BAD_INPUT)
    shape = SHAPES.get(session.options.shape)
    if shape and not isinstance(runner, WorkerRunner):
        environment.shape_class = shape(session)
        environment.shape_class.runner = runner
    _listen(environment, runner, session, on_page=web_ui is not None)
    if not isinstance(runner, MasterRunner):
        gevent.spawn(_watch_lag, session)


def _listen(environment: Environment, runner: Runner, session: Session, on_page: bool) -> None:
    hooks = environment.events

    def starts(**_: Any) -> None:
        if isinstance(runner, MasterRunner):
            session.tally.clear()
            session.broke = None
            return
        session.begin()
        if session.trouble:
            log.error(session.trouble)
            runner.log_exception("local", session.trouble, "")

    hooks.test_start.add_listener(starts)
    if isinstance(runner, WorkerRunner):
        hooks.report_to_master.add_listener(lambda data, **_: session.tally.tell(data))
        return
    hooks.worker_report.add_listener(lambda data, **_: session.tally.hear(data))
    if on_page:
        hooks.test_stop.add_listener(lambda **_: show(session, write(session)))
    hooks.quitting.add_listener(lambda **_: _finish(session))
    # After Locust's own tables.
    hooks.quit.add_listener(lambda **_: show(session, page_of(session)))


def _weigh(environment: Environment, session: Session) -> None:
    """--weights, where a locustfile has several kinds of users."""
    if len(environment.user_classes) < 2:
        return
    try:
        shares = weights(session.options.weights)
    except LoadError as error:
        log.error(error)
        sys.exit(BAD_INPUT)
    for user_class in environment.user_classes:
        if issubclass(user_class, TgiUser):
            user_class.weight = shares[user_class.name.split()[0]]
    environment.user_classes = [one for one in environment.user_classes if one.weight]


def _total_of_requests_only(stats: RequestStats) -> None:
    """TTFT and TPOT have rows of their own, and are no requests that a total may count."""
    log_request = stats.log_request

    def logged(method: str, name: str, response_time: int, content_length: int) -> None:
        if method in (TTFT, TPOT):
            stats.get(name, method).log(response_time, content_length)
        else:
            log_request(method, name, response_time, content_length)

    stats.log_request = logged  # type: ignore[method-assign]


def _watch_lag(session: Session) -> None:
    while True:
        before_s = time.perf_counter()
        gevent.sleep(LAG_PERIOD_S)
        if session.tally.outcomes:
            session.tally.lags_ms.append(1000 * (time.perf_counter() - before_s - LAG_PERIOD_S))


def _finish(session: Session) -> None:
    """The report and the exit code."""
    write(session)
    environment = session.environment
    broken = environment.runner is not None and bool(environment.runner.exceptions)
    code = exit_code(session.tally.outcomes, session.options.tolerate_refusals)
    environment.process_exit_code = BAD_INPUT if session.trouble else int(broken or code)
    if getattr(session.options, "csv_prefix", None):
        # Locust writes its tables once a period and not at the end: what ended since would be missing.
        gevent.sleep(CSV_STATS_INTERVAL_SEC + CSV_WRITE_S)


def page_of(session: Session) -> str:
    """The summary for people."""
    return text(session.environment.host or "", *_measured(session), session.slo, _notes(session))


def show(session: Session, page: str) -> None:
    folder = session.options.report_dir
    sys.stdout.write(f"\n{page}\n" + (f"Report: {folder}\n" if folder else ""))
    sys.stdout.flush()


def write(session: Session) -> str:
    """The summary, written into --report-dir as text and JSON."""
    page = page_of(session)
    if folder := session.options.report_dir:
        whole, groups = _measured(session)
        told = whole.to_json() | {
            "host": session.environment.host,
            "slo": {"ttft_ms": session.slo.ttft_ms, "tpot_ms": session.slo.tpot_ms},
            "parts": [group.to_json() for group in groups],
            "ramp": session.broke,
            "generator_lag_p99_ms": _lag_ms(session),
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "summary.txt").write_text(page, encoding="utf-8")
        Path(folder, "summary.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return page


def _measured(session: Session) -> tuple[Figures, list[Figures]]:
    outcomes, slo = session.tally.outcomes, session.slo
    run_s = run_seconds(outcomes)
    return figures("all", outcomes, slo, run_s), parts(outcomes, slo, run_s)


def _lag_ms(session: Session) -> float | None:
    return percentile(sorted(session.tally.lags_ms), 0.99)


def _notes(session: Session) -> list[str]:
    lag_ms = _lag_ms(session)
    notes = [session.broke] if session.broke else []
    if lag_ms is not None:
        notes.append(f"Load generator: its event loop was late by {lag_ms:.1f} ms (p99).")
        if lag_ms > LAG_LIMIT_MS:
            notes[-1] += (
                " That is part of the times above: give it an idle core, fewer users, or --processes."
            )
    return notes
