"""What the embedded shard's engine costs beside a bare transformers loop: same weights, dtype, threads.

Both take turns in every round and report medians of CPU time, so the ratios hold on a busy machine.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from orchestrator.embedded.shard.attention import KVPool
from orchestrator.embedded.shard.loading import Loaded, load
from orchestrator.embedded.shard.model import TransformersModel
from orchestrator.embedded.shard.seam import Batch, CachedBatch, Request, Sampling, Stopping

PROMPT_TOKENS = 300
BATCHES = (1, 8)
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison; milliseconds of CPU, medians over the rounds."""

    what: str
    dtype: str
    engine_ms: float
    bare_ms: float
    ratio: float


def measure(folder: Path, dtype: str, *, rounds: int = 9, threads: int = 1) -> list[dict[str, object]]:
    """Prefill of 300 tokens and decode steps at batch 1 and 8, with the fields of Row.

    int8 is compared with the same quantized model run bare.
    """
    torch.set_num_threads(threads)
    loaded = load(folder, dtype)
    pool = _pool(loaded, max(BATCHES) * (PROMPT_TOKENS + rounds + 8))
    engine = TransformersModel(loaded, pool, None, threads=threads)
    try:
        rows = asyncio.run(_rows(engine, loaded, dtype, rounds))
    finally:
        engine.close()
    return [asdict(row) for row in rows]


async def _rows(engine: TransformersModel, loaded: Loaded, dtype: str, rounds: int) -> list[Row]:
    rows = [await _prefill(engine, loaded, dtype, rounds)]
    rows += [await _decode(engine, loaded, dtype, rounds, batch) for batch in BATCHES]
    return rows


async def _prefill(engine: TransformersModel, loaded: Loaded, dtype: str, rounds: int) -> Row:
    ids = _prompts(loaded, 1)
    mine, theirs = [], []
    for number in range(rounds + 1):
        start = time.process_time()
        await engine.prefill(Batch(number, _requests(ids, 1)))
        middle = time.process_time()
        with _bare(loaded):
            loaded.model(torch.tensor(ids), use_cache=True, logits_to_keep=1)
        if number:  # the first round warms up
            mine.append(middle - start)
            theirs.append(time.process_time() - middle)
    return _row(f"prefill of {PROMPT_TOKENS} tokens", dtype, mine, theirs)


async def _decode(engine: TransformersModel, loaded: Loaded, dtype: str, rounds: int, batch: int) -> Row:
    ids = _prompts(loaded, batch)
    _, cached = await engine.prefill(Batch(0, _requests(ids, rounds + 4)))
    with _bare(loaded):
        output = loaded.model(torch.tensor(ids), use_cache=True, logits_to_keep=1)
    mine, theirs = [], []
    for number in range(rounds + 1):
        assert isinstance(cached, CachedBatch)
        start = time.process_time()
        _, cached = await engine.decode([cached])
        middle = time.process_time()
        with _bare(loaded):
            last = output.logits[:, -1].float().argmax(-1, keepdim=True)
            output = loaded.model(last, past_key_values=output.past_key_values, use_cache=True)
        if number:
            mine.append(middle - start)
            theirs.append(time.process_time() - middle)
    await engine.clear_cache()
    return _row(f"decode step at batch {batch}", dtype, mine, theirs)


@contextmanager
def _bare(loaded: Loaded) -> Iterator[None]:
    """The same weights with transformers' own attention and cache."""
    config: Any = loaded.model.config
    ours = config._attn_implementation
    config._attn_implementation = "sdpa"
    try:
        with torch.inference_mode():
            yield
    finally:
        config._attn_implementation = ours


def _prompts(loaded: Loaded, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    shape = (count, PROMPT_TOKENS)
    ids: list[list[int]] = torch.randint(loaded.model.config.vocab_size, shape, generator=generator).tolist()
    return ids


def _requests(prompts: list[list[int]], new_tokens: int) -> tuple[Request, ...]:
    span = PROMPT_TOKENS + new_tokens
    stopping = Stopping(new_tokens, ignore_eos_token=True)
    return tuple(
        Request(i, "", tuple(ids), Sampling(), stopping, tuple(range(i * span, (i + 1) * span)))
        for i, ids in enumerate(prompts)
    )


def _pool(loaded: Loaded, tokens: int) -> KVPool:
    return KVPool.create(
        layers=loaded.layers,
        blocks=-(-tokens // _BLOCK),
        block_size=_BLOCK,
        kv_heads=loaded.kv_heads,
        head_dim=loaded.head_dim,
        dtype=loaded.dtype,
    )


def _row(what: str, dtype: str, mine: list[float], theirs: list[float]) -> Row:
    engine_ms, bare_ms = statistics.median(mine) * 1e3, statistics.median(theirs) * 1e3
    return Row(what, dtype, round(engine_ms, 2), round(bare_ms, 2), round(engine_ms / bare_ms, 3))
