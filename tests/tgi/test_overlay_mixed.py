"""Requests that share batches, in float32: each answers as it does alone on a stock server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.embedded.shard.seam import Batch, CachedBatch, Generation, Request, Sampling, Stopping
from orchestrator.embedded.tgi.model import ModelLimits, TgiModel
from tests.tgi.pair import LIMITS, Models, Prompt, Trio, logprobs, tokens, trio
from tests.tgi.prompts import twenty
from tests.tgi.servers import ServerPlan, Servers
from tgi_patches.contract import new_handle

NEW_TOKENS = 10
CHUNKS = ModelLimits(max_input_tokens=640, max_total_tokens=1024, max_batch_prefill_tokens=64)
NEARLY = 2e-3
"""Batches of other shapes round differently; tokens are the same, their logprobs nearly."""
_batch_ids = itertools.count(10_000)


@pytest.fixture(scope="module")
def flash(servers: Servers, model: Path, tgi_python: Path) -> Iterator[Trio]:
    with trio(servers, ServerPlan(model), tgi_python) as started:
        assert started.put.report.model_class == "FlashCausalLM"
        yield started


@pytest.fixture(scope="module")
def causal(servers: Servers, model: Path, tgi_python: Path) -> Iterator[Trio]:
    with trio(servers, ServerPlan(model, flash=False), tgi_python) as started:
        assert started.put.report.model_class == "CausalLM"
        yield started


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[Prompt]:
    return twenty(model)


class Run:
    """One server's schedule, decided by the test; steps of each request as they come."""

    def __init__(self, model: TgiModel) -> None:
        self._model = model
        self.steps: dict[int, list[Generation]] = {}

    async def prefill(self, *requests: Request, joins: CachedBatch | None = None) -> CachedBatch | None:
        self.steps |= {request.id: [] for request in requests}
        return self._took(await self._model.prefill(Batch(next(_batch_ids), requests), joins))

    async def decode(self, *batches: CachedBatch | None, times: int = 1) -> CachedBatch | None:
        running = [batch for batch in batches if batch is not None]
        for _ in range(times):
            left = self._took(await self._model.decode(running))
            running = [left] if left is not None else []
        return running[0] if running else None

    async def finish(self, *batches: CachedBatch | None) -> None:
        left = await self.decode(*batches)
        while left is not None:
            left = await self.decode(left)

    def _took(self, step: tuple[list[Generation], CachedBatch | None]) -> CachedBatch | None:
        for generation in step[0]:
            self.steps[generation.request_id].append(generation)
        return step[1]


async def hit(models: Models, asked: Request) -> Request:
    """A get leg whose record is there."""
    handle, first = await models.put_leg(asked)
    return replace(asked, adapter_id=models.get_tag(handle, first.token.id))


async def miss(models: Models, asked: Request) -> Request:
    """A get leg whose record was never written; its first token is known all the same."""
    _, first = await models.put_leg(asked)
    return replace(asked, adapter_id=models.get_tag(new_handle(), first.token.id))


async def assert_as_alone(models: Models, run: Run, asked: Sequence[Request]) -> None:
    for request in asked:
        alone = await models.colocated(request)
        assert tokens(run.steps[request.id]) == tokens(alone), request.inputs
        assert logprobs(run.steps[request.id]) == pytest.approx(logprobs(alone), abs=NEARLY)


def three(models: Models, prompts: list[Prompt], *numbers: int) -> list[Request]:
    stopping = Stopping(NEW_TOKENS, ignore_eos_token=True)
    return [models.ask(prompts[number], stopping) for number in numbers]


KINDS = ("flash", "causal")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_hit_joins_a_running_batch(
    kind: str, request: pytest.FixtureRequest, prompts: list[Prompt]
) -> None:
    trio_: Trio = request.getfixturevalue(kind)
    async with trio_.models() as models:
        plain, joins, later = three(models, prompts, 5, 13, 4)
        run = Run(models.get)
        running = await run.decode(await run.prefill(plain), times=2)
        running = await run.decode(running, await run.prefill(await hit(models, joins)))
        await run.finish(running, await run.prefill(await hit(models, later)))
        assert [run.steps[r.id][0].import_result for r in (plain, joins, later)] == ["", "hit", "hit"]
        await assert_as_alone(models, run, (plain, joins, later))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_hit_and_a_miss_begin_together(
    kind: str, request: pytest.FixtureRequest, prompts: list[Prompt]
) -> None:
    trio_: Trio = request.getfixturevalue(kind)
    async with trio_.models() as models:
        plain, found, lost, found_too = three(models, prompts, 5, 9, 6, 13)
        legs = (plain, await hit(models, found), await miss(models, lost), await hit(models, found_too))
        run = Run(models.get)
        await run.finish(await run.prefill(*legs))
        results = [run.steps[leg.id][0].import_result for leg in legs]
        assert results == ["", "hit", "missing", "hit"]
        await assert_as_alone(models, run, (plain, found, lost, found_too))


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_that_leave_do_not_touch_the_others(
    kind: str, request: pytest.FixtureRequest, prompts: list[Prompt]
) -> None:
    trio_: Trio = request.getfixturevalue(kind)
    async with trio_.models() as models:
        leaves, stays, stays_too = three(models, prompts, 9, 5, 10)
        legs = [await hit(models, leaves), await hit(models, stays), stays_too]
        run = Run(models.get)
        running = await run.decode(await run.prefill(*legs), times=2)
        assert running is not None
        kept = await models.get.filter_batch(running.id, (stays.id, stays_too.id))
        await run.finish(kept)
        assert len(run.steps[leaves.id]) == 3
        await assert_as_alone(models, run, (stays, stays_too))


async def test_a_miss_in_chunks_begins_with_the_known_token_beside_a_hit(
    flash: Trio, prompts: list[Prompt]
) -> None:
    """Its first token comes inside a Decode, not inside its Prefill."""
    async with flash.models(CHUNKS) as models:
        found, lost = three(models, prompts, 6, 13)
        first = (await models.colocated(lost))[0].token
        wrong = first.id + 1
        in_chunks = replace(lost, adapter_id=models.get_tag(new_handle(), wrong), chunk_len=40)
        run = Run(models.get)
        running = await run.prefill(await hit(models, found), in_chunks)
        assert len(run.steps[found.id]) == 1
        assert run.steps[lost.id] == []
        await run.finish(running)
        assert run.steps[lost.id][0].token.id == wrong  # forced, whatever this server would choose
        await assert_as_alone(models, run, (found,))


async def test_a_miss_in_chunks_answers_as_alone(flash: Trio, prompts: list[Prompt]) -> None:
    async with flash.models(CHUNKS) as models:
        found, lost = three(models, prompts, 6, 13)
        run = Run(models.get)
        legs = (await hit(models, found), replace(await miss(models, lost), chunk_len=40))
        await run.finish(await run.prefill(*legs))
        assert run.steps[found.id][0].import_result == "hit"
        await assert_as_alone(models, run, (found, lost))


async def test_a_hit_joins_as_part_of_a_chunked_step(flash: Trio, prompts: list[Prompt]) -> None:
    """With chunks the running batch steps along inside the joining Prefill."""
    async with flash.models(CHUNKS) as models:
        long, joins = three(models, prompts, 13, 6)
        run = Run(models.get)
        running = await run.prefill(replace(long, chunk_len=64))
        running = await run.prefill(await hit(models, joins), joins=running)
        await run.finish(running)
        assert run.steps[joins.id][0].import_result == "hit"
        await assert_as_alone(models, run, (long, joins))


async def test_a_put_in_chunks_is_exported_when_its_prompt_completes_in_a_decode(
    flash: Trio, prompts: list[Prompt]
) -> None:
    async with flash.models(CHUNKS) as models:
        asked, other = three(models, prompts, 14, 6)
        handle = new_handle()
        leg = replace(
            asked,
            adapter_id=f"|kv1:put:{handle}",
            stopping=replace(asked.stopping, max_new_tokens=1),
            chunk_len=50,
        )
        before = flash.put.report.exports.get("ok", 0)
        run = Run(models.put)
        running = await run.prefill(leg)
        assert running is not None
        assert flash.put.report.exports.get("ok", 0) == before
        running = await run.prefill(other, joins=running)
        await run.finish(running)
        assert flash.put.report.exports["ok"] == before + 1
        got = Run(models.get)
        first = run.steps[leg.id][0].token
        await got.finish(await got.prefill(replace(asked, adapter_id=models.get_tag(handle, first.id))))
        assert got.steps[asked.id][0].import_result == "hit"
        await assert_as_alone(models, got, (asked,))
        await assert_as_alone(models, run, (other,))


async def test_a_half_done_put_survives_a_filter(flash: Trio, prompts: list[Prompt]) -> None:
    async with flash.models(CHUNKS) as models:
        leaves, asked, stays = three(models, prompts, 6, 14, 9)
        handle = new_handle()
        leg = replace(asked, adapter_id=f"|kv1:put:{handle}", chunk_len=20)
        run = Run(models.put)
        running = await run.prefill(leaves, leg, stays)
        assert running is not None
        before = flash.put.report.exports.get("ok", 0)
        await run.finish(await models.put.filter_batch(running.id, (leg.id, stays.id)))
        assert flash.put.report.exports["ok"] == before + 1
        await assert_as_alone(models, run, (asked, stays))


async def test_a_prefix_that_the_router_knows_is_not_written_again(
    flash: Trio, prompts: list[Prompt]
) -> None:
    """The first 64 positions stand in the blocks of an earlier request with the same prompt."""
    async with flash.models(LIMITS) as models:
        earlier, asked = three(models, prompts, 14, 14)
        shared = earlier.slots[:64]
        asked = replace(asked, slots=shared + asked.slots[64:])
        run = Run(models.get)
        await run.finish(await run.prefill(earlier))
        cached = replace(await hit(models, asked), cache_len=64)
        await run.finish(await run.prefill(cached))
        assert run.steps[asked.id][0].import_result == "hit"
        await assert_as_alone(models, run, (earlier, asked))


async def test_a_put_whose_prefix_was_cached_exports_the_whole_prompt(
    flash: Trio, prompts: list[Prompt]
) -> None:
    async with flash.models(LIMITS) as models:
        earlier, asked = three(models, prompts, 14, 14)
        asked = replace(asked, slots=earlier.slots[:64] + asked.slots[64:])
        run = Run(models.put)
        await run.finish(await run.prefill(earlier))
        handle, first = await models.put_leg(replace(asked, cache_len=64))
        got = Run(models.get)
        own = replace(asked, slots=models.slots.take(len(asked.slots)))
        await got.finish(await got.prefill(replace(own, adapter_id=models.get_tag(handle, first.token.id))))
        assert got.steps[asked.id][0].import_result == "hit"
        await assert_as_alone(models, got, (asked,))


async def test_chunks_do_not_change_what_a_seed_draws(flash: Trio, prompts: list[Prompt]) -> None:
    """Stock TGI draws for a row in every chunk of its prompt; the legs of a request have unlike chunks."""
    sampling = Sampling(do_sample=True, temperature=1.0, seed=7)
    stopping = Stopping(NEW_TOKENS, ignore_eos_token=True)
    async with flash.models(CHUNKS) as models:
        asked = models.ask(prompts[14], stopping, sampling=sampling)
        whole = await models.colocated(asked)
        handle = new_handle()
        leg = replace(
            asked,
            adapter_id=f"|kv1:put:{handle}",
            stopping=replace(stopping, max_new_tokens=1),
            chunk_len=50,
        )
        put, got = Run(models.put), Run(models.get)
        await put.finish(await put.prefill(leg))
        first = put.steps[asked.id][0].token
        await got.finish(await got.prefill(replace(asked, adapter_id=models.get_tag(handle, first.id))))
        assert got.steps[asked.id][0].import_result == "hit"
        assert tokens(got.steps[asked.id]) == tokens(whole)
        missed = Run(models.get)
        lost = replace(asked, adapter_id=models.get_tag(new_handle(), first.id), chunk_len=50)
        await missed.finish(await missed.prefill(lost))
        assert missed.steps[asked.id][0].import_result == ""
        assert tokens(missed.steps[asked.id]) == tokens(whole)
