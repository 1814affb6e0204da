"""Every counter and histogram by name, with its labels, its buckets and what it means.

Beside our names stand the `tgi_*` names that TGI's own dashboard reads, as seen from the gateway.
"""

from __future__ import annotations

from dataclasses import dataclass

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TPOT_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TOKENS = tuple(float(2**power) for power in range(16))
_AS_TGI = "As TGI's router counts it, seen from the gateway."


@dataclass(frozen=True, slots=True)
class Counted:
    """A counter; its name lacks `_total`, which TGI's names do not have."""

    name: str
    text: str
    labels: tuple[str, ...] = ()

    @property
    def ours(self) -> bool:
        return self.name.startswith("orchestrator_")


@dataclass(frozen=True, slots=True)
class Measured:
    """A histogram with the upper bounds of its buckets; the one above the last is implied."""

    name: str
    text: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = _SECONDS


COUNTERS = (
    Counted("orchestrator_requests", "Requests by how they ended.", ("route", "outcome")),
    Counted("orchestrator_tokens", "Tokens by kind: prompt or generated.", ("kind",)),
    Counted("orchestrator_kv_imports", "Get legs by what became of the record.", ("result",)),
    Counted("orchestrator_kv_pulls", "Records fetched from another host, by result.", ("result",)),
    Counted("orchestrator_kv_pulled_bytes", "KV bytes fetched from other hosts."),
    Counted("orchestrator_routing", "Grants by choice and reason.", ("choice", "reason")),
    Counted("orchestrator_capped", "Requests whose answer the mode made shorter."),
    Counted("orchestrator_shed", "Requests that the mode refused."),
    Counted("orchestrator_key_requests", "Requests of named API keys.", ("key", "outcome")),
    Counted("orchestrator_key_tokens", "Tokens of named API keys, by kind.", ("key", "kind")),
    Counted("tgi_request_count", _AS_TGI),
    Counted("tgi_request_success", _AS_TGI),
    Counted("tgi_request_failure", _AS_TGI, ("err",)),
)

HISTOGRAMS = (
    Measured("orchestrator_kv_pull_seconds", "Time of a pull, whatever its result."),
    Measured("orchestrator_phase_seconds", "Time in each phase of a request.", ("phase",)),
    Measured("orchestrator_ttft_seconds", "Arrival to first token sent."),
    Measured(
        "orchestrator_tpot_seconds",
        "Mean time per token after the first, of one request.",
        bounds=_TPOT_SECONDS,
    ),
    Measured("tgi_request_duration", "Whole request."),
    Measured("tgi_request_queue_duration", "Wait for a grant."),
    Measured("tgi_request_inference_duration", "Grant to last token."),
    Measured("tgi_request_validation_duration", "Validation."),
    Measured("tgi_request_mean_time_per_token_duration", "Per token.", bounds=_TPOT_SECONDS),
    Measured("tgi_request_input_length", "Prompt tokens.", bounds=_TOKENS),
    Measured("tgi_request_max_new_tokens", "Tokens asked for.", bounds=_TOKENS),
    Measured("tgi_request_generated_tokens", "Tokens.", bounds=_TOKENS),
)
