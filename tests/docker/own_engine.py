"""A Docker engine of a test's own, which it may stop and start.  Needs root and `dockerd`."""

from __future__ import annotations

import gc
import io
import os
import shutil
import signal
import socket
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, Popen, run

import pytest

from .engine import answers, until

STOP_LIMIT_S = 30
SHELL = Path("/bin/sh")
PROGRAMS = (SHELL, Path("/bin/sleep"))


class OwnEngine:
    """On a socket in `folder`; it changes no rule of the host's firewall.

    It shares the bridge docker0: one without a bridge deletes that, also where another engine has it.
    """

    def __init__(self, folder: Path) -> None:
        self.host = f"unix://{folder}/docker.sock"
        self._folder = folder
        self._process: Popen[bytes] | None = None

    def start(self) -> None:
        places = [f"--{name}={self._folder / name}" for name in ("data-root", "exec-root", "pidfile")]
        # Its log is kept: what a failed start says stands there.
        with (self._folder / "log").open("ab") as log:
            self._process = Popen(
                ["dockerd", *places, "--host", self.host, "--iptables=false"],
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
            )
        until(lambda: answers(self.host), f"the engine, see {self._folder}/log")

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(STOP_LIMIT_S)
            self._process = None


@contextmanager
def own_engine() -> Iterator[OwnEngine]:
    """Runs inside the block; nothing is left of it."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("An engine of one's own needs root and dockerd.")
    folder = Path(tempfile.mkdtemp(prefix="tgio-"))  # short: a socket's path has 107 characters at most
    made = OwnEngine(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        for mount in _mounts_below(folder):
            run(["umount", "--lazy", mount], check=True)
        shutil.rmtree(folder)


def _mounts_below(folder: Path) -> list[str]:
    """What the engine leaves: a namespace of its network, volumes; the deepest first."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return sorted((mount for mount in mounts if mount.startswith(f"{folder}/")), reverse=True)


def close_lost_sockets() -> None:
    """The SDK leaves each socket that found no engine to the garbage collector, which warns of it."""
    for one in gc.get_objects():
        if issubclass(type(one), socket.socket) and one.family == socket.AF_UNIX and one.fileno() >= 0:
            try:
                one.getpeername()
            except OSError:
                one.close()


def tiny_root() -> bytes:
    """A tar with this machine's shell, `sleep` and the libraries that they need."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as tar:
        for path in sorted(
            {*PROGRAMS, *(library for program in PROGRAMS for library in _libraries(program))}
        ):
            tar.add(path, str(path))
    return packed.getvalue()


def _libraries(program: Path) -> list[Path]:
    told = run(["ldd", program], capture_output=True, text=True, check=True).stdout
    words = [word for line in told.splitlines() for word in line.split() if word.startswith("/")]
    return [Path(word) for word in words]
