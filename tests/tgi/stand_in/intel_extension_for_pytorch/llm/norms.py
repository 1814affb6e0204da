"""Norms of a sum, computed in float32."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["add_layer_norm", "add_rms_norm"]


def add_rms_norm(
    add: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    add_back: bool,
) -> torch.Tensor:
    """The RMS norm of `x + add` over the last dimension; `add_back` leaves the sum in `add`."""
    total = _sum(add, x, add_back).float()
    scaled = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    normed = scaled.to(x.dtype) * weight
    return normed if bias is None else normed + bias


def add_layer_norm(
    add: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    add_back: bool,
) -> torch.Tensor:
    """The layer norm of `x + add` over the last dimension; `add_back` leaves the sum in `add`."""
    total = _sum(add, x, add_back).float()
    normed = functional.layer_norm(
        total, total.shape[-1:], weight.float(), None if bias is None else bias.float(), eps
    )
    return normed.to(x.dtype)


def _sum(add: torch.Tensor | None, x: torch.Tensor, add_back: bool) -> torch.Tensor:
    if add is None:
        return x
    return add.add_(x) if add_back else add + x
