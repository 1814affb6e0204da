"""Streams from a gateway with the time of every token, for part `break-even`."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import httpx

from orchestrator.errors import OrchestratorError, Unreachable

AUTO = "auto"
REQUEST_LIMIT_S = 120.0
BEGUN_TOKENS = 4
_WORDS = ("river", "stone", "lamp", "paper", "window", "garden", "engine", "letter", "bridge", "winter")
_PREDICTED = re.compile(r"(separated|mixed)=([0-9.]+)")


class Unanswered(OrchestratorError):
    """The gateway did not answer as it must: no figure would mean anything."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One stream.  Times are seconds of `time.perf_counter`."""

    asked_s: float
    tokens_s: tuple[float, ...]
    route: str
    reason: str
    predicted: Mapping[str, float]
    """Seconds to the last token, by choice, as the cost model saw them."""

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.asked_s

    @property
    def took_s(self) -> float:
        return self.tokens_s[-1] - self.asked_s


class Asking:
    """Requests to one gateway; no two have the same prompt."""

    def __init__(self, gateway: httpx.AsyncClient, seed: int = 5) -> None:
        self._gateway = gateway
        self._chance = random.Random(seed)

    def body(self, prompt_tokens: int, answer_tokens: int) -> dict[str, Any]:
        """About one token a word; the answer is as long as it may be."""
        text = " ".join(self._chance.choice(_WORDS) for _ in range(prompt_tokens))
        wanted = {"max_new_tokens": answer_tokens, "ignore_eos_token": True}
        return {"inputs": text, "parameters": wanted}

    async def ask(
        self, body: Mapping[str, Any], choice: str = AUTO, told: Callable[[float], None] | None = None
    ) -> Answer:
        """A whole stream; `told` hears of each token.  Raises Unanswered and Unreachable."""
        headers = {"x-orchestrator-debug": "1"}
        if choice != AUTO:
            headers["x-orchestrator-choice"] = choice
        times: list[float] = []

        def note(now_s: float) -> None:
            times.append(now_s)
            if told is not None:
                told(now_s)

        asked_s = time.perf_counter()
        try:
            async with (
                asyncio.timeout(REQUEST_LIMIT_S),
                self._gateway.stream("POST", "/generate_stream", json=body, headers=headers) as response,
            ):
                if not response.is_success:
                    raise Unanswered(
                        f"The gateway answered {response.status_code} to a request of the bench."
                    )
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        note(time.perf_counter())
        except (httpx.TransportError, TimeoutError) as error:
            raise Unreachable(f"The gateway did not answer a request of the bench: {error}") from None
        if not times:
            raise Unanswered("The gateway answered a request of the bench without a token.")
        return Answer(
            asked_s,
            tuple(times),
            response.headers.get("x-orchestrator-route", ""),
            response.headers.get("x-orchestrator-reason", ""),
            predictions(response.headers.get("x-orchestrator-predicted", "")),
        )


def predictions(header: str) -> dict[str, float]:
    """`separated=0.412 mixed=0.388` as a mapping; empty where nothing is said."""
    return {choice: float(seconds) for choice, seconds in _PREDICTED.findall(header)}


@dataclass(slots=True)
class Background:
    """Streams that decode beside what is measured: when each of their tokens came."""

    streams: list[list[float]] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Each stream has a few tokens."""

    def note(self, stream: int, now_s: float) -> None:
        """A token of a stream came."""
        self.streams[stream].append(now_s)
        if all(len(times) >= BEGUN_TOKENS for times in self.streams):
            self.begun.set()

    def quiet_gap_s(self, begin_s: float, end_s: float) -> float:
        """Mean time between two tokens of a stream in this span; 0 without streams."""
        gaps = [gap for stream in self.streams for gap in _gaps(stream, begin_s, end_s)]
        return sum(gaps) / len(gaps) if gaps else 0.0

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """Between two tokens of one stream, of which the later is in this span."""
        return max((gap for stream in self.streams for gap in _gaps(stream, begin_s, end_s)), default=0.0)

    def harm_s(self, begin_s: float, end_s: float, quiet_gap_s: float) -> float:
        """What all streams lost in this span: its gaps, less what they take undisturbed."""
        gaps = [gap for stream in self.streams for gap in _gaps(stream, begin_s, end_s)]
        return max(0.0, sum(gaps) - quiet_gap_s * len(gaps))


def _gaps(times: Sequence[float], begin_s: float, end_s: float) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times) if begin_s < later <= end_s]


@asynccontextmanager
async def decoding(asking: Asking, count: int, answer_tokens: int) -> AsyncIterator[Background]:
    """So many endless streams inside the block, each with at least a few tokens before it begins."""
    background = Background([[] for _ in range(count)])
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_endless(asking, partial(background.note, number), answer_tokens))
            for number in range(count)
        ]
        try:
            if count:
                async with asyncio.timeout(REQUEST_LIMIT_S):
                    await background.begun.wait()
            yield background
        finally:
            for task in tasks:
                task.cancel()


async def _endless(asking: Asking, told: Callable[[float], None], answer_tokens: int) -> None:
    while True:
        await asking.ask(asking.body(16, answer_tokens), "separated", told)
