"""Structured logs: JSON lines for files; what went wrong also as a plain line for the terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import orjson
import structlog
import typer

log = structlog.get_logger()

LOUD = frozenset({"warning", "error", "critical"})
_HIDDEN = frozenset({"event", "level", "timestamp", "exception"})


class Echo:
    """A processor that says warnings on stderr in words, while it is switched on."""

    def __init__(self) -> None:
        self.on = False

    def __call__(self, _: Any, level: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if self.on and level in LOUD:
            typer.echo(in_words(event), err=True)
        return event


def log_json_to(stream: TextIO, echo: Echo | None = None, *, for_good: bool = True) -> None:
    """Send all log events of this process to `stream`, `for_good` or until somebody configures anew."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=for_good,
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.format_exc_info,
            *([echo] if echo else []),
            _line,
        ],
        logger_factory=structlog.BytesLoggerFactory(stream.buffer),
    )


class ServerErrors(logging.Handler):
    """What the HTTP server says in prose, as an event; at most once a second."""

    EVERY_S = 1.0

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self.EVERY_S
            error = record.exc_info[1] if record.exc_info else None
            log.warning("http_server", text=record.getMessage(), error=error and type(error).__name__)


def log_server_errors() -> None:
    """For good, in a process that serves."""
    logger = logging.getLogger("uvicorn.error")
    logger.handlers[:] = [ServerErrors()]
    logger.propagate = False


def _line(_: Any, level: str, event: MutableMapping[str, Any]) -> bytes:
    """One line of JSON.  Three of structlog's own processors in one: every request writes a line."""
    event["level"] = level
    event["timestamp"] = datetime.now(UTC).isoformat()[:-6] + "Z"
    return orjson.dumps(event, default=repr)


@contextmanager
def json_log(path: Path) -> Iterator[Echo]:
    """Append all log events of the block to a file; afterwards they go where they went before."""
    before, echo = structlog.get_config(), Echo()
    with path.open("a", buffering=1) as stream:
        log_json_to(stream, echo, for_good=False)
        try:
            yield echo
        finally:
            structlog.configure(**before)


def in_words(event: Mapping[str, Any]) -> str:
    """`shard_lost shard=decode-0` as a line for people: `shard lost: shard decode-0`."""
    facts = ", ".join(f"{key} {value}" for key, value in event.items() if key not in _HIDDEN)
    name = str(event.get("event", "")).replace("_", " ")
    return f"{name}: {facts}" if facts else name
