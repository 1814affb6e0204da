"""A child process must see its parent's settings: all that were given, and no others."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config import load_settings
from orchestrator.deployment.environment import child_env

ENV = {
    "PATH": "/bin",
    "ORCHESTRATOR_CONFIG": "/elsewhere.yaml",
    "ORCHESTRATOR_LIMITS__QUEUE_SIZE": "7",
    "ORCHESTRATOR_SHARDS__DECODE__CPUS": "[[0, 1]]",
}


def test_a_child_loads_the_same_settings_with_the_changes_on_top(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("version: 1\ndeployment: blue\nshards: {prefill: {cpus: [[1, 0]]}}\n")
    loaded = load_settings(file, {"gateway.listen": "0.0.0.0:8080", "model.id": "./here"}, ENV)
    env = child_env(loaded, ENV, {"redis.url": "unix:///r.sock", "limits.max_total_tokens": None})
    seen = load_settings(None, {}, env).settings
    assert seen.redis.url == "unix:///r.sock"
    assert seen.model_dump(exclude={"redis"}) == loaded.settings.model_dump(exclude={"redis"})


def test_defaults_stay_defaults_and_other_variables_are_kept() -> None:
    env = child_env(load_settings(None, {"deployment": "blue"}, {}), {"PATH": "/bin"}, {})
    assert env == {"PATH": "/bin", "ORCHESTRATOR_DEPLOYMENT": "blue"}


def test_variables_of_ours_that_were_overridden_do_not_reach_the_child() -> None:
    loaded = load_settings(None, {"limits.queue_size": 9}, ENV)
    env = child_env(loaded, ENV, {})
    assert env["ORCHESTRATOR_LIMITS__QUEUE_SIZE"] == "9"
    assert "ORCHESTRATOR_CONFIG" not in env
