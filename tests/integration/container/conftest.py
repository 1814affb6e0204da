"""A container's processes without one: the entrypoint, a stand-in for the launcher, a real sidecar."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.container import stand_in

LIMIT_S = 20.0
ENTRY = (sys.executable, "-I", "-m", "tgi_patches.entrypoint.container")


def until(true: Callable[[], Any], what: str) -> Any:
    """The first result that is true; a failure that says `what` did not come."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        if found := true():
            return found
        time.sleep(0.01)
    pytest.fail(f"this did not come within {LIMIT_S:g} s: {what}")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Container:
    """One entrypoint, from its start to its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / "venv"
        (self.venv / "bin").mkdir(parents=True)
        launcher = self.venv / "bin" / "text-generation-launcher"
        launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {stand_in.__file__} "$@"\n')
        launcher.chmod(0o755)
        self.spec: dict[str, Any] = {
            "deployment": "dep",
            "shard": "p0",
            "model": "/models/m",
            "arena_dir": str(folder / "arenas"),
            "arena_bytes": 1 << 20,
            "port": 1,  # nothing listens there
            "sidecar_port": free_port(),
        }
        self.beat = folder / "arenas" / "dep" / "p0.sidecar"
        self.process: subprocess.Popen[str] | None = None

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": os.defpath,
            "VIRTUAL_ENV": str(self.venv),
            "RECORD": str(self.folder),
            "BEAT": str(self.beat),
            "HOSTNAME": "0f1e2d3c",
            "PORT": "80",
        }

    def start(self, behaviour: str, *arguments: str, stock: bool = False, **more: str) -> None:
        spec = {} if stock else {"ORCHESTRATOR_SHARD_SPEC": json.dumps(self.spec)}
        self.process = subprocess.Popen(
            [*ENTRY, *arguments],
            env={**self.env, "STAND_IN": behaviour, **spec, **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def launched(self) -> dict[str, Any]:
        """How the launcher was started."""
        facts: dict[str, Any] = until(lambda: self._read("started.json"), "a launcher")
        return facts

    def stopped(self) -> dict[str, Any]:
        facts: dict[str, Any] = until(lambda: self._read("stopped.json"), "the launcher's end")
        return facts

    def sidecar(self, other_than: int = 0) -> int:
        """The pid of a sidecar that is ready."""

        def ready() -> int:
            with contextlib.suppress(OSError, ValueError):
                pid: int = json.loads(self.beat.read_text())["pid"]
                return pid if pid != other_than else 0
            return 0

        found: int = until(ready, "a sidecar")
        return found

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended(self) -> tuple[int, str]:
        """(exit code, all that was said)."""
        assert self.process is not None
        said, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, said

    def close(self) -> None:
        """Nothing of it is left behind, whatever the test found."""
        if self.process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(self.pid).children(recursive=True), psutil.Process(self.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        with contextlib.suppress(ValueError):
            self.process.communicate(timeout=LIMIT_S)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            facts: dict[str, Any] = json.loads((self.folder / name).read_text())
        except OSError:
            return None
        return facts


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    made = Container(tmp_path)
    yield made
    made.close()
