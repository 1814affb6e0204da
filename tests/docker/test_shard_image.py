"""The shard image, built and run by a Docker daemon on this machine, with a stand-in for TGI's launcher.

TGI_ORCHESTRATOR_TEST_BASE_IMAGE names an image that is laid out like TGI's: Python 3.11 in /usr/src/.venv.
TGI_ORCHESTRATOR_TEST_BUILD holds more arguments for `docker build`: a package index of one's own, a network.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT, run

import pytest

from tests.integration.container.conftest import until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
BASE = os.environ.get("TGI_ORCHESTRATOR_TEST_BASE_IMAGE", "")
SPEC = {"deployment": "demo", "shard": "p0", "arena_dir": "/arenas", "arena_bytes": 1 << 20, "port": 3100}
SHARD = (
    *("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
    "--tmpfs=/arenas:uid=10001,gid=10001,mode=2770",
    f"--env=ORCHESTRATOR_SHARD_SPEC={json.dumps(SPEC | {'sidecar_port': 3101})}",
)
FLAG = "--prefill-specialization"
OVERLAY = "/opt/tgi-orchestrator/overlay"
PYTHON = "/opt/tgi-orchestrator/sidecar/bin/python"
ASK = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:3101/kv/status').read().decode())"
LAUNCHER = """#!/bin/sh
trap 'echo stopped; exit 7' TERM
echo pid $$ user $(id -u) arguments "$@"
echo server $(command -v text-generation-server) path $PYTHONPATH key $ORCHESTRATOR_DEPLOYMENT_KEY.
grep CapEff /proc/self/status
(sleep 0.1 & sleep 600 &)
echo started
sleep 600 & wait
"""


def docker(*arguments: str, limit_s: float = 60) -> str:
    """What it said."""
    done = run(["docker", *arguments], stdout=PIPE, stderr=STDOUT, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    if not BASE:
        pytest.skip("TGI_ORCHESTRATOR_TEST_BASE_IMAGE names no image to build on.")
    if shutil.which("docker") is None or run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("No Docker daemon answers.")
    name = f"tgi-orchestrator-test:{uuid.uuid4().hex[:8]}"
    more = shlex.split(os.environ.get("TGI_ORCHESTRATOR_TEST_BUILD", ""))
    options = (*more, f"--build-arg=BASE_IMAGE={BASE}", f"--file={ROOT / 'tgi_patches' / 'Dockerfile'}")
    docker("build", *options, "--tag", name, str(ROOT), limit_s=800)
    yield name
    docker("image", "rm", name)


@pytest.fixture
def start(image: str, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts a container; its name, once the launcher runs."""
    launcher = tmp_path / "text-generation-launcher"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    name = f"tgi-orchestrator-test-{uuid.uuid4().hex[:8]}"

    def started(*options: str, arguments: tuple[str, ...]) -> str:
        volume = f"{launcher}:/usr/local/bin/{launcher.name}:ro"
        docker("run", "--detach", "--name", name, "--volume", volume, *options, image, *arguments)
        until(lambda: "started" in docker("logs", name), "the launcher")
        return name

    yield started
    docker("rm", "--force", name)


def test_a_shard_from_start_to_stop_needs_no_privilege(start: Callable[..., str]) -> None:
    key = "--env=ORCHESTRATOR_DEPLOYMENT_KEY=0123456789abcdef"
    name = start(*SHARD, key, arguments=(FLAG, "--model-id", "m"))
    until(lambda: '"sidecar_ready"' in docker("logs", name), "the sidecar")
    status = json.loads(docker("exec", name, PYTHON, "-I", "-c", ASK))
    assert (status["shard"], status["role"], status["hooked"]) == ("p0", "prefill", False)
    docker("stop", "--time", "20", name)
    said = docker("logs", name)
    assert "user 10001 arguments --model-id m\n" in said
    server = f"{OVERLAY}/tgi_patches/entrypoint/bin/text-generation-server"
    assert f"server {server} path {OVERLAY} key .\n" in said
    assert "CapEff:\t0000000000000000\n" in said
    assert "stopped\n" in said
    assert docker("inspect", "--format", "{{.State.ExitCode}}", name) == "7\n"


def test_orphans_are_reaped_and_a_killed_launcher_is_128_and_its_signal(start: Callable[..., str]) -> None:
    name = start(*SHARD, arguments=(FLAG, "--model-id", "m"))
    launcher = docker("logs", name).partition("pid ")[2].split()[0]
    until(lambda: not re.search("sleep 0.1|defunct", docker("top", name)), "the end of an orphan")
    docker("exec", name, "sh", "-c", f"kill -KILL {launcher}")
    assert docker("wait", name) == "137\n"


def test_without_flag_and_spec_the_first_process_is_the_launcher(start: Callable[..., str]) -> None:
    name = start(arguments=("--model-id", "m"))
    assert "pid 1 user 10001 arguments --model-id m\n" in docker("logs", name)
    docker("stop", "--time", "20", name)
    assert docker("inspect", "--format", "{{.State.ExitCode}}", name) == "7\n"
