"""Requests, batches and answers as TGI's hooks see them, and what every test asks.

A token's KV is its id; the next token is the sum of all ids in the cache, so that it is right only where
the whole prompt's KV is.  `bias` shifts it: two shards that would sample differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tgi_patches.contract import Fingerprint

DEPLOYMENT = "dep"
EPOCH = 3
VOCAB = 26
HEADS, DIM, LAYERS = 2, 4, 2
BLOCKS, BLOCK = 8, 4
RING_BYTES = 1 << 16
ROUNDING = 0.25
"""What a forward over one token alone computes differently, in the second layer."""
PROMPT = [3, 1, 4, 1, 5]
SUM = 14
"""The token that a shard without a bias samples after PROMPT."""
DECODE_BIAS = 7
OWN = 21
"""And the one that `decode` would."""
SLOTS = [9, 10, 11, 12, 20, 21, 22, 23]
"""As TGI's router does: for what will be generated too."""
OTHER_SLOTS = [0, 1, 2, 3, 4, 5, 6, 7]
WHOLE_KV = [
    [3, 1, 4, 1, 5],
    [3, 1, 4, 1, 5],
    [103, 101, 104, 101, 105],
    [203, 201, 204, 201, 205],
]
"""Of PROMPT, by [layer][k|v], as a forward over the whole prompt leaves it."""
FINGERPRINT = Fingerprint("m", "", "tok", "float32", "float32", layers=LAYERS, kv_heads=HEADS, head_dim=DIM)


def handle(number: int) -> str:
    return f"{number:032x}"


def put_tag(number: int, adapter: str = "") -> str:
    return f"{adapter}|kv1:put:{handle(number)}"


def pin_tag(number: int) -> str:
    return f"|kv1:pin:{handle(number)}"


def get_tag(number: int, first: int | str = "-", adapter: str = "", shard: str = "p") -> str:
    return f"{adapter}|kv1:get:{shard}.{EPOCH}:{handle(number)}:{first}"


@dataclass
class Request:
    """As protobuf's: an optional field is there or not."""

    id: int
    token_ids: list[int]
    adapter_id: str = ""
    slots: list[int] = field(default_factory=list)
    cache_len: int = 0
    chunk_len: int = 0
    prefill_logprobs: bool = False
    max_new_tokens: int = 20
    top_n_tokens: int = 0
    truncate: int = 1000
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos_token: bool = False
    stop_sequences: tuple[str, ...] = ()
    cleared: bool = False

    @property
    def stopping_parameters(self) -> SimpleNamespace:
        return SimpleNamespace(max_new_tokens=self.max_new_tokens)

    def HasField(self, name: str) -> bool:  # noqa: N802 - protobuf's name
        assert name == "chunk_len"
        return self.chunk_len > 0

    def ClearField(self, name: str) -> None:  # noqa: N802 - protobuf's name
        assert name == "adapter_id"
        self.adapter_id = ""
        self.cleared = True


@dataclass
class PbBatch:
    """A batch message."""

    requests: list[Request] = field(default_factory=list)
    size: int = 0

    def CopyFrom(self, other: PbBatch) -> None:  # noqa: N802 - protobuf's name
        self.requests, self.size = list(other.requests), other.size


@dataclass(frozen=True)
class Generation:
    """One request's token of one step."""

    request_id: int
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    finish: str | None = None
    """Why it was the request's last one."""


def logits_of(total: float, bias: int) -> Tensor:
    logits = torch.zeros(VOCAB)
    logits[(int(total) + bias) % VOCAB] = 2.0 + bias
    return logits


def expected_logprob(bias: int) -> float:
    """Of the token that a shard of that bias likes best."""
    return float(torch.log_softmax(logits_of(0, bias), -1).max())


def top_lists(top_n: Sequence[int], _tensor: Any, logprobs: Tensor, _accepted: Any) -> tuple[Any, Any]:
    tops = [torch.topk(row, count) for row, count in zip(logprobs, top_n, strict=True)]
    return [[top.indices.tolist()] for top in tops], [[top.values.tolist()] for top in tops]


def text_of(token_ids: Iterable[int]) -> str:
    return "".join(chr(ord("a") + token_id) for token_id in token_ids)


def ask(adapter_id: str, id_: int = 1, **options: Any) -> Request:
    options = {"token_ids": list(PROMPT), "slots": SLOTS} | options
    return Request(id_, adapter_id=adapter_id, **options)


def tokens(generations: list[Generation]) -> dict[int, int]:
    return {generation.request_id: generation.token_id for generation in generations}
