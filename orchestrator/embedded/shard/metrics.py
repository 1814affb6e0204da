"""A shard's counters as Prometheus text, read from its status: nothing is counted twice."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tgi_patches.contract import StatusReply

_GAUGES = {
    "orchestrator_shard_running": ("Requests being decoded.", "running"),
    "orchestrator_shard_waiting": ("Requests waiting for a batch.", "waiting"),
    "orchestrator_shard_kv_tokens": ("Tokens the KV pool holds.", "kv_tokens"),
    "orchestrator_shard_kv_tokens_used": ("Tokens of the KV pool in use.", "kv_tokens_used"),
    "tgi_batch_current_size": ("Requests being decoded (TGI's name).", "running"),
    "tgi_queue_size": ("Requests waiting for a batch (TGI's name).", "waiting"),
}
_COUNTERS = {
    "orchestrator_kv_exports": ("KV records exported, by result.", "exports"),
    "orchestrator_kv_imports": ("KV records imported, by result.", "imports"),
}


class _StatusCollector(Collector):
    def __init__(self, status: StatusReply) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        for name, (text, attribute) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(self._status, attribute))
        for name, (text, attribute) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["result"])
            for result, count in sorted(getattr(self._status, attribute).items()):
                counter.add_metric([result], count)
            yield counter


def exposition(status: StatusReply) -> bytes:
    """The text of `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatusCollector(status))
    return generate_latest(registry)
