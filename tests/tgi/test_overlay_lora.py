"""LoRA adapters: a handle travels behind the adapter's name, and the record holds that adapter's KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.embedded.shard.seam import Request, Stopping
from tests.tgi.features import SMALL_CACHE, same
from tests.tgi.pair import Models, Prompt, Trio, logprobs, tokens, told, trio
from tests.tgi.prompts import prompt_of, tokenizer_of
from tests.tgi.reference import write_adapter
from tests.tgi.servers import ServerPlan, Servers
from tests.tgi.stepping import answers

NEW_TOKENS = 8
ADAPTERS = ("red", "blue")
TEXTS = ("one two three four", "the ship left the harbour before", "def add(first, second): return")
NEARLY = 1e-4
"""Of a logprob: batches of other shapes round differently."""


@pytest.fixture(scope="module")
def pair(
    servers: Servers, tiny: Path, tgi_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trio]:
    folder = tmp_path_factory.mktemp("adapters")
    folders = {name: write_adapter(folder / name, tiny, seed) for seed, name in enumerate(ADAPTERS)}
    adapters = ",".join(f"{name}={path}" for name, path in folders.items())
    plan = ServerPlan(tiny, env={"LORA_ADAPTERS": adapters, **SMALL_CACHE})
    with trio(servers, plan, tgi_python) as started:
        report = started.get.report
        assert (report.model_class, report.hooked) == ("FlashCausalLM", True)
        yield started
        assert [member.report.faults for member in (started.put, started.get)] == [0, 0]


@pytest.fixture(scope="module")
def prompts(tiny: Path) -> list[Prompt]:
    tokenizer = tokenizer_of(tiny)
    return [prompt_of(tokenizer, text) for text in TEXTS]


def ask(models: Models, prompt: Prompt, adapter: str) -> Request:
    return models.ask(prompt, Stopping(NEW_TOKENS, ignore_eos_token=True), adapter_id=adapter, top_n_tokens=2)


async def get_leg(models: Models, asked: Request) -> Request:
    handle, first = await models.put_leg(asked, asked.adapter_id)
    return replace(asked, adapter_id=models.get_tag(handle, first.token.id, asked.adapter_id))


async def test_each_adapter_answers_as_on_a_stock_server(pair: Trio, prompts: list[Prompt]) -> None:
    async with pair.models() as models:
        for prompt in prompts:
            answered = {
                tuple(tokens(await same(models, ask(models, prompt, adapter), adapter)))
                for adapter in ("", *ADAPTERS)
            }
            assert len(answered) == 3


async def test_an_adapter_that_the_servers_do_not_know_answers_as_the_base_model(
    pair: Trio, prompts: list[Prompt]
) -> None:
    async with pair.models() as models:
        unknown = await same(models, ask(models, prompts[0], "green"), "green")
        assert tokens(unknown) == tokens(await models.colocated(ask(models, prompts[0], "")))


async def test_prompts_of_several_adapters_and_of_none_are_exported_from_one_batch(
    pair: Trio, prompts: list[Prompt]
) -> None:
    async with pair.models() as models:
        asked = [ask(models, prompts[0], adapter) for adapter in ("red", "", "blue")]
        handles = {request.id: f"{request.id:032x}" for request in asked}
        legs = [
            replace(
                request,
                adapter_id=f"{request.adapter_id}|kv1:put:{handles[request.id]}",
                stopping=Stopping(1),
            )
            for request in asked
        ]
        first = await answers(models.put, legs)
        for request in asked:
            tag = models.get_tag(handles[request.id], first[request.id][0].token.id, request.adapter_id)
            steps = (await answers(models.get, [replace(request, adapter_id=tag)]))[request.id]
            assert steps[0].import_result == "hit"
            assert tokens(steps) == tokens(await models.colocated(request))


async def test_gets_of_several_adapters_share_a_batch_with_the_base_model(
    pair: Trio, prompts: list[Prompt]
) -> None:
    async with pair.models() as models:
        plain = ask(models, prompts[1], "blue")
        asked = [ask(models, prompts[0], adapter) for adapter in ("red", "", "blue")]
        steps = await answers(models.get, [plain, *[await get_leg(models, request) for request in asked]])
        results = [steps[request.id][0].import_result for request in (plain, *asked)]
        assert results == ["", "hit", "hit", "hit"]
        for request in (plain, *asked):
            alone = await models.colocated(request)
            assert tokens(steps[request.id]) == tokens(alone), request.adapter_id
            assert logprobs(steps[request.id]) == pytest.approx(logprobs(alone), abs=NEARLY)


@pytest.mark.parametrize(("put", "get"), [("red", "blue"), ("red", ""), ("", "red")])
async def test_a_record_of_another_adapter_is_not_used(
    pair: Trio, prompts: list[Prompt], put: str, get: str
) -> None:
    async with pair.models() as models:
        asked = ask(models, prompts[0], get)
        expected = await models.colocated(asked)
        handle, _ = await models.put_leg(ask(models, prompts[0], put), put)
        leg = replace(asked, adapter_id=models.get_tag(handle, expected[0].token.id, get))
        steps = (await answers(models.get, [leg]))[asked.id]
        assert steps[0].import_result == "tokens_differ"
        assert told(steps) == told(expected)
