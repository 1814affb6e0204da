"""Who owns which KV block.  Pure bookkeeping; prefers one run, which attention reads without a copy.

A block is free, owned by one request or more, or (with prefix caching) kept: nobody's, but still
holding the KV of a known prefix until its place is needed.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Allocation:
    blocks: tuple[int, ...]
    cached_tokens: int = 0
    """Leading tokens whose KV the first blocks hold already."""


class Allocator(Protocol):
    """What the loop needs of a KV pool's bookkeeping."""

    @property
    def used_tokens(self) -> int: ...

    def allocate(self, tokens: int, prompt: Sequence[int] = ()) -> Allocation | None:
        """Blocks for `tokens` positions that begin with `prompt`; None if too few are free."""
        ...

    def computed(self, blocks: tuple[int, ...], prompt: Sequence[int]) -> None:
        """The KV of `prompt` now stands in `blocks`."""
        ...

    def free(self, blocks: tuple[int, ...]) -> None: ...

    def slots(self, blocks: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """Slot of each of the first `tokens` logical positions."""
        ...


class BlockAllocator:
    """Fixed-size blocks 0..count-1; each belongs to one request or is free.

    The first `reserved` of them are never given out: the model writes there itself.
    """

    def __init__(self, count: int, block_size: int, *, reserved: int = 0) -> None:
        self.count = count - reserved
        self.block_size = block_size
        self._free = list(range(reserved, count))

    @property
    def free_tokens(self) -> int:
        return len(self._free) * self.block_size

    @property
    def used_tokens(self) -> int:
        return (self.count - len(self._free)) * self.block_size

    def allocate(self, tokens: int, prompt: Sequence[int] = ()) -> Allocation | None:  # noqa: ARG002
        need = -(-tokens // self.block_size)
        return None if need > len(self._free) else Allocation(self._take(need))

    def computed(self, blocks: tuple[int, ...], prompt: Sequence[int]) -> None:
        """Nothing to remember without prefix caching."""

    def free(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            insort(self._free, block)

    def slots(self, blocks: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        size = self.block_size
        return tuple(blocks[p // size] * size + p % size for p in range(tokens))

    def _take(self, need: int) -> tuple[int, ...]:
        """The first run that is long enough, else the lowest free blocks."""
        start = next((i for i, length in self._runs() if length >= need), 0)
        taken = tuple(self._free[start : start + need])
        del self._free[start : start + need]
        return taken

    def _runs(self) -> Iterator[tuple[int, int]]:
        """(index into the free list, length) of each run of consecutive free blocks."""
        start = 0
        for i in range(1, len(self._free) + 1):
            if i == len(self._free) or self._free[i] != self._free[i - 1] + 1:
                yield start, i - start
                start = i


class PrefixAllocator(BlockAllocator):
    """Blocks of equal prompt prefixes are shared; the least recently used are given up first.

    A prefix is known only once its KV was computed, so a failed prefill poisons nothing.
    """

    def __init__(self, count: int, block_size: int, *, reserved: int = 0) -> None:
        super().__init__(count, block_size, reserved=reserved)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._owners: Counter[int] = Counter()
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def free_tokens(self) -> int:
        return super().free_tokens + len(self._kept) * self.block_size

    @property
    def used_tokens(self) -> int:
        return super().used_tokens - len(self._kept) * self.block_size

    def allocate(self, tokens: int, prompt: Sequence[int] = ()) -> Allocation | None:
        shared = self._known_prefix(prompt)
        need = -(-tokens // self.block_size) - len(shared)
        available = len(self._free) + sum(block not in shared for block in self._kept)
        if need > available:
            return None
        for block in shared:
            self._kept.pop(block, None)
        while len(self._free) < need:
            self._forget(next(iter(self._kept)))
        blocks = (*shared, *self._take(need))
        self._owners.update(blocks)
        return Allocation(blocks, len(shared) * self.block_size)

    def computed(self, blocks: tuple[int, ...], prompt: Sequence[int]) -> None:
        for block, chain in zip(blocks, self._chain(prompt), strict=False):
            if chain not in self._block_of and block not in self._hash_of:
                self._block_of[chain] = block
                self._hash_of[block] = chain

    def free(self, blocks: tuple[int, ...]) -> None:
        for block in reversed(blocks):  # the end of a prefix is given up before its beginning
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            del self._owners[block]
            if block in self._hash_of:
                self._kept[block] = None
            else:
                insort(self._free, block)

    def _known_prefix(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Blocks of the longest known prefix; at least one token is always left to compute."""
        known: list[int] = []
        usable = max(0, len(prompt) - 1) // self.block_size
        for chain in self._chain(prompt[: usable * self.block_size]):
            block = self._block_of.get(chain)
            if block is None:
                break
            known.append(block)
        return tuple(known)

    def _chain(self, prompt: Sequence[int]) -> Iterator[bytes]:
        """One digest per full block, over all tokens up to its end; too long to collide."""
        chain = b""
        for start in range(0, len(prompt) - self.block_size + 1, self.block_size):
            block = array("I", prompt[start : start + self.block_size]).tobytes()
            chain = blake2b(chain + block, digest_size=16).digest()
            yield chain

    def _forget(self, block: int) -> None:
        del self._kept[block]
        del self._block_of[self._hash_of.pop(block)]
        insort(self._free, block)


class RowAllocator:
    """For a model that pads: no blocks, but a budget of tokens for all rows at the longest one's length.

    TGI's router counts so too (backends/v3/src/queue.rs, where there is no block allocator).
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._rows: dict[int, int] = {}
        self._ids = count()

    @property
    def used_tokens(self) -> int:
        return len(self._rows) * max(self._rows.values(), default=0)

    def allocate(self, tokens: int, prompt: Sequence[int] = ()) -> Allocation | None:  # noqa: ARG002
        """A row, named in place of a block."""
        longest = max(self._rows.values(), default=0)
        if (len(self._rows) + 1) * max(longest, tokens) > self._tokens:
            return None
        row = next(self._ids)
        self._rows[row] = tokens
        return Allocation((row,))

    def computed(self, blocks: tuple[int, ...], prompt: Sequence[int]) -> None:
        """No prefix is shared."""

    def free(self, blocks: tuple[int, ...]) -> None:
        for row in blocks:
            del self._rows[row]

    def slots(self, blocks: tuple[int, ...], tokens: int) -> tuple[int, ...]:  # noqa: ARG002
        return ()
