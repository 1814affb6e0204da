"""What an operator asks a gateway."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Response

from orchestrator.api.figures import costs_of
from orchestrator.api.gateway import Gateway
from orchestrator.core import degraded
from orchestrator.core.ticket import ShardView

_SHARD_FIELDS = (
    "shard",
    "role",
    "epoch",
    "url",
    "state",
    "engine",
    "hooked",
    "note",
    "kv_tokens",
    "slots",
    "ring_bytes",
    "arena_id",
    "pull_port",
    "pulls",
    "reserved_kv_tokens",
    "reserved_slots",
    "outstanding_records",
    "outstanding_bytes",
    "batch_requests",
    "batch_tokens",
    "hot_groups",
)


def routes(gateway: Gateway) -> APIRouter:
    """`/admin/status`."""
    router = APIRouter(prefix="/admin", tags=["Administration"])

    @router.get("/status")
    async def status() -> Response:
        await gateway.queue.refresh()
        return Response(orjson.dumps(status_of(gateway)), media_type="application/json")

    return router


def status_of(gateway: Gateway) -> dict[str, Any]:
    """Mode, shards, what is reserved on them and what they cost, what this gateway has counted."""
    views = gateway.queue.shards()
    return {
        "gateway": gateway.queue.gateway,
        "model": gateway.admission.model_name(),
        "mode": degraded.facts(gateway.queue.mode),
        "redis": gateway.connected,
        "degraded": gateway.queue.degraded,
        "waiting": gateway.queue.waiting,
        "open_requests": gateway.metrics.open_requests(),
        "reserved": {
            "kv_tokens": sum(view.reserved_kv_tokens for view in views),
            "slots": sum(view.reserved_slots for view in views),
        },
        "outstanding": {
            "records": sum(view.outstanding_records for view in views),
            "bytes": sum(view.outstanding_bytes for view in views),
        },
        "shards": [_shard(view) for view in views],
        "counters": gateway.metrics.counters(),
    }


def _shard(view: ShardView) -> dict[str, Any]:
    fields = {name: getattr(view, name) for name in _SHARD_FIELDS}
    fingerprint = view.fingerprint
    return fields | {
        "model": fingerprint.model,
        "dtype": fingerprint.quantization or fingerprint.dtype,
        "costs": costs_of(view),
    }
