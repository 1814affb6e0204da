"""n-gram speculation: several tokens a step, proposed from the text so far and checked by the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.embedded.shard.seam import Batch, Request, Sampling, Stopping
from orchestrator.embedded.tgi.model import TgiModel
from tests.tgi.features import same
from tests.tgi.pair import Models, Prompt, Trio, logprobs, tokens, trio
from tests.tgi.prompts import prompt_of, tokenizer_of
from tests.tgi.servers import ServerPlan, Servers
from tests.tgi.stepping import answers
from tgi_patches.contract import new_handle

NEW_TOKENS = 12
TEXTS = (
    "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1,",
    "red, green, blue, red, green, blue, red, green, blue, red, green,",
    "The capital of France is",
)
NEARLY = 2e-3
"""Of a logprob: batches of other shapes round differently."""
GREEDY = Sampling()
_batch_ids = itertools.count(20_000)


@pytest.fixture(scope="module")
def pair(servers: Servers, model: Path, tgi_python: Path) -> Iterator[Trio]:
    with trio(servers, ServerPlan(model, flags=("--speculate", "2")), tgi_python) as started:
        report = started.get.report
        assert (report.model_class, report.hooked) == ("FlashCausalLM", True)
        yield started
        assert [member.report.faults for member in (started.put, started.get)] == [0, 0]


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[Prompt]:
    tokenizer = tokenizer_of(model)
    return [prompt_of(tokenizer, text) for text in TEXTS]


def ask(models: Models, prompt: Prompt, sampling: Sampling = GREEDY) -> Request:
    stopping = Stopping(NEW_TOKENS, ignore_eos_token=True)
    return models.ask(prompt, stopping, sampling=sampling, top_n_tokens=2)


async def calls_of(model: TgiModel, asked: Request) -> int:
    """Steps that the server ran for a request."""
    calls = 1
    _, cached = await model.prefill(Batch(next(_batch_ids), (asked,)))
    while cached is not None:
        _, cached = await model.decode([cached])
        calls += 1
    return calls


CASES = {
    "greedy": (0, GREEDY),
    "greedy, other words": (1, GREEDY),
    "sampled": (1, Sampling(do_sample=True, temperature=0.7, seed=11)),
    "penalized": (2, Sampling(repetition_penalty=1.1)),
}


@pytest.mark.parametrize(("number", "sampling"), CASES.values(), ids=CASES)
async def test_the_pair_speculates_and_answers_as_a_stock_server(
    number: int, sampling: Sampling, pair: Trio, prompts: list[Prompt]
) -> None:
    async with pair.models() as models:
        steps = await same(models, ask(models, prompts[number], sampling))
        assert len(steps) == NEW_TOKENS


async def test_an_import_leaves_as_few_steps_as_a_local_prefill(pair: Trio, prompts: list[Prompt]) -> None:
    async with pair.models() as models:
        asked = ask(models, prompts[0])
        handle, first = await models.put_leg(asked)
        leg = replace(asked, adapter_id=models.get_tag(handle, first.token.id))
        calls = await calls_of(models.get, leg)
        assert calls == await calls_of(models.stock, asked)
        assert calls <= NEW_TOKENS / 2


async def test_hits_a_miss_and_others_speculate_in_one_batch(pair: Trio, prompts: list[Prompt]) -> None:
    async with pair.models() as models:
        asked = [ask(models, prompts[number]) for number in (2, 0, 1, 0)]
        tags = [""]
        for request in asked[1:]:
            handle, first = await models.put_leg(request)
            tags.append(models.get_tag(handle, first.token.id))
        tags[3] = models.get_tag(new_handle(), None)
        legs = [replace(request, adapter_id=tag) for request, tag in zip(asked, tags, strict=True)]
        steps = await answers(models.get, legs)
        assert [steps[leg.id][0].import_result for leg in legs] == ["", "hit", "hit", "missing"]
        for request in asked:
            alone = await models.colocated(request)
            assert tokens(steps[request.id]) == tokens(alone), request.inputs
            assert logprobs(steps[request.id]) == pytest.approx(logprobs(alone), abs=NEARLY)


async def test_a_miss_goes_on_from_the_known_token_and_not_from_what_was_proposed_after_its_own(
    pair: Trio, model: Path, prompts: list[Prompt]
) -> None:
    tokenizer = tokenizer_of(model)
    prompt = prompts[2]
    longer = prompt_of(tokenizer, prompt.text + " not")
    assert longer.ids[:-1] == prompt.ids
    async with pair.models() as models:
        asked = ask(models, prompt)
        assert (await models.colocated(asked))[0].token.id != longer.ids[-1]
        leg = replace(asked, adapter_id=models.get_tag(new_handle(), longer.ids[-1]))
        steps = (await answers(models.get, [leg]))[leg.id]
        assert steps[0].import_result == "missing"
        following = await models.colocated(ask(models, longer))
        assert tokens(steps) == [longer.ids[-1], *tokens(following)[:-1]]
