"""What is to be known of this machine: asks, and judges nothing.  All of it blocks for seconds at most."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import redis

from orchestrator.bootstrap import answers
from orchestrator.config import Loaded
from orchestrator.core.topology import Topology
from orchestrator.deployment.doctor.host import HubFacts
from orchestrator.deployment.plan import make_plan
from orchestrator.embedded import package
from orchestrator.embedded.redis import find_redis_server
from orchestrator.embedded.weights import ResolvedModel, is_folder, pick_dtype
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.settings import DEFAULT_MODEL, Settings, host_and_port
from orchestrator.topology.file import read_topology
from orchestrator.topology.nvml import discover

HUB_WITHIN_S = 3.0
REDIS_WITHIN_S = 3.0
HUB = "https://huggingface.co"
CHAR_DEVICES = Path("/dev/char")
NVIDIA_MAJOR = 195
"""Of the driver's character devices."""
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})


def topology_of(settings: Settings) -> tuple[Topology | None, str]:
    """The GPUs, or why they cannot be told."""
    path = settings.docker.topology
    try:
        return (read_topology(path) if path is not None else discover()), ""
    except OrchestratorError as error:
        return None, str(error)


def char_links(folder: Path = CHAR_DEVICES) -> bool | None:
    """Whether NVIDIA's devices have links there; None where nothing can be seen."""
    try:
        return any(path.name.startswith(f"{NVIDIA_MAJOR}:") for path in folder.iterdir())
    except OSError:
        return None


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that new pages can have without swapping."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def disk_bytes(root: str) -> int | None:
    """Free where the engine keeps images; None where that is not on this machine."""
    try:
        room = os.statvfs(root)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize


def listen_fault(address: str) -> str:
    """Why nobody can listen there; empty where one can."""
    host, port = host_and_port(address)
    try:
        family, _, _, _, place = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def redis_facts(url: str) -> tuple[str, str]:
    """(version, fault) of a Redis; no password in either."""
    try:
        with redis.Redis.from_url(
            url, socket_timeout=REDIS_WITHIN_S, socket_connect_timeout=REDIS_WITHIN_S
        ) as client:
            return str(client.info("server")["redis_version"]), ""
    except (redis.RedisError, OSError, ValueError, KeyError) as error:
        return "", " ".join(str(error).split()).rstrip(".") or type(error).__name__


def own_redis_facts() -> tuple[str, str, str]:
    """(binary, version, fault) of the server that `up` would start."""
    try:
        binary = find_redis_server()
        asked = subprocess.run(
            [str(binary), "--version"], capture_output=True, text=True, timeout=REDIS_WITHIN_S
        )
    except (ConfigError, OSError, subprocess.TimeoutExpired) as error:
        return "", "", str(error)
    version = next((part[2:] for part in asked.stdout.split() if part.startswith("v=")), "")
    return str(binary), version, ""


# --- the model ----------------------------------------------------------------------------------


def model_folder(settings: Settings, env: Mapping[str, str]) -> Path | None:
    """Where its config.json is already; nothing is fetched."""
    wanted = settings.model
    if is_folder(wanted.id):
        return Path(wanted.id).expanduser()
    if wanted.id == DEFAULT_MODEL and wanted.revision is None and (ready := package.converted(wanted.cache)):
        return ready
    found = [path.parent for path in _snapshots(settings, env) if wanted.revision in (None, path.parent.name)]
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def _snapshots(settings: Settings, env: Mapping[str, str]) -> Iterator[Path]:
    """Of the hub's own cache, and of the one that containers share."""
    home = Path(env.get("HF_HOME") or Path(env.get("HOME", "/")) / ".cache" / "huggingface")
    name = "models--" + settings.model.id.replace("/", "--")
    for cache in (Path(env.get("HF_HUB_CACHE") or home / "hub").expanduser(), settings.model.cache):
        yield from (cache / name).glob("snapshots/*/config.json")


def arenas_bytes(loaded: Loaded, folder: Path) -> int:
    """What the arenas of these settings need.  ConfigError for what cannot work."""
    settings = loaded.settings
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"The file {folder / 'config.json'} cannot be read: {error}.") from None
    model = ResolvedModel(folder, settings.model.id, "", "")
    dtype = pick_dtype(settings.model.dtype)
    cores = sorted(os.sched_getaffinity(0))
    return make_plan(loaded, model, config, dtype, cores).arena_bytes


def hub_facts(settings: Settings, env: Mapping[str, str], *, cached: bool) -> HubFacts:
    wanted = settings.model
    local, offline = is_folder(wanted.id), env.get("HF_HUB_OFFLINE", "").upper() in _TRUE
    endpoint = (env.get("HF_ENDPOINT") or HUB).rstrip("/")
    asked = not local and not offline
    token = wanted.token_file
    fault, open_to_all = token_facts(token) if token else ("", False)
    return HubFacts(
        endpoint=endpoint,
        model=wanted.id,
        local=local,
        cached=cached,
        answers=asked and answers(f"{endpoint}/api/models/{wanted.id}", HUB_WITHIN_S),
        offline=offline,
        packaged=wanted.id == DEFAULT_MODEL and wanted.revision is None,
        token_file=str(token or ""),
        token_fault=fault,
        token_open=open_to_all,
    )


def token_facts(path: Path) -> tuple[str, bool]:
    """(why it cannot be read, whether others may read it); nothing of the token itself."""
    try:
        if not path.read_text().strip():
            return f"The token file {path} is empty.", False
        return "", bool(stat.S_IMODE(path.stat().st_mode) & 0o077)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        return f"The token file {path} cannot be read: {reason}.", False
