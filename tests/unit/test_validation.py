"""TGI's rules, worked out from `router/src/validation.rs` of v3.3.7."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.validation import (
    GenerateParameters,
    GenerateRequest,
    chat_parameters,
    check_batch,
    check_lengths,
    surely_fits,
    validate_parameters,
    validate_request,
)
from orchestrator.errors import InvalidRequest
from tgi_patches.contract import Limits

LIMITS = Limits(max_input_tokens=100, max_total_tokens=120)
TOTAL = "`inputs` tokens + `max_new_tokens` must be <= 120. Given: {} `inputs` tokens and {} `max_new_tokens`"


def refusal(limits: Limits = LIMITS, *, stream: bool = False, **parameters: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        validate_parameters(GenerateParameters(**parameters), limits, stream=stream)
    assert caught.value.status == 422
    assert caught.value.error_type == "validation"
    text = str(caught.value)
    assert text.startswith("Input validation error: ")
    return text.removeprefix("Input validation error: ")


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3"),
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
        ({"temperature": 0.0}, "`temperature` must be strictly positive"),
        ({"temperature": -0.1}, "`temperature` must be strictly positive"),
        ({"temperature": 1e-60}, "`temperature` must be strictly positive"),
        ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
        ({"frequency_penalty": 2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"frequency_penalty": -2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"top_p": 0.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"top_p": 0.999999999}, "`top_p` must be > 0.0 and < 1.0"),
        ({"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
        ({"top_k": 0}, "`top_k` must be strictly positive"),
        ({"top_k": -1}, "`top_k` must be strictly positive"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"stop": tuple("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
        ({"truncate": 0}, "`truncate` must be strictly positive and less than 100. Given: 0"),
        ({"truncate": 101}, "`truncate` must be strictly positive and less than 100. Given: 101"),
    ],
)
def test_broken_rule_is_told_in_tgis_words(parameters: dict[str, Any], sentence: str) -> None:
    assert refusal(**parameters) == sentence


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.01},
        {"temperature": 100.0},
        {"frequency_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"top_p": 0.999},
        {"top_k": 1},
        {"max_new_tokens": 1},
        {"stop": tuple("abcd")},
        {"top_n_tokens": 5},
        {"truncate": 100},
        {"best_of": 2, "temperature": 1.0},
        {"best_of": 1, "seed": 0},
    ],
)
def test_values_at_the_edge_are_allowed(parameters: dict[str, Any]) -> None:
    validate_parameters(GenerateParameters(**parameters), LIMITS)


def test_best_of_can_be_switched_off() -> None:
    limits = Limits(max_input_tokens=100, max_total_tokens=120, max_best_of=1)
    assert refusal(limits, best_of=2, do_sample=True) == "`best_of` != 1 is not allowed for this endpoint"


def test_streams_have_rules_of_their_own() -> None:
    best_of = refusal(stream=True, best_of=2, do_sample=True)
    assert best_of == "`best_of` != 1 is not supported when streaming tokens"
    details = refusal(stream=True, decoder_input_details=True)
    assert details == "`decoder_input_details` == true is not supported when streaming tokens"


def test_first_broken_rule_in_tgis_order_is_told() -> None:
    assert refusal(temperature=-1.0, top_p=5.0, max_new_tokens=0) == "`temperature` must be strictly positive"
    assert refusal(max_new_tokens=0, truncate=0) == "`max_new_tokens` must be strictly positive"


def test_empty_prompt_is_refused_and_a_space_is_not() -> None:
    with pytest.raises(InvalidRequest, match=r"^Input validation error: `inputs` cannot be empty$"):
        validate_request(GenerateRequest("", GenerateParameters(do_sample=True)), LIMITS)
    validate_request(GenerateRequest(" ", GenerateParameters(do_sample=True)), LIMITS)


def test_defaults_are_filled_in() -> None:
    valid = validate_parameters(GenerateParameters(), LIMITS)
    assert (valid.temperature, valid.repetition_penalty, valid.frequency_penalty) == (1.0, 1.0, 0.0)
    assert (valid.top_k, valid.top_p, valid.typical_p, valid.top_n_tokens) == (0, 1.0, 1.0, 0)
    assert (valid.do_sample, valid.seed, valid.max_new_tokens, valid.best_of) == (False, None, None, 1)


@pytest.mark.parametrize(
    ("parameters", "samples"),
    [
        ({}, False),
        ({"do_sample": True}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 0.5}, True),
        ({"top_k": 10}, True),
        ({"top_p": 0.9}, True),
        ({"typical_p": 0.9}, True),
        ({"repetition_penalty": 1.2, "seed": 3}, False),
    ],
)
def test_warpers_turn_sampling_on_as_tgis_server_does(parameters: dict[str, Any], samples: bool) -> None:
    assert GenerateParameters(**parameters).samples is samples
    assert validate_parameters(GenerateParameters(**parameters), LIMITS).do_sample is samples


@pytest.mark.parametrize(
    ("prompt", "asked", "resolved"),
    [(20, None, 100), (100, None, 20), (100, 20, 20), (1, 119, 119), (0, 120, 120)],
)
def test_lengths_that_fit(prompt: int, asked: int | None, resolved: int) -> None:
    assert check_lengths(prompt, asked, LIMITS) == resolved


@pytest.mark.parametrize(
    ("prompt", "asked", "sentence"),
    [
        (
            100,
            21,
            TOTAL.format(100, 21),
        ),
        (
            121,
            None,
            TOTAL.format(121, 0),
        ),
        (101, 1, "`inputs` must have less than 100 tokens. Given: 101"),
        (101, None, "`inputs` must have less than 100 tokens. Given: 101"),
    ],
)
def test_lengths_that_do_not_fit(prompt: int, asked: int | None, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_lengths(prompt, asked, LIMITS)
    assert str(caught.value) == f"Input validation error: {sentence}"


@pytest.mark.parametrize(
    ("bound", "asked", "fits"),
    [(100, 20, True), (101, 1, False), (100, 21, False), (99, None, True), (118, None, False)],
)
def test_bound_that_surely_fits(bound: int, asked: int | None, fits: bool) -> None:
    assert surely_fits(bound, asked, LIMITS) is fits


def test_open_ended_answer_needs_room_for_two_tokens() -> None:
    limits = Limits(max_input_tokens=100, max_total_tokens=101)
    assert surely_fits(99, None, limits)
    assert not surely_fits(100, None, limits)


def test_chat_is_mapped_as_tgi_does() -> None:
    mapped = chat_parameters(
        model="m",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop=["x"],
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        top_logprobs=2,
    )
    assert mapped == GenerateParameters(
        temperature=0.5,
        repetition_penalty=1.5,
        frequency_penalty=0.25,
        top_p=0.9,
        do_sample=True,
        max_new_tokens=7,
        stop=("x",),
        details=True,
        seed=3,
        top_n_tokens=2,
        adapter_id="m",
    )


@pytest.mark.parametrize(("temperature", "samples"), [(None, True), (0.0, False), (1.0, True), (0.1, True)])
def test_only_temperature_zero_makes_a_chat_greedy(temperature: float | None, samples: bool) -> None:
    mapped = chat_parameters(temperature=temperature)
    assert mapped.samples is samples
    assert mapped.temperature == (temperature or None)


def test_model_named_tgi_is_no_adapter() -> None:
    assert chat_parameters(model="tgi").adapter_id is None
    assert chat_parameters().adapter_id is None


def test_more_prompts_than_one_body_may_carry() -> None:
    limits = Limits(100, 120, max_client_batch_size=2)
    check_batch(2, limits)
    with pytest.raises(InvalidRequest, match="exceeds the maximum allowed batch size of 2") as caught:
        check_batch(3, limits)
    assert caught.value.error_type == "batch size exceeded"
