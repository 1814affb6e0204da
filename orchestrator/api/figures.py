"""What a shard's cost model says, in figures that an operator can compare.  Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.core.cost import Costs
from orchestrator.core.ticket import ShardView


def costs_of(view: ShardView) -> dict[str, Any] | None:
    """All coefficients (seconds per unit) and what follows from them; None for what was never measured."""
    costs = view.costs
    if costs is None:
        return None
    return {**dataclasses.asdict(costs), "figures": figures(costs, view)}


def figures(costs: Costs, view: ShardView) -> dict[str, float]:
    """As far as they are known: L_m and its throughput, a decode step of one sequence and of a full batch.

    A full batch has as many sequences as the shard has slots, and together they fill its KV pool.
    """
    found: dict[str, float] = {}
    if costs.prefill is not None:
        length = costs.prefill.saturation_tokens(view.limits.max_input_tokens)
        took_s = costs.prefill.alone_s(length)
        found["saturation_tokens"] = length
        found["prefill_tokens_per_s"] = length / took_s if took_s > 0 else 0.0
    if costs.decode is not None:
        slots = max(view.slots, 1)
        found["decode_step_one_ms"] = 1000 * costs.decode.step_s(1, view.kv_tokens / slots)
        found["decode_step_full_ms"] = 1000 * costs.decode.step_s(slots, view.kv_tokens)
        found["full_batch"] = slots
    return found
