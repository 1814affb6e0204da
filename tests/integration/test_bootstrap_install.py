"""The set-up for real, on a project without dependencies whose build needs no network."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from orchestrator.bootstrap import ROOT

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "tgi-orchestrator"
version = "0"
dependencies = []

[project.optional-dependencies]
shard = ["torch; python_version < '3'"]
"""

# The few lines of PEP 660 that pip calls.
BACKEND = """
import os, pathlib, time, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    if os.environ.get("HANG"):
        pathlib.Path(os.environ["HANG"]).write_text(str(os.getpid()))
        time.sleep(600)
    name = "tgi_orchestrator-0-py3-none-any.whl"
    info = "tgi_orchestrator-0.dist-info"
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: tgi-orchestrator\\nVersion: 0\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\\ntgi-orchestrator = os:getpid\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""


class Project:
    """A folder with bootstrap.py and a project that installs in a second."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "orchestrator").mkdir(parents=True)
        shutil.copy(ROOT / "orchestrator" / "bootstrap.py", root / "orchestrator")
        (root / "pyproject.toml").write_text(PYPROJECT)
        (root / "backend.py").write_text(BACKEND)
        self.env = {**os.environ, "PIP_NO_INDEX": "1", "TORCH_INDEX": "file:///none"}
        self.stamp = root / ".venv" / "tgi-orchestrator.stamp.json"

    def command(self) -> list[str]:
        return [sys.executable, "-I", str(self.root / "orchestrator" / "bootstrap.py"), "run"]

    def set_up(self) -> str:
        done = subprocess.run(self.command(), env=self.env, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        return done.stderr


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "a project")


@pytest.mark.slow
def test_a_second_set_up_does_nothing_until_something_changed(project: Project) -> None:
    first = project.set_up()
    assert "Creating .venv" in first
    assert "about " in first.split("Installing the project")[1]
    assert (project.root / ".venv/bin/tgi-orchestrator").exists()
    assert project.set_up() == ""

    pyproject = project.root / "pyproject.toml"
    pyproject.write_text(PYPROJECT + "\n[tool.ruff]\nline-length = 110\n")
    assert project.set_up() == ""
    pyproject.write_text(PYPROJECT.replace('version = "0"', 'version = "1"'))
    again = project.set_up()
    assert "Installing the project" in again
    assert "Creating .venv" not in again

    moved = project.root.with_name("moved")
    project.root.rename(moved)
    project.root = moved
    assert "Creating .venv" in project.set_up()


def test_an_interrupted_set_up_leaves_no_process_and_is_done_again(project: Project, tmp_path: Path) -> None:
    marker = tmp_path / "building"
    os.mkfifo(marker)
    running = subprocess.Popen(
        project.command(), env={**project.env, "HANG": str(marker)}, stderr=subprocess.PIPE, text=True
    )
    builder = psutil.Process(int(marker.read_text()))
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert said.endswith("Interrupted; the same command starts the set-up again.\n")
    assert not project.stamp.exists()
    gone, alive = psutil.wait_procs([builder], timeout=10)
    assert (gone, alive) == ([builder], [])

    assert "Installing the project" in project.set_up()
    assert project.stamp.exists()


def test_a_broken_environment_is_made_anew(project: Project) -> None:
    (project.root / ".venv" / "bin").mkdir(parents=True)
    (project.root / ".venv" / "bin" / "python").symlink_to("/nowhere/python3")
    assert "Creating .venv" in project.set_up()
    assert project.set_up() == ""


def test_a_failing_install_is_reported_and_leaves_no_stamp(project: Project) -> None:
    (project.root / "pyproject.toml").write_text(
        PYPROJECT.replace("dependencies = []", 'dependencies = ["x"]')
    )
    (project.root / "backend.py").write_text("raise SystemExit('no backend')")
    done = subprocess.run(project.command(), env=project.env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr.endswith("pip could not install the dependencies; what failed stands above.\n")
    assert not project.stamp.exists()
