"""What the gateway's workers count: plain tallies on the way of a request, Prometheus' text at a scrape."""

from __future__ import annotations

from orchestrator.metrics.gateway import Metrics

__all__ = ["Metrics"]
