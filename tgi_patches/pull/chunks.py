"""How a record's data is cut for the wire.  Pure; both sides cut alike.

A chunk is a stretch of whole blocks: the record's own, which start anew with every plane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tgi_patches.bridge.blocks import BLOCK_BYTES

_BLOCKS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes from `start` up to `end` of the data, in blocks that end at `ends`."""

    start: int
    ends: tuple[int, ...]
    first_block: int
    """Its first block's number in the record."""

    @property
    def end(self) -> int:
        return self.ends[-1]

    @property
    def blocks(self) -> int:
        return len(self.ends)


def chunks(plane_bytes: Sequence[int], chunk_bytes: int) -> list[Chunk]:
    """The data of planes of these sizes, in chunks of at most `chunk_bytes` (at least a block)."""
    found: list[Chunk] = []
    start, first, ends = 0, 0, list[int]()
    for number, end in enumerate(_block_ends(plane_bytes)):
        if ends and (end - start > chunk_bytes or len(ends) == _BLOCKS_MAX):
            found.append(Chunk(start, tuple(ends), first))
            start, first, ends = ends[-1], number, []
        ends.append(end)
    return [*found, Chunk(start, tuple(ends), first)]


def pieces(chunk: Chunk) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(start, end, block ends) of stretches of about a block: hashed while the cache holds them."""
    start, ends = chunk.start, list[int]()
    for end in chunk.ends:
        if ends and end - start > BLOCK_BYTES:
            yield start, ends[-1], tuple(ends)
            start, ends = ends[-1], []
        ends.append(end)
    yield start, ends[-1], tuple(ends)


def _block_ends(plane_bytes: Sequence[int]) -> Iterator[int]:
    start = 0
    for size in plane_bytes:
        for offset in range(BLOCK_BYTES, size, BLOCK_BYTES):
            yield start + offset
        start += size
        yield start
