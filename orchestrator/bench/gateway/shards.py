"""What the shard table and the sidecars say of the mock shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.ticket import ShardView
from tgi_patches.contract import PROTOCOL_VERSION, Fingerprint, Limits, Role, ShardSpec, StatusReply

DEPLOYMENT = "bench"
EPOCH = 1
LIMITS = Limits(
    max_input_tokens=8192, max_total_tokens=16_384, max_concurrent_requests=8192, payload_bytes=2_000_000
)
_ROOM: Mapping[str, Any] = {
    "fingerprint": Fingerprint("bench", "1", "t", "float16", "float16", 30, 3, 64),
    "limits": LIMITS,
    "kv_tokens": 16_000_000,
    "slots": 8192,
    "ring_bytes": 1 << 40,
    "record_limit_bytes": 1 << 30,
    "bytes_per_token": 64,
}
"""For every request of the benchmark."""


def status_of(role: Role, port: int) -> StatusReply:
    """The answer of `GET /kv/status`."""
    return StatusReply(protocol=PROTOCOL_VERSION, deployment=DEPLOYMENT, **_named(role, port), **_ROOM)


def view_of(role: Role, port: int) -> ShardView:
    """The same as a row of the shard table."""
    return ShardView(url=url_of(port), state="ready", **_named(role, port), **_ROOM)


def _named(role: Role, port: int) -> dict[str, Any]:
    return {"shard": name_of(role), "role": role, "epoch": EPOCH + port}


def spec_of(role: Role, port: int) -> ShardSpec:
    """The launch order that the conductor observes it under."""
    return ShardSpec(DEPLOYMENT, name_of(role), role, "bench", "bench", port=port)


def name_of(role: Role) -> str:
    return f"{role}-0"


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"
