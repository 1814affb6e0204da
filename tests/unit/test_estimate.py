"""Prompt sizes without a tokenizer: the bound holds, the estimate learns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.estimate import Estimator, PromptSize, size_of_chat, size_of_text

TEXTS = st.text(max_size=300)


def bytes_as_tokens(text: str) -> int:
    """The worst tokenizer that covers at least a byte with each token."""
    return len(text.encode())


@given(text=TEXTS)
def test_bound_holds_for_one_token_a_byte_and_a_few_special_ones(text: str) -> None:
    assert size_of_text(text).upper_bound >= bytes_as_tokens(text) + 2


@given(texts=st.lists(TEXTS, max_size=5))
def test_bound_of_a_chat_covers_a_template_around_each_message(texts: list[str]) -> None:
    # ChatML with a default system prompt: 4 + role a message, about 30 tokens once.
    templated = sum(bytes_as_tokens(text) + 6 for text in texts) + 40
    assert size_of_chat(texts).upper_bound >= templated


def test_many_short_messages_are_bounded_by_what_the_template_adds_to_each() -> None:
    assert size_of_chat([""] * 100).upper_bound >= 100 * 6 + 40


@given(text=TEXTS, rate=st.floats(0.2, 1.0))
def test_estimate_lies_between_one_and_the_bound(text: str, rate: float) -> None:
    size = size_of_text(text)
    assert 1 <= Estimator(rate).estimate(size) <= size.upper_bound


def test_bytes_are_told_apart() -> None:
    assert size_of_text("Hello wörld 42!") == PromptSize(plain_bytes=11, dense_bytes=5, added_tokens=8)


def test_dense_scripts_count_every_byte() -> None:
    assert Estimator(0.2).estimate(size_of_text("好" * 10)) == 30 + 8


def test_prose_is_estimated_well_below_its_bytes() -> None:
    size = size_of_text("the quick brown fox jumps over the lazy dog " * 20)
    assert Estimator().estimate(size) < 0.7 * size.upper_bound


def test_more_tokens_than_expected_are_believed_at_once() -> None:
    size = PromptSize(plain_bytes=1000, dense_bytes=50, added_tokens=8)
    learned = Estimator(0.25).observe(size, 850)
    assert learned.rate == pytest.approx(0.8)
    assert learned.estimate(size) >= 850


def test_fewer_tokens_are_believed_slowly() -> None:
    size = PromptSize(plain_bytes=1000, dense_bytes=0, added_tokens=8)
    once = Estimator(0.5).observe(size, 250)
    assert once.rate == pytest.approx(0.4975)
    often = Estimator(0.5)
    for _ in range(600):
        often = often.observe(size, 250)
    assert often.rate == pytest.approx(0.25, abs=0.001)


def test_short_prompts_teach_nothing() -> None:
    assert Estimator(0.5).observe(PromptSize(10, 0, 8), 10) == Estimator(0.5)


def test_rate_never_leaves_its_range() -> None:
    size = PromptSize(plain_bytes=1000, dense_bytes=0, added_tokens=8)
    assert Estimator(0.9).observe(size, 5000).rate == 1.0
    low = Estimator(0.2)
    for _ in range(100):
        low = low.observe(size, 1)
    assert low.rate == pytest.approx(0.2)
