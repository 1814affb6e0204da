"""Puts a shard together whose engine is TGI's own Python server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from orchestrator.api import answers
from orchestrator.core.kv_bytes import ModelShape, shape_of
from orchestrator.embedded.folder import checked_config
from orchestrator.embedded.shard.blocks import Allocator, BlockAllocator, PrefixAllocator, RowAllocator
from orchestrator.embedded.shard.loop import Budgets, Loop
from orchestrator.embedded.shard.seam import ModelInfo
from orchestrator.embedded.shard.server import ShardServer
from orchestrator.embedded.shard.service import Service
from orchestrator.errors import ConfigError, GenerationFailed
from tgi_patches.contract import ShardSpec, new_epoch
from tgi_patches.sidecar import Sidecar

from .client import Connection
from .model import ModelLimits, TgiModel
from .overlay import Overlay
from .process import TgiServer, environment, private_folder, started
from .schema import read_schema
from .status import Engine, Status

START_DEADLINE_S = 600.0
"""From the start of the process to its socket: it loads the weights first."""
CONNECT_DEADLINE_S = 30.0
RESERVED_BLOCKS = 1
"""TGI writes to block 0 itself: health checks, and the padding of CUDA graphs."""
PADDED_POOL_TOKENS = 16_000
"""As TGI's router assumes for a model that cannot size its cache (backends/v3/src/lib.rs)."""
CPU_POOL_PROMPTS = 4
"""TGI would take all memory that is free, on a host that has several shards."""


@asynccontextmanager
async def opened(spec: ShardSpec) -> AsyncIterator[ShardServer]:
    """The shard of `spec`, warmed up; its server process is gone after the block.

    ConfigError in one sentence for what cannot work, ShardError for a server that ended.
    """
    async with AsyncExitStack() as stack:
        with _stoppable():
            server = await _assembled(spec, stack)
        yield server


async def _assembled(spec: ShardSpec, stack: AsyncExitStack) -> ShardServer:
    shape, epoch = _checked_shape(spec), new_epoch()
    overlay = Overlay(spec, epoch)
    folder = stack.enter_context(private_folder())
    env = environment(spec, epoch, folder, os.environ)
    schema = await read_schema(spec.tgi_python, env)
    overlay.prepare()
    stack.callback(overlay.remove)
    process = await stack.enter_async_context(started(spec, env, folder))
    tokenizer = await asyncio.to_thread(load_tokenizer, Path(spec.model))  # while the server starts
    await process.listening(START_DEADLINE_S)
    connections = []
    for rank in range(spec.tensor_parallel):
        opening = Connection.open(process.uds, schema, deadline_s=CONNECT_DEADLINE_S, rank=rank)
        connections.append(await process.while_running(opening))
        stack.push_async_callback(connections[-1].close)
    model, info = await _warmed_up(spec, process, connections)
    engine = Engine(spec, epoch, shape, model, info, kv_tokens(spec, info))
    return _server(stack, overlay, process, engine, tokenizer)


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends the block, and what runs in it, in order: a server takes long to start."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def stop() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _checked_shape(spec: ShardSpec) -> ModelShape:
    shape = shape_of(checked_config(Path(spec.model), spec.model_name))
    if shape.max_positions is not None and spec.max_total_tokens > shape.max_positions:
        raise ConfigError(
            f"max_total_tokens ({spec.max_total_tokens}) is over the model's {shape.max_positions} positions."
        )
    return shape


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer alone, for the HTTP surface; ConfigError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"The tokenizer in {folder} cannot be loaded: {reason}") from error


async def _warmed_up(
    spec: ShardSpec, process: TgiServer, connections: Sequence[Connection]
) -> tuple[TgiModel, ModelInfo]:
    limits = ModelLimits(spec.max_input_tokens, spec.max_total_tokens, spec.max_batch_prefill_tokens)
    lead, *others = connections
    model = TgiModel(lead, limits, others)
    info = await process.while_running(model.info())
    if info.dtype != spec.dtype:
        raise ConfigError(
            f"TGI serves this model in {info.dtype} here, not in {spec.dtype}: "
            f"set model.dtype to {info.dtype}."
        )
    try:
        await process.while_running(model.warmup())
    except GenerationFailed as error:
        raise ConfigError(f"TGI's server cannot serve {spec.model_name}: {error}") from error
    return model, await model.info()


def kv_tokens(spec: ShardSpec, info: ModelInfo) -> int:
    """Tokens that the loop gives out; ConfigError where the longest request could never run."""
    wanted = spec.kv_pool_tokens
    longest = spec.max_total_tokens + info.lookahead_tokens
    if info.padded:
        tokens = wanted or max(PADDED_POOL_TOKENS, longest, spec.max_batch_prefill_tokens)
    else:
        tokens = info.kv_tokens - RESERVED_BLOCKS * info.block_size
        if wanted or info.device == "cpu":
            tokens = min(tokens, wanted or CPU_POOL_PROMPTS * longest)
    if tokens < longest:
        raise ConfigError(
            f"TGI's KV cache has room for {tokens} tokens, and the longest request needs {longest}."
        )
    return tokens


def allocator(info: ModelInfo, tokens: int) -> Allocator:
    """Bookkeeping of `tokens` tokens of the server's cache."""
    if info.padded:
        return RowAllocator(tokens)
    blocks = -(-tokens // info.block_size) + RESERVED_BLOCKS
    kind = PrefixAllocator if info.prefix_caching else BlockAllocator
    return kind(blocks, info.block_size, reserved=RESERVED_BLOCKS)


def _server(
    stack: AsyncExitStack, overlay: Overlay, process: TgiServer, engine: Engine, tokenizer: Any
) -> ShardServer:
    """HTTP surface, loop and sidecar around the engine."""
    spec, info = engine.spec, engine.info
    budgets = Budgets(
        max_batch_prefill_tokens=spec.max_batch_prefill_tokens,
        max_batch_size=spec.max_concurrent_requests,
        max_concurrent_requests=spec.max_concurrent_requests,
        chunked=info.chunked,
        lookahead_tokens=info.lookahead_tokens,
    )
    loop = Loop(engine.model, allocator(info, engine.kv_tokens), budgets)
    service = Service(tokenizer=tokenizer, loop=loop, limits=engine.limits, guided=True)
    status = Status(engine, overlay, loop)
    records = overlay.records(status.fingerprint)
    stack.callback(records.close)
    sidecar = Sidecar(status, records, keep_s=spec.record_ttl_s)
    stack.enter_context(overlay.listening(sidecar, records))

    async def run() -> None:
        await process.while_running(loop.run())

    return ShardServer(service, sidecar, _info(engine, status.model_class), run)


def _info(engine: Engine, model_class: str) -> answers.Info:
    spec, limits = engine.spec, engine.limits
    return answers.Info(
        model_id=spec.model_name,
        model_sha=spec.revision or None,
        max_concurrent_requests=limits.max_concurrent_requests,
        max_best_of=limits.max_best_of,
        max_stop_sequences=limits.max_stop_sequences,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        max_client_batch_size=limits.max_client_batch_size,
        router="tgi-orchestrator-tgi",
        version=version("tgi-orchestrator"),
        docker_label="-".join(filter(None, ("tgi", model_class, engine.info.dtype))),
    )
