"""The second implementation of the seam: a running `text-generation-server`, over gRPC."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.embedded.shard.seam import Batch, CachedBatch, Generation, ModelInfo
from tgi_patches.contract import IMPORTS_METADATA

from .client import Connection
from .messages import batch_of, cached_from, cached_of, generations_from, info_from, warmup_of


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What Warmup must leave room for, in tokens."""

    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int


class TgiModel:
    """See `ShardModel`.  The server computes everything, `wanted` or not: a step cannot be given up."""

    def __init__(self, connection: Connection, limits: ModelLimits) -> None:
        self._connection = connection
        self._message = connection.message
        self._limits = limits
        self._info: ModelInfo | None = None

    async def info(self) -> ModelInfo:
        """Of the server; `kv_tokens` is known after the warmup."""
        if self._info is None:
            self._info = info_from(await self._call("Info", "InfoRequest"), kv_tokens=0)
        return self._info

    async def warmup(self) -> None:
        """Let the server run the largest batch there can be and size its KV cache by what is left."""
        info = await self.info()
        limits = self._limits
        request = warmup_of(
            self._message,
            prefill_tokens=limits.max_batch_prefill_tokens,
            max_input_tokens=limits.max_input_tokens,
            max_total_tokens=limits.max_total_tokens,
            padded=info.padded,
        )
        await self.clear_cache()
        reply = await self._connection.call("Warmup", request)
        self._info = info_from(await self._call("Info", "InfoRequest"), reply.max_supported_total_tokens)

    async def prefill(
        self, batch: Batch, cached: CachedBatch | None = None
    ) -> tuple[list[Generation], CachedBatch | None]:
        request = self._message("PrefillRequest")(batch=batch_of(self._message, batch, await self.info()))
        if cached is not None:
            request.cached_batch.CopyFrom(cached_of(self._message, cached))
        reply, metadata = await self._connection.call_with_metadata("Prefill", request)
        return await self._stepped(reply, _imports(metadata))

    async def decode(self, batches: list[CachedBatch]) -> tuple[list[Generation], CachedBatch | None]:
        parts = [cached_of(self._message, batch) for batch in batches]
        reply = await self._call("Decode", "DecodeRequest", batches=parts)
        return await self._stepped(reply, {})

    async def filter_batch(self, batch_id: int, request_ids: tuple[int, ...]) -> CachedBatch:
        reply = await self._call(
            "FilterBatch", "FilterBatchRequest", batch_id=batch_id, request_ids=request_ids
        )
        return cached_from(reply.batch)

    async def clear_cache(self, batch_id: int | None = None) -> None:
        named = {} if batch_id is None else {"id": batch_id}
        await self._call("ClearCache", "ClearCacheRequest", **named)

    async def _call(self, method: str, request: str, **fields: Any) -> Any:
        return await self._connection.call(method, self._message(request)(**fields))

    async def _stepped(
        self, reply: Any, imports: Mapping[int, str]
    ) -> tuple[list[Generation], CachedBatch | None]:
        """The server keeps requests that ended in its batch until it is told to drop them."""
        generations = generations_from(reply, imports)
        if not reply.HasField("batch"):
            return generations, None
        cached = cached_from(reply.batch)
        ended = {step.request_id for step in generations if step.generated_text is not None}
        left = tuple(i for i in cached.request_ids if i not in ended)
        if len(left) == len(cached.request_ids):
            return generations, cached
        return generations, await self.filter_batch(cached.id, left)


def _imports(metadata: Mapping[str, str]) -> dict[int, str]:
    """What the overlay tells after a Prefill, by request id; empty where the server has none."""
    told = json.loads(metadata.get(IMPORTS_METADATA, "{}"))
    return {int(request_id): str(result) for request_id, result in told.items()}
