"""Percentiles and their intervals, against values worked out by hand."""

from __future__ import annotations

import pytest

from orchestrator.bench.interference.stats import Estimate, estimate, percentile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([5.0], 0.99, 5.0),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0),
        ([float(i) for i in range(1, 101)], 0.99, 99.0),
        ([float(i) for i in range(1, 101)], 1.0, 100.0),
        ([float(i) for i in range(1, 201)], 0.99, 198.0),
    ],
)
def test_percentile_is_the_smallest_value_that_covers_the_share(
    values: list[float], share: float, expected: float
) -> None:
    assert percentile(values, share) == expected


def test_nothing_seen_is_no_estimate() -> None:
    assert estimate([[], []], 0.5) == Estimate(None, None, None)


def test_equal_values_have_an_interval_of_no_width() -> None:
    assert estimate([[0.02] * 50], 0.99) == Estimate(20.0, 20.0, 20.0)


def test_the_interval_holds_the_value_and_a_rare_stall_widens_it() -> None:
    steady = [0.02] * 400
    stalled = [0.02] * 395 + [0.3] * 5
    narrow, wide = estimate([steady], 0.99), estimate([stalled], 0.99)
    assert wide.low_ms is not None
    assert wide.high_ms is not None
    assert wide.low_ms <= (wide.value_ms or 0) <= wide.high_ms
    assert wide.high_ms == 300.0
    assert narrow.high_ms == 20.0
