"""The second implementation of the seam: a running `text-generation-server`, over gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
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


Reply = tuple[Any, Mapping[str, str]]
"""A message, and the metadata after it."""


class TgiModel:
    """See `ShardModel`.  The server computes everything, `wanted` or not: a step cannot be given up.

    `connection` is rank 0's.  Every call goes to all ranks, as from TGI's router: each computes its part
    of every request, and answers for some of them.
    """

    def __init__(
        self, connection: Connection, limits: ModelLimits, others: Sequence[Connection] = ()
    ) -> None:
        self._connections = (connection, *others)
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
        warmed = await self._everywhere("Warmup", request)
        tokens = min(reply.max_supported_total_tokens for reply, _ in warmed)
        self._info = info_from(await self._call("Info", "InfoRequest"), tokens)

    async def prefill(
        self, batch: Batch, cached: CachedBatch | None = None
    ) -> tuple[list[Generation], CachedBatch | None]:
        request = self._message("PrefillRequest")(batch=batch_of(self._message, batch, await self.info()))
        if cached is not None:
            request.cached_batch.CopyFrom(cached_of(self._message, cached))
        return await self._stepped(await self._everywhere("Prefill", request))

    async def decode(self, batches: list[CachedBatch]) -> tuple[list[Generation], CachedBatch | None]:
        parts = [cached_of(self._message, batch) for batch in batches]
        return await self._stepped(
            await self._everywhere("Decode", self._message("DecodeRequest")(batches=parts))
        )

    async def filter_batch(self, batch_id: int, request_ids: tuple[int, ...]) -> CachedBatch:
        reply = await self._call(
            "FilterBatch", "FilterBatchRequest", batch_id=batch_id, request_ids=request_ids
        )
        return cached_from(reply.batch)

    async def clear_cache(self, batch_id: int | None = None) -> None:
        named = {} if batch_id is None else {"id": batch_id}
        await self._call("ClearCache", "ClearCacheRequest", **named)

    async def _call(self, method: str, request: str, **fields: Any) -> Any:
        """Rank 0's answer."""
        (lead, _), *_ = await self._everywhere(method, self._message(request)(**fields))
        return lead

    async def _everywhere(self, method: str, request: Any) -> list[Reply]:
        """Every rank's answer, by rank; an error of any of them once all have answered or run late."""
        calls = (connection.call_with_metadata(method, request) for connection in self._connections)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return [reply for reply in replies if not isinstance(reply, BaseException)]

    async def _stepped(self, replies: Sequence[Reply]) -> tuple[list[Generation], CachedBatch | None]:
        """The server keeps requests that ended in its batch until it is told to drop them."""
        lead, metadata = replies[0]
        imports = _imports(metadata)
        generations = [step for reply, _ in replies for step in generations_from(reply, imports)]
        if not lead.HasField("batch"):
            return generations, None
        cached = cached_from(lead.batch)
        ended = {step.request_id for step in generations if step.generated_text is not None}
        left = tuple(i for i in cached.request_ids if i not in ended)
        if len(left) == len(cached.request_ids):
            return generations, cached
        return generations, await self.filter_batch(cached.id, left)


def _imports(metadata: Mapping[str, str]) -> dict[int, str]:
    """What the overlay tells after a Prefill, by request id; empty where the server has none."""
    told = json.loads(metadata.get(IMPORTS_METADATA, "{}"))
    return {int(request_id): str(result) for request_id, result in told.items()}
