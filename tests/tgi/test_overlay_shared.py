"""One record, many readers: each begins with a token of its own, and a pinned one outlives the ring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.embedded.shard.seam import Generation, Request, Sampling, Stopping
from orchestrator.embedded.tgi.model import ModelLimits
from tests.tgi.features import SMALL_CACHE
from tests.tgi.pair import Models, Prompt, Trio, arena_folder, logprobs, member, tokens, told
from tests.tgi.prompts import prompt_of, tokenizer_of
from tests.tgi.servers import ServerPlan, Servers
from tests.tgi.stepping import answers

ARENA_BYTES = 1 << 20
PINNED_BYTES = 1 << 18
LIMITS = ModelLimits(max_input_tokens=200, max_total_tokens=256, max_batch_prefill_tokens=256)
STOPPING = Stopping(8, ignore_eos_token=True)
TEXT = "the river and the stone under an old bridge in winter"
NEARLY = 1e-4
"""One row rounds differently from a whole prompt, so the first token's logprob does."""
LAP = 40
"""So many long records are more than the whole ring."""


@pytest.fixture(scope="module", params=[True, False], ids=["flash", "causal"])
def pair(request: pytest.FixtureRequest, servers: Servers, tiny: Path, tgi_python: Path) -> Iterator[Trio]:
    plan = ServerPlan(tiny, flash=request.param, env=SMALL_CACHE)
    sizes = {"arena_bytes": ARENA_BYTES, "pinned_bytes": PINNED_BYTES}
    with ExitStack() as stack:
        folder = stack.enter_context(arena_folder())
        put = stack.enter_context(member(servers, plan, "put", folder, **sizes))
        get = stack.enter_context(member(servers, plan, "get", folder))
        stock = stack.enter_context(servers.own(plan))
        yield Trio(put, get, stock, tgi_python)
        assert [one.report.faults for one in (put, get)] == [0, 0]


@pytest.fixture(scope="module")
def prompt(tiny: Path) -> Prompt:
    return prompt_of(tokenizer_of(tiny), TEXT)


@pytest.fixture(scope="module")
def long(tiny: Path) -> Prompt:
    return prompt_of(tokenizer_of(tiny), " ".join([TEXT] * 8))


def sampled(seed: int) -> Sampling:
    return Sampling(do_sample=True, temperature=1.5, top_k=50, seed=seed)


async def read(models: Models, handle: str, asked: Request) -> list[Generation]:
    """The steps of a request that reads the record of `handle` and has sent no token yet."""
    leg = replace(asked, adapter_id=models.get_tag(handle, None))
    return (await answers(models.get, [leg]))[leg.id]


def same(steps: list[Generation], expected: list[Generation]) -> None:
    """Once the imported KV is put back, all that follows the first token is exactly equal."""
    assert steps[0].import_result == "hit"
    assert tokens(steps) == tokens(expected)
    assert logprobs(steps) == pytest.approx(logprobs(expected), abs=NEARLY)
    assert told(steps[1:]) == told(expected[1:])


async def test_readers_of_a_record_sample_with_their_own_seeds_from_the_first_token_on(
    pair: Trio, prompt: Prompt
) -> None:
    async with pair.models(LIMITS) as models:
        handle, sent = await models.put_leg(models.ask(prompt, STOPPING, sampling=sampled(1)))
        firsts = {}
        for seed in (2, 3, 4, 1):
            asked = models.ask(prompt, STOPPING, sampling=sampled(seed), top_n_tokens=2)
            steps = await read(models, handle, asked)
            same(steps, await models.colocated(asked))
            firsts[seed] = steps[0].token.id
        assert len(set(firsts.values())) > 1
        assert firsts[1] == sent.token.id


async def test_a_greedy_reader_of_a_sampled_record_begins_with_the_likeliest_token(
    pair: Trio, prompt: Prompt
) -> None:
    async with pair.models(LIMITS) as models:
        likeliest = (await models.colocated(models.ask(prompt, STOPPING)))[0].token.id
        for seed in range(10, 30):
            handle, sent = await models.put_leg(models.ask(prompt, STOPPING, sampling=sampled(seed)))
            if sent.token.id != likeliest:
                break
        assert sent.token.id != likeliest
        asked = models.ask(prompt, STOPPING, top_n_tokens=3)
        steps = await read(models, handle, asked)
        same(steps, await models.colocated(asked))
        assert steps[0].token.id == likeliest


async def test_penalties_and_grammars_of_a_reader_are_its_own(pair: Trio, prompt: Prompt) -> None:
    async with pair.models(LIMITS) as models:
        handle, _ = await models.put_leg(models.ask(prompt, STOPPING))
        for sampling in (
            Sampling(repetition_penalty=1.5),
            Sampling(grammar="(red|green|blue) (ship|sun)"),
            replace(sampled(5), grammar="(red|green|blue) (ship|sun)"),
        ):
            asked = models.ask(prompt, Stopping(8), sampling=sampling)
            same(await read(models, handle, asked), await models.colocated(asked))


async def test_a_named_token_is_the_first_one_whatever_the_reader_would_sample(
    pair: Trio, prompt: Prompt
) -> None:
    """The other kind of get leg: its client has seen that token."""
    async with pair.models(LIMITS) as models:
        asked = models.ask(prompt, STOPPING, sampling=sampled(6))
        handle, sent = await models.put_leg(asked)
        other = replace(models.ask(prompt, STOPPING, sampling=sampled(7)))
        leg = replace(other, adapter_id=models.get_tag(handle, sent.token.id))
        steps = (await answers(models.get, [leg]))[leg.id]
        assert steps[0].token == sent.token


async def test_a_pinned_record_is_a_hit_after_a_turn_of_the_ring_and_another_one_is_not(
    pair: Trio, prompt: Prompt, long: Prompt
) -> None:
    async with pair.models(LIMITS) as models:
        asked = models.ask(prompt, STOPPING)
        before = pair.put.report.exports.get("pinned", 0)
        pinned, _ = await models.put_leg(asked, pinned=True)
        plain, _ = await models.put_leg(asked)
        for _ in range(LAP):
            await models.put_leg(models.ask(long, STOPPING))
        expected = await models.colocated(asked)
        same(await read(models, pinned, asked), expected)
        missed = await read(models, plain, asked)
        assert missed[0].import_result == "overwritten"
        assert told(missed) == told(expected)
        report = pair.put.report
        assert (report.exports["pinned"], report.pinned_bytes) == (before + 1, PINNED_BYTES)


async def test_records_that_find_no_room_to_be_pinned_are_in_the_ring(
    pair: Trio, prompt: Prompt, long: Prompt
) -> None:
    async with pair.models(LIMITS) as models:
        before = pair.put.report.exports
        asked = [models.ask(long, STOPPING), *(models.ask(prompt, STOPPING) for _ in range(3))]
        for _ in range(2):
            handles = [(await models.put_leg(one, pinned=True))[0] for one in asked]
        after = pair.put.report.exports
        assert after.get("ok", 0) > before.get("ok", 0)
        assert sum(after.values()) == sum(before.values()) + 2 * len(asked)
        for handle, one in zip(handles, asked, strict=True):
            same(await read(models, handle, one), await models.colocated(one))
