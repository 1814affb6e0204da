"""Choosing the next token, in the order TGI applies its rules.

Penalties, the grammar, then temperature, top-k, top-p, typical-p; then arg-max or a seeded draw.
Log probabilities are those of the processed scores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .matching import Matcher
from .seam import Sampling

_NEG_INF = -math.inf


class Chooser:
    """One request's rules and its random generator, which advances by one draw a token.

    `matcher` is at the answer's start, and is told of every token by `advance`; None without a grammar.
    """

    def __init__(self, sampling: Sampling, matcher: Matcher | None = None) -> None:
        self.sampling = sampling
        self._matcher = matcher
        self.seed = sampling.seed
        self._generator = _generator(sampling.seed) if sampling.do_sample else None

    @property
    def plain_greedy(self) -> bool:
        """True where the scores need no processing at all, so that rows can share one arg-max."""
        s = self.sampling
        penalized = s.repetition_penalty != 1.0 or s.frequency_penalty != 0.0
        return not (s.do_sample or penalized or self._matcher)

    def process(self, scores: Tensor, ids: list[int]) -> Tensor:
        """scores [vocab] float32, ids so far (prompt included) -> processed scores [vocab]."""
        s = self.sampling
        if s.repetition_penalty != 1.0:
            scores = _repetition(scores, ids, s.repetition_penalty)
        if s.frequency_penalty != 0.0:
            scores = _frequency(scores, ids, s.frequency_penalty)
        if self._matcher is not None:
            scores = self._matcher.mask(scores)
        if not s.do_sample:
            return scores
        if s.temperature != 1.0:
            scores = scores / s.temperature
        if s.top_k:
            scores = _top_k(scores, s.top_k)
        if s.top_p < 1.0:
            scores = _top_p(scores, s.top_p)
        if s.typical_p < 1.0:
            scores = _typical(scores, s.typical_p)
        return scores

    def pick(self, scores: Tensor) -> int:
        """The chosen id for processed scores [vocab]."""
        if self._generator is None:
            return int(scores.argmax())
        noise = torch.empty_like(scores).exponential_(1, generator=self._generator)
        return int((scores.softmax(-1) / noise).argmax())

    def advance(self, token_id: int) -> bool:
        """Take the token that was chosen, here or elsewhere; False where the grammar did not."""
        return self._matcher is None or self._matcher.advance(token_id)


def _generator(seed: int) -> torch.Generator:
    """torch takes seeds up to 2^63 - 1 and negatives; TGI's seeds are unsigned 64-bit."""
    seed &= (1 << 64) - 1
    return torch.Generator().manual_seed(seed - (1 << 64) if seed >> 63 else seed)


def _repetition(scores: Tensor, ids: list[int], penalty: float) -> Tensor:
    """CTRL (Keskar et al. 2019): divide a seen token's positive score, multiply its negative one."""
    seen = torch.tensor(sorted(set(ids)))
    seen_scores = scores[seen]
    punished = torch.where(seen_scores < 0, seen_scores * penalty, seen_scores / penalty)
    return scores.index_copy(0, seen, punished)


def _frequency(scores: Tensor, ids: list[int], penalty: float) -> Tensor:
    """Subtract `penalty` times the share of the sequence that a token makes up, as TGI does.

    OpenAI subtracts it for every occurrence, which is stronger by the length of the sequence.
    """
    counts = torch.bincount(torch.tensor(ids), minlength=scores.shape[0]).to(scores.dtype)
    return scores - penalty * counts / len(ids)


def _top_k(scores: Tensor, k: int) -> Tensor:
    kth = scores.topk(min(k, scores.shape[0])).values[-1]
    return scores.masked_fill(scores < kth, _NEG_INF)


def _top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens whose mass reaches p (Holtzman et al. 2020)."""
    ordered, order = scores.sort()
    drop = ordered.softmax(-1).cumsum(-1) <= 1.0 - p
    drop[-1] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter(0, order, drop), _NEG_INF)


def _typical(scores: Tensor, mass: float) -> Tensor:
    """Keep tokens whose surprise is closest to the entropy until `mass` (Meister et al. 2022)."""
    logprobs = scores.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).nansum()
    order = (-logprobs - entropy).abs().argsort()
    reached = scores[order].softmax(-1).cumsum(-1)
    last = int((reached < mass).sum().clamp(max=scores.shape[0] - 1))
    keep = torch.zeros_like(scores, dtype=torch.bool)
    keep[order[: last + 1]] = True
    return scores.masked_fill(~keep, _NEG_INF)
