"""The gateways that are measured: how each is started, and what it is started beside."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from orchestrator.bench.gateway.peers import nginx, vllm_router
from orchestrator.bench.gateway.peers.missing import Missing
from orchestrator.bench.gateway.shards import url_of
from orchestrator.errors import ConfigError

OURS = "ours"
OURS_REDIS = "ours-redis"
AIOHTTP = "aiohttp"
FASTAPI_HTTPX = "fastapi"
NGINX = "nginx"
VLLM_ROUTER = "vllm-router"
_PEERS = "orchestrator.bench.gateway.peers"


@dataclass(frozen=True, slots=True)
class Around:
    """What a gateway is started with."""

    port: int
    prefill_port: int
    decode_port: int
    folder: Path
    """Of its own, for files that it needs."""
    spare_port: int = 0
    redis_url: str = ""


@dataclass(frozen=True, slots=True)
class Kind:
    """One gateway.  `versions` and `command` raise Missing where it is not installed."""

    name: str
    title: str
    calls: str
    """What it asks the shards for one request."""
    versions: Callable[[], str]
    command: Callable[[Around], Sequence[str]]
    needs_redis: bool = False


def _ours(around: Around) -> list[str]:
    command = [sys.executable, "-m", "orchestrator.bench.gateway.ours", "--port", str(around.port)]
    command += ["--prefill-port", str(around.prefill_port), "--decode-port", str(around.decode_port)]
    return [*command, "--redis", around.redis_url] if around.redis_url else command


def _python_peer(module: str) -> Callable[[Around], list[str]]:
    def command(around: Around) -> list[str]:
        shards = ("--prefill", url_of(around.prefill_port), "--decode", url_of(around.decode_port))
        return [sys.executable, "-m", f"{_PEERS}.{module}", "--port", str(around.port), *shards]

    return command


def _nginx(around: Around) -> list[str]:
    return nginx.command(around.port, around.decode_port, around.folder)


def _vllm_router(around: Around) -> list[str]:
    shards = (url_of(around.prefill_port), url_of(around.decode_port))
    return vllm_router.command(around.port, around.spare_port, *shards)


def _packages(*names: str) -> Callable[[], str]:
    def versions() -> str:
        absent = [name for name in names if importlib.util.find_spec(name) is None]
        if absent:
            raise Missing(f"`pip install {' '.join(absent)}`")
        return ", ".join(f"{name} {version(name)}" for name in names)

    return versions


def _our_version() -> str:
    packages = _packages("uvicorn", "uvloop", "httptools")()
    return f"tgi-orchestrator {version('tgi-orchestrator')}, {packages}"


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(OURS, "ours, queue in memory", "put, wait, get", _our_version, _ours),
        Kind(OURS_REDIS, "ours, Redis", "put, wait, get", _our_version, _ours, needs_redis=True),
        Kind(
            AIOHTTP,
            "raw ASGI + aiohttp",
            "put, get",
            _packages("aiohttp", "uvicorn", "uvloop", "httptools"),
            _python_peer("asgi_aiohttp"),
        ),
        Kind(
            FASTAPI_HTTPX,
            "FastAPI + httpx",
            "put, get",
            _packages("fastapi", "httpx", "uvicorn", "uvloop", "httptools"),
            _python_peer("fastapi_httpx"),
        ),
        Kind(NGINX, "nginx", "get", nginx.version, _nginx),
        Kind(VLLM_ROUTER, "vllm-router", "put, get", vllm_router.version, _vllm_router),
    )
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """Versions of the gateways that run, and how to install the others."""

    versions: Mapping[str, str]
    missing: Mapping[str, str]


def choose(only: Sequence[str]) -> Chosen:
    """All kinds, or those named.  Raises ConfigError for a name that is none."""
    unknown = [name for name in only if name not in KINDS]
    if unknown:
        raise ConfigError(f"There is no gateway {unknown[0]!r}: choose from {', '.join(KINDS)}.")
    versions: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name in [name for name in KINDS if not only or name in only]:
        try:
            versions[name] = KINDS[name].versions()
        except Missing as how:
            missing[name] = str(how)
    return Chosen(versions, missing)
