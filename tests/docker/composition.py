"""One `docker compose up` of this repository's files, under a name of its own, with the tiny model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT, CompletedProcess, run
from typing import Any

import pytest
import yaml

from .engine import docker

COMPOSE = Path(__file__).parents[2] / "compose"
UP_LIMIT_S = 240.0
PROJECT_LABEL = "com.docker.compose.project"


def compose_command() -> list[str]:
    """The plugin, or Debian's own program; skips where there is neither."""
    if shutil.which("docker") and run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    if found := shutil.which("docker-compose"):
        return [found]
    pytest.skip("There is neither `docker compose` nor docker-compose.")


@dataclass(frozen=True)
class Composition:
    """`file` is one of COMPOSE, or a changed copy; `override` is laid over it where there is one."""

    project: str
    variables: Mapping[str, str]
    folder: Path
    """For the override."""
    file: Path = COMPOSE / "compose.yaml"
    override: Mapping[str, Any] | None = None

    def __call__(self, *arguments: str, limit_s: float = UP_LIMIT_S) -> str:
        """What it said on stdout; a failure shows the end of all that it said."""
        done = self.tried(*arguments, limit_s=limit_s)
        assert done.returncode == 0, f"{arguments}: {done.stderr[-3000:]}"
        return done.stdout

    def tried(self, *arguments: str, limit_s: float = UP_LIMIT_S) -> CompletedProcess[str]:
        files = ["--file", str(self.file)]
        if self.override is not None:
            path = self.folder / "override.yaml"
            path.write_text(json.dumps(self.override))
            files += ["--file", str(path)]
        # Neither this shell's variables nor a user's .env count.
        hidden = ("ORCHESTRATOR_", "COMPOSE_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        places = ["--project-directory", str(COMPOSE), "--project-name", self.project]
        empty = self.folder / "no.env"
        empty.touch()
        return run(
            [*compose_command(), *files, *places, "--env-file", str(empty), *arguments],
            capture_output=True,
            text=True,
            env=kept | dict(self.variables),
            timeout=limit_s,
        )

    def config(self) -> Any:
        """The file with its variables filled in, as compose understands it."""
        return yaml.safe_load(self("config"))

    def container(self, service: str) -> str:
        """Its id."""
        (found,) = self("ps", "--quiet", service).split()
        return found

    def left(self) -> list[str]:
        """Whatever the engine still has of it."""
        label = f"--filter=label={PROJECT_LABEL}={self.project}"
        listings: Sequence[Sequence[str]] = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        return [one for listing in listings for one in docker(*listing, "--quiet", label).split()]


def curl(url: str, body: Mapping[str, Any]) -> tuple[int, dict[str, str], Any]:
    """(status, headers in lower case, JSON) of a POST, as a user sends it."""
    line = [
        "curl",
        "--silent",
        "--show-error",
        "--include",
        "--max-time",
        "60",
        "--json",
        json.dumps(body),
        url,
    ]
    done = run(line, stdout=PIPE, stderr=STDOUT, text=True, timeout=90)
    assert done.returncode == 0, done.stdout
    head, _, said = done.stdout.replace("\r\n", "\n").rpartition("\n\n")
    first, *lines = head.split("\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, json.loads(said)
