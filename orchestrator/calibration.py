"""A first cost model of a shard that nobody has measured: a few requests straight to it while it is idle.

Prompts of growing length for one token each, then short answers alone and together.  Bounded in time as a
whole; what did not fit into it is left to what is observed later.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import orjson
import structlog

from orchestrator.core.batches import PrefillBatch
from orchestrator.core.cost import Costs
from orchestrator.core.fitting import LEAST_SAMPLES
from orchestrator.core.learning import ShardFit
from orchestrator.core.lives import DecodeSample
from orchestrator.core.ticket import Leg, ShardView
from orchestrator.errors import GatewayError
from orchestrator.shards.client import ShardAnswered, ShardClient, payload_of

log = structlog.get_logger()
T = TypeVar("T")

BUDGET_S = 10.0
SIZES = (16, 64, 256, 1024)
"""Tokens of the prompts, about."""
REPEATS = 3
"""Of each size, after a first one that warms up."""
LONGEST_S = 2.0
"""A size that is expected to take longer is left out."""
ANSWER_TOKENS = 16
TOGETHER = 4
DECODE_REPEATS = 2
TOGETHER_PROMPT_TOKENS = 32
LEAST_TOKENS = 4
"""Of an answer whose time per token is worth something."""
CALL_GRACE_S = 1.0
DECODE_SHARE = 0.4
"""Of the budget, that prefill leaves over."""

_WORDS = "sea ship wind rain stone tree road house light night day hand word book door fire bird river bridge"
_TOKENS_PER_WORD = 1.5
"""Until the shard has counted."""


class _Failed(Exception):
    """The shard did not do what it was asked."""


class _Refused(_Failed):
    """It found something wrong with the request itself."""


@dataclass(slots=True)
class _Stream:
    """When the tokens of one answer came; seconds of the clock."""

    context_tokens: int
    at_s: list[float] = field(default_factory=list)


async def calibrate(
    view: ShardView,
    client: ShardClient,
    *,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Costs | None:
    """What an idle shard's prefill and decode take, within `budget_s`; None when nothing could be measured.

    A relay needs two shards and stays unknown.  Raises nothing but a cancellation.
    """
    begun_s = clock()
    run = _Calibration(view, client, begun_s + budget_s, clock)
    reason = ""
    try:
        async with asyncio.timeout(budget_s):
            await run.prefill(begun_s + budget_s * (1 - DECODE_SHARE))
            await run.decode()
    except TimeoutError:
        reason = "out_of_time"
    except _Failed as failed:
        log.warning("calibration_failed", shard=view.shard, error=str(failed))
        return None
    took_s = clock() - begun_s
    costs = run.costs()
    log.info(
        "shard_calibrated", shard=view.shard, took_s=round(took_s, 3), reason=reason or None, known=costs
    )
    return costs


class _Calibration:
    """One run on one shard.  Times are seconds of `clock`."""

    def __init__(
        self, view: ShardView, client: ShardClient, end_s: float, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._leg = Leg(view.shard, view.epoch, view.url)
        self._limits = view.limits
        self._slots = view.slots
        self._client = client
        self._end_s = end_s
        self._random = random.Random()  # prompts must be new to any prefix cache
        self._tokens_per_word = _TOKENS_PER_WORD
        self._sizes: list[tuple[int, float]] = []
        """Tokens and seconds of each size that was measured."""
        self._decoded: list[DecodeSample] = []

    def costs(self) -> Costs | None:
        """None with less than two sizes of prompts: nothing tells the fixed part from the rest."""
        if len(self._sizes) < 2:
            return None
        fit = ShardFit()
        batches = [PrefillBatch(1, tokens, tokens * tokens, seconds) for tokens, seconds in self._sizes]
        for batch in _often(batches):
            fit.observe(batch)
        for sample in _often(self._decoded):
            fit.observe(sample)
        return fit.costs()

    async def prefill(self, until_s: float) -> None:
        """Sizes from small to large, as long as they promise to fit."""
        for tokens in SIZES:
            if tokens + ANSWER_TOKENS > min(self._limits.max_input_tokens, self._limits.max_total_tokens):
                return
            expected_s = self._expected_s(tokens)
            if expected_s > LONGEST_S or self._clock() + 2 * expected_s > until_s:
                return
            try:
                await self._measure(tokens, until_s)
            except _Refused:
                return  # beyond what its engine takes at once

    async def decode(self) -> None:
        """Alone with a short and a long context, then several at once."""
        longest = self._sizes[-1][0] if self._sizes else SIZES[0]
        for _ in range(DECODE_REPEATS):
            for tokens in (SIZES[0], longest):
                self._stepped([await self._stream(tokens)])
        together = min(TOGETHER, self._slots, self._limits.max_concurrent_requests)
        if together < 2:
            return
        for _ in range(DECODE_REPEATS):
            self._stepped(await self._at_once(together))

    # --- prefill --------------------------------------------------------------------------------

    def _expected_s(self, tokens: int) -> float:
        """Of a prompt four times as long as the longest so far, and somewhat more for its square."""
        if not self._sizes:
            return 0.0
        before, seconds = self._sizes[-1]
        return seconds * tokens / before * 1.25

    async def _measure(self, tokens: int, until_s: float) -> None:
        """One size: the first request warms up and shows how many tokens a word has."""
        await self._prefilled(tokens)
        measured: list[tuple[int, float]] = []
        for _ in range(REPEATS):
            measured.append(await self._prefilled(tokens))
            if self._clock() + measured[-1][1] > until_s:
                break
        # An idle shard is disturbed in one direction only.
        self._sizes.append(min(measured, key=lambda one: one[1]))

    async def _prefilled(self, tokens: int) -> tuple[int, float]:
        """Exact tokens of the prompt, and seconds to its first token."""
        body = self._body(tokens, 1)
        begun_s = self._clock()
        # The budget ends a call first: what was measured before counts then.
        within_s = max(0.0, self._end_s - begun_s) + CALL_GRACE_S
        answer = await _asked(lambda: self._client.post(self._leg, "/generate", body, within_s))
        took_s = self._clock() - begun_s
        told = answer.headers.get(b"x-prompt-tokens", b"")
        counted = int(told) if told.isdigit() else 0
        if counted < 1:
            raise _Failed("The shard does not tell how many tokens a prompt has.")
        self._tokens_per_word = max(0.25, counted / max(1, self._word_count(tokens)))
        return counted, took_s

    # --- decode ---------------------------------------------------------------------------------

    async def _stream(self, prompt_tokens: int) -> _Stream:
        """One short answer, token by token."""
        body = self._body(prompt_tokens, ANSWER_TOKENS)

        async def read() -> _Stream:
            seen = _Stream(prompt_tokens)
            async with self._client.stream(self._leg, "/generate_stream", body) as events:
                async for event in events:
                    if "token" in payload_of(self._leg.shard, event):
                        seen.at_s.append(self._clock())
            return seen

        return await _asked(read)

    async def _at_once(self, count: int) -> list[_Stream]:
        failed: ExceptionGroup[_Failed] | None = None
        tasks: list[asyncio.Task[_Stream]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(self._stream(TOGETHER_PROMPT_TOKENS)) for _ in range(count)]
        except* _Failed as caught:
            failed = caught
        if failed is not None:
            raise _Failed(str(failed.exceptions[0]))
        return [task.result() for task in tasks]

    def _stepped(self, streams: list[_Stream]) -> None:
        """The steps of the first stream while all of them were decoding."""
        if not all(len(stream.at_s) >= LEAST_TOKENS for stream in streams):
            return  # the model ended an answer early
        begun_s = max(stream.at_s[0] for stream in streams)
        ended_s = min(stream.at_s[-1] for stream in streams)
        within = [at_s for at_s in streams[0].at_s if begun_s <= at_s <= ended_s]
        if len(within) < LEAST_TOKENS:
            return
        context = sum(stream.context_tokens + len(stream.at_s) / 2 for stream in streams)
        steps, seconds = len(within) - 1, within[-1] - within[0]
        self._decoded.append(DecodeSample(steps, seconds, len(streams), context))

    # --- prompts --------------------------------------------------------------------------------

    def _body(self, prompt_tokens: int, max_new_tokens: int) -> bytes:
        words = " ".join(self._random.choices(_WORDS.split(), k=self._word_count(prompt_tokens)))
        body = {
            "inputs": words,
            "parameters": {"max_new_tokens": max_new_tokens, "do_sample": False},
        }
        return orjson.dumps(body)

    def _word_count(self, tokens: int) -> int:
        return max(1, math.floor(tokens / self._tokens_per_word))


def _often(samples: Sequence[T]) -> list[T]:
    """All of them, so often that they are enough for a fit: each is the best or the mean of several."""
    return list(samples) * -(-LEAST_SAMPLES // max(1, len(samples)))


async def _asked(ask: Callable[[], Awaitable[T]]) -> T:
    """What `ask` gives; _Failed for whatever a shard can do wrong."""
    try:
        return await ask()
    except ShardAnswered as refusal:
        raise (_Refused if refusal.status == 422 else _Failed)(str(refusal)) from None
    except GatewayError as error:
        raise _Failed(str(error)) from None
