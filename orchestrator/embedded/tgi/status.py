"""What a shard over TGI's server answers to `status`: its loop's counts, and the overlay's report."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.core.kv_bytes import ModelShape, bytes_per_token
from orchestrator.embedded.shard.loop import Loop
from orchestrator.embedded.shard.seam import ModelInfo
from tgi_patches.contract import Fingerprint, Limits, ShardSpec, StatusReply
from tgi_patches.sidecar.describe import Reach, RouterView, status_of, unhooked

from .model import TgiModel
from .overlay import Overlay


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
        reports = overlay.reports()
        self.note = unhooked(engine.spec, engine.epoch, reports)
        self.model_class = next((report.model_class for report in reports if report), "")
        self.fingerprint = overlay.reports.fingerprint() or _own_fingerprint(engine)

    def __call__(self) -> StatusReply:
        engine, loop = self._engine, self._loop
        front = RouterView("", engine.limits, loop.running, loop.waiting, loop.kv_tokens_used)
        told = status_of(engine.spec, engine.epoch, self._overlay.reports(), front, Reach(arena_id=""))
        note = self.note or told.note
        return replace(
            told,
            fingerprint=self.fingerprint,
            kv_tokens=engine.kv_tokens,
            bytes_per_token=told.bytes_per_token or bytes_per_token(engine.shape, engine.spec.dtype),
            ring_bytes=0 if note else told.ring_bytes,
            record_limit_bytes=0 if note else told.record_limit_bytes,
            pinned_bytes=0 if note else told.pinned_bytes,
            hooked=not note,
            note=note,
        )


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
        tensor_parallel=spec.tensor_parallel,
    )
