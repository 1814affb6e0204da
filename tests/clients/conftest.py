"""One deployment for all clients: two embedded shards, a gateway that asks for keys, a small body limit."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import CommandLine

from .curl import Curl, curl

ROOT = Path(__file__).parents[2]
CLIENTS = ("curl", "huggingface_hub", "openai", "text_generation")
PAYLOAD_BYTES = 20_000
KEY = "everyday-5f2b7c1e9a"
INSTALL_LIMIT_S = 240


@dataclass(frozen=True, slots=True)
class Deployment:
    url: str
    model: str
    """Its own name of the model that it serves."""
    key: str = KEY

    @staticmethod
    def limited(client: str) -> str:
        """A key with which `client` may ask once a minute."""
        return f"limited-{client}-8c03d4"


def _keys_file(folder: Path) -> Path:
    limited = {
        f"limited-{client}": {"key": Deployment.limited(client), "requests_per_minute": 1}
        for client in CLIENTS
    }
    path = folder / "keys.yaml"
    path.write_text(json.dumps({"keys": {"everyday": KEY, **limited}}))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="session")
def deployment(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Started through the command line; whatever is left of it is ended after the last test."""
    unique = uuid.uuid4().hex[:8]
    arena = Path("/dev/shm") / f"tgio-test-{unique}"
    state_home = tmp_path_factory.mktemp("c")
    cli = CommandLine(tiny_model, state_home, arena, f"clients-{unique}")
    cli.env["ORCHESTRATOR_GATEWAY__KEYS_FILE"] = str(_keys_file(state_home))
    cli.env["ORCHESTRATOR_LIMITS__PAYLOAD_BYTES"] = str(PAYLOAD_BYTES)
    try:
        facts = cli.json("up", "--detach")
        yield Deployment(facts["url"], facts["model"])
        assert cli.run("down").returncode == 0
        assert cli.left_over() == []
    finally:
        mine = [one for one in psutil.process_iter(["environ"]) if _belongs(one, cli.name)]
        for process in mine:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(mine, timeout=10)
        shutil.rmtree(arena, ignore_errors=True)


def _belongs(process: psutil.Process, name: str) -> bool:
    return (process.info["environ"] or {}).get("ORCHESTRATOR_DEPLOYMENT") == name


@pytest.fixture(scope="session")
def ask(deployment: Deployment) -> Curl:
    """curl with the everyday key; what it gets is what every other client must get."""
    return curl(deployment.url, deployment.key)


@pytest.fixture(scope="session")
def text_generation_python() -> Path:
    """An interpreter with TGI's own client, which cannot stand beside transformers 5.

    Its environment stays in the cache, by the versions that were asked for.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["project"]["optional-dependencies"]["clients"]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    named = hashlib.sha256(json.dumps([sys.base_prefix, version, wanted]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "tgi-orchestrator" / "test-clients" / named
    if not folder.exists():
        _install(wanted, folder)
    return folder / "bin" / "python"


def _install(wanted: list[str], folder: Path) -> None:
    making = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        subprocess.run([sys.executable, "-m", "venv", making], check=True, timeout=INSTALL_LIMIT_S)
        pip = [making / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
        if done.returncode:
            pytest.skip(f"{wanted[0]} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
