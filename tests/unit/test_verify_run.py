"""`verify` end to end against a fake TGI that speaks HTTP and can be told to lie in one way."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from orchestrator.verify.cases import Case, Prepare, Via, built_in, chat, prepared, raw
from orchestrator.verify.counters import problems_in
from orchestrator.verify.ground import Check
from orchestrator.verify.prepare import CannotPrepare, prepare
from orchestrator.verify.report import Report
from orchestrator.verify.run import Sides, Verdict, all_at_once, imports_seen, one_by_one

WORDS = ("Once", " upon", " upon", " time", " there", " was")
END = "<end>"
Body = dict[str, Any]


@dataclasses.dataclass
class FakeTgi:
    """Answers every prompt with WORDS, a prompt that ends in a full stop with the end token alone."""

    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    lie: Callable[[Body], None] = lambda body: None
    """Changes an answer before it is sent."""
    in_flight: int = 0
    most_in_flight: int = 0
    asked: list[Body] = dataclasses.field(default_factory=list)
    choices: set[str | None] = dataclasses.field(default_factory=set)
    """What the requests ask of routing."""

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self._respond), base_url="http://fake")

    async def _respond(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or b"{}")
        match request.url.path:
            case "/info":
                return httpx.Response(200, json={"max_input_tokens": 900, "max_total_tokens": 1000})
            case "/tokenize":
                return httpx.Response(200, json=self._tokens(body["inputs"]))
            case "/generate":
                self.asked.append(body)
                self.choices.add(request.headers.get("x-orchestrator-choice"))
                answer = self._generated(body)
                self.lie(answer)
                return httpx.Response(200, json=answer, headers=self.headers)
            case _:
                return httpx.Response(404, json={"error": "no such route"})

    @staticmethod
    def _tokens(text: str) -> list[Body]:
        """A token for each four characters."""
        return [
            {"id": at, "text": text[at : at + 4], "start": at, "stop": min(at + 4, len(text))}
            for at in range(0, len(text), 4)
        ]

    @staticmethod
    def _generated(body: Body) -> Body:
        parameters = body["parameters"]
        said: list[str] = []
        finish = "length"
        for word in (END,) if body["inputs"].endswith(".") else WORDS:
            said.append(word)
            if word == END:
                finish = "eos_token"
            if "".join(said).endswith(tuple(parameters.get("stop", ()))):
                finish = "stop_sequence"
            if finish != "length" or len(said) == parameters["max_new_tokens"]:
                break
        tokens = [{"id": len(word), "text": word, "logprob": -0.5, "special": word == END} for word in said]
        details = {"finish_reason": finish, "generated_tokens": len(said), "seed": None, "tokens": tokens}
        return {"generated_text": "".join(said).replace(END, ""), "details": details}


IMPORTED = {"x-orchestrator-route": "separated", "x-orchestrator-import": "hit"}
CASES = (raw("two words", "Tell me", 2), raw("six words", "Go on", 6))


async def verdicts_of(separated: FakeTgi, cases: tuple[Case, ...] = CASES) -> list[Verdict]:
    async with separated.client() as left, FakeTgi().client() as right:
        verdicts, _ = await one_by_one(cases, Sides(left, right, 1e-4), lambda verdict: None)
    return verdicts


def set_at(path: str, value: Any) -> Callable[[Body], None]:
    """A lie: put `value` at a dotted path of an answer that has at least six tokens."""

    def lie(answer: Body) -> None:
        at: Any = answer
        *steps, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
        if answer["details"]["generated_tokens"] < 6:
            return
        for step in steps:
            at = at[step]
        at[last] = value

    return lie


async def test_a_separated_pair_that_tells_the_truth_passes() -> None:
    verdicts = await verdicts_of(FakeTgi(IMPORTED))
    assert [(verdict.case, verdict.ok, verdict.generated_tokens) for verdict in verdicts] == [
        ("two words", True, 2),
        ("six words", True, 6),
    ]
    assert imports_seen(verdicts) == (2, 2)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("details.tokens.3.id", 77, "id of token 3: separated 77, reference 5"),
        ("details.tokens.5.logprob", -0.51, "logprob of token 5: separated -0.51, reference -0.5"),
        ("details.tokens.1.text", "upon", "text of token 1: separated 'upon', reference ' upon'"),
        ("generated_text", "Once", "text: separated 'Once', reference 'Once upon upon time there was'"),
        ("details.finish_reason", "eos_token", "finish reason: separated 'eos_token', reference 'length'"),
        ("details.generated_tokens", 7, "count of generated tokens: separated 7, reference 6"),
    ],
)
async def test_one_changed_value_in_one_answer_fails_that_case_and_no_other(
    path: str, value: Any, problem: str
) -> None:
    two_words, six_words = await verdicts_of(FakeTgi(IMPORTED, lie=set_at(path, value)))
    assert (two_words.ok, six_words.ok) == (True, False)
    assert six_words.problem == problem


@pytest.mark.parametrize("missing", ["x-orchestrator-import", "x-orchestrator-route"])
async def test_an_answer_that_does_not_prove_its_import_fails(missing: str) -> None:
    headers = {name: value for name, value in IMPORTED.items() if name != missing}
    verdicts = await verdicts_of(FakeTgi(headers))
    assert [verdict.ok for verdict in verdicts] == [False, False]


async def test_a_local_prefill_is_counted_and_fails() -> None:
    verdicts = await verdicts_of(FakeTgi(IMPORTED | {"x-orchestrator-import": "overwritten"}))
    assert [verdict.problem for verdict in verdicts] == ["a silent local prefill: import=overwritten"] * 2
    assert imports_seen(verdicts) == (2, 0)


async def test_many_at_once_are_compared_with_the_answers_given_one_by_one() -> None:
    separated = FakeTgi(IMPORTED)
    async with separated.client() as left, FakeTgi().client() as right:
        sides = Sides(left, right, 1e-4)
        _, asked = await one_by_one(CASES, sides, lambda verdict: None)
        separated.lie = set_at("details.tokens.3.id", 77)
        verdicts = await all_at_once(asked, 5, sides, lambda verdict: None)
    assert len(verdicts) == 5, "cases repeat until so many requests are in flight"
    assert {verdict.case: verdict.ok for verdict in verdicts} == {"two words": True, "six words": False}


async def test_only_the_separated_side_is_asked_to_split_whatever_the_cost_model_says() -> None:
    separated, reference = FakeTgi(IMPORTED), FakeTgi()
    async with separated.client() as left, reference.client() as right:
        sides = Sides(left, right, 1e-4)
        stop = prepared(raw("first", "Tell me", 20), Prepare.STOP_FIRST)
        _, asked = await one_by_one((*CASES, stop), sides, lambda verdict: None)
        assert (separated.choices, reference.choices) == ({"separated"}, {None})
        separated.choices.clear()
        await all_at_once(asked, 4, sides, lambda verdict: None)
    assert separated.choices == {"separated"}


async def test_sampled_cases_are_not_asked_at_once() -> None:
    sampled = raw("sampled", "Tell me", 2, do_sample=True, seed=1)
    separated = FakeTgi(IMPORTED)
    async with separated.client() as left, FakeTgi().client() as right:
        sides = Sides(left, right, 1e-4)
        _, asked = await one_by_one((sampled,), sides, lambda verdict: None)
        assert await all_at_once(asked, 4, sides, lambda verdict: None) == []


# --- preparing cases ----------------------------------------------------------------------------


async def prepared_case(case: Case) -> Case:
    async with FakeTgi().client() as client:
        return await prepare(case, client)


async def test_a_prompt_is_cut_to_its_length_in_tokens_and_to_what_fits() -> None:
    exact = await prepared_case(prepared(raw("exact", "", 9), Prepare.LENGTH, prompt_tokens=300))
    assert len(exact.body["inputs"]) == 4 * 300
    most = await prepared_case(prepared(raw("most", "", 16), Prepare.LENGTH, prompt_tokens=2000))
    assert len(most.body["inputs"]) == 4 * (900 - 8)


async def test_the_first_word_becomes_a_stop_string_that_ends_the_answer_at_once() -> None:
    case = await prepared_case(prepared(raw("first", "Tell me", 20), Prepare.STOP_FIRST))
    assert (case.body["parameters"]["stop"], case.finish, case.generated) == (["Once"], "stop_sequence", 1)
    (verdict,) = await verdicts_of(FakeTgi(IMPORTED), (case,))
    assert (verdict.ok, verdict.generated_tokens, verdict.needs_import) == (True, 1, False)


async def test_a_later_word_becomes_a_stop_string_unless_it_was_said_before() -> None:
    case = await prepared_case(prepared(raw("later", "Tell me", 20), Prepare.STOP_LATER))
    assert case.body["parameters"]["stop"][0] == " time", "' upon' was said before"
    assert (case.finish, case.generated) == ("stop_sequence", 4)


async def test_a_prompt_that_ends_at_its_first_token_is_found_and_must_end_there() -> None:
    case = await prepared_case(prepared(raw("end", "", 20), Prepare.EOS_FIRST))
    assert (case.finish, case.generated) == ("eos_token", 1)
    assert case.body["inputs"].endswith("<|im_start|>assistant\nTwo plus two is four.")
    (verdict,) = await verdicts_of(FakeTgi(IMPORTED), (case,))
    assert (verdict.ok, verdict.finish_reason, verdict.generated_tokens) == (True, "eos_token", 1)


async def test_a_case_that_this_model_cannot_give_is_skipped_and_says_why() -> None:
    async with FakeTgi(lie=lambda answer: answer["details"]["tokens"][0].update(text="")).client() as mute:
        with pytest.raises(CannotPrepare, match="no text of its own"):
            await prepare(prepared(raw("first", "Tell me", 20), Prepare.STOP_FIRST), mute)


async def test_a_case_that_the_reference_refuses_is_skipped_and_one_that_only_the_other_refuses_is_not() -> (
    None
):
    case = prepared(raw("grammar", "Tell me", 2), Prepare.SERVED)
    refuses = httpx.MockTransport(lambda _: httpx.Response(422, json={"error": "Grammar is disabled"}))
    async with (
        FakeTgi(headers=IMPORTED).client() as serving,
        httpx.AsyncClient(transport=refuses, base_url="http://fake") as refusing,
    ):
        skipped, _ = await one_by_one([case], Sides(serving, refusing, 1e-4), lambda verdict: None)
        differs, _ = await one_by_one([case], Sides(refusing, serving, 1e-4), lambda verdict: None)
    assert skipped[0].skipped == "the reference refuses it: status 422, Grammar is disabled"
    assert differs[0].problem == "status: separated 422, reference 200"


# --- the built-in cases and the report ----------------------------------------------------------


def test_the_built_in_cases_cover_what_they_promise() -> None:
    cases = built_in()
    names = [case.name for case in cases]
    assert len(names) == len(set(names))
    assert len(cases) >= 24
    constrained = [case for case in cases if case.prepare is Prepare.SERVED]
    assert [case.whole for case in constrained] == ["tool" in case.name for case in constrained]
    assert {case.via.chat for case in constrained if not case.whole} == {True, False}
    assert sum(case.greedy for case in cases) >= 16, "so many are asked at once"
    assert {case.via for case in cases} == set(Via)
    assert {case.prepare for case in cases} == set(Prepare)
    limits = {case.body.get("max_tokens") or case.body["parameters"]["max_new_tokens"] for case in cases}
    assert {1, 2, 200} <= limits
    assert {case.prompt_tokens for case in cases} >= {17, 300, 2000}
    sampled = [case.body for case in cases if not case.greedy and not case.via.chat]
    used = {name for body in sampled for name in body["parameters"]}
    assert {"temperature", "top_k", "top_p", "repetition_penalty", "seed"} <= used
    assert all("seed" in body["parameters"] for body in sampled)


def report_of(*verdicts: Verdict, problems: tuple[str, ...] = (), ground: tuple[Check, ...] = ()) -> Report:
    return Report("http://a", "http://b", "m", "float32", 1e-4, verdicts, problems=problems, ground=ground)


SAME = Verdict("a", "/generate", generated_tokens=3, imported="hit", needs_import=True, logprob_gap=2e-6)
OTHER = Verdict("b", "/generate", problem="id of token 0: separated 1, reference 2", generated_tokens=1)
SKIPPED = Verdict("c", "/generate", skipped="nothing to build it from")


def test_the_report_counts_what_was_compared() -> None:
    facts = report_of(SAME, OTHER, SKIPPED).to_dict()
    assert {key: facts[key] for key in ("ok", "compared", "identical", "different", "skipped")} == {
        "ok": False,
        "compared": 2,
        "identical": 1,
        "different": 1,
        "skipped": 1,
    }
    assert facts["imports"] == {"needed": 1, "hits": 1, "counted_by_shards": None}
    assert facts["largest_logprob_gap"] == 2e-6
    assert [case["case"] for case in facts["cases"]] == ["a", "b", "c"]
    json.dumps(facts)


@pytest.mark.parametrize(
    ("report", "ok"),
    [
        (report_of(SAME), True),
        (report_of(SAME, SKIPPED), True),
        (report_of(SAME, OTHER), False),
        (report_of(SAME, problems=("the shards counted one import less",)), False),
        (report_of(), False),
        (report_of(SAME, ground=(Check("routes", "1", "1"),)), True),
        (report_of(SAME, ground=(Check("routes", "1", "2", "One is missing."),)), False),
        (report_of(SKIPPED), False),
    ],
)
def test_a_report_is_ok_only_when_something_was_compared_and_all_of_it_was_the_same(
    report: Report, ok: bool
) -> None:
    assert report.ok is ok


@pytest.mark.parametrize(
    ("counted", "said"),
    [
        ({"hit": 3}, []),
        ({"hit": 5}, []),
        ({"hit": 2}, ["The gateway reports 3 imported records, the shards counted 2."]),
        (
            {"hit": 3, "missing": 1, "checksum": 2},
            ["The shards counted local prefills in place of an import: 2 x checksum, 1 x missing."],
        ),
    ],
)
def test_the_shards_counters_must_agree_with_what_the_gateway_says(
    counted: dict[str, int], said: list[str]
) -> None:
    assert problems_in(Counter(counted), hits=3) == said


def test_chat_cases_are_greedy_by_their_temperature() -> None:
    assert chat("a", ["hi"], 3).greedy
    assert not chat("b", ["hi"], 3, temperature=0.5, seed=1).greedy
