"""How long prompts and answers are: log-normal, with a tail of pasted documents.

Means of CHAT: ShareGPT in tokens as published with vLLM (Kwon et al., SOSP 2023): 161 in, 338 out.
Spreads, the tail and the other mixes are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

MARGIN = 0.85
"""Share of the server's limits that is used: texts are measured in characters, not in tokens."""
TEMPLATE_TOKENS = 32
"""Room for what a chat template adds to a message."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal mix of `mean` tokens, of which `tail_share` is drawn `tail_factor` times longer."""

    mean: float
    sigma: float
    tail_share: float = 0.0
    tail_factor: float = 1.0
    shortest: int = 4

    @property
    def mu(self) -> float:
        """So that the whole mix, tail included, has the mean."""
        body = self.mean / (1 + self.tail_share * (self.tail_factor - 1))
        return math.log(body) - self.sigma**2 / 2

    def draw(self, rng: Random, longest: int) -> int:
        """Tokens, between `shortest` and `longest`."""
        drawn = rng.lognormvariate(self.mu, self.sigma)
        if rng.random() < self.tail_share:
            drawn *= self.tail_factor
        return max(min(self.shortest, longest), min(round(drawn), longest))

    def scaled(self, factor: float) -> Lengths:
        return replace(self, mean=self.mean * factor)


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths of prompts and of answers."""

    prompt: Lengths
    answer: Lengths

    def scaled(self, factor: float) -> Mix:
        return Mix(self.prompt.scaled(factor), self.answer.scaled(factor))


CHAT = Mix(Lengths(161, 1.0, tail_share=0.03, tail_factor=8), Lengths(338, 0.9))
LONG_PROMPT = Mix(Lengths(1800, 0.35, shortest=600), Lengths(90, 0.6))
CODE = Mix(Lengths(170, 0.7), Lengths(32, 0.5))
TURNS = 3.5
"""Mean number of a conversation's questions (geometric)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the server's `/info`, in tokens."""

    max_input_tokens: int
    max_total_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """The longest prompt that is asked; a quarter of the total stays for the answer."""
        most = min(self.max_input_tokens, 3 * self.max_total_tokens // 4)
        return max(1, int(MARGIN * most) - TEMPLATE_TOKENS)

    def answer_tokens(self, prompt_tokens: int) -> int:
        """The longest answer to a prompt of about `prompt_tokens`; at least 1."""
        taken = math.ceil(prompt_tokens / MARGIN) + TEMPLATE_TOKENS
        return max(1, self.max_total_tokens - taken)


def turns(rng: Random) -> int:
    """Questions of one conversation; TURNS on average, at least 1."""
    return 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / TURNS))
