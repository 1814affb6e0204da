"""Who owns which KV block.  Pure bookkeeping; prefers one run, which attention reads without a copy."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator


class BlockAllocator:
    """Fixed-size blocks 0..count-1; a block belongs to exactly one owner or is free."""

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        self._free = list(range(count))

    @property
    def free_tokens(self) -> int:
        return len(self._free) * self.block_size

    @property
    def used_tokens(self) -> int:
        return (self.count - len(self._free)) * self.block_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, tokens: int) -> tuple[int, ...] | None:
        """Blocks for `tokens`: the first run that is long enough, else scattered; None if too few."""
        need = self.blocks_for(tokens)
        if need > len(self._free):
            return None
        start = next((i for i, length in self._runs() if length >= need), 0)
        taken = self._free[start : start + need]
        del self._free[start : start + need]
        return tuple(taken)

    def free(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            insort(self._free, block)

    def slots(self, blocks: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """Slot of each of the first `tokens` logical positions."""
        size = self.block_size
        return tuple(blocks[p // size] * size + p % size for p in range(tokens))

    def _runs(self) -> Iterator[tuple[int, int]]:
        """(index into the free list, length) of each run of consecutive free blocks."""
        start = 0
        for i in range(1, len(self._free) + 1):
            if i == len(self._free) or self._free[i] != self._free[i - 1] + 1:
                yield start, i - start
                start = i
