"""A pool of any order of dimensions, on any device, rearranged through a buffer in CPU memory.

The bytes are moved as they are, so every dtype works, fp8 included.  One thread; the buffer is kept
from call to call, because fresh pages cost more than the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tgi_patches.bridge import Planes
from tgi_patches.bridge.ring import align
from tgi_patches.heads import Share
from tgi_patches.kv.slots import Piece, pieces

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_PIECES_MAX = 32
"""More pieces than this are moved by an index: fewer kernels, each slower."""


class StagedPool:
    """`kv_cache` holds one (K, V) pair per layer; `heads_first` tells the order of their dimensions.

    False: `[blocks, block, heads, dim]`, TGI's flashinfer and flashdecoding.
    True: `[blocks, heads, block, dim]`, IPEX on the CPU.
    """

    def __init__(self, kv_cache: Sequence[tuple[Tensor, Tensor]], *, heads_first: bool) -> None:
        pools = [pool for pair in kv_cache for pool in pair]
        tokens_first = [pool.transpose(1, 2) if heads_first else pool for pool in pools]
        self._pools = [as_words(pool) for pool in tokens_first]
        self._block_size = self._pools[0].shape[1]
        self._buffer = Buffer(self._pools)
        self._part_buffers: dict[int, tuple[int, Buffer]] = {}
        """By a record's rank: heads in its rows, and where they arrive."""

    def outbox(self, slots: Sequence[int]) -> Planes:
        """What to export of the given slots; valid until the next use of this pool."""
        places = self._places(slots)
        planes = self._buffer.tensors(len(slots))
        for pool, plane in zip(self._pools, planes, strict=True):
            places.gather(pool, plane)
        return planes_of(planes)

    def inbox(self, slots: Sequence[int], first: int = 0, share: Share | None = None) -> StagedInbox:
        """For the given slots, of which those before position `first` are left alone.

        For a `share` of the heads, rows are the record's.  Valid until the next use of this pool for
        another request, but for `repair`.
        """
        pools, heads, buffer = self._pools, slice(None), self._buffer
        if share is not None and not share.whole:
            pools = [pool[:, :, share.ours : share.ours + share.count] for pool in pools]
            heads = slice(share.theirs, share.theirs + share.count)
            buffer = self._part_buffer(share)
        planes = buffer.tensors(len(slots))
        return StagedInbox(pools, planes, self._places(slots[first:]), self._places(slots[-1:]), first, heads)

    def _part_buffer(self, share: Share) -> Buffer:
        """Parts of one prompt arrive side by side: each rank's has memory of its own."""
        heads, buffer = self._part_buffers.get(share.rank, (0, self._buffer))
        if heads != share.heads:
            buffer = Buffer(self._pools, share.heads)
            self._part_buffers[share.rank] = share.heads, buffer
        return buffer

    def _places(self, slots: Sequence[int]) -> Places:
        return Places(slots, self._block_size, self._pools[0].device)


@dataclass(slots=True)
class StagedInbox:
    """An Inbox whose tokens go from the buffer into the pool on commit."""

    pools: list[Tensor]
    tensors: list[Tensor]
    places: Places
    last_place: Places
    first: int
    heads: slice
    """Of a record's row, those that the pools take."""
    last_kv: list[Tensor] | None = None

    @property
    def planes(self) -> Planes:
        return planes_of(self.tensors)

    def commit(self) -> None:
        self.last_kv = [plane[-1:, self.heads].clone() for plane in self.tensors]
        for pool, plane in zip(self.pools, self.tensors, strict=True):
            self.places.scatter(plane[self.first :, self.heads], pool)
        self.tensors = []

    def repair(self) -> None:
        for pool, exported in zip(self.pools, self.last_kv or (), strict=True):
            self.last_place.scatter(exported, pool)


class Buffer:
    """CPU memory for one record: a tensor `[tokens, heads, words]` per plane, by default with all heads."""

    def __init__(self, pools: Sequence[Tensor], heads: int | None = None) -> None:
        self._rows = [(heads or pool.shape[2], pool.shape[3]) for pool in pools]
        self._dtypes = [pool.dtype for pool in pools]
        self._row_bytes = [
            count * words * pool.element_size()
            for (count, words), pool in zip(self._rows, pools, strict=True)
        ]
        self._memory = torch.empty(0, dtype=torch.uint8)

    def tensors(self, tokens: int) -> list[Tensor]:
        """One per plane; they overwrite what the last call gave."""
        sizes = [row * tokens for row in self._row_bytes]
        ends = list(accumulate(align(size, _WORDS[0][0]) for size in sizes))
        if self._memory.numel() < ends[-1]:
            self._memory = torch.empty(ends[-1], dtype=torch.uint8)
        starts = [0, *ends]
        shaped = zip(starts, sizes, self._dtypes, self._rows, strict=False)
        return [
            self._memory[start : start + size].view(dtype).view(tokens, *row)
            for start, size, dtype, row in shaped
        ]


class Places:
    """Where slots stand in a pool `[blocks, block, heads, words]` of any strides."""

    def __init__(self, slots: Sequence[int], block_size: int, device: torch.device) -> None:
        cut = pieces(slots, block_size)
        self._pieces: list[Piece] = cut if len(cut) <= _PIECES_MAX else []
        self._index: tuple[Tensor, Tensor] | None = None
        if len(cut) > _PIECES_MAX:
            at = torch.tensor(slots, device=device)
            self._index = (at // block_size, at % block_size)

    def gather(self, pool: Tensor, plane: Tensor) -> None:
        """Copy the slots' rows into `plane`, `[tokens, heads, words]`."""
        if self._index is not None:
            plane.copy_(pool[self._index])
        for piece in self._pieces:
            self._part(plane, piece).copy_(self._box(pool, piece))

    def scatter(self, plane: Tensor, pool: Tensor) -> None:
        """Copy `plane` into the slots' rows."""
        if self._index is not None:
            pool[self._index] = plane.to(pool.device)
        for piece in self._pieces:
            self._box(pool, piece).copy_(self._part(plane, piece))

    @staticmethod
    def _box(pool: Tensor, piece: Piece) -> Tensor:
        return pool[piece.block : piece.block + piece.blocks, piece.offset : piece.offset + piece.length]

    @staticmethod
    def _part(plane: Tensor, piece: Piece) -> Tensor:
        tokens = plane[piece.token : piece.token + piece.blocks * piece.length]
        return tokens.view(piece.blocks, piece.length, *plane.shape[1:])


def as_words(pool: Tensor) -> Tensor:
    """`pool` seen as integers of the widest size that divides its rows: bytes move, values do not."""
    row_bytes = pool.shape[-1] * pool.element_size()
    for size, word in _WORDS:
        if size >= pool.element_size() and row_bytes % size == 0:
            return pool.view(word)
    return pool


def planes_of(tensors: Sequence[Tensor]) -> list[list[memoryview]]:
    """Contiguous CPU tensors as planes of one run."""
    return [[tensor.view(torch.uint8).reshape(-1).numpy().data] for tensor in tensors]
