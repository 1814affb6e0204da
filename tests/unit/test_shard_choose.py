"""Sampling rules against values worked out by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from orchestrator.embedded.shard.choose import Chooser
from orchestrator.embedded.shard.seam import Sampling


def process(sampling: Sampling, scores: list[float], ids: list[int]) -> list[float]:
    values: list[float] = Chooser(sampling).process(torch.tensor(scores), ids).tolist()
    return values


def kept(sampling: Sampling, probabilities: list[float]) -> set[int]:
    scores = [math.log(p) for p in probabilities]
    return {i for i, s in enumerate(process(sampling, scores, [])) if s > -math.inf}


def test_repetition_penalty_shrinks_positive_and_grows_negative_scores_of_seen_tokens() -> None:
    assert process(Sampling(repetition_penalty=2.0), [4.0, -3.0, 4.0], [0, 1, 1]) == [2.0, -6.0, 4.0]


def test_frequency_penalty_is_in_proportion_to_a_tokens_share_of_the_sequence() -> None:
    # shares of the four tokens: 0, 1/4, 3/4
    assert process(Sampling(frequency_penalty=0.5), [1.0, 1.0, 1.0], [1, 2, 2, 2]) == [1.0, 0.875, 0.625]


def test_greedy_ignores_temperature_and_top_k() -> None:
    assert process(Sampling(temperature=0.5, top_k=1), [1.0, 3.0, 2.0], []) == [1.0, 3.0, 2.0]


def test_temperature_divides() -> None:
    assert process(Sampling(do_sample=True, temperature=0.5), [1.0, 3.0], []) == [2.0, 6.0]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(do_sample=True, top_k=2), {0, 1}),
        (Sampling(do_sample=True, top_k=99), {0, 1, 2, 3}),
        (Sampling(do_sample=True, top_p=0.45), {0}),
        (Sampling(do_sample=True, top_p=0.6), {0, 1}),
        (Sampling(do_sample=True, top_p=0.85), {0, 1, 2}),
    ],
)
def test_filters_keep_the_likeliest(sampling: Sampling, expected: set[int]) -> None:
    assert kept(sampling, [0.5, 0.3, 0.15, 0.05]) == expected


def test_typical_keeps_tokens_whose_surprise_is_near_the_entropy() -> None:
    # entropy of (.5, .3, .15, .05) is 1.142 nats; surprises .693, 1.204, 1.897, 2.996:
    # nearest first is 1 (.062 away), 0 (.449), 2 (.755), 3 (1.854)
    assert kept(Sampling(do_sample=True, typical_p=0.25), [0.5, 0.3, 0.15, 0.05]) == {1}
    assert kept(Sampling(do_sample=True, typical_p=0.7), [0.5, 0.3, 0.15, 0.05]) == {0, 1}


def test_equal_seeds_draw_equal_tokens_and_others_differ() -> None:
    scores = torch.zeros(1000)

    def draw(seed: int) -> list[int]:
        chooser = Chooser(Sampling(do_sample=True, seed=seed))
        return [chooser.pick(scores) for _ in range(8)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(2**64 - 1) == draw(2**64 - 1)


def test_draws_follow_the_distribution() -> None:
    chooser = Chooser(Sampling(do_sample=True, seed=1))
    scores = torch.tensor([math.log(0.7), math.log(0.3)])
    counts = Counter(chooser.pick(scores) for _ in range(4000))
    # three standard deviations of a binomial(4000, .7) are 87
    assert abs(counts[0] - 2800) < 87
