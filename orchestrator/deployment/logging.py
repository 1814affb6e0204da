"""Structured logs: JSON lines for files; what went wrong also as a plain line for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import structlog
import typer

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


def log_json_to(stream: TextIO, echo: Echo | None = None) -> None:
    """Send all log events of this process to `stream`, for good."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *([echo] if echo else []),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(stream),
    )


@contextmanager
def json_log(path: Path) -> Iterator[Echo]:
    """Append all log events of the block to a file; afterwards they go where they went before."""
    before, echo = structlog.get_config(), Echo()
    with path.open("a", buffering=1) as stream:
        log_json_to(stream, echo)
        try:
            yield echo
        finally:
            structlog.configure(**before)


def in_words(event: Mapping[str, Any]) -> str:
    """`shard_lost shard=decode-0` as a line for people: `shard lost: shard decode-0`."""
    facts = ", ".join(f"{key} {value}" for key, value in event.items() if key not in _HIDDEN)
    name = str(event.get("event", "")).replace("_", " ")
    return f"{name}: {facts}" if facts else name
