"""What one shard's phases take, learned from samples and from what was known of its kind before."""

from __future__ import annotations

from orchestrator.core.batches import PrefillBatch
from orchestrator.core.cost import (
    LEAST_BYTES_PER_S,
    MOST_BYTES_PER_S,
    MOST_FIXED_S,
    MOST_PER_CONTEXT_S,
    MOST_PER_SQUARE_S,
    MOST_PER_TOKEN_S,
    Costs,
    DecodeCost,
    PrefillCost,
    RelayCost,
)
from orchestrator.core.fitting import Coefficients, Law, Point
from orchestrator.core.lives import DecodeSample
from orchestrator.core.observing import RelaySample, Sample

# Of a machine of which nothing is known: how one size compares to another, not how long either takes.
_PREFILL_SHAPE = (32.0, 1.0, 5e-5)
_DECODE_SHAPE = (1.0, 1e-5, 0.02)
_RELAY_SHAPE = (1.0, 1e-7, 0.0)
_PREFILL_ANCHORS: tuple[Point, ...] = tuple((float(n), float(n * n)) for n in (16, 256, 2048))
_DECODE_ANCHORS: tuple[Point, ...] = ((64.0, 1.0), (4096.0, 1.0), (4096.0, 16.0))
"""Context tokens and sequences."""
_RELAY_ANCHORS: tuple[Point, ...] = ((1e5, 0.0), (1e7, 0.0), (1e9, 0.0))

_LEAST_PURE_SHARE = 0.2
"""Of a request's decode that is left without the prefills that held it up: below it nothing can be told."""


class ShardFit:
    """The four laws of one shard; `prior` is the latest known of a shard of its kind."""

    def __init__(self, prior: Costs | None = None) -> None:
        known = prior or Costs()
        self._prefill = Law(_PREFILL_SHAPE, _PREFILL_ANCHORS, _of_prefill(known.prefill))
        self._decode = Law(_DECODE_SHAPE, _DECODE_ANCHORS, _of_decode(known.decode))
        self._relay = Law(_RELAY_SHAPE, _RELAY_ANCHORS, _of_relay(known.relay))
        self._pull = Law(_RELAY_SHAPE, _RELAY_ANCHORS, _of_relay(known.pull))
        self._laws = (self._prefill, self._decode, self._relay, self._pull)
        self._costs: Costs | None = None

    @property
    def seen(self) -> int:
        """Samples so far."""
        return sum(law.seen for law in self._laws)

    def observe(self, sample: Sample) -> bool:
        """False for a sample that cannot be true."""
        if isinstance(sample, PrefillBatch):
            return self._prefill.observe(sample.tokens, sample.squares, sample.seconds)
        if isinstance(sample, RelaySample):
            law = self._pull if sample.pulled else self._relay
            return law.observe(sample.kv_bytes, 0.0, sample.seconds)
        return self._observe_decode(sample)

    def costs(self) -> Costs:
        """As far as anything is known; fits anew where that is due, which costs about half a millisecond."""
        due = self._costs is None
        for law in self._laws:
            due = due or law.due
        if self._costs is None or due:
            self._costs = Costs(
                _prefill(self._prefill.coefficients()),
                _decode(self._decode.coefficients()),
                _relay(self._relay.coefficients()),
                _relay(self._pull.coefficients()),
            )
        return self._costs

    def _observe_decode(self, sample: DecodeSample) -> bool:
        """The steps alone: what others' prefills took of the request's time is subtracted."""
        seconds = sample.seconds
        if sample.prefills:
            prefill = _prefill(self._prefill.coefficients())
            if prefill is None:
                return False
            together = prefill.seconds(sample.prefill_tokens, sample.prefill_squares)
            seconds -= together + (sample.prefills - 1) * prefill.fixed_s
        if seconds < _LEAST_PURE_SHARE * sample.seconds:
            return False
        return self._decode.observe(sample.context_tokens, sample.batch, seconds / sample.steps)


def _of_prefill(cost: PrefillCost | None) -> Coefficients | None:
    return None if cost is None else (cost.fixed_s, cost.per_token_s, cost.per_square_s)


def _of_decode(cost: DecodeCost | None) -> Coefficients | None:
    return None if cost is None else (cost.fixed_s, cost.per_context_s, cost.per_sequence_s)


def _of_relay(cost: RelayCost | None) -> Coefficients | None:
    return None if cost is None else (cost.latency_s, 1 / cost.bytes_per_s, 0.0)


def _prefill(known: Coefficients | None) -> PrefillCost | None:
    if known is None:
        return None
    fixed_s, per_token_s, per_square_s = known
    return PrefillCost(
        min(fixed_s, MOST_FIXED_S), min(per_token_s, MOST_PER_TOKEN_S), min(per_square_s, MOST_PER_SQUARE_S)
    )


def _decode(known: Coefficients | None) -> DecodeCost | None:
    if known is None:
        return None
    fixed_s, per_context_s, per_sequence_s = known
    return DecodeCost(
        min(fixed_s, MOST_FIXED_S),
        min(per_context_s, MOST_PER_CONTEXT_S),
        min(per_sequence_s, MOST_PER_TOKEN_S),
    )


def _relay(known: Coefficients | None) -> RelayCost | None:
    if known is None:
        return None
    latency_s, per_byte_s, _ = known
    bytes_per_s = 1 / per_byte_s if per_byte_s * MOST_BYTES_PER_S > 1 else MOST_BYTES_PER_S
    return RelayCost(min(latency_s, MOST_FIXED_S), max(bytes_per_s, LEAST_BYTES_PER_S))
