"""L_m and the three laws, against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.cost import Costs, DecodeCost, PrefillCost, RelayCost


def test_l_m_of_opt_13b_is_a_little_over_512() -> None:
    """7.10 tokens/ms at 512 and 7.98 at 2048, taken for the best length.

    There t(n)/n = a/n + b + c n has its minimum: a = c * 2048^2.  From 1/7.10 and 1/7.98 ms a token:
    a = 14.138 ms, b = 0.111506 ms, c = 3.3708e-6 ms.  7.10 is 89 % of the best, so 90 % is just beyond 512:
    a/n + b + c n = 0.125313 / 0.9 gives n = 546.08.
    """
    opt = PrefillCost(14.138e-3, 0.111506e-3, 3.3708e-9)
    assert opt.alone_s(512) == pytest.approx(512 / 7100, rel=1e-3)
    assert opt.alone_s(2048) == pytest.approx(2048 / 7980, rel=1e-3)
    assert opt.saturation_tokens(4096) == 547


def test_l_m_without_a_square_term_is_nine_times_the_fixed_cost_in_tokens() -> None:
    # n / (a + b n) = 0.9 / b at n = 9 a / b
    assert PrefillCost(0.010, 0.0001).saturation_tokens(4096) == 900


@pytest.mark.parametrize(
    ("cost", "most", "expected"),
    [
        (PrefillCost(0.010, 0.0001), 512, 512),  # a batch has no room for more
        (PrefillCost(0.001, 0.001), 4096, 64),  # 9 tokens would do
        (PrefillCost(0.0, 0.001), 4096, 64),
        (PrefillCost(0.0, 0.0, 1e-6), 4096, 64),  # the shorter the better
        (PrefillCost(0.010, 0.0), 4096, 4096),  # the longer the better
        (PrefillCost(0.010, 5e-324), 4096, 4096),
        (PrefillCost(0.0, 0.0), 4096, 64),
        (PrefillCost(0.010, 0.0001), 0, 1),
    ],
)
def test_l_m_at_its_ends(cost: PrefillCost, most: int, expected: int) -> None:
    assert cost.saturation_tokens(most) == expected


@given(
    st.floats(0, 1).map(lambda x: x * 0.5),
    st.floats(0, 0.01),
    st.one_of(st.just(0.0), st.floats(1e-12, 1e-5)),
)
def test_a_prompt_of_l_m_reaches_nine_tenths_of_the_best_throughput(a: float, b: float, c: float) -> None:
    cost, most = PrefillCost(a, b, c), 1 << 20
    l_m = cost.saturation_tokens(most)
    if l_m in (64, most) or b + 2 * math.sqrt(a * c) < 1e-12:
        return  # bounds
    best_length = max(1.0, min(math.sqrt(a / c), most)) if c else most
    best_s_per_token = a / best_length + b + c * best_length
    assert cost.alone_s(l_m) / l_m <= best_s_per_token / 0.9 * (1 + 1e-9)
    shorter = l_m - 1
    assert cost.alone_s(shorter) / shorter >= (b + 2 * math.sqrt(a * c)) / 0.9 * (1 - 1e-9)


def test_a_batch_costs_its_fixed_part_once_and_the_square_of_each_prompt() -> None:
    cost = PrefillCost(1.0, 0.5, 0.01)
    assert cost.batch_s([10, 20]) == pytest.approx(1 + 0.5 * 30 + 0.01 * (100 + 400))
    assert cost.alone_s(30) == pytest.approx(1 + 0.5 * 30 + 0.01 * 900)


def test_a_step_and_a_relay_add_up() -> None:
    assert DecodeCost(0.02, 1e-6, 1e-3).step_s(8, 4000) == pytest.approx(0.02 + 0.004 + 0.008)
    assert RelayCost(0.003, 1e9).seconds(500_000_000) == pytest.approx(0.503)


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, -math.inf, 1e6, "1", None, True])
@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (PrefillCost, "fixed_s"),
        (PrefillCost, "per_token_s"),
        (PrefillCost, "per_square_s"),
        (DecodeCost, "fixed_s"),
        (DecodeCost, "per_context_s"),
        (DecodeCost, "per_sequence_s"),
        (RelayCost, "latency_s"),
    ],
)
def test_a_number_that_cannot_be_true_is_refused_by_name(kind: type[Any], field: str, value: Any) -> None:
    good = {"latency_s": 0.0, "bytes_per_s": 1e9} if kind is RelayCost else {}
    others = {name: 0.0 for name in kind.__dataclass_fields__ if name not in good}
    with pytest.raises(ValueError, match=field):
        kind(**{**others, **good, field: value})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_link_has_a_bandwidth(value: float) -> None:
    with pytest.raises(ValueError, match="bytes_per_s"):
        RelayCost(0.0, value)


def test_nothing_measured_is_nothing_known() -> None:
    assert Costs() == Costs(None, None, None, None)
