"""Percentiles with confidence intervals; pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_RESAMPLES = 300
_BLOCK = 8


@dataclass(frozen=True, slots=True)
class Estimate:
    """A percentile in ms with its 95 % confidence interval; None where nothing was seen."""

    value_ms: float | None
    low_ms: float | None
    high_ms: float | None


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    rank = min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))
    return ordered[rank]


def estimate(groups: Sequence[Sequence[float]], share: float) -> Estimate:
    """A percentile over all values, in seconds, with a block bootstrap's interval.

    Neighbouring values hang together (one prefill stalls every stream), so blocks of a group are
    drawn again, never single values.
    """
    values = [value for group in groups for value in group]
    if not values:
        return Estimate(None, None, None)
    blocks = [group[i : i + _BLOCK] for group in groups for i in range(0, len(group), _BLOCK)]
    chance = random.Random(0)
    drawn = sorted(
        percentile([value for block in chance.choices(blocks, k=len(blocks)) for value in block], share)
        for _ in range(_RESAMPLES)
    )
    low, high = drawn[int(0.025 * _RESAMPLES)], drawn[int(0.975 * _RESAMPLES)]
    return Estimate(*(round(v * 1e3, 1) for v in (percentile(values, share), low, high)))
