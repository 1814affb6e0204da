"""Puts a sidecar process together: files of its shard on one side, HTTP and pulls on the other."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from tgi_patches.bridge.arena_id import arena_id
from tgi_patches.bridge.files import make_directories
from tgi_patches.contract import EPOCH_VARIABLE, KEY_FILE_VARIABLE, ContractError, ShardSpec, StatusReply
from tgi_patches.key import check_keyed, key_from, open_addresses
from tgi_patches.sidecar import log
from tgi_patches.sidecar.app import App, create_app
from tgi_patches.sidecar.core import Sidecar
from tgi_patches.sidecar.describe import Reach, Reports, limits_of, status_of
from tgi_patches.sidecar.heartbeat import beating, begin, heartbeat_path
from tgi_patches.sidecar.mail import listening
from tgi_patches.sidecar.pulls import AwaitedPuller, offering
from tgi_patches.sidecar.records import Records
from tgi_patches.sidecar.router import Router

STOP_GRACE_S = 1
"""For answers under way when the sidecar is told to end."""
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class Order:
    """What a sidecar was started for."""

    spec: ShardSpec
    epoch: int
    key: bytes
    router_port: int

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Order:
        """Raises ContractError, in one sentence that never holds the key."""
        spec = ShardSpec.from_env(env)
        if not spec.arena_dir:
            raise ContractError(
                "A sidecar needs the folder of its shard's arenas: the spec has no arena_dir."
            )
        if not env.get(EPOCH_VARIABLE, "").isdecimal():
            raise ContractError(f"The variable {EPOCH_VARIABLE} must hold the epoch of the shard's server.")
        port = env.get("PORT", "") or str(spec.port)
        if not port.isdecimal():
            raise ContractError(f"The variable PORT must be a number, not {port!r}.")
        key = key_from(env)
        check_keyed(key, open_addresses(spec), f"name the deployment's key in {KEY_FILE_VARIABLE}")
        return cls(spec, int(env[EPOCH_VARIABLE]), key, int(port))


async def serve(order: Order, listener: socket.socket) -> None:
    """Until it is told to end by SIGTERM or SIGINT.

    Raises ArenaError, ContractError or OSError, each a sentence, for what cannot work.
    """
    spec = order.spec
    beat = heartbeat_path(Path(spec.arena_dir), spec.deployment, spec.shard)
    make_directories(beat)
    router = Router(_EVERY_ADDRESS.get(spec.host, spec.host), order.router_port, limits_of(spec))
    async with _assembled(order, router) as (app, pull_port):
        port = listener.getsockname()[1]
        begin(beat, {"pid": os.getpid(), "epoch": order.epoch, "port": port, "pull_port": pull_port})
        log.event("sidecar_ready", shard=spec.shard, port=port, pull_port=pull_port)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(beating(beat)), tasks.create_task(router.watch())]
            await _http(app, listener)
            for task in background:
                task.cancel()


@asynccontextmanager
async def _assembled(order: Order, router: Router) -> AsyncIterator[tuple[App, int]]:
    """(what answers, the port at which other hosts pull)."""
    spec, epoch = order.spec, order.epoch
    reports = Reports(spec, epoch)
    here = arena_id(Path(spec.arena_dir))
    async with offering(spec, epoch, reports.fingerprint, order.key) as pull_port:
        reach = Reach(here, pull_port, spec.pull_host, pulls=spec.pulled_bytes > 0)

        def describe() -> StatusReply:
            return status_of(spec, epoch, reports(), router.view, reach)

        def unhealthy() -> str:
            return describe().note or router.view.fault

        with (
            closing(Records(spec, epoch, reports.fingerprint)) as records,
            closing(AwaitedPuller(spec, reports.fingerprint, order.key)) as puller,
        ):
            sidecar = Sidecar(describe, records, keep_s=spec.record_ttl_s)
            with listening(spec, sidecar, records):
                yield create_app(sidecar, puller, unhealthy), pull_port


async def _http(app: App, listener: socket.socket) -> None:
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_GRACE_S,
    )
    http = uvicorn.Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        # For a signal that comes before uvicorn listens for it, and when uvicorn raises it again at its end.
        signal.signal(number, lambda *_: setattr(http, "should_exit", True))
    await http.serve(sockets=[listener])
