"""The figures that `status` shows of a shard's cost model."""

from __future__ import annotations

import pytest

from orchestrator.api.figures import costs_of
from orchestrator.core.cost import Costs, DecodeCost, PrefillCost, RelayCost
from orchestrator.core.ticket import ShardView
from tgi_patches.contract import Fingerprint, Limits, Role


def view(costs: Costs | None, max_input_tokens: int = 4000) -> ShardView:
    """8 slots and 8000 KV tokens."""
    return ShardView(
        shard="s",
        role=Role.DECODE,
        epoch=1,
        url="http://s",
        state="ready",
        fingerprint=Fingerprint("m", "r", "t", "float32", "float32", 2, 1, 8),
        limits=Limits(max_input_tokens, 4096),
        kv_tokens=8000,
        slots=8,
        ring_bytes=1000,
        record_limit_bytes=1000,
        bytes_per_token=1,
        costs=costs,
    )


def test_a_shard_that_was_never_measured_has_none() -> None:
    assert costs_of(view(None)) is None
    told = costs_of(view(Costs()))
    assert told == {"prefill": None, "decode": None, "relay": None, "pull": None, "figures": {}}


def test_prefill_is_told_by_the_length_that_fills_a_batch_and_its_throughput() -> None:
    # 0.1 s + 1 ms a token: best 1000 tokens/s, 90 % of it at n where n / (0.1 + n / 1000) = 900, n = 900.
    cost = PrefillCost(fixed_s=0.1, per_token_s=0.001)
    told = costs_of(view(Costs(prefill=cost)))
    assert told is not None
    assert told["prefill"] == {"fixed_s": 0.1, "per_token_s": 0.001, "per_square_s": 0.0}
    assert told["figures"]["saturation_tokens"] == pytest.approx(900, abs=1)
    assert told["figures"]["prefill_tokens_per_s"] == pytest.approx(900, rel=0.01)
    # No prompt is longer than 100 tokens: 100 / 0.2 s.
    short = costs_of(view(Costs(prefill=cost), max_input_tokens=100))
    assert short is not None
    assert short["figures"] == {"saturation_tokens": 100, "prefill_tokens_per_s": pytest.approx(500)}


def test_decode_is_told_by_a_step_of_one_sequence_and_of_a_full_batch() -> None:
    # 10 ms + 1 us a context token + 2 ms a sequence; a full batch is 8 sequences of 1000 tokens.
    told = costs_of(view(Costs(decode=DecodeCost(0.010, 0.000001, 0.002), relay=RelayCost(0.001, 1e9))))
    assert told is not None
    assert told["figures"] == {
        "decode_step_one_ms": pytest.approx(10 + 1 + 2),
        "decode_step_full_ms": pytest.approx(10 + 8 + 16),
        "full_batch": 8,
    }
    assert told["relay"] == {"latency_s": 0.001, "bytes_per_s": 1e9}
