"""A shard process: `python -m orchestrator.embedded.shard`, configured by its spec in the environment."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import structlog
import uvicorn

from orchestrator.errors import ConfigError, OrchestratorError, ShardError
from tgi_patches.contract import ContractError, ShardSpec

from .process import die_with_parent, log_to_stderr, pin
from .ranks.cores import cores_of

if TYPE_CHECKING:
    from .server import ShardServer

_SHUTDOWN_GRACE_S = 1

log = structlog.get_logger(__name__)


def main() -> int:
    log_to_stderr()
    die_with_parent(signal.SIGTERM)
    try:
        spec = ShardSpec.from_env(os.environ)
        if spec.cpus:
            # TGI's ranks are all children of this process, and get what it has.
            pin(cores_of(spec.cpus, 1 if spec.tgi_python else spec.tensor_parallel, rank=0))
        listener = _listen(spec)
        return asyncio.run(_serve(spec, listener))
    except (OrchestratorError, ContractError) as error:
        sys.stderr.write(f"{error}\n")
        return getattr(error, "exit_code", ConfigError.exit_code)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 0


async def _serve(spec: ShardSpec, listener: socket.socket) -> int:
    from orchestrator.embedded.pulls import pulling

    from .server import create_app

    async with _opened(spec) as server, pulling(spec, server, os.environ):
        config = uvicorn.Config(
            create_app(server),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
            lifespan="on",
        )
        http = uvicorn.Server(config)
        # For a signal that comes before uvicorn listens for it, and when uvicorn raises it again at its end.
        signal.signal(signal.SIGTERM, lambda *_: setattr(http, "should_exit", True))
        log.info("shard_ready", shard=spec.shard, role=str(spec.role), dtype=spec.dtype)
        await http.serve(sockets=[listener])
        _check(server)
    return 0


def _opened(spec: ShardSpec) -> AbstractAsyncContextManager[ShardServer]:
    """The engine that the spec asks for, behind the same HTTP surface."""
    # Imported after pinning: torch sizes its thread pool when it is imported.
    if spec.tgi_python:
        try:
            from orchestrator.embedded.tgi.assemble import opened as opened_tgi
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"Driving TGI's server needs the package {error.name}: install tgi-orchestrator[shard,tgi]."
            ) from error
        return opened_tgi(spec)
    if spec.tensor_parallel > 1:
        from .ranks.assemble import opened as opened_ranks

        return opened_ranks(spec)
    from .assemble import opened

    return opened(spec)


def _check(server: ShardServer) -> None:
    """ShardError for a shard that did not end because it was told to."""
    failure = server.failure
    if isinstance(failure, OrchestratorError):
        raise ShardError(str(failure)) from failure
    if failure is not None:
        raise ShardError(f"The shard's loop ended: {failure!r}") from failure


def _listen(spec: ShardSpec) -> socket.socket:
    # the protocol is named because asyncio sets TCP_NODELAY only where it is
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((spec.host, spec.port))
    except OSError as error:
        raise ShardError(
            f"Shard {spec.shard} cannot listen on {spec.host}:{spec.port}: {error.strerror}."
        ) from None
    return listener


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # all is closed; to take the interpreter down with torch in it costs another second
