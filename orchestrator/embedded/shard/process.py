"""What every process of a shard does first: where it logs and runs, and with whom it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

import structlog

from orchestrator.errors import ConfigError
from tgi_patches.contract import PARENT_VARIABLE

_PR_SET_PDEATHSIG = 1


def pin(cpus: Sequence[int]) -> None:
    """Run on these cores only, before torch is imported: it sizes its thread pool then."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        raise ConfigError(f"The CPU cores {', '.join(map(str, cpus))} are not all usable here.") from None


def die_with_parent(number: signal.Signals) -> None:
    """Ask Linux for a signal when the parent dies, however it dies, and see that it still lives."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None and int(parent) != os.getppid():
        sys.exit("The process that started this shard is gone.")


def log_to_stderr() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
