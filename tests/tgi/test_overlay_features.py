"""What a request may ask for beside plain sampling: the separated pair answers as a stock server does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.embedded.shard.seam import Sampling, Stopping
from tests.tgi.features import SMALL_CACHE, same, with_start_token, with_ties
from tests.tgi.pair import Prompt, Trio, tokens, told, trio
from tests.tgi.prompts import prompt_of, tokenizer_of
from tests.tgi.servers import ServerPlan, Servers

NEW_TOKENS = 8
TEXTS = (
    "one two three four",
    "the ship left the harbour",
    "seven eight nine",
    "def add(first, second): return",
    "the sun rose before the quiet ship and " * 5,
    "ten",
)
CLASSES = {"flash": "FlashCausalLM", "causal": "CausalLM"}
ENVIRONMENT = {"REQUEST_LOGPROBS": "1", **SMALL_CACHE}

CHOICE = "(red|green|blue) (ship|sun){1,2}"
JSON_OBJECT = r'\{"age":[ ]?[0-9]{1,2},[ ]?"name":[ ]?"[a-f]{1,3}"\}'
"""As TGI's router writes a JSON schema; its Python server enforces only expressions."""
GRAMMARS = {
    "choice": Sampling(grammar=CHOICE),
    "choice, sampled": Sampling(grammar=CHOICE, do_sample=True, temperature=2.0, seed=7),
    "json": Sampling(grammar=JSON_OBJECT),
    "json, sampled": Sampling(grammar=JSON_OBJECT, do_sample=True, top_k=30, seed=8),
}


@pytest.fixture(scope="module")
def special(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its prompts begin with a special token, and its tokens tie."""
    folder = tmp_path_factory.mktemp("special")
    return with_ties(with_start_token(tiny, folder / "start"), folder / "ties")


@pytest.fixture(scope="module", params=CLASSES)
def pair(request: pytest.FixtureRequest, servers: Servers, special: Path, tgi_python: Path) -> Iterator[Trio]:
    plan = ServerPlan(special, flash=request.param == "flash", env=ENVIRONMENT)
    with trio(servers, plan, tgi_python) as started:
        report = started.put.report
        assert (report.model_class, report.hooked) == (CLASSES[request.param], True)
        yield started
        assert [member.report.faults for member in (started.put, started.get)] == [0, 0]
        assert set(started.put.report.exports) == {"ok"}


@pytest.fixture(scope="module")
def prompts(special: Path) -> list[Prompt]:
    tokenizer = tokenizer_of(special)
    return [prompt_of(tokenizer, text) for text in TEXTS]


@pytest.mark.parametrize("sampling", GRAMMARS.values(), ids=GRAMMARS)
async def test_a_grammar_holds_from_the_first_token_to_the_last(
    sampling: Sampling, pair: Trio, prompts: list[Prompt]
) -> None:
    async with pair.models() as models:
        for prompt in prompts[:4]:
            steps = await same(models, models.ask(prompt, Stopping(40), sampling=sampling))
            ending = steps[-1].generated_text
            assert ending is not None
            assert ending.finish_reason == "eos_token"
            assert re.fullmatch(sampling.grammar, ending.text)
            if sampling.grammar == JSON_OBJECT:
                assert set(json.loads(ending.text)) == {"age", "name"}


async def test_a_grammar_with_two_ways_to_go_on_lists_two_tokens_where_five_are_asked_for(
    pair: Trio, prompts: list[Prompt]
) -> None:
    async with pair.models() as models:
        asked = models.ask(
            prompts[0], Stopping(NEW_TOKENS), sampling=Sampling(grammar="X{3}|Z{3}"), top_n_tokens=5
        )
        steps = await same(models, asked)
        if pair.put.report.model_class == "FlashCausalLM":  # the other lists tokens as if there were none
            assert {token.text for token in steps[0].top_tokens} == {"X", "Z"}


@pytest.mark.parametrize("seed", [None, 3])
async def test_a_watermark_marks_the_same_tokens(seed: int | None, pair: Trio, prompts: list[Prompt]) -> None:
    plain = Sampling(do_sample=True, seed=seed, temperature=1.5) if seed is not None else Sampling()
    async with pair.models() as models:
        marked, unmarked = [], []
        for prompt in prompts:
            asked = models.ask(prompt, Stopping(NEW_TOKENS), sampling=replace(plain, watermark=True))
            marked.append(tokens(await same(models, asked)))
            unmarked.append(tokens(await models.colocated(replace(asked, sampling=plain))))
        assert marked != unmarked


@pytest.mark.parametrize("top_n", [1, 2, 3, 4])
async def test_the_likeliest_tokens_are_those_of_a_stock_server(
    top_n: int, pair: Trio, prompts: list[Prompt]
) -> None:
    """One more than was asked for, where the last is as likely as another."""
    async with pair.models() as models:
        lengths = set()
        for prompt in prompts:
            steps = await same(models, models.ask(prompt, Stopping(NEW_TOKENS), top_n_tokens=top_n))
            lengths |= {len(step.top_tokens) for step in steps}
        assert lengths == {top_n, top_n + 1}


async def test_a_sixth_token_that_is_as_likely_as_the_fifth_is_listed_too(
    pair: Trio, prompts: list[Prompt]
) -> None:
    async with pair.models() as models:
        listed = []
        for prompt in prompts:
            steps = await same(models, models.ask(prompt, Stopping(NEW_TOKENS), top_n_tokens=5))
            listed.append(len(steps[0].top_tokens))
        assert set(listed) == {5, 6}


async def test_a_prompt_cut_from_the_left_is_imported(pair: Trio, prompts: list[Prompt]) -> None:
    whole = prompts[4]
    async with pair.models() as models:
        answered = []
        for kept in (1, 2, 7, len(whole.ids)):
            cut = Prompt(whole.text, whole.ids[:1] + whole.ids[-kept:][1:])
            answered.append(tokens(await same(models, models.ask(cut, Stopping(NEW_TOKENS)))))
        assert len({tuple(answer) for answer in answered}) > 1


@pytest.mark.parametrize("pair", ["flash"], indirect=True)
async def test_a_prompt_without_special_tokens_is_imported(pair: Trio, prompts: list[Prompt]) -> None:
    async with pair.models() as models:
        for prompt in prompts:
            bare = Prompt(prompt.text, prompt.ids[1:])
            asked = models.ask(bare, Stopping(NEW_TOKENS), add_special_tokens=False)
            steps = await same(models, asked)
            whole = await models.colocated(models.ask(prompt, Stopping(NEW_TOKENS)))
            assert told(steps) != told(whole)


async def test_prompt_logprobs_cost_a_local_prefill(pair: Trio, prompts: list[Prompt]) -> None:
    async with pair.models() as models:
        for prompt in prompts:
            before = pair.get.report.imports.get("unsupported", 0)
            asked = models.ask(prompt, Stopping(NEW_TOKENS), prefill_logprobs=True)
            steps = await models.separated(asked)
            colocated = await models.colocated(asked)
            assert steps[0].import_result == "unsupported"
            assert pair.get.report.imports["unsupported"] == before + 1
            assert told(steps) == told(colocated)
            assert len(colocated[0].prompt_logprobs) == len(prompt.ids) - 1
            assert steps[0].prompt_logprobs == colocated[0].prompt_logprobs
