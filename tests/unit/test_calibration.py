"""Calibration against a machine whose coefficients are known, in the machine's own time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from orchestrator.calibration import REPEATS, SIZES, calibrate
from orchestrator.core.cost import DecodeCost, PrefillCost
from orchestrator.core.sse import Event
from orchestrator.core.ticket import Leg, ShardView
from orchestrator.errors import DeadlinePassed, GatewayError, ShardLost
from orchestrator.shards.client import Answer, ShardAnswered, ShardClient
from tgi_patches.contract import Fingerprint, Limits, Role

TOKENS_PER_WORD = 3


class Machine(ShardClient):
    """Computes prompts one after the other and steps all running answers together."""

    def __init__(self, prefill: PrefillCost, decode: DecodeCost, *, ends_after: int = 1000) -> None:
        super().__init__()
        self.prefill, self.decode = prefill, decode
        self.now_s = 0.0
        self.prompts: list[str] = []
        self.refuses_beyond = 1 << 30
        self.headers = True
        self.error: GatewayError | None = None
        self._ends_after = ends_after
        self._contexts: dict[int, int] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self.most_at_once = self.posts = 0

    def clock(self) -> float:
        return self.now_s

    async def post(
        self, leg: Leg, path: str, body: bytes, timeout_s: float, *, request_id: str = ""
    ) -> Answer:
        assert (leg.shard, path) == ("p0", "/generate")
        tokens, new = self._computed(body)
        assert new == 1
        self.posts += 1
        headers: Mapping[bytes, bytes] = {b"x-prompt-tokens": b"%d" % tokens} if self.headers else {}
        return Answer(leg.shard, headers, b"{}")

    @asynccontextmanager
    async def stream(self, leg: Leg, path: str, body: bytes, *, request_id: str = "") -> AsyncIterator[Any]:
        assert (leg.shard, path) == ("p0", "/generate_stream")
        tokens, new = self._computed(body)
        mine = id(body)
        self._contexts[mine] = tokens
        self.most_at_once = max(self.most_at_once, len(self._contexts))
        try:
            yield self._tokens(mine, min(new, self._ends_after))
        finally:
            del self._contexts[mine]

    def _computed(self, body: bytes) -> tuple[int, int]:
        if self.error is not None:
            raise self.error
        asked = orjson.loads(body)
        tokens = len(asked["inputs"].split()) * TOKENS_PER_WORD
        if tokens > self.refuses_beyond:
            raise ShardAnswered(422, "`inputs` is too long.", "validation")
        self.prompts.append(asked["inputs"])
        self.now_s += self.prefill.alone_s(tokens)
        return tokens, asked["parameters"]["max_new_tokens"]

    async def _tokens(self, mine: int, count: int) -> AsyncIterator[Event]:
        for index in range(count):
            if index:
                await self._step()
                self._contexts[mine] += 1
            yield Event(b"", orjson.dumps({"token": {"id": index}}))

    async def _step(self) -> None:
        """One step of all that run, as soon as each of them waits for it."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        await asyncio.sleep(0)
        if len(self._waiting) == len(self._contexts):
            self.now_s += self.decode.step_s(len(self._contexts), sum(self._contexts.values()))
            for each in self._waiting:
                each.set_result(None)
            self._waiting.clear()
        async with asyncio.timeout(5):
            await done


def view(most: int = 2000, slots: int = 16) -> ShardView:
    return ShardView(
        shard="p0",
        role=Role.PREFILL,
        epoch=1,
        url="http://p0",
        state="ready",
        fingerprint=Fingerprint("m", "r", "t", "float32", "float32", 2, 1, 8),
        limits=Limits(most, most + 100),
        kv_tokens=100_000,
        slots=slots,
        ring_bytes=1 << 20,
        record_limit_bytes=1 << 18,
        bytes_per_token=10,
    )


PREFILL, DECODE = PrefillCost(0.004, 1e-4, 2e-8), DecodeCost(0.010, 1e-6, 1e-3)


async def test_the_coefficients_of_a_machine_are_found() -> None:
    machine = Machine(PREFILL, DECODE)
    costs = await calibrate(view(), machine, clock=machine.clock)
    assert costs is not None
    assert costs.prefill is not None
    assert costs.decode is not None
    for tokens in (16, 100, 1000, 2000):
        assert costs.prefill.alone_s(tokens) == pytest.approx(PREFILL.alone_s(tokens), rel=0.05)
    for batch, context in ((1, 32), (4, 160), (8, 1000)):
        assert costs.decode.step_s(batch, context) == pytest.approx(DECODE.step_s(batch, context), rel=0.08)
    assert costs.relay is None
    assert machine.most_at_once == 4


async def test_every_prompt_is_another_one_and_sizes_are_about_those_asked_for() -> None:
    machine = Machine(PREFILL, DECODE)
    await calibrate(view(), machine, clock=machine.clock)
    assert len(set(machine.prompts)) == len(machine.prompts)
    assert machine.posts == len(SIZES) * (1 + REPEATS)  # each size is warmed up
    another = Machine(PREFILL, DECODE)
    await calibrate(view(), another, clock=another.clock)
    assert not set(machine.prompts) & set(another.prompts)
    lengths = {len(prompt.split()) * TOKENS_PER_WORD for prompt in machine.prompts}
    for size in SIZES:
        assert any(abs(length - size) <= TOKENS_PER_WORD for length in lengths), size


async def test_sizes_beyond_the_limits_are_left_out() -> None:
    machine = Machine(PREFILL, DECODE)
    costs = await calibrate(view(most=300), machine, clock=machine.clock)
    assert max(len(prompt.split()) * TOKENS_PER_WORD for prompt in machine.prompts) < 300
    assert costs is not None
    assert costs.prefill is not None
    assert costs.prefill.alone_s(200) == pytest.approx(PREFILL.alone_s(200), rel=0.05)


async def test_a_size_that_the_engine_refuses_ends_the_sizes_only() -> None:
    machine = Machine(PREFILL, DECODE)
    machine.refuses_beyond = 512
    costs = await calibrate(view(), machine, clock=machine.clock)
    assert costs is not None
    assert costs.decode is not None


@pytest.mark.parametrize("budget_s", [10.0, 100.0])
async def test_a_slow_machine_is_not_asked_for_what_would_take_too_long(budget_s: float) -> None:
    """10 ms a token: 256 tokens take 2.56 s."""
    machine = Machine(PrefillCost(0.0, 0.01), DecodeCost(0.05, 0.0, 0.0))
    costs = await calibrate(view(), machine, budget_s=budget_s, clock=machine.clock)
    assert max(len(prompt.split()) * TOKENS_PER_WORD for prompt in machine.prompts) < 100
    assert machine.now_s < 12
    assert costs is not None
    assert costs.prefill is not None
    assert costs.prefill.alone_s(50) == pytest.approx(0.5, rel=0.1)


async def test_a_shard_of_one_slot_is_not_asked_for_two_answers_at_once() -> None:
    machine = Machine(PREFILL, DECODE)
    costs = await calibrate(view(slots=1), machine, clock=machine.clock)
    assert machine.most_at_once == 1
    assert costs is not None
    assert costs.decode is not None


async def test_answers_that_end_early_leave_decode_unknown() -> None:
    machine = Machine(PREFILL, DECODE, ends_after=2)
    costs = await calibrate(view(), machine, clock=machine.clock)
    assert costs is not None
    assert costs.prefill is not None
    assert costs.decode is None


@pytest.mark.parametrize(
    "error",
    [
        ShardLost("Shard p0 went away."),
        DeadlinePassed("Shard p0 did not answer in time."),
        ShardAnswered(429, "Model is overloaded", "overloaded"),
        ShardAnswered(424, "Request failed during generation", "generation"),
    ],
)
async def test_a_shard_that_fails_is_not_calibrated(error: GatewayError) -> None:
    machine = Machine(PREFILL, DECODE)
    machine.error = error
    assert await calibrate(view(), machine, clock=machine.clock) is None


async def test_a_shard_that_does_not_count_prompts_is_not_calibrated() -> None:
    machine = Machine(PREFILL, DECODE)
    machine.headers = False
    assert await calibrate(view(), machine, clock=machine.clock) is None


class Silent(Machine):
    """Never answers a stream."""

    @asynccontextmanager
    async def stream(self, leg: Leg, path: str, body: bytes, *, request_id: str = "") -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None


async def test_what_was_measured_before_the_time_was_up_counts() -> None:
    machine = Silent(PREFILL, DECODE)
    costs = await calibrate(view(), machine, budget_s=0.5, clock=machine.clock)
    assert costs is not None
    assert costs.prefill is not None
    assert costs.decode is None
