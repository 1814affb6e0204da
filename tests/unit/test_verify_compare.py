"""`verify` must notice every way in which two answers can differ, and every silent local prefill."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.verify.answer import Answer, Route, Token
from orchestrator.verify.cases import Via, raw
from orchestrator.verify.compare import first_difference, largest_logprob_gap, path_problem
from orchestrator.verify.run import judge

TOKENS = (Token(11, " Pa", -0.5), Token(12, "ris", -0.25), Token(13, ".", -1.5))
IMPORTED = Route("separated", "", "hit")
GOOD = Answer(200, " Paris.", TOKENS, "length", 3, 7, None, IMPORTED)
REFERENCE = dataclasses.replace(GOOD, route=Route())
CASE = raw("capital", "The capital of France is", 3)


def changed_token(index: int, **changes: Any) -> Answer:
    tokens = list(TOKENS)
    tokens[index] = dataclasses.replace(tokens[index], **changes)
    return dataclasses.replace(GOOD, tokens=tuple(tokens))


def test_equal_answers_have_no_difference_and_no_problem() -> None:
    verdict = judge(CASE, GOOD, REFERENCE, 1e-4)
    assert (verdict.ok, verdict.problem, verdict.needs_import) == (True, "", True)


@pytest.mark.parametrize(
    ("answer", "what", "index"),
    [
        (changed_token(1, id=99), "id", 1),
        (changed_token(2, logprob=-1.5002), "logprob", 2),
        (changed_token(2, logprob=None), "logprob", 2),
        (changed_token(2, logprob=float("nan")), "logprob", 2),
        (changed_token(0, text="Pa"), "text", 0),
        (dataclasses.replace(GOOD, tokens=TOKENS[:2]), "presence", 2),
        (dataclasses.replace(GOOD, tokens=(*TOKENS, Token(14, "!", -1.0))), "presence", 3),
        (dataclasses.replace(GOOD, tokens=(TOKENS[0], *TOKENS)), "id", 1),
        (dataclasses.replace(GOOD, text=" Paris"), "text", None),
        (dataclasses.replace(GOOD, finish_reason="eos_token"), "finish reason", None),
        (dataclasses.replace(GOOD, generated_tokens=4), "count of generated tokens", None),
        (dataclasses.replace(GOOD, prompt_tokens=8), "count of prompt tokens", None),
        (dataclasses.replace(GOOD, prompt_tokens=None), "count of prompt tokens", None),
        (dataclasses.replace(GOOD, seed=5), "seed", None),
        (dataclasses.replace(GOOD, calls=(("tell", "{}"),)), "function calls", None),
        (dataclasses.replace(GOOD, status=500), "status", None),
        (dataclasses.replace(GOOD, error="the stream ended early"), "error", None),
    ],
)
def test_each_kind_of_difference_is_found_where_it_is(answer: Answer, what: str, index: int | None) -> None:
    difference = first_difference(answer, REFERENCE, 1e-4)
    assert difference is not None
    assert (difference.what, difference.index) == (what, index)
    assert judge(CASE, answer, REFERENCE, 1e-4).problem == str(difference)


def test_a_logprob_within_the_tolerance_is_equal() -> None:
    near = changed_token(2, logprob=-1.50009)
    assert first_difference(near, REFERENCE, 1e-4) is None
    assert largest_logprob_gap(near, REFERENCE) == pytest.approx(9e-5)


def test_the_first_of_several_differences_is_told_with_both_sides() -> None:
    answer = dataclasses.replace(changed_token(1, id=99, logprob=-9.0), text="other")
    assert str(first_difference(answer, REFERENCE, 1e-4)) == "id of token 1: separated 99, reference 12"


@pytest.mark.parametrize(
    ("route", "problem"),
    [
        (Route(), "the gateway did not say how it served it"),
        (Route("mixed", "no decode shard", ""), "served mixed (no decode shard)"),
        (Route("separated", "", ""), "a silent local prefill: import=not told"),
        (Route("separated", "", "overwritten"), "a silent local prefill: import=overwritten"),
    ],
)
def test_an_answer_without_an_imported_record_is_a_problem(route: Route, problem: str) -> None:
    answer = dataclasses.replace(GOOD, route=route)
    assert path_problem(answer) == problem
    assert judge(CASE, answer, REFERENCE, 1e-4).problem == problem


@pytest.mark.parametrize(
    ("whole", "splits", "problem"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_what_is_never_split_needs_no_record(whole: bool, splits: bool, problem: bool) -> None:
    served = dataclasses.replace(GOOD, route=Route("mixed", "unsplittable", ""))
    case = dataclasses.replace(CASE, whole=whole)
    verdict = judge(case, served, REFERENCE, 1e-4, splits=splits)
    assert (bool(verdict.problem), verdict.needs_import) == (problem, problem)
    other = dataclasses.replace(served, text="other")
    assert judge(case, other, REFERENCE, 1e-4, splits=splits).problem.startswith("text: ")


def test_an_answer_that_ended_at_its_first_token_needs_no_import() -> None:
    single = Answer(200, " Pa", TOKENS[:1], "eos_token", 1, 7, None, Route("separated"))
    assert path_problem(single) is None
    assert not judge(CASE, single, dataclasses.replace(single, route=Route()), 1e-4).needs_import


def test_two_equal_refusals_are_not_a_success() -> None:
    refused = Answer(422, error="`inputs` cannot be empty")
    assert "both sides refuse it: status 422" in judge(CASE, refused, refused, 1e-4).problem


@pytest.mark.parametrize(
    ("finish", "generated", "said"),
    [("eos_token", None, "should end with 'eos_token'"), ("", 1, "should end after 1 tokens")],
)
def test_a_case_that_does_not_end_as_it_must_is_a_problem_even_when_both_agree(
    finish: str, generated: int | None, said: str
) -> None:
    case = dataclasses.replace(CASE, finish=finish, generated=generated)
    assert said in judge(case, GOOD, REFERENCE, 1e-4).problem


def test_greedy_is_read_from_the_request_itself() -> None:
    sampled = raw("sampled", "x", 3, do_sample=True)
    assert (CASE.greedy, sampled.greedy, CASE.via) == (True, False, Via.GENERATE)


tokens = st.builds(
    Token,
    id=st.integers(0, 9),
    text=st.sampled_from(["a", "b", ""]),
    logprob=st.one_of(st.none(), st.sampled_from([-1.0, -2.0])),
)
answers = st.builds(
    Answer,
    status=st.sampled_from([200, 422]),
    text=st.sampled_from(["x", "y"]),
    tokens=st.lists(tokens, max_size=4).map(tuple),
    finish_reason=st.sampled_from(["length", "eos_token"]),
    generated_tokens=st.integers(0, 4),
    prompt_tokens=st.one_of(st.none(), st.integers(1, 3)),
)


@given(answers, answers)
def test_a_difference_is_reported_exactly_when_the_answers_are_not_equal(one: Answer, other: Answer) -> None:
    assert (first_difference(one, other, 1e-4) is None) == (one == other)
