"""A shard's way to other hosts: its own records are offered, others' are fetched.

Both run on the event loop of the shard's HTTP server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from orchestrator.errors import ConfigError, ShardError
from tgi_patches.bridge import ArenaError
from tgi_patches.bridge.arena_id import arena_id
from tgi_patches.contract import ShardSpec, StatusReply
from tgi_patches.key import key_from
from tgi_patches.pull.puller import Puller
from tgi_patches.pull.server import PullServer
from tgi_patches.pull.source import ArenaSource

if TYPE_CHECKING:
    from orchestrator.embedded.shard.server import ShardServer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pulls:
    """What a shard's status says of its links, and who fetches for it."""

    arena_id: str
    pull_port: int = 0
    pull_host: str = ""
    puller: Puller | None = None

    def told(self, status: StatusReply) -> StatusReply:
        """`status` with the links in it."""
        pulls = self.puller is not None
        return replace(
            status,
            arena_id=self.arena_id,
            pull_port=self.pull_port,
            pull_host=self.pull_host,
            pulls=pulls,
        )


@asynccontextmanager
async def pulling(spec: ShardSpec, server: ShardServer, env: Mapping[str, str]) -> AsyncIterator[None]:
    """`server` has its links inside the block.  The key is `env`'s.

    ConfigError for an arena folder or a key that cannot be used, ShardError for an address that is taken.
    """
    status, key = server.sidecar.status(), key_from(env)
    async with AsyncExitStack() as stack:
        pulls = Pulls(_arena_id(spec))
        if spec.pull_listen and status.hooked:
            port = await stack.enter_async_context(_serving(spec, status, key))
            pulls = replace(pulls, pull_port=port, pull_host=spec.pull_host)
        if spec.pulled_bytes and status.hooked:
            puller = _puller(spec, status, key)
            stack.callback(puller.close)
            pulls = replace(pulls, puller=puller)
        server.pulls = pulls
        yield


def _arena_id(spec: ShardSpec) -> str:
    if not spec.arena_dir:
        return ""
    try:
        return arena_id(Path(spec.arena_dir))
    except ArenaError as error:
        raise ConfigError(str(error)) from error


@asynccontextmanager
async def _serving(spec: ShardSpec, status: StatusReply, key: bytes) -> AsyncIterator[int]:
    """Yields the port."""
    source = ArenaSource(
        Path(spec.arena_dir),
        spec.deployment,
        spec.shard,
        status.epoch,
        status.fingerprint,
        status.fingerprint.tensor_parallel,
    )
    host, _, port = spec.pull_listen.rpartition(":")
    async with AsyncExitStack() as stack:
        try:
            bound = PullServer(source, key).serving(host.strip("[]"), int(port))
            port_bound = await stack.enter_async_context(bound)
        except OSError as error:
            raise ShardError(
                f"Shard {spec.shard} cannot offer its records at {spec.pull_listen}: {error.strerror}."
            ) from None
        log.info("pulls_offered", shard=spec.shard, host=host, port=port_bound, keyed=bool(key))
        yield port_bound


def _puller(spec: ShardSpec, status: StatusReply, key: bytes) -> Puller:
    return Puller(
        Path(spec.arena_dir),
        spec.deployment,
        spec.shard,
        status.fingerprint,
        spec.pulled_bytes,
        spec.record_ttl_s,
        key,
    )
