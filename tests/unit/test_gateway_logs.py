"""What a gateway's processes write besides requests: the HTTP server's words, and never too much."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from orchestrator.deployment.logging import ServerErrors
from orchestrator.deployment.start import kept_short


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, text, (), None)


def test_the_http_servers_words_are_an_event_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("orchestrator.deployment.logging.time.monotonic", lambda: now_s)
    handler = ServerErrors()
    with capture_logs() as events:
        for _ in range(50):
            handler.emit(record("Invalid HTTP request received."))
        now_s = 101.0
        handler.emit(record("another"))
    assert [(event["event"], event["text"]) for event in events] == [
        ("http_server", "Invalid HTTP request received."),
        ("http_server", "another"),
    ]


async def test_a_log_that_grows_is_moved_aside_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "gateway.log"
    with path.open("ab", buffering=0) as writer:
        async with kept_short([path], limit_bytes=100, every_s=0.01):
            writer.write(b"x" * 101)
            async with asyncio.timeout(10):
                while path.stat().st_size:  # noqa: ASYNC110 - a file tells nobody
                    await asyncio.sleep(0.01)
            writer.write(b"new")
    assert path.read_bytes() == b"new"
    assert (tmp_path / "gateway.log.1").read_bytes() == b"x" * 101
