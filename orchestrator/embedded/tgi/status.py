"""What a shard over TGI's server answers to `status`: its loop's counts, and the overlay's report."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.kv_bytes import ModelShape, bytes_per_token
from orchestrator.embedded.shard.loop import Loop
from orchestrator.embedded.shard.seam import ModelInfo
from tgi_patches.contract import PROTOCOL_VERSION, Fingerprint, Limits, ShardSpec, StatusReply
from tgi_patches.report import Report

from .model import TgiModel
from .overlay import Overlay, unhooked


@dataclass(frozen=True, slots=True)
class Engine:
    """A warmed-up server, and what is known of it."""

    spec: ShardSpec
    epoch: int
    shape: ModelShape
    model: TgiModel
    info: ModelInfo
    kv_tokens: int
    """That the loop may give out."""

    @property
    def limits(self) -> Limits:
        spec = self.spec
        return Limits(spec.max_input_tokens, spec.max_total_tokens, spec.max_concurrent_requests)


class Status:
    """Whether records flow is settled by the warmup; the counters are read anew each time."""

    def __init__(self, engine: Engine, overlay: Overlay, loop: Loop) -> None:
        self._engine = engine
        self._overlay = overlay
        self._loop = loop
        report = overlay.report()
        self.note = unhooked(report)
        self.model_class = report.model_class if report is not None else ""
        told = report.fingerprint if report is not None and not self.note else None
        self.fingerprint = told or _own_fingerprint(engine)

    def __call__(self) -> StatusReply:
        spec, report = self._engine.spec, self._overlay.report()
        note = self.note or unhooked(report)
        records = report if report is not None and not note else None
        return StatusReply(
            protocol=PROTOCOL_VERSION,
            deployment=spec.deployment,
            shard=spec.shard,
            role=spec.role,
            epoch=self._engine.epoch,
            fingerprint=self.fingerprint,
            limits=self._engine.limits,
            kv_tokens=self._engine.kv_tokens,
            slots=spec.max_concurrent_requests,
            ring_bytes=records.ring_bytes if records else 0,
            record_limit_bytes=records.record_limit_bytes if records else 0,
            bytes_per_token=self._bytes_per_token(records),
            running=self._loop.running,
            waiting=self._loop.waiting,
            kv_tokens_used=self._loop.kv_tokens_used,
            exports=dict(report.exports) if report else {},
            imports=dict(report.imports) if report else {},
            hooked=not note,
            note=note,
        )

    def _bytes_per_token(self, report: Report | None) -> int:
        told = report.bytes_per_token if report else 0
        return told or bytes_per_token(self._engine.shape, self._engine.spec.dtype)


def _own_fingerprint(engine: Engine) -> Fingerprint:
    """For a shard that forms no pair: what `status` shows of its model."""
    spec, shape = engine.spec, engine.shape
    return Fingerprint(
        model=spec.model_name,
        revision=spec.revision,
        tokenizer="",
        dtype=engine.info.dtype,
        kv_dtype=engine.info.dtype,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        attention=engine.info.attention,
        block_size=engine.info.block_size,
    )
