"""Processes without the `subprocess` module: the entrypoint reaps every child there is, also orphans.

One thread only: what runs between fork and exec is safe for no other reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
NOT_FOUND = 127
SIGNALLED = 128
"""Added to a signal's number where the process cannot end by that signal itself."""


def adopt_orphans() -> None:
    """Descendants that lose their parent become our children, as those of a container's first process do."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def started(command: Sequence[str], env: Mapping[str, str]) -> int:
    """The pid of a new process in a group of its own, which gets SIGTERM when we die, however we die.

    A terminal's Ctrl-C reaches us alone: we pass it on to whom it concerns.
    """
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _become(command, env, parent)
    return child


def ended() -> dict[int, int]:
    """Wait status by pid of every child that has ended and was not asked for yet."""
    statuses = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[found[0]] = found[1]
    return statuses


def children() -> list[int]:
    """Pids of all children, adopted ones too; those that ended count until `ended` has told of them."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (any name) state parent ...
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def send(pid: int, number: int) -> None:
    """To a process that may have ended already, but is still ours."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def as_before_python() -> None:
    """Python ignores two signals, and what it becomes by exec would inherit that."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def end_as(status: int) -> int:
    """The exit code for a wait status; a signal ends us too, except where we are the first process."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    if os.getpid() != 1:  # the kernel keeps signals from the first process of a container
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the dump that matters is the launcher's own
        with contextlib.suppress(OSError):  # of SIGKILL nothing can be set
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    return SIGNALLED - code


def _become(command: Sequence[str], env: Mapping[str, str], parent: int) -> None:
    """In the new process; does not return."""
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(SIGNALLED + signal.SIGTERM)
        as_before_python()
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvpe(command[0], [*command], env)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}.\n")
        sys.stderr.flush()
    finally:
        os._exit(NOT_FOUND)
