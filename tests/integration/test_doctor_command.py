"""`tgi-orchestrator doctor` on a machine without an engine: all the rest is looked at and told."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ORCHESTRATOR_")}
    return kept | {
        "DOCKER_HOST": f"unix://{tmp_path}/none.sock",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "HF_HUB_OFFLINE": "1",
        "ORCHESTRATOR_GATEWAY__LISTEN": "127.0.0.1:0",
    }


def doctor(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator.cli", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=90)


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Findings by name."""
    return {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_without_an_engine_everything_else_is_still_checked(
    env: dict[str, str], tmp_path: Path, tiny_model: Path
) -> None:
    done = doctor(env | {"ORCHESTRATOR_MODEL__ID": str(tiny_model)}, "--json")
    assert (done.returncode, done.stderr) == (3, "")
    found = told(done)
    engine = found["engine"]
    assert engine["state"] == "failed"
    assert f"No Docker engine answers at unix://{tmp_path}/none.sock" in engine["told"]
    assert "systemctl start docker" in engine["do"]
    assert "launcher: process" in engine["do"]
    states = {name: finding["state"] for name, finding in found.items()}
    assert states["settings"] == states["memory"] == states["port gateway.listen"] == states["hub"] == "ok"
    assert "redis" in states
    assert {name for name in states if name.startswith("transport")} == {
        "transport arena",
        "transport pull",
        "transport gloo",
        "transport nccl",
    }
    assert {states[name] for name in states if name.startswith("transport")} == {"skipped"}
    assert json.loads(done.stdout)["summary"]["exit_code"] == 3
    assert not list((tmp_path / "state").rglob("bandwidths.json")), "nothing was proved"


def test_the_host_of_the_flag_goes_before_the_environment(env: dict[str, str], tmp_path: Path) -> None:
    found = told(doctor(env, "--json", "--host", f"unix://{tmp_path}/other.sock"))
    assert "other.sock" in found["engine"]["told"]


def test_settings_that_cannot_be_used_are_a_finding_and_the_rest_is_checked(
    env: dict[str, str], tmp_path: Path
) -> None:
    config = tmp_path / "orchestrator.yaml"
    config.write_text("version: 1\nshards: {prefill: {cuont: 2}}\n")
    done = doctor(env, "--config", str(config), "--json")
    found = told(done)
    assert done.returncode == 2
    assert found["settings"]["state"] == "failed"
    assert "shards.prefill.count" in found["settings"]["told"], "the nearest key"
    assert found["engine"]["state"] == "failed"
    assert "redis" in found


def test_a_taken_port_and_a_dead_redis_are_failures_with_what_to_do(env: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        dead = closed.getsockname()[1]
        closed.close()
        changes = {
            "ORCHESTRATOR_GATEWAY__LISTEN": address,
            "ORCHESTRATOR_REDIS__URL": f"redis://:geheim@127.0.0.1:{dead}",
        }
        done = doctor(env | changes, "--json")
    found = told(done)
    assert found["port gateway.listen"]["state"] == found["redis"]["state"] == "failed"
    assert address in found["port gateway.listen"]["told"]
    assert "redis.url" in found["redis"]["do"]
    assert "geheim" not in done.stdout + done.stderr


def test_limits_that_up_would_refuse_are_failed(env: dict[str, str], tiny_model: Path) -> None:
    changes = {"ORCHESTRATOR_MODEL__ID": str(tiny_model), "ORCHESTRATOR_LIMITS__MAX_TOTAL_TOKENS": "100000"}
    found = told(doctor(env | changes, "--json"))
    assert found["memory"]["state"] == "failed"
    assert "ends at 4096 tokens" in found["memory"]["told"]


def test_arenas_beyond_all_memory_are_failed(env: dict[str, str], tiny_model: Path) -> None:
    changes = {"ORCHESTRATOR_MODEL__ID": str(tiny_model), "ORCHESTRATOR_ARENA__BYTES": str(1 << 50)}
    memory = told(doctor(env | changes, "--json"))["memory"]
    assert memory["state"] == "failed"
    assert memory["figures"]["arenas_bytes"] >= 1 << 50
    assert "arena.bytes" in memory["do"]


def test_the_report_for_people_has_every_check_and_fits_a_terminal(env: dict[str, str]) -> None:
    done = doctor(env | {"COLUMNS": "100"})
    assert done.returncode == 3
    assert "engine" in done.stdout
    assert "Do:" in done.stdout
    assert "transport arena" in done.stdout
    assert "default:" in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stdout + done.stderr
