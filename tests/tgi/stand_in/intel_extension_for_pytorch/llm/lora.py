"""LoRA for packed rows: down to the rank (shrink) and up again (expand), an adapter per row.

Adapters are stacked: A [adapters, rank, inputs] and B [adapters, outputs, rank].  -1 is no adapter.
`sgmv` names adapters per segment of rows, `bgmv` per row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["bgmv_expand", "bgmv_shrink", "sgmv_expand", "sgmv_shrink"]


def sgmv_shrink(
    inputs: torch.Tensor,
    lora_a: torch.Tensor,
    output: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    adapters: torch.Tensor,
    batches: int,
    max_length: int,
    scaling: float,
) -> None:
    """Set the rows of `output` [rows, rank] that have an adapter to `scaling * inputs @ A.T`."""
    for rows, adapter in _segments(starts, lengths, adapters):
        output[rows] = scaling * (inputs[rows] @ lora_a[adapter].T)


def sgmv_expand(
    inputs: torch.Tensor,
    lora_b: torch.Tensor,
    output: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    adapters: torch.Tensor,
    batches: int,
    max_length: int,
    add_inputs: bool = False,
) -> None:
    """Set the rows of `output` [rows, outputs] to `inputs @ B.T`, or add that to them."""
    for rows, adapter in _segments(starts, lengths, adapters):
        _put(output, rows, inputs[rows] @ lora_b[adapter].T, add_inputs)


def bgmv_shrink(
    inputs: torch.Tensor,
    lora_a: torch.Tensor,
    output: torch.Tensor,
    adapters: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """As `sgmv_shrink`, with an adapter per row."""
    rows = (adapters >= 0).nonzero()[:, 0]
    output[rows] = scaling * _each(lora_a[adapters[rows]], inputs[rows])


def bgmv_expand(
    inputs: torch.Tensor,
    lora_b: torch.Tensor,
    output: torch.Tensor,
    adapters: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """As `sgmv_expand`, with an adapter per row."""
    rows = (adapters >= 0).nonzero()[:, 0]
    _put(output, rows, _each(lora_b[adapters[rows]], inputs[rows]), add_inputs)


def _segments(
    starts: torch.Tensor, lengths: torch.Tensor, adapters: torch.Tensor
) -> Iterator[tuple[slice, int]]:
    """The rows of every segment that has an adapter, and that adapter."""
    for start, length, adapter in zip(starts.tolist(), lengths.tolist(), adapters.tolist(), strict=True):
        if adapter >= 0:
            yield slice(start, start + length), adapter


def _each(matrices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Every row by its own matrix, so that no row's result depends on the others."""
    return torch.bmm(matrices, rows[:, :, None])[:, :, 0]


def _put(output: torch.Tensor, rows: slice | torch.Tensor, result: torch.Tensor, add: bool) -> None:
    output[rows] = output[rows] + result if add else result
