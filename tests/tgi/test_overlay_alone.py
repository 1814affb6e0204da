"""One request at a time: what the separated pair answers is what one stock server answers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.embedded.shard.seam import Sampling, Stopping
from tests.tgi.pair import Prompt, Trio, told, trio
from tests.tgi.prompts import twenty
from tests.tgi.servers import ServerPlan, Servers

NEW_TOKENS = 16
THREADS = 2

CONFIGURATIONS = {
    "flash-float32": ({}, "FlashCausalLM", "float32"),
    "flash-bfloat16": ({"dtype": "bfloat16"}, "FlashCausalLM", "bfloat16"),
    "flash-fp8-kv": ({"dtype": "bfloat16", "kv_dtype": "fp8_e5m2"}, "FlashCausalLM", "float8_e5m2"),
    "causal-float32": ({"flash": False}, "CausalLM", "float32"),
}


@pytest.fixture(scope="module", params=CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def pair(
    request: pytest.FixtureRequest, servers: Servers, model: Path, tgi_python: Path
) -> Iterator[tuple[Trio, str, str]]:
    changes, model_class, kv_dtype = request.param
    with trio(servers, replace(ServerPlan(model, threads=THREADS), **changes), tgi_python) as started:
        yield started, model_class, kv_dtype


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[Prompt]:
    return twenty(model)


async def test_twenty_prompts_answer_token_for_token_and_every_record_is_imported(
    pair: tuple[Trio, str, str], prompts: list[Prompt]
) -> None:
    started, model_class, kv_dtype = pair
    async with started.models() as models:
        before = started.get.report.imports.get("hit", 0)
        for number, prompt in enumerate(prompts):
            asked = models.ask(prompt, Stopping(NEW_TOKENS), top_n_tokens=number % 4)
            separated = await models.separated(asked)
            assert separated[0].import_result == "hit"
            assert told(separated) == told(await models.colocated(asked)), prompt.text
        for member in (started.put, started.get):
            report = member.report
            assert (report.model_class, report.hooked, report.faults) == (model_class, True, 0)
            assert report.fingerprint is not None
            assert report.fingerprint.kv_dtype == kv_dtype
        assert started.get.report.imports == {"hit": before + len(prompts)}


async def test_a_seed_draws_the_same_tokens(pair: tuple[Trio, str, str], prompts: list[Prompt]) -> None:
    started, _, _ = pair
    async with started.models() as models:
        answered = set()
        for prompt in prompts[5:11]:
            sampling = Sampling(
                do_sample=True, temperature=0.9, top_k=40, top_p=0.95, seed=secrets.randbits(63)
            )
            asked = models.ask(prompt, Stopping(NEW_TOKENS), sampling=sampling)
            separated = await models.separated(asked)
            assert separated[0].import_result == "hit"
            assert told(separated) == told(await models.colocated(asked)), sampling
            answered.add(tuple(step.token.id for step in separated))
        assert len(answered) > 1


async def test_penalties_see_the_whole_prompt(pair: tuple[Trio, str, str], prompts: list[Prompt]) -> None:
    started, _, _ = pair
    async with started.models() as models:
        for sampling in (
            Sampling(repetition_penalty=1.3),
            Sampling(frequency_penalty=0.7),
            Sampling(do_sample=True, typical_p=0.8, seed=5),
        ):
            asked = models.ask(prompts[6], Stopping(NEW_TOKENS), sampling=sampling)
            separated = await models.separated(asked)
            assert separated[0].import_result == "hit"
            assert told(separated) == told(await models.colocated(asked)), sampling
