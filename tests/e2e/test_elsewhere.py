"""A prefill shard that `shard` keeps, with an arena of its own, and a deployment that finds it by its URL."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .conftest import CommandLine

pytestmark = pytest.mark.e2e

BODY = {
    "inputs": "The lighthouse keeper counted the ships every evening, and",
    "parameters": {"max_new_tokens": 8, "details": True},
}


def free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        return one.getsockname()[1], two.getsockname()[1]


@pytest.fixture
def elsewhere(cli: CommandLine) -> Iterator[Path]:
    """Another arena folder."""
    folder = cli.arena.with_name(f"{cli.arena.name}-elsewhere")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_shard_kept_elsewhere_serves_by_pulls_and_outlives_the_deployment(
    cli: CommandLine, elsewhere: Path
) -> None:
    port, pull_port = free_ports()
    key_file = cli.state_home / "given-key"
    key_file.write_text(secrets.token_hex(32))
    flags = ("--listen", f"127.0.0.1:{port}", "--pull-listen", f"127.0.0.1:{pull_port}")
    cli.env["ORCHESTRATOR_KEY_FILE"] = str(key_file)
    deployment_arena, cli.env["ORCHESTRATOR_ARENA__DIR"] = cli.env["ORCHESTRATOR_ARENA__DIR"], str(elsewhere)
    shard = cli.popen("shard", "--role", "prefill", *flags)
    try:
        cli.env["ORCHESTRATOR_ARENA__DIR"] = deployment_arena
        cli.env["ORCHESTRATOR_SHARDS__PREFILL__URLS"] = json.dumps([f"http://127.0.0.1:{port}"])
        facts = cli.json("up", "--detach")
        end_s = time.monotonic() + 60
        while "prefill-0" not in [one["shard"] for one in cli.json("status")["shards"]]:
            assert time.monotonic() < end_s
            time.sleep(0.1)
        answer = httpx.post(f"{facts['url']}/generate", json=BODY, timeout=60)
        assert (answer.status_code, answer.headers["x-orchestrator-import"]) == (200, "hit")
        status = cli.json("status")
        assert status["counters"]["kv_pulls"] == {"ok": 1.0}
        assert status["degraded"] is None
        assert sorted(facts["logs"]) == ["conductor", "decode-0", "gateway"]
        refused = cli.run("verify", "-d", "another")
        assert (refused.returncode, "start it with `up`" in refused.stderr) == (2, True)
        assert cli.run("down").returncode == 0
        assert cli.left_over() == []
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200
    finally:
        shard.send_signal(signal.SIGTERM)
        output = "".join(shard.communicate(timeout=30))
    assert shard.returncode == 0, output
    assert not list(elsewhere.rglob("*.arena"))
    key = key_file.read_text()
    written = [path for path in cli.state_home.rglob("*") if path.is_file() and path != key_file]
    assert [str(path) for path in written if key.encode() in path.read_bytes()] == []
    assert key not in output + json.dumps(facts) + json.dumps(status)
