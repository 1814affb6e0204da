"""Requests of a simulation: lengths as chats have them, Poisson arrivals, bursts of nearly equal texts."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.core.cost import PrefillCost


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.  Equal `text` is an equal prompt; equal `kind` is counted together."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    text: str
    simhash: int
    kind: str = "steady"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths in tokens: `median * exp(sigma * N(0, 1))`, cut at both ends."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, chance: random.Random) -> int:
        drawn = self.median * math.exp(self.sigma * chance.gauss(0.0, 1.0))
        return max(self.least, min(self.most, round(drawn)))


PROMPTS = LogNormal(median=512, sigma=math.log(4096 / 512) / 1.6449, least=8, most=16_384)
"""Shaped like ShareGPT's: 5 % are longer than 4,096 tokens, for 1.6449 is N(0, 1)'s 95th percentile."""
ANSWERS = LogNormal(median=150, sigma=0.9, least=2, most=1024)


def capacity_per_s(cost: PrefillCost, prompts: LogNormal, *, seed: int = 0, draws: int = 20_000) -> float:
    """Prompts a second that one prefill shard can compute, as the cost model predicts.

    Short ones share the fixed part in groups of L_m tokens, longer ones pay it alone.
    """
    chance = random.Random(seed)
    group = cost.saturation_tokens(prompts.most)
    total_s = 0.0
    for _ in range(draws):
        n = prompts.draw(chance)
        total_s += cost.alone_s(n) - cost.fixed_s * (1 - min(1.0, n / group))
    return draws / total_s


def steady(
    rate_per_s: float,
    prompts: LogNormal,
    answers: LogNormal,
    *,
    seed: int,
    count: int | None = None,
    until_s: float = math.inf,
) -> Iterator[Arrival]:
    """Poisson arrivals of prompts that have nothing in common: `count` of them, or until a time."""
    chance = random.Random(seed)
    at_s = 0.0
    for number in itertools.count() if count is None else range(count):
        at_s += chance.expovariate(rate_per_s)
        if at_s >= until_s:
            return
        yield Arrival(
            at_s,
            prompts.draw(chance),
            answers.draw(chance),
            text=f"steady {seed} {number}",
            simhash=chance.getrandbits(64),
        )


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests of a few nearly equal texts, spread evenly at random over `within_s`."""

    at_s: float
    requests: int = 100
    prompt_tokens: Sequence[int] = (1180, 1184, 1192)
    """Of each text."""
    within_s: float = 1.0
    differing_bits: int = 2
    """Of each text's similarity fingerprint, against the first one's."""

    def arrivals(self, answers: LogNormal, *, seed: int) -> list[Arrival]:
        """In order; every text is asked for at least once."""
        chance = random.Random(f"burst {seed}")
        first = chance.getrandbits(64)
        marks = [first]
        for _ in self.prompt_tokens[1:]:
            bits = chance.sample(range(64), self.differing_bits)
            marks.append(first ^ sum(1 << bit for bit in bits))
        times = sorted(self.at_s + self.within_s * chance.random() for _ in range(self.requests))
        texts = [number % len(marks) for number in range(self.requests)]
        chance.shuffle(texts)
        return [
            Arrival(
                at_s,
                self.prompt_tokens[text],
                answers.draw(chance),
                text=f"burst {seed} {text}",
                simhash=marks[text],
                kind="burst",
            )
            for at_s, text in zip(times, texts, strict=True)
        ]
