"""The `docker` command against the engine of the tests, and what a test leaves on it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from subprocess import PIPE, STDOUT, run
from typing import Any

import pytest

from orchestrator.shards.docker.names import DEPLOYMENT_LABEL

COMMAND_LIMIT_S = 60.0


def docker(*arguments: str, limit_s: float = COMMAND_LIMIT_S, env: Mapping[str, str] | None = None) -> str:
    """What it said; a failure shows the end of that."""
    done = run(["docker", *arguments], stdout=PIPE, stderr=STDOUT, text=True, timeout=limit_s, env=env)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout[-2000:]}"
    return done.stdout


def answers(host: str) -> bool:
    """An engine is at `host`, and the command to ask it is installed."""
    if shutil.which("docker") is None:
        return False
    return (
        run(["docker", "-H", host, "version"], capture_output=True, timeout=COMMAND_LIMIT_S).returncode == 0
    )


def has_image(name: str) -> bool:
    return (
        run(["docker", "image", "inspect", name], capture_output=True, timeout=COMMAND_LIMIT_S).returncode
        == 0
    )


def inspected(name: str) -> Any:
    """`docker inspect` of a container, an image, a volume or a network."""
    return json.loads(docker("inspect", name))[0]


def containers_of(deployment: str) -> list[str]:
    """Names, running or not."""
    return _listed("ps", "--all", "--format={{.Names}}", deployment=deployment)


def left_of(deployment: str) -> list[str]:
    """Everything that carries the deployment's label: containers, volumes, networks."""
    volumes = _listed("volume", "ls", "--quiet", deployment=deployment)
    networks = _listed("network", "ls", "--format={{.Name}}", deployment=deployment)
    return [*containers_of(deployment), *volumes, *networks]


def remove_all(deployment: str) -> None:
    """By label, so that a test that failed leaves nothing either."""
    if containers := containers_of(deployment):
        docker("rm", "--force", "--volumes", *containers)
    if networks := _listed("network", "ls", "--quiet", deployment=deployment):
        docker("network", "rm", *networks)
    if volumes := _listed("volume", "ls", "--quiet", deployment=deployment):
        docker("volume", "rm", "--force", *volumes)


def until(true: Callable[[], Any], what: str, limit_s: float = COMMAND_LIMIT_S) -> Any:
    """The first result that is true; a failure that says `what` did not come."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if found := true():
            return found
        time.sleep(0.05)
    pytest.fail(f"this did not come within {limit_s:g} s: {what}")


def _listed(*command: str, deployment: str) -> list[str]:
    return docker(*command, f"--filter=label={DEPLOYMENT_LABEL}={deployment}").split()
