"""Attention of packed sequences, each for itself, in float32.

A sequence's result must not depend on what else is in the batch: the tests compare batches.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

__all__ = ["attend", "bounds", "varlen_attention"]


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    seqlen_q: torch.Tensor,
    seqlen_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    pdropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    return_softmax: bool,
    gen_: Any,
) -> None:
    """Packed rows [tokens, heads, dim] and where each sequence begins; the result goes to `out`."""
    for rows, columns in zip(bounds(seqlen_q), bounds(seqlen_k), strict=True):
        keys, values = (packed[columns].transpose(0, 1) for packed in (key, value))
        out[rows] = attend(query[rows], keys, values, softmax_scale, causal=is_causal)


def bounds(starts: torch.Tensor) -> list[slice]:
    """Of starts [0, 3, 7]: rows 0 to 3 and rows 3 to 7."""
    at = starts.tolist()
    return [slice(begin, end) for begin, end in pairwise(at)]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    causal: bool,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = -1.0,
) -> torch.Tensor:
    """One sequence: `query` [rows, heads, dim], keys and values [kv heads, columns, dim].

    The last row stands at the last column.  A window counts columns before and after a row's own,
    -1 is no limit; a `softcap` above 0 bends the scores into ±softcap.
    """
    rows, columns, content = query.float().transpose(0, 1), keys.float(), values.float()
    seen = _seen(rows.shape[1], columns.shape[1], window_left, 0 if causal else window_right)
    if softcap > 0:
        mixed = _softcapped(rows * scale, columns, content, seen, softcap)
    else:
        mixed = functional.scaled_dot_product_attention(
            rows[None], columns[None], content[None], attn_mask=seen, scale=scale, enable_gqa=True
        )[0]
    return mixed.transpose(0, 1).to(query.dtype)


def _softcapped(
    rows: torch.Tensor, columns: torch.Tensor, content: torch.Tensor, seen: torch.Tensor, softcap: float
) -> torch.Tensor:
    """torch has no such attention."""
    group = rows.shape[0] // columns.shape[0]
    columns, content = (one.repeat_interleave(group, 0) for one in (columns, content))
    scores = softcap * torch.tanh(rows @ columns.transpose(1, 2) / softcap)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ content


def _seen(rows: int, columns: int, left: int, right: int) -> torch.Tensor:
    """[rows, columns]: which columns a row attends to."""
    ahead = torch.arange(columns)[None] - (torch.arange(rows) + columns - rows)[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    return seen
