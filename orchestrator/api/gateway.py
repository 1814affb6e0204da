"""What every route of one gateway shares."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.admission import Admission
from orchestrator.metrics import Metrics
from orchestrator.pipeline import Pipeline
from orchestrator.queues.protocol import RequestQueue


@dataclass(frozen=True, slots=True)
class Gateway:
    pipeline: Pipeline
    queue: RequestQueue
    metrics: Metrics

    @property
    def admission(self) -> Admission:
        return self.pipeline.admission

    @property
    def connected(self) -> bool:
        """Redis answers this gateway."""
        return self.queue.connected

    @property
    def body_timeout_s(self) -> float:
        """For a client to send a body."""
        return self.pipeline.settings.body_timeout_s

    @property
    def payload_bytes(self) -> int:
        """The largest body that is read."""
        return min(self.pipeline.settings.limits.payload_bytes, self.admission.limits().payload_bytes)
