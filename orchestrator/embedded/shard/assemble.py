"""Puts a shard together from its spec."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import structlog
import torch

from orchestrator.api import answers
from orchestrator.errors import ConfigError
from tgi_patches.bridge import ArenaError
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import (
    PROTOCOL_VERSION,
    Fingerprint,
    Limits,
    ShardSpec,
    StatusReply,
    new_epoch,
)
from tgi_patches.relay import Relay
from tgi_patches.sidecar import Sidecar

from .attention import KVPool
from .blocks import BlockAllocator, PrefixAllocator
from .loading import Loaded, load, rope_of, tokenizer_hash
from .loop import Budgets, Loop
from .matching import Patterns
from .model import TransformersModel
from .seam import ShardModel
from .server import ShardServer
from .service import Service

log = structlog.get_logger(__name__)

BLOCK_TOKENS = 16
_DEFAULT_POOL_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class Shard:
    """The parts that need closing, and the server."""

    server: ShardServer
    model: TransformersModel
    bridge: ArenaBridge

    def close(self) -> None:
        self.model.close()
        self.bridge.close()


@asynccontextmanager
async def opened(spec: ShardSpec) -> AsyncIterator[ShardServer]:
    """The shard of `spec`, warmed up; closed at the end."""
    shard = assemble(spec)
    try:
        await warm_up(shard.server, spec)
        yield shard.server
    finally:
        shard.close()


async def warm_up(server: ShardServer, spec: ShardSpec) -> None:
    """The first step of a model shows what its config does not: refuse it here, in a sentence."""
    try:
        await server.warmup()
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"The model {spec.model_name} cannot be served: {error}") from error


def assemble(spec: ShardSpec) -> Shard:
    """Load the model and open the arena; ConfigError in one sentence for what cannot work.

    For a shard of one process; `ranks.assemble` does it for more.
    """
    assert spec.tensor_parallel == 1
    loaded = load_checked(spec)
    epoch = new_epoch()
    fingerprint = fingerprint_of(spec, loaded)
    bridge = open_bridge(spec, epoch, fingerprint)
    pool = make_pool(spec, loaded)
    status = Status(spec, epoch, fingerprint, loaded, bridge, pool)
    sidecar = Sidecar(status, bridge, keep_s=spec.record_ttl_s)
    relay = Relay(
        bridge,
        published=sidecar.published,
        failed=sidecar.failed,
        warn=log.warning,
        kv_heads=loaded.kv_heads,
    )
    threads = len(spec.cpus) or len(os.sched_getaffinity(0))
    model = TransformersModel(loaded, pool, relay, threads=threads, chunk_tokens=chunk_tokens(spec))
    status.relay, status.exports = relay, relay.exports
    server = make_server(spec, model, pool, loaded.tokenizer, status, sidecar, model.patterns)
    return Shard(server, model, bridge)


def load_checked(spec: ShardSpec) -> Loaded:
    """The model of `spec`, as long as its limits ask for."""
    loaded = load(Path(spec.model), spec.dtype)
    if spec.max_total_tokens > loaded.max_position:
        raise ConfigError(
            f"max_total_tokens ({spec.max_total_tokens}) is over the model's {loaded.max_position} positions."
        )
    return loaded


def chunk_tokens(spec: ShardSpec) -> int:
    return spec.max_batch_prefill_tokens if spec.chunked_prefill else 0


def make_server(
    spec: ShardSpec,
    model: ShardModel,
    pool: KVPool,
    tokenizer: Any,
    status: Status,
    sidecar: Sidecar,
    patterns: Patterns | None,
) -> ShardServer:
    """HTTP surface and loop around a model; `patterns` are those that the model follows."""
    allocator = PrefixAllocator if spec.prefix_caching else BlockAllocator
    check = None if patterns is None else patterns.check
    status.loop = Loop(model, allocator(pool.blocks, BLOCK_TOKENS), _budgets(spec))
    service = Service(tokenizer=tokenizer, loop=status.loop, limits=status.limits, check=check)
    return ShardServer(service, sidecar, _info(spec))


class Status:
    """Builds the sidecar's `status`, of all ranks together; the attributes are set once they exist.

    `loaded` is the whole model, `bridge` the arena of one of the ranks, which are all alike.
    """

    loop: Loop
    relay: Relay
    exports: Mapping[str, int]

    def __init__(
        self,
        spec: ShardSpec,
        epoch: int,
        fingerprint: Fingerprint,
        loaded: Loaded,
        bridge: ArenaBridge,
        pool: KVPool,
    ) -> None:
        self._spec = spec
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._bytes_per_token = loaded.kv_bytes_per_token
        self._bridge = bridge
        self._kv_tokens = pool.tokens
        self.limits = Limits(
            max_input_tokens=spec.max_input_tokens,
            max_total_tokens=spec.max_total_tokens,
            max_concurrent_requests=spec.max_concurrent_requests,
        )

    def __call__(self) -> StatusReply:
        ranks = self._spec.tensor_parallel
        return StatusReply(
            protocol=PROTOCOL_VERSION,
            deployment=self._spec.deployment,
            shard=self._spec.shard,
            role=self._spec.role,
            epoch=self._epoch,
            fingerprint=self._fingerprint,
            limits=self.limits,
            kv_tokens=self._kv_tokens,
            slots=self._spec.max_concurrent_requests,
            ring_bytes=ranks * self._bridge.ring_bytes,
            record_limit_bytes=ranks * self._bridge.record_limit_bytes,
            pinned_bytes=ranks * self._bridge.pinned_bytes,
            bytes_per_token=self._bytes_per_token,
            running=self.loop.running,
            waiting=self.loop.waiting,
            kv_tokens_used=self.loop.kv_tokens_used,
            exports=dict(self.exports),
            imports=dict(self.relay.imports),
            imported_tokens=self.relay.imported_tokens,
            recomputed_tokens=self.relay.recomputed_tokens,
        )


def _budgets(spec: ShardSpec) -> Budgets:
    return Budgets(
        max_batch_prefill_tokens=spec.max_batch_prefill_tokens,
        max_batch_size=spec.max_concurrent_requests,
        max_concurrent_requests=spec.max_concurrent_requests,
        chunked=spec.chunked_prefill,
    )


def open_bridge(spec: ShardSpec, epoch: int, fingerprint: Fingerprint, rank: int = 0) -> ArenaBridge:
    """The arena of one rank; they share the bytes of the ring, and of the pinned region."""
    try:
        return ArenaBridge(
            Path(spec.arena_dir),
            spec.deployment,
            spec.shard,
            rank=rank,
            epoch=epoch,
            fingerprint=fingerprint,
            arena_bytes=spec.arena_bytes // spec.tensor_parallel,
            record_ttl_s=spec.record_ttl_s,
            pinned_bytes=spec.pinned_bytes // spec.tensor_parallel,
        )
    except ArenaError as error:
        raise ConfigError(str(error)) from error


def make_pool(spec: ShardSpec, loaded: Loaded) -> KVPool:
    """With the KV heads of `loaded`, which may be a rank's part."""
    tokens = spec.kv_pool_tokens or _DEFAULT_POOL_PROMPTS * spec.max_total_tokens
    if tokens < spec.max_total_tokens:
        raise ConfigError(
            f"kv_pool_tokens ({tokens}) is below max_total_tokens ({spec.max_total_tokens}): "
            "the longest request could never run."
        )
    try:
        return KVPool.create(
            layers=loaded.layers,
            blocks=-(-tokens // BLOCK_TOKENS),
            block_size=BLOCK_TOKENS,
            kv_heads=loaded.kv_heads,
            head_dim=loaded.head_dim,
            dtype=loaded.dtype,
        )
    except (RuntimeError, MemoryError):
        size_mb = tokens * loaded.kv_bytes_per_token // 1_000_000
        raise ConfigError(f"A KV pool of {tokens} tokens needs {size_mb} MB, more than is free.") from None


def fingerprint_of(spec: ShardSpec, loaded: Loaded) -> Fingerprint:
    """`loaded` is the whole model."""
    folder = Path(spec.model)
    return Fingerprint(
        model=spec.model_name,
        revision=spec.revision,
        tokenizer=tokenizer_hash(folder),
        dtype=_name(loaded.dtype),
        kv_dtype=_name(loaded.dtype),
        quantization=loaded.quantization,
        layers=loaded.layers,
        kv_heads=loaded.kv_heads,
        head_dim=loaded.head_dim,
        rope=rope_of(folder),
        block_size=BLOCK_TOKENS,
        tensor_parallel=spec.tensor_parallel,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _info(spec: ShardSpec) -> answers.Info:
    limits = Limits(spec.max_input_tokens, spec.max_total_tokens, spec.max_concurrent_requests)
    return answers.Info(
        model_id=spec.model_name,
        model_sha=spec.revision or None,
        max_concurrent_requests=limits.max_concurrent_requests,
        max_best_of=limits.max_best_of,
        max_stop_sequences=limits.max_stop_sequences,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        max_client_batch_size=limits.max_client_batch_size,
        router="tgi-orchestrator-embedded",
        version=version("tgi-orchestrator"),
        docker_label=f"embedded-{spec.dtype}",
    )
