"""What one rank of a shard holds: its part of the weights, of the KV pool and of the records."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from orchestrator.embedded.shard.assemble import (
    chunk_tokens,
    fingerprint_of,
    load_checked,
    make_pool,
    open_bridge,
)
from orchestrator.embedded.shard.attention import KVPool
from orchestrator.embedded.shard.loading import Loaded
from orchestrator.embedded.shard.model import TransformersModel
from orchestrator.embedded.shard.seam import CachedBatch, Generation
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import ShardSpec
from tgi_patches.relay import Relay

from .group import Group
from .messages import Clear, Command, Decode, Filter, Prefill, Start, Warmup
from .records import Reports
from .split import check_split, split

log = structlog.get_logger(__name__)

JOIN_DEADLINE_S = 20.0
"""All ranks have loaded by then: they only have to connect."""

Stepped = tuple[list[Generation], CachedBatch | None]


@dataclass(frozen=True, slots=True)
class Part:
    """The parts that need closing, the model, and what its relay says."""

    model: TransformersModel
    group: Group
    pool: KVPool
    bridge: ArenaBridge
    relay: Relay
    reports: Reports

    async def run(self, command: Command) -> Stepped:
        """Carry out a verb of the seam."""
        match command:
            case Prefill(batch, cached):
                return await self.model.prefill(batch, cached)
            case Decode(batches):
                return await self.model.decode(list(batches))
            case Filter(batch_id, request_ids):
                return [], await self.model.filter_batch(batch_id, request_ids)
            case Clear(batch_id):
                await self.model.clear_cache(batch_id)
            case Warmup():
                await self.model.warmup()
            case _:
                raise TypeError(f"{type(command).__name__} is no verb of a model")
        return [], None

    def close(self) -> None:
        self.model.close()
        self.group.close()
        self.bridge.close()


def load_whole(spec: ShardSpec) -> Loaded:
    """The model before it is split; ConfigError where it cannot be."""
    loaded = load_checked(spec)
    check_split(loaded, spec.tensor_parallel)
    return loaded


def follower_part(start: Start, loaded: Loaded, meeting: str) -> Part:
    spec = start.spec
    bridge = open_bridge(spec, start.epoch, fingerprint_of(spec, loaded), start.rank)
    return make_part(spec, loaded, bridge, start.rank, meeting, start.threads)


def make_part(
    spec: ShardSpec, loaded: Loaded, bridge: ArenaBridge, rank: int, meeting: str, threads: int
) -> Part:
    """Meets the other ranks, and cuts `loaded` down to what `rank` holds."""
    group = Group(meeting, rank, spec.tensor_parallel, join_deadline_s=JOIN_DEADLINE_S)
    own = split(loaded, rank, spec.tensor_parallel, group.add)
    pool = make_pool(spec, own)
    reports = Reports()
    relay = Relay(
        bridge,
        published=reports.published,
        failed=reports.failed,
        warn=log.bind(rank=rank).warning,
        kv_heads=loaded.kv_heads,
        rank=rank,
        ranks=spec.tensor_parallel,
        agree=group.agree,
    )
    model = TransformersModel(own, pool, relay, threads=threads, chunk_tokens=chunk_tokens(spec))
    return Part(model, group, pool, bridge, relay, reports)
