"""Slots of a paged pool as stretches.  Pure; a slot is block * block size + offset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """(first slot, length) of every stretch of consecutive slots, in the given order."""
    if not slots:
        return []
    first, count = slots[0], len(slots)
    if slots[-1] == first + count - 1 and list(slots) == list(range(first, first + count)):
        return [(first, count)]
    merged: list[tuple[int, int]] = []
    start = following = first
    for slot in slots:
        if slot != following:
            merged.append((start, following - start))
            start = slot
        following = slot + 1
    merged.append((start, following - start))
    return merged


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a pool: `blocks` whole blocks, or a part of one; and the tokens that it holds."""

    token: int
    """The first token's position among the slots."""
    block: int
    blocks: int
    offset: int
    length: int
    """Tokens taken from each block."""


def pieces(slots: Sequence[int], block_size: int) -> list[Piece]:
    """The slots as boxes, in order: whole blocks in a row are one piece, a part of a block is one."""
    cut: list[Piece] = []
    token = 0
    for start, length in runs(slots):
        cut.extend(_boxes(token, start, length, block_size))
        token += length
    return cut


def _boxes(token: int, start: int, length: int, block_size: int) -> Iterator[Piece]:
    while length:
        block, offset = divmod(start, block_size)
        if offset == 0 and length >= block_size:
            blocks, taken = length // block_size, block_size
        else:
            blocks, taken = 1, min(length, block_size - offset)
        yield Piece(token, block, blocks, offset, taken)
        token += blocks * taken
        start += blocks * taken
        length -= blocks * taken
