"""SIGHUP: read keys and certificates again; or stop, when it says that our terminal has gone.

Under `nohup` it never stops anything.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)


def on_hangup(reload: Callable[[], None], stop: Callable[[], None] | None = None) -> None:
    """Install the handler in the running loop; a SIGHUP that was blocked until now is heard at once."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    bound_to_terminal = stop is not None and not ignored and _has_terminal()

    def hear() -> None:
        if bound_to_terminal and stop is not None and not _has_terminal():
            stop()
            return
        log.info("reloading")
        reload()

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hear)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
