"""What a phase takes, in three coefficients each, as DistServe's cost model has them (OSDI '24, section 3).

    prefill of a batch   a + b * sum(n) + c * sum(n^2)          n: tokens of each prompt
    one decode step      a + b * sum(context) + c * batch       context: tokens of KV of each sequence
    relay of a record    latency + bytes / bandwidth

All coefficients are seconds per unit and never negative, so that more work never costs less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SATURATED = 0.9
"""Share of the best prefill throughput at which a batch counts as full."""
L_M_LEAST_TOKENS = 64

MOST_FIXED_S = 60.0
MOST_PER_TOKEN_S = 10.0
MOST_PER_SQUARE_S = 0.01
MOST_PER_CONTEXT_S = 0.01
LEAST_BYTES_PER_S = 1e3
MOST_BYTES_PER_S = 1e15
"""Beyond these a number is damaged: no machine that serves a model is so slow, no link so fast."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds: `fixed_s + per_token_s * sum(n) + per_square_s * sum(n^2)`."""

    fixed_s: float
    per_token_s: float
    per_square_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for a coefficient that is negative, not finite or absurd."""
        _within("fixed_s", self.fixed_s, 0.0, MOST_FIXED_S)
        _within("per_token_s", self.per_token_s, 0.0, MOST_PER_TOKEN_S)
        _within("per_square_s", self.per_square_s, 0.0, MOST_PER_SQUARE_S)

    def seconds(self, tokens: int, squares: int) -> float:
        """Of one batch: the sum of its prompts' lengths, and of their squares."""
        return self.fixed_s + self.per_token_s * tokens + self.per_square_s * squares

    def alone_s(self, tokens: int) -> float:
        """Of a single prompt."""
        return self.fixed_s + (self.per_token_s + self.per_square_s * tokens) * tokens

    def batch_s(self, prompts: Sequence[int]) -> float:
        """Of a batch of prompts of these lengths."""
        return self.seconds(sum(prompts), sum(n * n for n in prompts))

    def saturation_tokens(self, most: int, share: float = SATURATED) -> int:
        """L_m: the shortest prompt that reaches 90 % of the best throughput, between 64 and `most`.

        Throughput n / (a + b n + c n^2) is best at n = sqrt(a / c), or for ever longer prompts without c.
        """
        a, b, c = self.fixed_s, self.per_token_s, self.per_square_s
        best_s = b + 2 * math.sqrt(a * c)  # seconds per token at the best length
        # a / n + b + c n = best / share, a quadratic in n; its smaller root
        slack_s = best_s / share - b
        root = slack_s * slack_s - 4 * a * c
        divisor = slack_s + math.sqrt(max(root, 0.0))
        if 2 * a >= most * divisor:  # also where only `a` is known: then no batch is ever full
            return max(1, most if a > 0 else min(L_M_LEAST_TOKENS, most))
        return max(1, min(max(math.ceil(2 * a / divisor), L_M_LEAST_TOKENS), most))


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a step: `fixed_s + per_context_s * sum(context) + per_sequence_s * batch`."""

    fixed_s: float
    per_context_s: float
    per_sequence_s: float

    def __post_init__(self) -> None:
        """Raises ValueError for a coefficient that is negative, not finite or absurd."""
        _within("fixed_s", self.fixed_s, 0.0, MOST_FIXED_S)
        _within("per_context_s", self.per_context_s, 0.0, MOST_PER_CONTEXT_S)
        _within("per_sequence_s", self.per_sequence_s, 0.0, MOST_PER_TOKEN_S)

    def step_s(self, batch: float, context_tokens: float) -> float:
        """Of `batch` sequences that together have so many tokens of KV."""
        return self.fixed_s + self.per_context_s * context_tokens + self.per_sequence_s * batch


@dataclass(frozen=True, slots=True)
class RelayCost:
    """Seconds: `latency_s + bytes / bytes_per_s`."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        """Raises ValueError for a number that is negative, not finite or absurd."""
        _within("latency_s", self.latency_s, 0.0, MOST_FIXED_S)
        _within("bytes_per_s", self.bytes_per_s, LEAST_BYTES_PER_S, MOST_BYTES_PER_S)

    def seconds(self, kv_bytes: int) -> float:
        return self.latency_s + kv_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one shard; what was never measured is None.  `relay` is of records that it imports."""

    prefill: PrefillCost | None = None
    decode: DecodeCost | None = None
    relay: RelayCost | None = None
    """In place, from an arena that it maps."""
    pull: RelayCost | None = None
    """From another host."""


KINDS: Mapping[str, type[PrefillCost | DecodeCost | RelayCost]] = {
    "prefill": PrefillCost,
    "decode": DecodeCost,
    "relay": RelayCost,
    "pull": RelayCost,
}
"""The parts of Costs by name, for those who read them from a file or from Redis."""


def _within(name: str, value: float, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name} must be a number between {least:g} and {most:g}, not {value!r}.")
