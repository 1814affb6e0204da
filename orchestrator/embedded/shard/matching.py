"""Holding a running answer to its regular expression: which tokens may come next.

llguidance walks the tokenizer's vocabulary along the expression as it is needed, so nothing is
compiled per vocabulary and a new expression costs milliseconds.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from .grammar import PatternError
from .loading import Loaded

_KEPT = 32
"""Expressions that stay compiled, as many as in TGI."""
_FUEL = 500_000
"""The library's measure of an expression's size: half its default, so that a wild one costs 2 s at most."""


class Matcher:
    """One answer's place in its expression.

    The end token is allowed where the text may end, and is the only one where it must.  Where only one
    text can follow, only the first of its own tokens is allowed.
    """

    def __init__(self, inner: LLMatcher) -> None:
        self._inner = inner

    def mask(self, scores: Tensor) -> Tensor:
        """scores [vocab] with minus infinity for every token that may not come next."""
        bias = torch.frombuffer(bytearray(self._inner.compute_logit_bias()), dtype=torch.uint8)
        return scores.masked_fill(bias[: scores.shape[0]] == 0, -math.inf)

    def advance(self, token_id: int) -> bool:
        """Take a token.  False where the expression cannot be followed further: only the end is left."""
        return bool(self._inner.consume_token(token_id))


class Patterns:
    """Compiles expressions for one tokenizer.  May be used from several threads."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled = lru_cache(_KEPT)(self._compile)

    @classmethod
    def of(cls, loaded: Loaded) -> Patterns | None:
        """None for a tokenizer that cannot be walked: a slow one, or one without an end token.

        Takes half a second for 50,000 tokens, so a shard does it before it is ready.
        """
        if not loaded.eos_token_ids or getattr(loaded.tokenizer, "backend_tokenizer", None) is None:
            return None
        tokens = max(loaded.model.config.vocab_size, len(loaded.tokenizer))
        return cls(from_tokenizer(loaded.tokenizer, tokens, list(loaded.eos_token_ids)))

    def check(self, pattern: str) -> None:
        """Raises PatternError.  Compiles, which may take a second for a wild one."""
        self._compiled(pattern)

    def matcher(self, pattern: str) -> Matcher:
        """At the start of an answer."""
        return Matcher(self._compiled(pattern).deep_copy())

    def _compile(self, pattern: str) -> LLMatcher:
        grammar, limits = LLMatcher.grammar_from_regex(pattern), LLParserLimits(initial_lexer_fuel=_FUEL)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # what is too big shows here
        if matcher.is_error():
            raise PatternError(_reason(matcher.get_error()))
        return matcher


def _reason(text: str) -> str:
    """The line that says why; others draw the expression."""
    lines = [line.strip() for line in text.splitlines()]
    told = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return told[-1] if told else lines[0].rpartition("(in regex): ")[2]
