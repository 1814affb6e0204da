"""Puts a shard together from its spec."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

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
from .model import TransformersModel
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
        await _warm_up(shard.server, spec)
        yield shard.server
    finally:
        shard.close()


async def _warm_up(server: ShardServer, spec: ShardSpec) -> None:
    """The first step of a model shows what its config does not: refuse it here, in a sentence."""
    try:
        await server.warmup()
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"The model {spec.model_name} cannot be served: {error}") from error


def assemble(spec: ShardSpec) -> Shard:
    """Load the model and open the arena; ConfigError in one sentence for what cannot work."""
    loaded = load(Path(spec.model), spec.dtype)
    if spec.max_total_tokens > loaded.max_position:
        raise ConfigError(
            f"max_total_tokens ({spec.max_total_tokens}) is over the model's {loaded.max_position} positions."
        )
    epoch = new_epoch()
    fingerprint = _fingerprint(spec, loaded)
    bridge = _open_bridge(spec, epoch, fingerprint)
    pool = _pool(spec, loaded)
    status = _Status(spec, epoch, fingerprint, loaded, bridge, pool)
    sidecar = Sidecar(status, bridge, keep_s=spec.record_ttl_s)
    relay = Relay(bridge, published=sidecar.published, failed=sidecar.failed, warn=log.warning)
    threads = len(spec.cpus) or len(os.sched_getaffinity(0))
    chunk_tokens = spec.max_batch_prefill_tokens if spec.chunked_prefill else 0
    model = TransformersModel(loaded, pool, relay, threads=threads, chunk_tokens=chunk_tokens)
    allocator = PrefixAllocator if spec.prefix_caching else BlockAllocator
    loop = Loop(model, allocator(pool.blocks, BLOCK_TOKENS), _budgets(spec))
    status.loop, status.relay = loop, relay
    service = Service(tokenizer=loaded.tokenizer, loop=loop, limits=status.limits)
    return Shard(ShardServer(service, sidecar, _info(spec)), model, bridge)


class _Status:
    """Builds the sidecar's `status`; `loop` and `relay` are set once they exist."""

    loop: Loop
    relay: Relay

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
            ring_bytes=self._bridge.ring_bytes,
            record_limit_bytes=self._bridge.record_limit_bytes,
            bytes_per_token=self._bytes_per_token,
            running=self.loop.running,
            waiting=self.loop.waiting,
            kv_tokens_used=self.loop.kv_tokens_used,
            exports=dict(self.relay.exports),
            imports=dict(self.relay.imports),
        )


def _budgets(spec: ShardSpec) -> Budgets:
    return Budgets(
        max_batch_prefill_tokens=spec.max_batch_prefill_tokens,
        max_batch_size=spec.max_concurrent_requests,
        max_concurrent_requests=spec.max_concurrent_requests,
        chunked=spec.chunked_prefill,
    )


def _open_bridge(spec: ShardSpec, epoch: int, fingerprint: Fingerprint) -> ArenaBridge:
    try:
        return ArenaBridge(
            Path(spec.arena_dir),
            spec.deployment,
            spec.shard,
            rank=0,
            epoch=epoch,
            fingerprint=fingerprint,
            arena_bytes=spec.arena_bytes,
            record_ttl_s=spec.record_ttl_s,
        )
    except ArenaError as error:
        raise ConfigError(str(error)) from error


def _pool(spec: ShardSpec, loaded: Loaded) -> KVPool:
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


def _fingerprint(spec: ShardSpec, loaded: Loaded) -> Fingerprint:
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
