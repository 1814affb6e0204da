"""Tallies as prometheus_client's families, and from there as Prometheus' text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from orchestrator.core.ticket import ShardView
from orchestrator.metrics.families import COUNTERS, HISTOGRAMS, Counted, Measured
from orchestrator.metrics.tally import Distribution, Tally
from tgi_patches.contract import Role


@dataclass(frozen=True, slots=True)
class Scrape(Collector):
    """What one scrape tells."""

    tally: Tally
    """Of all workers."""
    workers: int
    shards: Sequence[ShardView]
    level: int
    redis_up: bool

    def text(self) -> bytes:
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        for counted in COUNTERS:
            yield _counter(counted, self.tally)
        for measured in HISTOGRAMS:
            yield _histogram(measured, self.tally)

    def _gauges(self) -> Iterator[Metric]:
        reserved = GaugeMetricFamily(
            "orchestrator_reserved_kv_tokens", "KV tokens promised to requests.", labels=["shard"]
        )
        for view in self.shards:
            reserved.add_metric([view.shard], view.reserved_kv_tokens)
        yield reserved
        batches = GaugeMetricFamily(
            "orchestrator_prefill_batch_requests",
            "Prompts of one prefill batch, lately and on the average, as measured.",
            labels=["shard"],
        )
        for view in self.shards:
            if view.batch_requests:
                batches.add_metric([view.shard], view.batch_requests)
        yield batches
        hot = GaugeMetricFamily(
            "orchestrator_hot_groups", "Groups of hot prompts that keep to a decode shard.", labels=["shard"]
        )
        for view in self.shards:
            if view.role is Role.DECODE:
                hot.add_metric([view.shard], view.hot_groups)
        yield hot
        yield GaugeMetricFamily("orchestrator_mode", "Level of degradation; 0 is normal.", value=self.level)
        yield GaugeMetricFamily(
            "orchestrator_redis_up", "Whether Redis answers the worker that tells.", value=self.redis_up
        )
        yield GaugeMetricFamily("orchestrator_workers", "Gateway processes that live.", value=self.workers)
        yield GaugeMetricFamily(
            "orchestrator_open_requests", "Requests in the gateway.", value=self.tally.open
        )
        yield GaugeMetricFamily("tgi_queue_size", "Requests without a grant.", value=self.tally.queued)


def _counter(counted: Counted, tally: Tally) -> Metric:
    values = tally.counters[counted.name].items()
    if counted.ours:
        family = CounterMetricFamily(counted.name, counted.text, labels=counted.labels)
        for labels, value in values:
            family.add_metric(labels, value)
        return family
    # A counter's name would get `_total` here, and TGI's dashboard reads names without it.
    plain = Metric(counted.name, counted.text, "unknown")
    for labels, value in values:
        plain.add_sample(counted.name, dict(zip(counted.labels, labels, strict=True)), value)
    return plain


def _histogram(measured: Measured, tally: Tally) -> Metric:
    family = HistogramMetricFamily(measured.name, measured.text, labels=measured.labels)
    for labels, one in tally.histograms[measured.name].items():
        family.add_metric(labels, _buckets(one), one.sum)
    return family


def _buckets(one: Distribution) -> list[tuple[str, float]]:
    """(upper bound, values at or below it)."""
    names = [*map(floatToGoString, one.bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(one.counts)), strict=True))
