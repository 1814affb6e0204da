"""What is asked of the gateway, as ratios of medians from one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.bench.gateway import subjects

Medians = Mapping[str, Mapping[str, float]]
"""By subject, by figure."""


@dataclass(frozen=True, slots=True)
class Target:
    """`figure` of `subject` over the same of `peer` is at most `limit`; without a peer the figure itself."""

    what: str
    figure: str
    subject: str
    limit: float
    peer: str = ""
    over: str = ""
    """Another figure of the same subject to divide by."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`value` is None where a figure was not measured."""

    target: Target
    value: float | None

    @property
    def met(self) -> bool | None:
        return None if self.value is None else self.value <= self.target.limit


_EVENT = "CPU per relayed event"
_REQUEST = "CPU per request"
_TTFT = "added TTFT p50"
_OURS, _REDIS = subjects.OURS, subjects.OURS_REDIS

TARGETS = (
    Target(_EVENT, "event_us", _OURS, 1.1, peer=subjects.VLLM_ROUTER),
    Target(_EVENT, "event_us", _OURS, 1.4, peer=subjects.NGINX),
    Target(_EVENT, "event_us", _OURS, 0.25, peer=subjects.FASTAPI_HTTPX),
    Target(_REQUEST, "request_us", _OURS, 1.2, peer=subjects.AIOHTTP),
    Target(_REQUEST + ", Redis", "request_us", _REDIS, 1.5, peer=subjects.VLLM_ROUTER),
    Target(_TTFT, "added_ttft_p50_ms", _OURS, 1.5, peer=subjects.VLLM_ROUTER),
    Target(_TTFT + ", Redis", "added_ttft_p50_ms", _REDIS, 1.5, peer=subjects.VLLM_ROUTER),
    Target("256 pooled connections to 1, all busy", "busy_256_us", _OURS, 1.1, over="busy_1_us"),
    Target("256 pooled connections to 1, one busy", "idle_256_us", _OURS, 1.1, over="idle_1_us"),
    Target("open streams that were not open at once", "not_open_at_once", _OURS, 0.0),
    Target("kB per open stream", "rss_per_stream_kb", _OURS, 40.0),
)


def judge(medians: Medians) -> list[Verdict]:
    """One verdict a target, in order."""
    return [Verdict(target, _value(target, medians)) for target in TARGETS]


def _value(target: Target, medians: Medians) -> float | None:
    ours = medians.get(target.subject, {}).get(target.figure)
    if not target.peer and not target.over:
        return ours
    theirs = (
        medians.get(target.peer, {}).get(target.figure)
        if target.peer
        else medians.get(target.subject, {}).get(target.over)
    )
    return None if ours is None or not theirs else ours / theirs
