"""The scheduling loop over a fake model that records the calls it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager

import pytest

from orchestrator.embedded.shard.blocks import BlockAllocator
from orchestrator.embedded.shard.loop import Budgets, Loop
from orchestrator.embedded.shard.seam import (
    Batch,
    CachedBatch,
    GeneratedText,
    Generation,
    ModelInfo,
    Request,
    Sampling,
    Stopping,
    Token,
)
from orchestrator.errors import GenerationFailed, Overloaded

CHUNK = 4


class RecordingModel:
    """Yields token n on step n.  Every step waits for `allow`, so tests decide what arrives when."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.allow = asyncio.Semaphore(0)
        self.fail_next = False
        self._batches: dict[int, dict[int, Request]] = {}
        self._steps: dict[int, int] = {}
        self._left: dict[int, int] = {}

    async def info(self) -> ModelInfo:
        return ModelInfo("fake", "float32", 10, 1, 64, 64, 1)

    async def warmup(self) -> None:
        self.calls.append(("warmup",))

    async def prefill(
        self, batch: Batch, cached: CachedBatch | None = None
    ) -> tuple[list[Generation], CachedBatch | None]:
        self.calls.append(("prefill", *(r.chunk_len or len(r.input_ids) for r in batch.requests)))
        await self._step()
        if cached is None and not batch.wanted():
            return [], None
        joined = {} if cached is None else self._batches.pop(cached.id)
        self._left |= {r.id: len(r.input_ids) - r.chunk_len for r in batch.requests if r.chunk_len}
        self._batches[batch.id] = joined | {r.id: r for r in batch.requests}
        return self._advance(batch.id, started={r.id for r in batch.requests})

    async def decode(self, batches: list[CachedBatch]) -> tuple[list[Generation], CachedBatch | None]:
        joined: dict[int, Request] = {}
        for batch in batches:
            joined |= self._batches.pop(batch.id)
        self.calls.append(("decode", len(joined)))
        await self._step()
        self._batches[batches[0].id] = joined
        return self._advance(batches[0].id)

    async def filter_batch(self, batch_id: int, request_ids: tuple[int, ...]) -> CachedBatch:
        self.calls.append(("filter", len(request_ids)))
        self._batches[batch_id] = {i: self._batches[batch_id][i] for i in request_ids}
        return CachedBatch(batch_id, request_ids)

    async def clear_cache(self, batch_id: int | None = None) -> None:
        self.calls.append(("clear",))
        self._batches.clear()

    async def _step(self) -> None:
        await self.allow.acquire()
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("out of luck")

    def _advance(
        self, batch_id: int, started: Container[int] = ()
    ) -> tuple[list[Generation], CachedBatch | None]:
        """A token for every request whose prompt is complete; others take `CHUNK` more of theirs."""
        generations = []
        for request in self._batches[batch_id].values():
            if request.id in self._left and request.id not in started:
                self._left[request.id] -= CHUNK
            if self._left.get(request.id, 0) > 0:
                continue
            n = self._steps[request.id] = self._steps.get(request.id, 0) + 1
            ended = n == request.stopping.max_new_tokens
            text = GeneratedText("", n, "length", None) if ended else None
            generations.append(Generation(request.id, Token(n, str(n), 0.0, False), generated_text=text))
        rows = self._batches[batch_id]
        left = {i: r for i, r in rows.items() if self._steps.get(i, 0) < r.stopping.max_new_tokens}
        self._batches[batch_id] = left
        tokens = sum(min(CHUNK, max(1, self._left.get(i, 0))) for i in left)
        return generations, CachedBatch(batch_id, tuple(left), tokens) if left else None


def request(prompt_tokens: int, max_new_tokens: int) -> Request:
    return Request(0, "", tuple(range(prompt_tokens)), Sampling(), Stopping(max_new_tokens), ())


@asynccontextmanager
async def running_loop(
    *,
    blocks: int = 512,
    prefill_tokens: int = 100,
    batch: int = 8,
    concurrent: int = 8,
    chunked: bool = False,
) -> AsyncIterator[tuple[Loop, RecordingModel]]:
    model = RecordingModel()
    loop = Loop(model, BlockAllocator(blocks, 1), Budgets(prefill_tokens, batch, concurrent, chunked))
    task = asyncio.create_task(loop.run())
    try:
        yield loop, model
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def collect(loop: Loop, item: Request) -> list[int]:
    return [generation.token.id async for generation in loop.generate(item)]


async def until(model: RecordingModel, calls: int) -> None:
    async with asyncio.timeout(5):
        while len(model.calls) < calls:  # noqa: ASYNC110 - the model's steps are the events
            await asyncio.sleep(0)


async def test_a_request_gets_one_token_a_step_and_gives_its_blocks_back() -> None:
    async with running_loop() as (loop, model):
        task = asyncio.create_task(collect(loop, request(3, 3)))
        await until(model, 1)
        assert loop.kv_tokens_used == 5  # 3 prompt tokens and the KV of two of three new ones
        for _ in range(3):
            model.allow.release()
        assert await task == [1, 2, 3]
        assert model.calls == [("prefill", 3), ("decode", 1), ("decode", 1)]
        assert (loop.running, loop.waiting, loop.kv_tokens_used) == (0, 0, 0)


async def test_a_joining_request_is_prefilled_then_decoded_with_the_others() -> None:
    async with running_loop() as (loop, model):
        first = asyncio.create_task(collect(loop, request(3, 4)))
        await until(model, 1)
        second = asyncio.create_task(collect(loop, request(7, 2)))
        await asyncio.sleep(0)
        for _ in range(5):
            model.allow.release()
        assert await first == [1, 2, 3, 4]
        assert await second == [1, 2]
        assert model.calls == [("prefill", 3), ("prefill", 7), ("decode", 2), ("decode", 1), ("decode", 1)]


async def test_requests_are_taken_in_order_up_to_the_prefill_budget() -> None:
    async with running_loop(prefill_tokens=10) as (loop, model):
        tasks = [asyncio.create_task(collect(loop, request(n, 1))) for n in (4, 6, 1)]
        await until(model, 1)
        assert model.calls == [("prefill", 4, 6)]
        model.allow.release()
        await until(model, 2)
        assert model.calls[1] == ("prefill", 1)
        model.allow.release()
        await asyncio.gather(*tasks)


async def test_few_waiting_requests_do_not_interrupt_a_large_batch_at_once() -> None:
    async with running_loop() as (loop, model):
        large = [asyncio.create_task(collect(loop, request(1, 25))) for _ in range(7)]
        await until(model, 1)
        assert model.calls == [("prefill", *[1] * 7)]
        late = asyncio.create_task(collect(loop, request(2, 1)))
        await asyncio.sleep(0)
        for _ in range(26):
            model.allow.release()
        await asyncio.gather(*large, late)
        # 0.3 x 7 running = 2 must wait, so one waits until 20 steps have passed
        assert model.calls.index(("prefill", 2)) == 20


async def test_a_request_without_free_blocks_waits_for_them() -> None:
    async with running_loop(blocks=6) as (loop, model):
        first = asyncio.create_task(collect(loop, request(4, 2)))
        await until(model, 1)
        second = asyncio.create_task(collect(loop, request(4, 2)))
        await asyncio.sleep(0)
        for _ in range(4):
            model.allow.release()
        assert await first == [1, 2]
        assert await second == [1, 2]
        assert model.calls == [("prefill", 4), ("decode", 1), ("prefill", 4), ("decode", 1)]


async def test_a_reader_that_leaves_is_dropped_after_the_running_step() -> None:
    async with running_loop() as (loop, model):
        stays = asyncio.create_task(collect(loop, request(1, 3)))
        leaves = asyncio.create_task(collect(loop, request(2, 100)))
        await until(model, 1)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        for _ in range(3):
            model.allow.release()
        assert await stays == [1, 2, 3]
        assert model.calls == [("prefill", 1, 2), ("filter", 1), ("decode", 1), ("decode", 1)]
        assert loop.kv_tokens_used == 0


async def test_a_prefill_that_the_model_gives_up_leaves_nothing_behind() -> None:
    async with running_loop() as (loop, model):
        leaves = asyncio.create_task(collect(loop, request(2, 100)))
        await until(model, 1)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        model.allow.release()
        model.allow.release()
        model.allow.release()
        assert await collect(loop, request(1, 2)) == [1, 2]
        assert model.calls == [("prefill", 2), ("prefill", 1), ("decode", 1)]
        assert (loop.running, loop.kv_tokens_used) == (0, 0)


async def test_a_reader_that_leaves_while_waiting_is_never_prefilled() -> None:
    async with running_loop(batch=1) as (loop, model):
        first = asyncio.create_task(collect(loop, request(1, 2)))
        await until(model, 1)
        second = asyncio.create_task(collect(loop, request(9, 2)))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        model.allow.release()
        model.allow.release()
        assert await first == [1, 2]
        assert ("prefill", 9) not in model.calls


async def test_a_failed_step_fails_its_requests_and_the_next_one_works() -> None:
    async with running_loop() as (loop, model):
        model.fail_next = True
        model.allow.release()
        with pytest.raises(GenerationFailed, match="RuntimeError"):
            await collect(loop, request(2, 2))
        assert loop.kv_tokens_used == 0
        for _ in range(2):
            model.allow.release()
        assert await collect(loop, request(2, 2)) == [1, 2]


async def test_too_many_requests_are_refused_as_overloaded() -> None:
    async with running_loop(concurrent=2) as (loop, model):
        tasks = [asyncio.create_task(collect(loop, request(1, 1))) for _ in range(2)]
        await until(model, 1)
        with pytest.raises(Overloaded, match="Model is overloaded"):
            await collect(loop, request(1, 1))
        model.allow.release()
        await asyncio.gather(*tasks)


async def test_with_chunks_a_long_prompt_is_split_and_the_running_batch_steps_along() -> None:
    async with running_loop(prefill_tokens=CHUNK, chunked=True) as (loop, model):
        first = asyncio.create_task(collect(loop, request(2, 6)))
        await until(model, 1)
        second = asyncio.create_task(collect(loop, request(9, 2)))
        await asyncio.sleep(0)
        for _ in range(6):
            model.allow.release()
        assert await first == [1, 2, 3, 4, 5, 6]
        assert await second == [1, 2]
        # budget 4, one token of it for the running request: a first chunk of 3 of 9 tokens
        assert model.calls == [
            ("prefill", 2),
            ("prefill", 3),
            ("decode", 2),
            ("decode", 2),
            ("decode", 2),
            ("decode", 1),
        ]


async def test_with_chunks_nothing_joins_while_a_split_prompt_takes_the_whole_budget() -> None:
    async with running_loop(prefill_tokens=CHUNK, chunked=True) as (loop, model):
        long = asyncio.create_task(collect(loop, request(11, 1)))
        await until(model, 1)
        late = asyncio.create_task(collect(loop, request(1, 1)))
        await asyncio.sleep(0)
        for _ in range(5):
            model.allow.release()
        assert await long == [1]
        assert await late == [1]
        assert model.calls == [("prefill", 4), ("decode", 1), ("prefill", 1)]
