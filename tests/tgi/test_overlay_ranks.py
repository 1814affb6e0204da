"""Tensor parallelism, in float32: put and get servers of any number of ranks answer as one stock server.

Sums over ranks add up in another order than in one process: tokens are the same, their log probabilities
nearly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.embedded.shard.seam import Batch, Generation, Sampling, Stopping
from tests.tgi.pair import Models, Prompt, Trio, logprobs, tokens, trio
from tests.tgi.prompts import prompt_of, tokenizer_of, twenty
from tests.tgi.servers import ServerPlan, Servers
from tgi_patches.contract import new_handle

NEARLY = 2e-3
NEW_TOKENS = 24
LENGTHS = (1, 3, 63, 64, 65, 200)
"""Of prompts, in tokens: around the ends of blocks of 64."""


@pytest.fixture(scope="module", params=[(2, 1), (1, 2), (2, 2)], ids="{0[0]} to {0[1]}".format)
def pair(request: pytest.FixtureRequest, servers: Servers, tiny: Path, tgi_python: Path) -> Iterator[Trio]:
    with trio(servers, ServerPlan(tiny), tgi_python, ranks=request.param) as started:
        for member in (started.put, started.get):
            assert {report.model_class for report in member.reports} == {"FlashCausalLM"}
        yield started


@pytest.fixture(scope="module")
def prompts(tiny: Path) -> list[Prompt]:
    tokenizer = tokenizer_of(tiny)
    ids = [(7 * i * i + 3 * i) % 200 + 20 for i in range(max(LENGTHS))]
    texts = (str(tokenizer.decode(ids[-count:])) for count in LENGTHS)
    return [prompt_of(tokenizer, text) for text in texts]


async def test_every_prompt_is_imported_by_every_rank_and_answered_as_by_one_server(
    pair: Trio, prompts: list[Prompt]
) -> None:
    stopping = Stopping(NEW_TOKENS, ignore_eos_token=True)
    before = [report.imports.get("hit", 0) for report in pair.get.reports]
    async with pair.models() as models:
        for prompt in prompts:
            asked = models.ask(prompt, stopping, top_n_tokens=3)
            same(await models.separated(asked), await models.colocated(asked))
    assert [report.imports.get("hit", 0) for report in pair.get.reports] == [
        count + len(prompts) for count in before
    ]
    assert {report.faults for report in (*pair.put.reports, *pair.get.reports)} == {0}


async def test_requests_of_one_batch_hit_and_miss_together(pair: Trio, prompts: list[Prompt]) -> None:
    """Ranks answer for the requests in turn."""
    async with pair.models() as models:
        asked = [models.ask(prompt, Stopping(8, ignore_eos_token=True)) for prompt in prompts[2:]]
        alone = [await models.colocated(one) for one in asked]
        legs = []
        for number, one in enumerate(asked):
            handle, first = await models.put_leg(one)
            handle = handle if number % 2 else new_handle()
            legs.append(replace(one, adapter_id=models.get_tag(handle, first.token.id)))
        together = await together_on_get(models, legs)
        for one, expected in zip(asked, alone, strict=True):
            same(together[one.id], expected)


async def test_who_reads_anothers_record_samples_on_every_rank_alike(
    pair: Trio, prompts: list[Prompt]
) -> None:
    """Its handle names no token: each rank draws one, and they have to go on together."""
    async with pair.models() as models:
        owner = models.ask(prompts[4], Stopping(8, ignore_eos_token=True))
        handle, _ = await models.put_leg(owner)
        firsts = set()
        for seed in (1, 2, 3):
            sampling = Sampling(do_sample=True, temperature=1.5, seed=seed)
            asked = models.ask(prompts[4], owner.stopping, sampling=sampling)
            leg = replace(asked, adapter_id=models.get_tag(handle, None))
            steps = (await together_on_get(models, [leg]))[asked.id]
            assert steps[0].import_result == "hit"
            same(steps, await models.colocated(asked))
            firsts.add(steps[0].token.id)
        assert len(firsts) > 1


async def test_a_rank_whose_part_is_gone_makes_all_ranks_miss(pair: Trio, prompts: list[Prompt]) -> None:
    """The put server's last rank loses its record: whoever needs it says why, the others `ranks`."""
    last = pair.put.server.plan.ranks - 1
    async with pair.models() as models:
        asked = models.ask(prompts[4], Stopping(8, ignore_eos_token=True))
        expected = await models.colocated(asked)
        handle, first = await models.put_leg(asked)
        before = [dict(report.imports) for report in pair.get.reports]
        damage(pair.put.arena_of(last))
        leg = replace(asked, adapter_id=models.get_tag(handle, first.token.id))
        same((await together_on_get(models, [leg]))[asked.id], expected)
    gained = [
        Counter(report.imports) - Counter(old) for report, old in zip(pair.get.reports, before, strict=True)
    ]
    assert [one.total() for one in gained] == [1] * len(gained)
    assert {"checksum"} <= {reason for one in gained for reason in one} <= {"checksum", "ranks"}


async def test_the_packaged_model_on_three_ranks(servers: Servers, model: Path, tgi_python: Path) -> None:
    """SmolLM2-135M has 9 heads and 3 KV heads."""
    with trio(servers, ServerPlan(model), tgi_python, ranks=(3, 3)) as started:
        async with started.models() as models:
            for prompt in twenty(model)[::4]:
                asked = models.ask(prompt, Stopping(NEW_TOKENS))
                same(await models.separated(asked), await models.colocated(asked))
        assert [report.imports for report in started.get.reports] == [{"hit": 5}] * 3
        fingerprints = [report.fingerprint for report in started.get.reports]
        assert [one and (one.kv_heads, one.tensor_parallel) for one in fingerprints] == [(3, 3)] * 3


def same(answered: list[Generation], expected: list[Generation]) -> None:
    assert tokens(answered) == tokens(expected)
    assert logprobs(answered) == pytest.approx(logprobs(expected), abs=NEARLY)
    assert answered[-1].generated_text == expected[-1].generated_text


async def together_on_get(models: Models, legs: list[Any]) -> dict[int, list[Generation]]:
    """The legs as one batch of the get server, until all have ended."""
    steps: dict[int, list[Generation]] = {leg.id: [] for leg in legs}
    done, cached = await models.get.prefill(Batch(77_000 + legs[0].id, tuple(legs)))
    while True:
        for step in done:
            steps[step.request_id].append(step)
        if cached is None:
            return steps
        done, cached = await models.get.decode([cached])


def damage(arena: Path) -> None:
    """Flip a bit in every 4 KiB of the ring: whatever record is read next does not fit its checksums."""
    with arena.open("r+b") as file:
        size = arena.stat().st_size
        for offset in range(size // 2 % 4096 + 512 * 1024, size, 4096):
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))
