"""How many tokens a prompt has, before anybody tokenizes it.

An upper bound decides whether a limit could be broken (then a shard counts exactly); an estimate,
corrected by what shards report, is what a ticket reserves.
"""

from __future__ import annotations

import math
import string
from dataclasses import dataclass

SPECIAL_TOKENS = 8
"""What a tokenizer may add around a raw prompt."""
TEMPLATE_TOKENS = 128
"""What a chat template may add once: a default system prompt, the generation prompt."""
MESSAGE_TOKENS = 16
"""What a chat template may add to each message."""

_PLAIN = (string.ascii_letters + " ").encode()
_MARGIN = 1.25
_DECAY = 0.01
_RATE_MIN = 0.2


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class PromptSize:
    """What can be known of a prompt without its tokenizer."""

    plain_bytes: int
    """ASCII letters and spaces: several of them share a token."""
    dense_bytes: int
    """Digits, punctuation, every other script: at worst one token a byte."""
    added_tokens: int
    """What template and tokenizer may add."""

    @property
    def upper_bound(self) -> int:
        """Tokens at most, for any vocabulary whose tokens cover at least one byte each."""
        return self.plain_bytes + self.dense_bytes + self.added_tokens


def size_of_text(text: str) -> PromptSize:
    """A raw prompt."""
    return _size([text], SPECIAL_TOKENS)


def size_of_chat(texts: list[str]) -> PromptSize:
    """A chat, from the text of each message."""
    return _size(texts, TEMPLATE_TOKENS + MESSAGE_TOKENS * len(texts))


def _size(texts: list[str], added_tokens: int) -> PromptSize:
    plain = dense = 0
    for text in texts:
        data = text.encode()
        others = len(data.translate(None, _PLAIN))
        plain += len(data) - others
        dense += others
    return PromptSize(plain, dense, added_tokens)


@dataclass(frozen=True, slots=True)
class Estimator:
    """Tokens per plain byte, learned: up at once, down slowly, so that it errs on the safe side."""

    rate: float = 0.5

    def estimate(self, size: PromptSize) -> int:
        """Tokens to reserve; at least 1, never above the upper bound."""
        guess = size.plain_bytes * self.rate * _MARGIN + size.dense_bytes + size.added_tokens
        return max(1, min(math.ceil(guess), size.upper_bound))

    def observe(self, size: PromptSize, tokens: int) -> Estimator:
        """After a shard has counted `tokens` for a prompt of this size."""
        if size.plain_bytes < 64:
            return self  # what the template adds drowns the rate
        seen = min(1.0, max(_RATE_MIN, (tokens - size.dense_bytes) / size.plain_bytes))
        rate = seen if seen > self.rate else self.rate + (seen - self.rate) * _DECAY
        return self if rate == self.rate else Estimator(rate)
