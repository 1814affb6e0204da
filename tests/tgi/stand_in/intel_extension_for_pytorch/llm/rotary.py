"""Rotary position embeddings."""

from __future__ import annotations

import torch

__all__ = ["rotary_embedding"]


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    rotary_dim: int,
    conjugate: bool,
) -> None:
    """Rotate the pairs of `query` and `key` [tokens, heads, dim] in place.

    `sin` and `cos` [tokens, 1, pairs] tell how many pairs are rotated.  With `conjugate` a pair is
    (i, i + pairs), else (2i, 2i + 1); what lies beyond the pairs is left alone.
    """
    for rows in (query, key):
        _rotate(rows[..., : 2 * cos.shape[-1]], sin.float(), cos.float(), halves=conjugate)


def _rotate(rows: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, *, halves: bool) -> None:
    first, second = rows.chunk(2, -1) if halves else (rows[..., ::2], rows[..., 1::2])
    real, imaginary = first.float(), second.float()
    turned = real * cos - imaginary * sin, real * sin + imaginary * cos
    first.copy_(turned[0])
    second.copy_(turned[1])
