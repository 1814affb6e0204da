"""TGI's FlashCausalLM, its batch and its chooser, with a model that adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.overlay_stand_ins.host import Host
from tests.unit.overlay_stand_ins.messages import (
    BLOCK,
    BLOCKS,
    DECODE_BIAS,
    DIM,
    FINGERPRINT,
    HEADS,
    LAYERS,
    RING_BYTES,
    ROUNDING,
    Generation,
    PbBatch,
    Request,
    ask,
    logits_of,
    put_tag,
    text_of,
    top_lists,
)
from tests.unit.overlay_stand_ins.tokens import tokens_module
from tgi_patches.device.path import DevicePath
from tgi_patches.hooks.flash import FlashHooks
from tgi_patches.report import Report


@dataclass
class FlashRow:
    """What TGI keeps of one request, in one place for filter and concatenate."""

    request: Request
    all_input_ids: list[int]
    prompt_length: int
    cache_length: int
    input_length: int
    prefilling: bool
    criteria: Any


class FlashBatchBase:
    """The attributes that the hooks read are lists by row."""

    chooser_class: Any = None

    def __init__(self, rows: list[FlashRow]) -> None:
        self.rows = rows
        self.next_token_chooser = self.chooser_class()
        self.requests = [row.request for row in rows]
        self.all_input_ids = [row.all_input_ids for row in rows]
        self.prompt_lengths = [row.prompt_length for row in rows]
        self.stopping_criterias = [row.criteria for row in rows]
        self.top_n_tokens = [row.request.top_n_tokens for row in rows]
        self.update()

    def update(self) -> None:
        self.cache_lengths = [row.cache_length for row in self.rows]
        self.input_lengths = [row.input_length for row in self.rows]
        self.prefilling_mask = [row.prefilling for row in self.rows]


def flash_module(tokens: Any) -> Any:
    """TGI's flash_causal_lm with fresh classes, which a test's hooks may wrap."""
    module = SimpleNamespace(batch_top_tokens=top_lists)

    class FlashCausalLMBatch(FlashBatchBase):
        chooser_class = tokens.HeterogeneousNextTokenChooser

        @classmethod
        def from_tokenized(
            cls, pb: PbBatch, tokenizer: Any, ids: Any, dtype: Any, device: Any
        ) -> FlashCausalLMBatch:
            rows = []
            for request, token_ids in zip(pb.requests, ids, strict=True):
                remaining = len(token_ids) - request.cache_len
                input_length = request.chunk_len if request.HasField("chunk_len") else remaining
                criteria = tokens.StoppingCriteria(request)
                rows.append(
                    FlashRow(
                        request,
                        list(token_ids),
                        len(token_ids),
                        request.cache_len,
                        input_length,
                        True,
                        criteria,
                    )
                )
            return cls(rows)

        def filter(self, request_ids: Sequence[int]) -> FlashCausalLMBatch:
            if len(request_ids) == len(self.rows):
                return self
            return type(self)([row for row in self.rows if row.request.id in request_ids])

        @classmethod
        def concatenate(cls, batches: Sequence[FlashCausalLMBatch]) -> FlashCausalLMBatch:
            return cls([row for batch in batches for row in batch.rows])

    class FlashCausalLM(FlashModelBase):
        def generate_token(self, batch: Any) -> Any:
            return self.step(batch, module)

    module.FlashCausalLMBatch = FlashCausalLMBatch
    module.FlashCausalLM = FlashCausalLM
    return module


class FlashModelBase:
    """Its forward: KV into the slots, logits from the cache."""

    def __init__(self, bias: int, *, heads_first: bool) -> None:
        self.bias = bias
        self.fails = False
        self.heads_first = heads_first
        self.num_kv_heads = HEADS
        self.chunk = 1000
        self.tokens_computed = 0
        self.new_cache()

    def new_cache(self) -> None:
        """As TGI's warmup does."""
        shape = (BLOCKS, HEADS, BLOCK, DIM) if self.heads_first else (BLOCKS, BLOCK, HEADS, DIM)
        self.kv_cache = [
            SimpleNamespace(kv_cache=(torch.full(shape, -9.0), torch.full(shape, -9.0)))
            for _ in range(LAYERS)
        ]

    def at(self, layer: int, plane: int, slot: int) -> Tensor:
        """`[heads, dim]` of one slot."""
        pool = self.kv_cache[layer].kv_cache[plane]
        block, offset = divmod(slot, BLOCK)
        view: Tensor = pool[block, :, offset] if self.heads_first else pool[block, offset]
        return view

    def step(self, batch: Any, module: Any) -> Any:
        if self.fails:
            raise RuntimeError("the device has no memory left")
        logits = torch.stack([self._forward(row) for row in batch.rows])
        for row in batch.rows:
            row.prefilling = row.cache_length + row.input_length < row.prompt_length
        batch.update()
        ids, logprobs, all_logprobs, accepted, _ = batch.next_token_chooser(None, logits, 0)
        top_ids, top_logprobs = module.batch_top_tokens(batch.top_n_tokens, None, all_logprobs, accepted)
        generations = []
        running = 0
        for i, row in enumerate(batch.rows):
            row.cache_length += row.input_length
            if row.prefilling:
                row.input_length = min(self.chunk, row.prompt_length - row.cache_length)
                running += 1
                continue
            row.input_length = 1
            row.all_input_ids.append(int(ids[i]))
            ended, why = batch.stopping_criterias[i](int(ids[i]), text_of([int(ids[i])]))
            running += not ended
            top = tuple(zip(top_ids[i][0], top_logprobs[i][0], strict=True))
            generations.append(Generation(row.request.id, int(ids[i]), float(logprobs[i]), top, why))
        batch.update()
        return generations, batch if running else None, (1, 2)

    def _forward(self, row: FlashRow) -> Tensor:
        rounding = ROUNDING if row.input_length == 1 else 0.0
        end = row.cache_length + row.input_length
        for position in range(row.cache_length, end):
            self.tokens_computed += 1
            token_id = row.all_input_ids[position]
            for layer in range(LAYERS):
                for plane in range(2):
                    value = token_id + layer * (100 * (plane + 1) + rounding)
                    self.at(layer, plane, row.request.slots[position]).fill_(value)
        total = sum(float(self.at(0, 0, slot)[0, 0]) for slot in row.request.slots[:end])
        return logits_of(total, self.bias)


class FlashShard:
    """One TGI process with the overlay."""

    def __init__(
        self,
        host: Host,
        name: str,
        *,
        bias: int = 0,
        armed: bool = True,
        heads_first: bool = False,
        request_logprobs: bool = False,
        path: DevicePath | None = None,
        pinned_bytes: int = 0,
    ) -> None:
        self._host = host
        self.path = path
        self.tokens = tokens_module()
        self.module = flash_module(self.tokens)
        self.model = self.module.FlashCausalLM(bias, heads_first=heads_first)
        self.overlay = host.overlay(name, "FlashCausalLM", pinned_bytes)
        self.hooks = FlashHooks(
            self.overlay, heads_first=heads_first, request_logprobs=request_logprobs, path=path
        )
        self.hooks.install(self.module, self.tokens)
        if armed:
            self.arm()

    def arm(self) -> None:
        self.overlay.arm(FINGERPRINT, self.hooks.arm(self.model))
        if self.path is not None:
            self.path.armed(None, RING_BYTES)

    def batch(self, *requests: Request) -> Any:
        pb = PbBatch(list(requests), len(requests))
        ids = [request.token_ids for request in requests]
        return self.module.FlashCausalLMBatch.from_tokenized(pb, None, ids, None, None)

    def step(self, batch: Any) -> tuple[list[Generation], Any]:
        generations, left, timings = self.model.generate_token(batch)
        assert timings == (1, 2)
        return generations, left

    def prefill(self, *requests: Request) -> list[Generation]:
        return self.step(self.batch(*requests))[0]

    @property
    def report(self) -> Report:
        return self._host.report(self.overlay)

    def kv(self, slots: Sequence[int]) -> list[list[float]]:
        """By [layer][k|v], the value of every slot; heads and dims must hold one."""
        found = []
        for layer in range(LAYERS):
            for plane in range(2):
                tensors = [self.model.at(layer, plane, slot) for slot in slots]
                assert all((tensor == tensor[0, 0]).all() for tensor in tensors)
                found.append([float(tensor[0, 0]) for tensor in tensors])
        return found


@pytest.fixture
def prefill(host: Host) -> FlashShard:
    return FlashShard(host, "p")


@pytest.fixture
def decode(host: Host) -> FlashShard:
    return FlashShard(host, "d", bias=DECODE_BIAS)


def exported(prefill: FlashShard) -> None:
    """The record of PROMPT under handle 1."""
    prefill.prefill(ask(put_tag(1), max_new_tokens=1))
    assert prefill.report.exports == {"ok": 1}
