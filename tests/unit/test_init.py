"""`init` without a container, and what it does with files and ports.  With one: tests/docker."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from orchestrator.bootstrap import ROOT
from orchestrator.cli import app
from orchestrator.commands.init import for_this_machine, free_port, urls_of, write
from orchestrator.config import load_settings
from orchestrator.core.launcher_flags import Told
from orchestrator.core.settings_text import settings_text
from orchestrator.core.stock import Published, Stock
from orchestrator.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("ORCHESTRATOR_", "DOCKER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["init", *arguments])


def test_a_file_for_this_machine_is_accepted_and_says_what_comes_next(tmp_path: Path) -> None:
    done = run()
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Wrote orchestrator.yaml.\n")
    assert "tgi-orchestrator up --config orchestrator.yaml" in done.stdout
    assert "--against" not in done.stdout
    loaded = load_settings(tmp_path / "orchestrator.yaml", {}, {})
    shards = loaded.settings.shards
    assert (shards.prefill.count, shards.decode.count, shards.mixed.count) == (1, 1, 0)


def test_gpus_make_it_containers_and_none_processes() -> None:
    assert for_this_machine(("GPU-a", "GPU-b")).values["launcher"] == "docker"
    assert for_this_machine(()).values["launcher"] == "process"
    assert for_this_machine(None).values["launcher"] == "process"


def test_each_value_for_this_machine_has_its_reason_above_it() -> None:
    out = for_this_machine(None)
    text = settings_text(out.values, out.comments, head=["x"], notes=[])
    assert yaml.safe_load(text)["model"]["dtype"] == "auto"
    assert "  # auto, float32, bfloat16 or int8.\n  dtype: auto\n" in text


def test_a_file_that_is_there_stays_unless_forced(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine\n")
    refused = run("-o", str(file))
    assert (refused.exit_code, file.read_text()) == (2, "mine\n")
    assert "mine.yaml exists: name another file with --output, or give --force." in refused.stderr
    printed = run("-o", str(file), "--print")
    assert (printed.exit_code, file.read_text()) == (0, "mine\n")
    assert run("-o", str(file), "--force").exit_code == 0
    assert file.read_text() == printed.stdout


def test_a_file_that_came_meanwhile_stays_too(tmp_path: Path) -> None:
    file = tmp_path / "o.yaml"
    file.write_text("mine\n")
    with pytest.raises(ConfigError, match="File exists"):
        write(file, "ours\n", force=False)
    assert file.read_text() == "mine\n"


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    done = run("-o", str(tmp_path / "nowhere" / "o.yaml"))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "cannot be written: No such file or directory." in done.stderr


def test_without_an_engine_a_container_cannot_be_read(tmp_path: Path) -> None:
    # In a process of its own: the SDK leaves the socket open that it could not connect.
    line = [sys.executable, "-m", "orchestrator.cli", "init", "--from-container", "tgi"]
    env = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none.sock", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert done.stderr.startswith("No Docker engine answers at unix://")
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_somebody_has_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) > port
    assert free_port(port) == port


def test_a_container_is_asked_where_it_is_published_first() -> None:
    def urls(published: Published | None, address: str) -> list[str]:
        return urls_of(Stock("a", "i", "", True, Told(), published=published, address=address))

    assert urls(Published("", 8080), "172.17.0.2:80") == ["http://127.0.0.1:8080", "http://172.17.0.2:80"]
    assert urls(Published("10.0.0.1", 8080), "") == ["http://10.0.0.1:8080"]
    assert urls(None, "") == []
