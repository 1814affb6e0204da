"""Puts a shard of several ranks together; this process is rank 0."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from orchestrator.embedded.shard.assemble import Status, fingerprint_of, make_server, warm_up
from orchestrator.embedded.shard.loading import Loaded
from orchestrator.embedded.shard.server import ShardServer
from orchestrator.errors import ConfigError
from tgi_patches.bridge import ArenaError
from tgi_patches.contract import Fingerprint, ShardSpec, new_epoch
from tgi_patches.sidecar import Sidecar

from .cores import threads_of
from .followers import Followers, Launch, launched, started
from .messages import Join
from .model import RankedModel, serve
from .part import JOIN_DEADLINE_S, Part, load_whole, make_part
from .records import Exports, LeadBridge

LOAD_DEADLINE_S = 600.0
"""From rank 0's own weights to the last rank's."""


@asynccontextmanager
async def opened(spec: ShardSpec, launch: Launch = launched) -> AsyncIterator[ShardServer]:
    """The shard of `spec`, warmed up; its processes are gone after the block.

    ConfigError in one sentence for what cannot work, ShardError for a rank that ended.
    """
    epoch = new_epoch()
    threads = threads_of(len(spec.cpus) or len(os.sched_getaffinity(0)), spec.tensor_parallel)
    async with AsyncExitStack() as stack:
        followers = await stack.enter_async_context(started(spec, epoch, threads, launch))
        loaded = load_whole(spec)
        followers.check(await followers.replies(LOAD_DEADLINE_S))
        fingerprint = fingerprint_of(spec, loaded)
        bridge = _lead_bridge(spec, epoch, fingerprint)
        own = await _met(spec, loaded, bridge, followers, threads)
        stack.callback(own.close)
        stack.push_async_callback(followers.stop)  # before `own` is closed, which waits for its last step
        status = Status(spec, epoch, fingerprint, loaded, bridge, own.pool)
        sidecar = Sidecar(status, bridge, keep_s=spec.record_ttl_s)
        exports = Exports(bridge, sidecar)
        status.relay, status.exports = own.relay, exports.counts
        model = RankedModel(own, followers, exports, spec.tensor_parallel)
        patterns = own.model.patterns
        server = make_server(spec, model, own.pool, loaded.tokenizer, status, sidecar, patterns)
        server.run = lambda: serve(status.loop, followers)
        await warm_up(server, spec)
        yield server


async def _met(
    spec: ShardSpec, loaded: Loaded, bridge: LeadBridge, followers: Followers, threads: int
) -> Part:
    """Rank 0's part, once all ranks are connected."""
    with tempfile.TemporaryDirectory(prefix="tgi-orchestrator-") as folder:
        meeting = str(Path(folder, "ranks"))
        followers.send(Join(meeting))
        own = make_part(spec, loaded, bridge, 0, meeting, threads)
        followers.check(await followers.replies(JOIN_DEADLINE_S))
    return own


def _lead_bridge(spec: ShardSpec, epoch: int, fingerprint: Fingerprint) -> LeadBridge:
    try:
        return LeadBridge(spec, epoch, fingerprint)
    except ArenaError as error:
        raise ConfigError(str(error)) from error
