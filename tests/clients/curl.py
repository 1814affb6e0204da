"""curl, as one types it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

LIMIT_S = 60
Curl = Callable[..., "Got"]


@dataclass(frozen=True, slots=True)
class Got:
    status: int
    headers: Mapping[str, str]
    body: str

    def json(self) -> Any:
        return json.loads(self.body)

    def lines(self) -> list[str]:
        """What stands behind `data:`, event by event."""
        return [line.removeprefix("data:").strip() for line in self.body.splitlines() if line]

    def events(self) -> list[Any]:
        """The same, parsed, without `[DONE]`."""
        return [json.loads(line) for line in self.lines() if line != "[DONE]"]


def curl(url: str, key: str) -> Curl:
    """Asks `url`; another or no key with `key=`."""

    def ask(path: str, body: Any = None, *, key: str = key, headers: Mapping[str, str] | None = None) -> Got:
        if shutil.which("curl") is None:
            pytest.skip("there is no curl on PATH")
        line = ["curl", "-sSN", "-i", "-w", "\n%{http_code}", "--noproxy", "*", "--max-time", str(LIMIT_S)]
        if key:
            line += ["-H", f"Authorization: Bearer {key}"]
        for name, value in (headers or {}).items():
            line += ["-H", f"{name}: {value}"]
        if body is not None:
            line += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        done = subprocess.run([*line, f"{url}{path}"], capture_output=True, text=True, timeout=2 * LIMIT_S)
        assert done.returncode == 0, done.stderr
        return _read(done.stdout)

    return ask


def _read(output: str) -> Got:
    # Text mode has made "\n" of HTTP's line ends.
    told, _, status = output.rpartition("\n")
    head, _, body = told.partition("\n\n")
    lines = (line.split(": ", 1) for line in head.splitlines()[1:])
    return Got(int(status), {name.lower(): value for name, value in lines}, body)
