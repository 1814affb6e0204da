"""Locust against a whole deployment: every kind of user is answered, and the report says so."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.bootstrap import ROOT

from .conftest import CommandLine

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        importlib.util.find_spec("locust") is None, reason="needs Locust: pip install '.[load]'"
    ),
]


def test_a_short_run_finds_the_deployment_and_every_user_is_answered(
    cli: CommandLine, tmp_path: Path
) -> None:
    cli.json("up", "--detach")
    arguments = ["--users", "3", "--spawn-rate", "3", "--run-time", "8s", "--think-s", "0.1"]
    mix = ["--weights", "chat=1,code=1,long=1", "--max-answer-tokens", "16", "--by-route"]
    done = subprocess.run(
        [sys.executable, "locustfiles/run.py", "--report-dir", str(tmp_path), *arguments, *mix],
        cwd=ROOT,
        env=cli.env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "summary.json").read_text())
    assert (told["failed"], told["refused"]) == (0, 0)
    parts = {part["name"]: part for part in told["parts"]}
    assert {"chat", "code", "long prompt", "route separated"} <= set(parts)
    for part in parts.values():
        assert part["done"] >= 1
        assert 0 < part["ttft_ms"]["p50"] <= part["total_ms"]["p50"]
    assert "chat [separated]" in (tmp_path / "load_stats.csv").read_text()
    status = cli.json("status")
    assert (status["open_requests"], status["outstanding"]["records"]) == (0, 0)
    assert cli.run("down").returncode == 0


def test_without_a_deployment_and_a_host_there_is_one_sentence(cli: CommandLine) -> None:
    done = subprocess.run(
        [sys.executable, "locustfiles/run.py"],
        cwd=ROOT,
        env=cli.env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    assert done.stderr == "Nothing runs here: start it with make up, or name a server with --host URL.\n"
