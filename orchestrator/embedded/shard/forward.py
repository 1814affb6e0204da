"""One forward over the new tokens of many running sequences, packed into one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tgi_patches.contract import Tag
from tgi_patches.relay import Imported

from .attention import KVPool, Span, Step, consecutive_start
from .choose import Chooser
from .loading import Loaded
from .seam import Request
from .text import Detokenizer, StopRule

_LOGPROB_CHUNK = 256


@dataclass(slots=True)
class Row:
    """One running sequence."""

    request: Request
    tag: Tag | None
    chooser: Chooser
    text: Detokenizer
    stop: StopRule
    slots: Tensor
    first_slot: int
    """Start of `slots` if consecutive, else -1."""
    kv_tokens: int
    """Positions whose KV is in the pool."""
    imported: Imported | None = None
    import_result: str = ""
    prompt_logprobs: list[float] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.input_ids)

    @property
    def prefilled(self) -> bool:
        """The prompt's KV is complete; what is left is one token a step."""
        return self.kv_tokens >= self.prompt_tokens

    @property
    def scored(self) -> bool:
        """The next chunk holds prompt tokens whose log probabilities are wanted."""
        return self.request.prefill_logprobs and self.kv_tokens < self.prompt_tokens - 1

    @property
    def chunk_limit(self) -> int:
        """Prompt tokens of one step at most: logits of a whole long prompt would not fit in memory."""
        return _LOGPROB_CHUNK if self.request.prefill_logprobs else self.prompt_tokens


def forward(
    loaded: Loaded, pool: KVPool, rows: list[Row], chunks: list[int], wanted: Callable[[], bool]
) -> Tensor:
    """Run the next `chunks[i]` tokens of row i; float32 logits [rows, vocab] of each row's last one.

    Advances `kv_tokens`, and `prompt_logprobs` of the rows that want them.  Raises Abandoned as soon
    as `wanted` says no.
    """
    packed = _pack(pool, rows, chunks, wanted)
    output = loaded.model(
        input_ids=torch.tensor([packed.ids]),
        position_ids=torch.tensor([packed.positions]),
        use_cache=False,
        logits_to_keep=torch.tensor(packed.wanted),
        paged_step=packed.step,
    )
    if packed.step.layers_seen != loaded.layers:
        raise RuntimeError("this model does not route every layer through the attention registry")
    logits: Tensor = output.logits[0].float()
    lasts = []
    begin = 0
    for row, chunk, kept in zip(rows, chunks, packed.kept, strict=True):
        if row.scored:
            _score(row, chunk, logits[begin : begin + kept])
        row.kv_tokens += chunk
        begin += kept
        lasts.append(begin - 1)
    return logits[lasts]


@dataclass(slots=True)
class _Packed:
    """`wanted` are the packed rows whose logits are needed, `kept[i]` how many of them are row i's."""

    ids: list[int]
    positions: list[int]
    wanted: list[int]
    kept: list[int]
    step: Step


def _pack(pool: KVPool, rows: list[Row], chunks: list[int], step_wanted: Callable[[], bool]) -> _Packed:
    ids: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    kept: list[int] = []
    write_slots: list[int] = []
    spans: list[Span] = []
    for row, chunk in zip(rows, chunks, strict=True):
        begin, end = row.kv_tokens, row.kv_tokens + chunk
        spans.append(Span(chunk, end, row.slots[:end], row.first_slot))
        ids.extend(row.text.ids[begin:end])
        positions.extend(range(begin, end))
        write_slots.extend(row.request.slots[begin:end])
        kept.append(chunk if row.scored else 1)
        wanted.extend(range(len(ids) - kept[-1], len(ids)))
    step = Step(pool, spans, torch.tensor(write_slots), consecutive_start(write_slots), step_wanted)
    return _Packed(ids, positions, wanted, kept, step)


def _score(row: Row, chunk: int, logits: Tensor) -> None:
    """The logits at position p tell how likely prompt token p + 1 was."""
    following = row.request.input_ids[row.kv_tokens + 1 : row.kv_tokens + chunk + 1]
    logprobs = logits[: len(following)].log_softmax(-1)
    row.prompt_logprobs += logprobs.gather(1, torch.tensor(following)[:, None])[:, 0].tolist()
