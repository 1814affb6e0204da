"""What the kernel says of a process, and where it may run."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from orchestrator.embedded.redis import end_with_owner

OPEN_FILES = 65_536
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def tree(pid: int) -> tuple[int, ...]:
    """The process and all of its children now."""
    return pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of the processes with all their threads, ended ones included, to the ns.

    The kernel's CPU clock of another process; /proc/<pid>/stat has the same in steps of 10 ms.
    """
    return sum(time.clock_gettime(_clock_of(pid)) for pid in pids)


def _clock_of(pid: int) -> int:
    return (~pid << 3) | 2  # what clock_getcpuclockid(3) gives for a process


def rss_bytes(pids: Iterable[int]) -> int:
    """Resident memory."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * _PAGE_BYTES


def cores() -> tuple[int, int]:
    """One core for the gateway, another for load and mock; the same one twice where there is only one."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[-1]


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """This process runs on one core inside the block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def many_files() -> Iterator[int]:
    """As many open files as the hard limit allows, up to OPEN_FILES; yields how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    limit = max(limit, soft)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def child_of(owner: int, core: int) -> Callable[[], None]:
    """Runs in a child before exec: on `core`, and ended with its owner."""
    ended = end_with_owner(owner)

    def begin() -> None:
        os.sched_setaffinity(0, {core})
        ended()

    return begin
