"""Runs a program that ends with whoever started it: `python leash.py STARTER_PID PROGRAM ARGUMENT...`

The kernel kills the program when its starter dies, however that dies.  A process of its own asks for
that, because code between fork and exec is unsafe where threads run.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(starter: int, program: list[str]) -> None:
    """Does not return."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter:
        sys.exit("The shard that started this server is gone.")
    os.execv(program[0], program)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
