"""The online fit, against machines whose coefficients are known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.batches import PrefillBatch
from orchestrator.core.cost import Costs, DecodeCost, PrefillCost, RelayCost
from orchestrator.core.fitting import MOST_SAMPLES, PER_SIZE, Law
from orchestrator.core.learning import ShardFit
from orchestrator.core.lives import DecodeSample
from orchestrator.core.observing import RelaySample

MACHINE = PrefillCost(0.010, 1.2e-4, 2e-8)
LENGTHS = (16, 64, 256, 1024, 4096)
NOISE = 0.1


def noisy(rng: random.Random, seconds: float, outliers: float) -> float:
    """Log-normal noise of 10 %, and some samples ten times too slow."""
    return seconds * math.exp(rng.gauss(0, NOISE)) * (10 if rng.random() < outliers else 1)


def prompts(rng: random.Random) -> list[int]:
    """One to eight prompts, 8 to 4096 tokens with every magnitude alike."""
    return [int(2 ** rng.uniform(3, 12)) for _ in range(rng.choice((1, 1, 1, 2, 4, 8)))]


def feed(
    fit: ShardFit,
    machine: PrefillCost,
    count: int,
    rng: random.Random,
    *,
    outliers: float = 0.1,
    lengths: Callable[[random.Random], list[int]] = prompts,
) -> None:
    for _ in range(count):
        batch = lengths(rng)
        seconds = noisy(rng, machine.batch_s(batch), outliers)
        fit.observe(PrefillBatch(len(batch), sum(batch), sum(n * n for n in batch), seconds))
        fit.costs()


def error(fit: ShardFit, machine: PrefillCost, tokens: int) -> float:
    """Of the prediction, relative."""
    known = fit.costs().prefill
    assert known is not None
    return known.alone_s(tokens) / machine.alone_s(tokens) - 1


@pytest.mark.parametrize("seed", range(8))
def test_known_coefficients_are_found_under_noise_and_outliers(seed: int) -> None:
    fit = ShardFit()
    feed(fit, MACHINE, 400, random.Random(seed))
    for tokens in LENGTHS:
        assert abs(error(fit, MACHINE, tokens)) < 0.15, tokens


@pytest.mark.parametrize("seed", range(8))
def test_one_sample_in_ten_that_is_ten_times_too_slow_moves_predictions_by_less_than_a_tenth(
    seed: int,
) -> None:
    clean, dirty = ShardFit(), ShardFit()
    rng = random.Random(seed)
    for _ in range(400):
        batch = prompts(rng)
        seconds, struck = noisy(rng, MACHINE.batch_s(batch), 0.0), rng.random() < 0.1
        for fit, took_s in ((clean, seconds), (dirty, seconds * (10 if struck else 1))):
            fit.observe(PrefillBatch(len(batch), sum(batch), sum(n * n for n in batch), took_s))
            fit.costs()
    for tokens in LENGTHS:
        one, other = clean.costs().prefill, dirty.costs().prefill
        assert one is not None
        assert other is not None
        assert abs(other.alone_s(tokens) / one.alone_s(tokens) - 1) < 0.1, tokens


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_becomes_twice_as_slow_is_followed_within_200_batches(seed: int) -> None:
    rng, fit = random.Random(seed), ShardFit()
    slower = PrefillCost(0.020, 2.4e-4, 4e-8)
    feed(fit, MACHINE, 400, rng)
    feed(fit, slower, 200, rng)
    for tokens in LENGTHS:
        assert abs(error(fit, slower, tokens)) < 0.2, tokens


def test_what_is_ten_times_slower_for_good_is_no_outlier() -> None:
    rng, fit = random.Random(1), ShardFit()
    slower = PrefillCost(0.1, 1.2e-3, 2e-7)
    feed(fit, MACHINE, 400, rng)
    feed(fit, slower, 200, rng)
    for tokens in LENGTHS:
        assert abs(error(fit, slower, tokens)) < 0.3, tokens


def test_a_machine_that_becomes_faster_is_followed_as_well() -> None:
    rng, fit = random.Random(1), ShardFit()
    faster = PrefillCost(0.005, 0.6e-4, 1e-8)
    feed(fit, MACHINE, 400, rng)
    feed(fit, faster, 200, rng)
    for tokens in LENGTHS:
        assert abs(error(fit, faster, tokens)) < 0.2, tokens


def test_prompts_of_one_length_keep_the_prior_s_proportions_elsewhere() -> None:
    """The prior is a machine twice as fast: what was measured at one length scales it everywhere."""
    prior = PrefillCost(0.005, 0.6e-4, 1e-8)
    fit = ShardFit(Costs(prefill=prior))
    feed(fit, MACHINE, 200, random.Random(2), lengths=lambda _: [256])
    for tokens in LENGTHS:
        assert abs(error(fit, MACHINE, tokens)) < 0.1, tokens


def test_prompts_of_one_length_without_any_prior_predict_nothing_absurd_elsewhere() -> None:
    fit = ShardFit()
    feed(fit, MACHINE, 200, random.Random(3), lengths=lambda _: [256])
    assert abs(error(fit, MACHINE, 256)) < 0.1
    for tokens in (16, 64, 1024, 4096):
        assert -0.6 < error(fit, MACHINE, tokens) < 1.0, tokens


def test_few_samples_do_not_replace_a_prior_s_shape() -> None:
    prior = Costs(prefill=MACHINE)
    fit = ShardFit(prior)
    assert fit.costs().prefill == MACHINE
    feed(fit, MACHINE, 4, random.Random(4), outliers=0.0, lengths=lambda _: [64])
    for tokens in LENGTHS:
        assert abs(error(fit, MACHINE, tokens)) < 0.25, tokens


def test_nothing_is_said_before_anything_is_known() -> None:
    fit = ShardFit()
    assert fit.costs() == Costs()
    for _ in range(5):
        fit.observe(PrefillBatch(1, 100, 10_000, 0.05))
        assert fit.costs().prefill is None
    fit.observe(PrefillBatch(1, 100, 10_000, 0.05))
    known = fit.costs().prefill
    assert known is not None
    assert known.alone_s(100) == pytest.approx(0.05, rel=0.05)


def test_decode_is_found_from_batches_of_all_sizes() -> None:
    machine = DecodeCost(0.020, 1e-7, 1e-3)
    rng, fit = random.Random(5), ShardFit()
    for _ in range(400):
        batch = rng.uniform(1, 32)
        context = batch * rng.uniform(50, 4000)
        seconds = noisy(rng, machine.step_s(batch, context), 0.1)
        fit.observe(DecodeSample(20, 20 * seconds, batch, context))
        fit.costs()
    known = fit.costs().decode
    assert known is not None
    for batch, context in ((1, 100), (1, 4000), (16, 8000), (32, 64_000)):
        assert known.step_s(batch, context) == pytest.approx(machine.step_s(batch, context), rel=0.12)


def test_the_prefills_that_held_a_request_up_are_not_counted_as_its_steps() -> None:
    """20 steps of 30 ms, and two prefills of 100 and 300 tokens: 2 * 10 ms + 400 * 0.1 ms."""
    fit = ShardFit(Costs(prefill=PrefillCost(0.010, 1e-4)))
    sample = DecodeSample(20, 20 * 0.030 + 0.060, 1.0, 100.0, 2, 400, 100**2 + 300**2)
    for _ in range(10):
        assert fit.observe(sample)
    known = fit.costs().decode
    assert known is not None
    assert known.step_s(1, 100) == pytest.approx(0.030, rel=0.02)


def test_steps_beside_prefills_say_nothing_where_prefill_is_not_known() -> None:
    assert not ShardFit().observe(DecodeSample(20, 1.0, 1.0, 100.0, 1, 100, 10_000))


def test_relays_in_place_and_from_another_host_are_two_laws() -> None:
    here, far = RelayCost(0.002, 8e9), RelayCost(0.010, 1e9)
    rng, fit = random.Random(6), ShardFit()
    for _ in range(200):
        size = 10 ** rng.uniform(5, 8.5)
        fit.observe(RelaySample(size, noisy(rng, 0.002 + size / 8e9, 0.1), pulled=False))
        fit.observe(RelaySample(size, noisy(rng, 0.010 + size / 1e9, 0.1), pulled=True))
    known = fit.costs()
    assert known.relay is not None
    assert known.pull is not None
    for size in (100_000, 10_000_000, 300_000_000):
        assert known.relay.seconds(size) == pytest.approx(here.seconds(size), rel=0.12)
        assert known.pull.seconds(size) == pytest.approx(far.seconds(size), rel=0.12)


def test_a_law_never_keeps_more_than_its_bound() -> None:
    law = Law((1.0, 1.0, 0.0), ((1.0, 0.0),))
    for exponent in range(40):
        for other in range(40):
            for _ in range(3):
                law.observe(2.0**exponent, 2.0**other, 1.0)
    kept = [len(bucket) for bucket in law._buckets.values()]
    assert sum(kept) == MOST_SAMPLES == law._kept
    assert max(kept) <= PER_SIZE


def test_what_happens_all_the_time_does_not_push_out_what_is_rare() -> None:
    """After one measured long prompt, 500 short ones."""
    fit = ShardFit()
    for _ in range(4):
        fit.observe(PrefillBatch(1, 4096, 4096**2, MACHINE.alone_s(4096)))
    feed(fit, MACHINE, 500, random.Random(7), outliers=0.0, lengths=lambda rng: [rng.randrange(32, 128)])
    assert abs(error(fit, MACHINE, 4096)) < 0.1


@pytest.mark.parametrize("seed", range(4))
def test_a_size_that_is_met_for_the_first_time_is_learned_and_not_taken_for_an_outlier(seed: int) -> None:
    """Short prompts only, then one in ten has 4096 tokens, on a machine with a large square term."""
    machine, rng, fit = PrefillCost(0.010, 1.2e-4, 2e-7), random.Random(seed), ShardFit()
    feed(fit, machine, 300, rng, lengths=lambda rng: [rng.randrange(32, 128)])
    assert error(fit, machine, 4096) < -0.5  # nothing told of it
    feed(fit, machine, 200, rng, lengths=lambda rng: [4096 if rng.random() < 0.1 else rng.randrange(32, 128)])
    assert abs(error(fit, machine, 4096)) < 0.15
    assert abs(error(fit, machine, 64)) < 0.15


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_a_time_that_cannot_be_true_is_not_kept(seconds: float) -> None:
    law = Law((1.0, 1.0, 0.0), ((1.0, 0.0),))
    assert not law.observe(1.0, 1.0, seconds)
    assert law.seen == 0


@pytest.mark.parametrize("size", [-1.0, math.nan, math.inf])
def test_a_size_that_cannot_be_true_is_not_kept(size: float) -> None:
    law = Law((1.0, 1.0, 0.0), ((1.0, 0.0),))
    assert not law.observe(size, 1.0, 1.0)
    assert not law.observe(1.0, size, 1.0)


@pytest.mark.parametrize("power", [0, 1, 2])
def test_a_machine_slower_than_any_is_known_by_the_bounds(power: int) -> None:
    """100 s at any size, 100 s a token, 1 s a square; known before as one at the bound."""
    unit_s, prior = (100.0, 100.0, 1.0)[power], [0.0, 0.0, 0.0]
    prior[power] = (60.0, 10.0, 0.01)[power]
    fit = ShardFit(Costs(prefill=PrefillCost(*prior)))
    for tokens in range(2, 33):
        fit.observe(PrefillBatch(1, tokens, tokens * tokens, unit_s * tokens**power))
    known = fit.costs().prefill
    assert known is not None
    assert (known.fixed_s, known.per_token_s, known.per_square_s)[power] == prior[power]


numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0, 1e4),
    st.integers(-10, 10**6).map(float),
    st.sampled_from([0.0, 1e-300, 5e-324, 1e15, 1e300]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=60), st.booleans())
def test_coefficients_are_finite_and_not_negative_whatever_is_observed(
    samples: list[tuple[float, float, float]], with_prior: bool
) -> None:
    law = Law(
        (32.0, 1.0, 5e-5), ((16.0, 256.0), (2048.0, 2048.0**2)), (0.01, 1e-4, 1e-8) if with_prior else None
    )
    for x, y, seconds in samples:
        law.observe(x, y, seconds)
        known = law.coefficients()
        if known is not None:
            assert all(0 <= value < math.inf for value in known)
            assert sum(known) > 0


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.builds(PrefillBatch, st.just(1), st.integers(0, 10**9), st.integers(0, 10**18), numbers),
            st.builds(DecodeSample, st.integers(1, 9), numbers, numbers, numbers, st.integers(0, 3)),
            st.builds(RelaySample, numbers, numbers, st.booleans()),
        ),
        max_size=60,
    )
)
def test_a_shard_s_costs_can_always_be_used(
    samples: list[PrefillBatch | DecodeSample | RelaySample],
) -> None:
    """`Costs` itself refuses what is negative, not finite or absurd."""
    fit = ShardFit()
    for sample in samples:
        fit.observe(sample)
        fit.costs()
