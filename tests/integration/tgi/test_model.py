"""The model over gRPC, alone and below the scheduling loop, against a fake server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from orchestrator.embedded.shard.blocks import BlockAllocator
from orchestrator.embedded.shard.loop import Budgets, Loop
from orchestrator.embedded.shard.seam import Batch, CachedBatch, Request, Sampling, Stopping
from orchestrator.embedded.tgi.client import Connection
from orchestrator.embedded.tgi.model import ModelLimits, TgiModel
from orchestrator.errors import GenerationFailed, ShardError
from tests.integration.tgi.fake_server import FakeTgi

GET = f"|kv1:get:prefill-0.7:{'0' * 32}:1"


@pytest.fixture
async def model(connection: Connection) -> TgiModel:
    warm = TgiModel(connection, ModelLimits(100, 120, 100))
    await warm.warmup()
    return warm


def request(request_id: int, prompt_tokens: int, max_new_tokens: int, adapter_id: str = "") -> Request:
    ids = tuple(range(prompt_tokens))
    stopping = Stopping(max_new_tokens)
    slots = tuple(range(64, 64 + prompt_tokens + max_new_tokens - 1))
    return Request(request_id, "text", ids, Sampling(), stopping, slots, adapter_id)


def batch(*requests: Request) -> Batch:
    return Batch(requests[0].id, requests)


# --- alone ---


async def test_the_warmup_tells_the_size_of_the_cache_and_forgets_earlier_batches(
    tgi: FakeTgi, model: TgiModel
) -> None:
    assert (await model.info()).kv_tokens == 6400
    assert [name for name, _ in tgi.calls] == ["Info", "ClearCache", "Warmup", "Info"]
    assert not tgi.requests("ClearCache")[0].HasField("id")


async def test_a_server_that_measures_nothing_has_no_size(tgi: FakeTgi, connection: Connection) -> None:
    tgi.supported_tokens, tgi.info = 0, {"requires_padding": True}
    model = TgiModel(connection, ModelLimits(100, 120, 100))
    await model.warmup()
    info = await model.info()
    assert (info.padded, info.kv_tokens) == (True, 0)
    await model.prefill(batch(replace(request(1, 3, 2), slots=())))
    assert not tgi.requests("Prefill")[0].batch.requests[0].blocks


async def test_requests_that_ended_leave_the_batch_before_the_next_step(
    tgi: FakeTgi, model: TgiModel
) -> None:
    steps, cached = await model.prefill(batch(request(1, 2, 1), request(2, 2, 3)))
    assert [(s.request_id, s.token.id, s.generated_text is None) for s in steps] == [
        (1, 1, False),
        (2, 1, True),
    ]
    assert cached == CachedBatch(1, (2,), 1)
    assert list(tgi.requests("FilterBatch")[0].request_ids) == [2]
    steps, cached = await model.decode([cached])
    assert [(s.request_id, s.token.id) for s in steps] == [(2, 2)]
    assert len(tgi.requests("FilterBatch")) == 1
    assert cached is not None
    steps, cached = await model.decode([cached])
    assert cached is None
    assert steps[0].generated_text is not None
    assert steps[0].generated_text.text == "<1><2><3>"


async def test_a_joining_batch_takes_the_running_one_along(tgi: FakeTgi, model: TgiModel) -> None:
    _, running = await model.prefill(batch(request(1, 2, 5)))
    steps, cached = await model.prefill(batch(request(2, 2, 5)), running)
    assert [(s.request_id, s.token.id) for s in steps] == [(1, 2), (2, 1)]
    assert cached is not None
    assert cached.request_ids == (1, 2)
    assert cached.id == 1


async def test_clearing_names_one_batch_or_none(tgi: FakeTgi, model: TgiModel) -> None:
    await model.clear_cache(3)
    await model.clear_cache()
    named = [(r.HasField("id"), r.id) for r in tgi.requests("ClearCache")[1:]]
    assert named == [(True, 3), (False, 0)]


async def test_what_became_of_a_record_is_told_with_the_first_token(tgi: FakeTgi, model: TgiModel) -> None:
    tgi.imports = "overwritten"
    steps, cached = await model.prefill(batch(request(1, 2, 2, GET), request(2, 2, 2)))
    assert [step.import_result for step in steps] == ["overwritten", ""]
    assert cached is not None
    steps, _ = await model.decode([cached])
    assert [step.import_result for step in steps] == ["", ""]


# --- below the loop ---


@contextlib.asynccontextmanager
async def looping(model: TgiModel, budgets: Budgets) -> AsyncIterator[tuple[Loop, asyncio.Task[None]]]:
    loop = Loop(model, BlockAllocator(100, 64, reserved=1), budgets)
    task = asyncio.create_task(loop.run())
    try:
        yield loop, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


BUDGETS = Budgets(max_batch_prefill_tokens=8, max_batch_size=4, max_concurrent_requests=8, chunked=True)


async def collect(loop: Loop, item: Request) -> list[int]:
    return [step.token.id async for step in loop.generate(item)]


async def test_requests_run_to_their_end_together(tgi: FakeTgi, model: TgiModel) -> None:
    async with looping(model, BUDGETS) as (loop, _):
        answers = await asyncio.gather(*(collect(loop, request(0, 2, count)) for count in (1, 3, 5)))
        assert answers == [[1], [1, 2, 3], [1, 2, 3, 4, 5]]
        assert loop.kv_tokens_used == 0
    first = {tuple(r.blocks) for call in tgi.requests("Prefill") for r in call.batch.requests}
    assert first == {(1,), (2,), (3,)}


async def test_a_prompt_over_the_budget_is_split_where_the_server_can(tgi: FakeTgi, model: TgiModel) -> None:
    async with looping(model, BUDGETS) as (loop, _):
        assert await collect(loop, request(0, 12, 2)) == [1, 2]
    sent = tgi.requests("Prefill")[0].batch.requests[0]
    assert (sent.chunk_len, sent.truncate) == (8, 12)


async def test_a_speculating_server_gets_room_for_what_it_guesses(tgi: FakeTgi, model: TgiModel) -> None:
    tgi.tokens_a_step, tgi.info = 3, {"speculate": 2}
    async with looping(model, replace(BUDGETS, lookahead_tokens=2)) as (loop, _):
        assert await collect(loop, request(0, 62, 5)) == [1, 2, 3, 4, 5]
    sent = tgi.requests("Prefill")[0].batch.requests[0]
    assert len(sent.slots) == 62 + 5 - 1 + 2
    assert list(sent.blocks) == [1, 2]


async def test_a_failed_step_costs_its_requests_and_their_batch(tgi: FakeTgi, model: TgiModel) -> None:
    async with looping(model, BUDGETS) as (loop, task):
        tgi.fail_with = "no luck"
        with pytest.raises(GenerationFailed, match=r"^Request failed during generation: no luck$"):
            await collect(loop, request(0, 2, 2))
        assert await collect(loop, request(0, 2, 2)) == [1, 2]
        assert not task.done()
    assert [name for name, _ in tgi.calls][4:7] == ["Prefill", "ClearCache", "Prefill"]


async def test_a_server_that_hangs_ends_the_loop_and_nobody_is_left_waiting(
    tgi: FakeTgi, model: TgiModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.embedded.tgi.client.DEADLINES_S", {"Prefill": 0.2})
    tgi.hang = asyncio.Event()
    one_by_one = replace(BUDGETS, max_batch_size=1)
    async with looping(model, one_by_one) as (loop, task):
        answers = await asyncio.gather(
            *(collect(loop, request(0, 2, 2)) for _ in range(3)), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [GenerationFailed] * 3
        assert "did not finish Prefill within 0.2 s" in str(answers[0])
        with pytest.raises(ShardError):
            await task
        assert (loop.running, loop.waiting, loop.kv_tokens_used) == (0, 0, 0)
    tgi.hang.set()
