"""The cache of TGI's CausalLM: per layer K and V `[batch, heads, length, dim]`, padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgi_patches.bridge import Planes
from tgi_patches.kv.staged import planes_of

Layers = Sequence[tuple[Tensor, Tensor]]


def outbox(layers: Layers, row: int, tokens: int) -> Planes:
    """The last `tokens` positions of one row, as `[tokens, heads, dim]` a plane."""
    planes = [
        tensor[row, :, -tokens:].transpose(0, 1).contiguous().cpu() for pair in layers for tensor in pair
    ]
    return planes_of(planes)


@dataclass(frozen=True, slots=True)
class RowShape:
    """Of one token in one plane."""

    planes: int
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.planes * self.heads * self.dim * self.dtype.itemsize


class PaddedInbox:
    """An Inbox for one prompt; `joined` makes the cache of a batch out of several."""

    def __init__(self, shape: RowShape, tokens: int) -> None:
        self._tensors = [
            torch.empty((tokens, shape.heads, shape.dim), dtype=shape.dtype) for _ in range(shape.planes)
        ]
        self.tokens = tokens
        self.planes: Planes = planes_of(self._tensors)
        self._target: tuple[Layers, int] | None = None

    def commit(self) -> None:
        """Nothing to do: `joined` copies."""

    def before_last(self, plane: int) -> Tensor:
        """`[heads, tokens - 1, dim]`."""
        return self._tensors[plane][:-1].transpose(0, 1)

    def aim(self, layers: Layers, row: int) -> None:
        """Say where `repair` finds the row, whose newest position is this prompt's last token."""
        self._target = (layers, row)

    def repair(self) -> None:
        if self._target is None:
            return
        layers, row = self._target
        cache = [tensor for pair in layers for tensor in pair]
        for tensor, exported in zip(cache, self._tensors, strict=True):
            tensor[row, :, -1] = exported[-1]
        self._target = None


def joined(inboxes: Sequence[PaddedInbox], device: torch.device) -> list[list[Tensor]]:
    """The cache of a batch of these prompts without their last tokens, as TGI keeps it: `[k, v]` a layer."""
    length = max(inbox.tokens for inbox in inboxes) - 1
    planes = []
    for plane in range(len(inboxes[0].planes)):
        first = inboxes[0].before_last(plane)
        cache = torch.zeros((len(inboxes), first.shape[0], length, first.shape[2]), dtype=first.dtype)
        for row, inbox in enumerate(inboxes):
            if inbox.tokens > 1:
                cache[row, :, -(inbox.tokens - 1) :] = inbox.before_last(plane)
        planes.append(cache.to(device))
    return [list(pair) for pair in zip(planes[::2], planes[1::2], strict=True)]
