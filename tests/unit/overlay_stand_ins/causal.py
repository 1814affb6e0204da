"""TGI's CausalLM, its left-padded batch and its choosers, with a model that adds up."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.unit.overlay_stand_ins.host import Host
from tests.unit.overlay_stand_ins.messages import (
    DIM,
    FINGERPRINT,
    HEADS,
    LAYERS,
    ROUNDING,
    Generation,
    PbBatch,
    Request,
    ask,
    logits_of,
    text_of,
    top_lists,
)
from tests.unit.overlay_stand_ins.tokens import tokens_module
from tgi_patches.hooks.causal import CausalHooks
from tgi_patches.report import Report

Pairs = Sequence[Sequence[Tensor]]


class Cache:
    """As transformers' newer caches: lists are refused, and made into one by `from_legacy_cache`."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = [(key, value) for key, value in pairs]

    @classmethod
    def from_legacy_cache(cls, pairs: Pairs) -> Cache:
        assert type(pairs) is tuple
        return cls(pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.pairs[layer]


class CausalBatchBase:
    """The attributes that the hooks read or write."""

    def __init__(self, requests: list[Request], prompts: Sequence[Sequence[int]], tokens: Any) -> None:
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self.requests = requests
        self.input_ids = torch.tensor(padded)
        starts = torch.tensor([[longest - len(prompt)] for prompt in prompts])
        self.position_ids = (torch.arange(longest) - starts).clamp(min=0)
        self.attention_mask = torch.ones(len(prompts), longest)
        self.past_key_values: Any = None
        self.all_input_ids = [torch.tensor(row).view(-1, 1) for row in padded]
        self.input_lengths = [len(prompt) for prompt in prompts]
        self.next_token_choosers = [tokens.NextTokenChooser() for _ in requests]
        self.stopping_criterias = [tokens.StoppingCriteria(request) for request in requests]
        self.top_n_tokens = [request.top_n_tokens for request in requests]

    def prompt_and_answer(self, row: int) -> list[int]:
        ids: list[int] = self.all_input_ids[row].view(-1).tolist()
        return ids[-self.input_lengths[row] :]


class CausalModelBase:
    """Its forward: KV appended to the cache, logits from all of it."""

    def __init__(self, bias: int, *, legacy: bool) -> None:
        self.bias = bias
        self.fails = False
        self.legacy = legacy
        self.tokens_computed: list[int] = []
        """New tokens a row, by forward."""
        self.positions: list[list[int]] = []
        """Of the newest forward, by row."""

    def compute(self, input_ids: Tensor, past: Any) -> tuple[Tensor, None, Any]:
        if self.fails:
            raise RuntimeError("the device has no memory left")
        if past is not None and not self.legacy and not isinstance(past, Cache):
            raise AttributeError("'list' object has no attribute 'get_seq_length'")
        batch, new = input_ids.shape
        self.tokens_computed.append(new)
        rounding = ROUNDING if new == 1 else 0.0
        pairs = []
        for layer in range(LAYERS):
            pair = []
            for plane in range(2):
                values = input_ids + layer * (100 * (plane + 1) + rounding)
                added = values.float().view(batch, 1, new, 1).expand(batch, HEADS, new, DIM)
                pair.append(added if past is None else torch.cat([past[layer][plane], added], dim=2))
            pairs.append((pair[0].clone(), pair[1].clone()))
        totals = pairs[0][0][:, 0, :, 0].sum(-1)
        logits = torch.stack([logits_of(float(total), self.bias) for total in totals])
        return logits.view(batch, 1, -1), None, tuple(pairs) if self.legacy else Cache(pairs)


def causal_module(tokens: Any) -> Any:
    """TGI's causal_lm with fresh classes, which a test's hooks may wrap."""
    module = SimpleNamespace(batch_top_tokens=top_lists)

    class CausalLMBatch(CausalBatchBase):
        @classmethod
        def from_pb(cls, pb: PbBatch, tokenizer: Any, dtype: Any, device: Any) -> CausalLMBatch:
            assert pb.size == len(pb.requests)
            limit = max(request.truncate for request in pb.requests)
            prompts = [request.token_ids[-limit:] for request in pb.requests]
            return cls(list(pb.requests), prompts, tokens)

        @classmethod
        def concatenate(cls, batches: Sequence[CausalLMBatch]) -> Any:
            return joined(cls, batches)

    class CausalLM(CausalModelBase):
        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, past: Any = None) -> Any:
            assert position_ids.shape == input_ids.shape
            self.positions = position_ids.tolist()
            return self.compute(input_ids, past)

        def generate_token(self, batch: CausalLMBatch) -> Any:
            return step(self, batch, module)

    module.CausalLMBatch = CausalLMBatch
    module.CausalLM = CausalLM
    return module


def step(model: Any, batch: Any, module: Any) -> Any:
    logits, _, past = model.forward(
        batch.input_ids, batch.attention_mask, batch.position_ids, batch.past_key_values
    )
    logprobs = torch.log_softmax(logits[:, -1], -1)
    top_ids, top_logprobs = module.batch_top_tokens(batch.top_n_tokens, None, logprobs, None)
    generations = []
    running = 0
    for i, request in enumerate(batch.requests):
        next_id, row = batch.next_token_choosers[i](batch.all_input_ids[i].view(1, -1), logits[i])
        batch.all_input_ids[i] = torch.cat([batch.all_input_ids[i], next_id])
        batch.input_lengths[i] += 1
        batch.input_ids[i, 0] = next_id
        top = tuple(zip(top_ids[i][0], top_logprobs[i][0], strict=True))
        ended, why = batch.stopping_criterias[i](int(next_id), text_of([int(next_id)]))
        running += not ended
        generations.append(Generation(request.id, int(next_id), float(row[-1, next_id]), top, why))
    if not running:
        return generations, None, (1, 2)
    batch.input_ids = batch.input_ids[:, :1]
    batch.position_ids = batch.position_ids[:, -1:] + 1
    batch.past_key_values = past
    return generations, batch, (1, 2)


def joined(cls: Any, batches: Sequence[Any]) -> Any:
    """As TGI does: caches become lists, padded on the left to the longest."""
    parts = list(batches)
    both = cls.__new__(cls)
    for name in (
        "requests",
        "all_input_ids",
        "input_lengths",
        "next_token_choosers",
        "stopping_criterias",
        "top_n_tokens",
    ):
        setattr(both, name, [item for part in parts for item in getattr(part, name)])
    both.input_ids = torch.cat([part.input_ids for part in parts])
    both.position_ids = torch.cat([part.position_ids for part in parts])
    both.attention_mask = None
    longest = max(part.past_key_values[0][0].shape[2] for part in parts)
    both.past_key_values = [
        [
            torch.cat([_left_padded(part.past_key_values[layer][plane], longest) for part in parts])
            for plane in range(2)
        ]
        for layer in range(LAYERS)
    ]
    return both


def _left_padded(tensor: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, length - tensor.shape[2], 0))


class CausalShard:
    """One TGI process with the overlay; its warmup is a prefill of one prompt."""

    def __init__(
        self,
        host: Host,
        name: str,
        *,
        bias: int = 0,
        legacy: bool = False,
        armed: bool = True,
        pinned_bytes: int = 0,
    ) -> None:
        self._host = host
        self.tokens = tokens_module()
        self.module = causal_module(self.tokens)
        self.model = self.module.CausalLM(bias, legacy=legacy)
        self.overlay = host.overlay(name, "CausalLM", pinned_bytes)
        self.hooks = CausalHooks(self.overlay)
        self.hooks.install(self.module, self.tokens)
        if armed:
            self.arm()

    def arm(self) -> None:
        self.step(self.batch(ask("", 0)))
        self.model.tokens_computed.clear()
        self.overlay.arm(FINGERPRINT, self.hooks.arm(self.model))

    def batch(self, *requests: Request) -> Any:
        return self.module.CausalLMBatch.from_pb(PbBatch(list(requests), len(requests)), None, None, None)

    def step(self, batch: Any) -> tuple[list[Generation], Any]:
        generations, left, _ = self.model.generate_token(batch)
        return generations, left

    def prefill(self, *requests: Request) -> list[Generation]:
        return self.step(self.batch(*requests))[0]

    @property
    def report(self) -> Report:
        return self._host.report(self.overlay)


def kv(batch: Any, row: int, tokens: int) -> list[list[float]]:
    """By [layer][k|v], the values of the first `tokens` positions of a row, padding left out."""
    past = batch.past_key_values
    prompt_and_answer = past[0][0].shape[2]
    start = prompt_and_answer - (batch.input_lengths[row] - 1)
    planes = [past[layer][plane][row] for layer in range(LAYERS) for plane in range(2)]
    assert all((plane == plane[:1, :, :1]).all() for plane in planes)
    return [plane[0, start : start + tokens, 0].tolist() for plane in planes]
