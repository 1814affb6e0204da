"""What a gateway counts, in a registry of its own: one per application, none global.

Beside our names stand the `tgi_*` names that TGI's own dashboard reads, as seen from the gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.core.routing import Mode
from orchestrator.core.ticket import Grant, Outcome, ShardView

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TPOT_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TOKENS = tuple(float(2**power) for power in range(16))


class Metrics:
    """Counters and histograms; `shards` and `mode` are asked at each scrape."""

    def __init__(self, shards: Callable[[], tuple[ShardView, ...]], mode: Callable[[], Mode] = Mode) -> None:
        self.registry = registry = CollectorRegistry()
        self.queued = 0
        """Requests that wait for a grant now."""
        self.tgi: dict[tuple[str, str], float] = {}
        """TGI's plain counters by (name, value of the label `err`)."""
        registry.register(_Now(self, shards, mode))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"orchestrator_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, text, labels, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Requests by how they ended.", "route", "outcome")
        self.tokens = counter("tokens", "Tokens by kind: prompt or generated.", "kind")
        self.imports = counter("kv_imports", "Get legs by what became of the record.", "result")
        self.pulls = counter("kv_pulls", "Records fetched from another host, by result.", "result")
        self.pulled_bytes = counter("kv_pulled_bytes", "KV bytes fetched from other hosts.")
        self.pull_s = histogram("orchestrator_kv_pull_seconds", "Time of a pull, whatever its result.")
        self.routing = counter("routing", "Grants by choice and reason.", "choice", "reason")
        self.phase_s = histogram("orchestrator_phase_seconds", "Time in each phase of a request.", "phase")
        self.ttft_s = histogram("orchestrator_ttft_seconds", "Arrival to first token sent.")
        self.tpot_s = histogram(
            "orchestrator_tpot_seconds",
            "Mean time per token after the first, of one request.",
            buckets=_TPOT_SECONDS,
        )
        self.tgi_duration_s = histogram("tgi_request_duration", "Whole request.")
        self.tgi_queue_s = histogram("tgi_request_queue_duration", "Wait for a grant.")
        self.tgi_inference_s = histogram("tgi_request_inference_duration", "Grant to last token.")
        self.tgi_validation_s = histogram("tgi_request_validation_duration", "Validation.")
        self.tgi_token_s = histogram(
            "tgi_request_mean_time_per_token_duration", "Per token.", buckets=_TPOT_SECONDS
        )
        self.tgi_input = histogram("tgi_request_input_length", "Prompt tokens.", buckets=_TOKENS)
        self.tgi_new = histogram("tgi_request_max_new_tokens", "Tokens asked for.", buckets=_TOKENS)
        self.tgi_generated = histogram("tgi_request_generated_tokens", "Tokens.", buckets=_TOKENS)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts a request as queued for the length of the block."""
        self.queued += 1
        try:
            yield
        finally:
            self.queued -= 1

    def arrived(self) -> None:
        self._tgi_count("tgi_request_count")

    def unparsed(self, route: str, error_type: str) -> None:
        """A request whose body could not be read as one."""
        self.arrived()
        self.requests.labels(route, Outcome.REFUSED).inc()
        self._tgi_count("tgi_request_failure", error_type)

    def granted(self, grant: Grant) -> None:
        self.routing.labels(grant.choice, grant.reason).inc()

    def imported(self, result: str) -> None:
        """`hit` or the reason of a miss, as the decode shard reported it."""
        self.imports.labels(result).inc()

    def pulled(self, result: str, took_s: float, kv_bytes: int) -> None:
        """`ok`, a miss reason, or `lost` and `timeout` for a sidecar that did not answer."""
        self.pulls.labels(result).inc()
        self.pull_s.observe(took_s)
        self.pulled_bytes.inc(kv_bytes)

    def ended(
        self,
        route: str,
        outcome: Outcome,
        *,
        error_type: str | None,
        phases_s: Mapping[str, float],
        total_s: float,
        ttft_s: float | None,
        prompt_tokens: int,
        generated_tokens: int,
    ) -> None:
        """A request is over; times in seconds."""
        self.requests.labels(route, outcome).inc()
        for phase, took_s in phases_s.items():
            self.phase_s.labels(phase).observe(took_s)
        if ttft_s is not None:
            self.ttft_s.observe(ttft_s)
        if outcome is not Outcome.DONE:
            if error_type is not None:
                self._tgi_count("tgi_request_failure", error_type)
            return
        self.tokens.labels("prompt").inc(prompt_tokens)
        self.tokens.labels("generated").inc(generated_tokens)
        self._tgi_count("tgi_request_success")
        queue_s = phases_s.get("queue", 0.0)
        self.tgi_duration_s.observe(total_s)
        self.tgi_queue_s.observe(queue_s)
        self.tgi_inference_s.observe(max(0.0, total_s - queue_s))
        self.tgi_generated.observe(generated_tokens)
        self.tgi_input.observe(prompt_tokens)
        if ttft_s is not None and generated_tokens > 1:
            per_token_s = (total_s - ttft_s) / (generated_tokens - 1)
            self.tpot_s.observe(per_token_s)
            self.tgi_token_s.observe(per_token_s)

    def counters(self) -> dict[str, dict[str, float]]:
        """Our counters by name, then by label values joined with a comma."""
        counted: dict[str, dict[str, float]] = {}
        shown = (self.requests, self.tokens, self.imports, self.pulls, self.pulled_bytes, self.routing)
        for counter in shown:
            for family in counter.collect():
                values = {
                    ",".join(s.labels.values()): s.value for s in family.samples if s.name.endswith("_total")
                }
                counted[family.name.removeprefix("orchestrator_")] = values
        return counted

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _tgi_count(self, name: str, err: str = "") -> None:
        self.tgi[name, err] = self.tgi.get((name, err), 0.0) + 1.0


class _Now(Collector):
    """What is read at the moment of a scrape, and TGI's counters, whose names lack `_total`."""

    def __init__(
        self, metrics: Metrics, shards: Callable[[], tuple[ShardView, ...]], mode: Callable[[], Mode]
    ) -> None:
        self._metrics = metrics
        self._shards = shards
        self._mode = mode

    def collect(self) -> Iterator[Metric]:
        reserved = GaugeMetricFamily(
            "orchestrator_reserved_kv_tokens", "KV tokens promised to requests.", labels=["shard"]
        )
        for view in self._shards():
            reserved.add_metric([view.shard], view.reserved_kv_tokens)
        yield reserved
        yield GaugeMetricFamily(
            "orchestrator_mode", "Level of degradation; 0 is normal.", value=self._mode().level
        )
        yield GaugeMetricFamily("tgi_queue_size", "Requests without a grant.", value=self._metrics.queued)
        for name in ("tgi_request_count", "tgi_request_success", "tgi_request_failure"):
            family = Metric(name, "As TGI's router counts it, seen from the gateway.", "unknown")
            for (key, err), value in self._metrics.tgi.items():
                if key == name:
                    family.add_sample(name, {"err": err} if err else {}, value)
            yield family
