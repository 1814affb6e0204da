"""`init`: writes a first settings file, for this machine or from a stock TGI container that runs here.

It reads from the engine and starts, stops and changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import typer
from pydantic import ValidationError

from orchestrator.config import load_settings
from orchestrator.core.moving_in import Here, Moved, moved
from orchestrator.core.moving_notes import COMMAND
from orchestrator.core.settings_text import settings_text
from orchestrator.core.stock import Stock, stock_of
from orchestrator.errors import ConfigError, Unreachable
from orchestrator.settings import DEFAULT_MODEL, Settings
from orchestrator.shards.docker.engine import Engine
from orchestrator.shards.docker.stock import read_container
from orchestrator.topology.file import read_topology
from orchestrator.topology.nvml import discover

ASK_TIMEOUT_S = 3.0
FIRST_PORT = 3000
PORTS_TRIED = 100
NOTE_COLUMNS = 100


@dataclass(frozen=True, slots=True)
class Wish:
    """What the flags of `init` say."""

    container: str | None
    output: Path
    force: bool
    print_only: bool


def run_init(wish: Wish) -> None:
    """ConfigError for a file that is there, and for a container that cannot be taken over."""
    if wish.output.exists() and not (wish.force or wish.print_only):
        raise ConfigError(f"{wish.output} exists: name another file with --output, or give --force.")
    settings = load_settings(None, {}, os.environ).settings.docker
    gpus = gpus_here(settings.topology)
    stock: Stock | None = None
    if wish.container is None:
        out = for_this_machine(gpus)
        head = "Settings of tgi-orchestrator: docs/configuration.md has every key."
    else:
        stock, info = asyncio.run(_looked_at(wish.container, settings.host))
        out = moved(stock, Here(port=free_port(_after(stock)), gpus=gpus, info=info))
        head = f"Written by `tgi-orchestrator init` from the container {stock.name} ({stock.image})."
    check(out)
    text = settings_text(out.values, out.comments, head=[head], notes=out.notes)
    if wish.print_only:
        typer.echo(text, nl=False)
        return
    write(wish.output, text, force=wish.force)
    typer.echo(f"Wrote {wish.output}.")
    for line in [*_listed(out.notes), *_next(wish.output, stock)]:
        typer.echo(line)


def check(out: Moved) -> None:
    """ConfigError, in a sentence, where the settings would not be accepted."""
    tree: dict[str, Any] = {}
    for key, value in out.values.items():
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    try:
        Settings.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"The container cannot be taken over as it is: {where}: {said}.") from None


def for_this_machine(gpus: tuple[str, ...] | None) -> Moved:
    """The least that a file needs, with GPUs in containers and without them as processes."""
    out = Moved()
    out.put("version", 1)
    out.put("deployment", "default", "Several can run on one machine, each with a name of its own.")
    out.put("model.id", DEFAULT_MODEL, "A hub id, or a local folder with safetensors.")
    out.put("model.dtype", "auto", "auto, float32, bfloat16 or int8.")
    if gpus:
        out.put("launcher", "docker", f"Containers, since this machine has {len(gpus)} of NVIDIA's GPUs.")
    else:
        out.put("launcher", "process", "Processes on the CPU; with `docker` they are containers.")
    out.put("shards.prefill.count", 1)
    out.put("shards.decode.count", 1)
    out.comments["shards"] = "prefill computes prompts, decode writes answers; mixed does both."
    out.put("gateway.listen", f"127.0.0.1:{free_port(FIRST_PORT)}", "For this machine alone.")
    return out


# --- the container ------------------------------------------------------------------------------


async def _looked_at(name: str, host: str) -> tuple[Stock, Mapping[str, Any] | None]:
    engine = await Engine.connect(host)
    try:
        inspected, image_env = await read_container(engine, name)
    finally:
        await engine.aclose()
    stock = stock_of(inspected, image_env)
    return stock, await _info(stock)


async def _info(stock: Stock) -> Mapping[str, Any] | None:
    """What the container says of itself; None where it does not run or does not answer."""
    for url in urls_of(stock) if stock.running else ():
        with contextlib.suppress(httpx.HTTPError, ValueError):
            async with httpx.AsyncClient(timeout=ASK_TIMEOUT_S, trust_env=False) as client:
                answer = await client.get(f"{url}/info")
            if answer.status_code == httpx.codes.OK and isinstance(told := answer.json(), dict):
                return told
    return None


def urls_of(stock: Stock) -> list[str]:
    """Where the container is reached from this host, the published port first."""
    urls = []
    if stock.published is not None:
        urls.append(f"http://{stock.published.host or '127.0.0.1'}:{stock.published.port}")
    if stock.address:
        urls.append(f"http://{stock.address}")
    return urls


# --- this machine -------------------------------------------------------------------------------


def gpus_here(topology: Path | None = None) -> tuple[str, ...] | None:
    """UUIDs by index, by `docker.topology` where that is given; None where nothing can be told."""
    try:
        found = read_topology(topology) if topology else discover()
    except Unreachable:
        return None
    if found is None:
        return None
    return tuple(gpu.uuid for gpu in sorted(found.gpus, key=lambda gpu: gpu.index))


def _after(stock: Stock) -> int:
    return stock.published.port + 1 if stock.published else FIRST_PORT


def free_port(first: int) -> int:
    """The next one from `first` on that nobody listens at; `first` where none is free."""
    for port in range(first, min(first + PORTS_TRIED, 65_536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return first


# --- what is written and said -------------------------------------------------------------------


def write(path: Path, text: str, *, force: bool) -> None:
    """ConfigError where it cannot be; without `force` never over a file that came meanwhile."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


def _listed(notes: list[str]) -> list[str]:
    lines = []
    for note in notes:
        if note.startswith(COMMAND):
            lines.append(f"    {note.strip()}")
        else:
            lines += textwrap.wrap(note, NOTE_COLUMNS, initial_indent="- ", subsequent_indent="  ")
    return lines


def _next(path: Path, stock: Stock | None) -> list[str]:
    urls = urls_of(stock) if stock else []
    lines = [
        "Next:",
        f"  tgi-orchestrator doctor --config {path}",
        f"  tgi-orchestrator up --config {path}",
    ]
    if stock is not None:
        lines.append(f"  tgi-orchestrator verify --config {path} --against {urls[0] if urls else 'URL'}")
    return lines
