"""One line per event, through TGI's own logger where there is one.

TGI shows only what comes from its own package, and without JSON only at debug level: the overlay's
lines are filed under that package's name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

_NAME = "text_generation_server.tgi_orchestrator"


def event(level: str, name: str, /, **facts: str) -> None:
    """Write `name` and its facts; never raises."""
    line = f"{name} {json.dumps(facts)}" if facts else name
    try:
        _writer(level)(line)
    except Exception:  # noqa: BLE001 - a log line is not worth a request
        return


def warn(name: str, /, **facts: str) -> None:
    event("warning", name, **facts)


def info(name: str, /, **facts: str) -> None:
    event("info", name, **facts)


def _writer(level: str) -> Callable[[str], None]:
    try:
        from loguru import logger
    except ImportError:
        writer: Callable[[str], None] = getattr(logging.getLogger(_NAME), level)
        return writer
    filed: Any = logger.patch(lambda record: record.update(name=_NAME))
    # The line is an argument and not the template: loguru would read braces in it.
    return lambda line: filed.log(level.upper(), "{}", line)
