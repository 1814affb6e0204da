"""What the shard table and the sidecars say of the mock shards."""

from __future__ import annotations

from orchestrator.core.ticket import ShardView
from tgi_patches.contract import PROTOCOL_VERSION, Fingerprint, Limits, Role, ShardSpec, StatusReply

DEPLOYMENT = "bench"
EPOCH = 1
LIMITS = Limits(
    max_input_tokens=8192, max_total_tokens=16_384, max_concurrent_requests=8192, payload_bytes=2_000_000
)
_FINGERPRINT = Fingerprint("bench", "1", "t", "float16", "float16", 30, 3, 64)
_KV_TOKENS = 16_000_000
_SLOTS = 8192
_RING_BYTES = 1 << 40
_RECORD_LIMIT_BYTES = 1 << 30
_BYTES_PER_TOKEN = 64


def status_of(role: Role, port: int) -> StatusReply:
    """The answer of `GET /kv/status`: room for every request of the benchmark."""
    return StatusReply(
        protocol=PROTOCOL_VERSION,
        deployment=DEPLOYMENT,
        shard=name_of(role),
        role=role,
        epoch=EPOCH + port,
        fingerprint=_FINGERPRINT,
        limits=LIMITS,
        kv_tokens=_KV_TOKENS,
        slots=_SLOTS,
        ring_bytes=_RING_BYTES,
        record_limit_bytes=_RECORD_LIMIT_BYTES,
        bytes_per_token=_BYTES_PER_TOKEN,
    )


def view_of(role: Role, port: int) -> ShardView:
    """The same as a row of the shard table."""
    return ShardView(
        shard=name_of(role),
        role=role,
        epoch=EPOCH + port,
        url=url_of(port),
        state="ready",
        fingerprint=_FINGERPRINT,
        limits=LIMITS,
        kv_tokens=_KV_TOKENS,
        slots=_SLOTS,
        ring_bytes=_RING_BYTES,
        record_limit_bytes=_RECORD_LIMIT_BYTES,
        bytes_per_token=_BYTES_PER_TOKEN,
    )


def spec_of(role: Role, port: int) -> ShardSpec:
    """The launch order that the conductor observes it under."""
    return ShardSpec(DEPLOYMENT, name_of(role), role, "bench", "bench", port=port)


def name_of(role: Role) -> str:
    return f"{role}-0"


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"
