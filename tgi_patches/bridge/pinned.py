"""Where a pinned record goes: first fit in a small region of its own, until its place is given back.

Neighbouring free pieces are merged at once.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from tgi_patches.bridge.ring import ALIGNMENT, align

PINNED_SLOTS = 64
"""Records that can be pinned at a time; they have index slots of their own."""


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Bytes from `start` up to `end` of the region."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class PinnedRegion:
    """Both the arena and the fake in memory place with it; `slots` records at most."""

    region_bytes: int
    slots: int = PINNED_SLOTS
    held: dict[int, Piece] = field(default_factory=dict)
    """By slot, 0 and up."""
    free: list[Piece] = field(init=False)
    """In order; no two touch."""

    def __post_init__(self) -> None:
        self.free = [Piece(0, self.region_bytes)] if self.region_bytes else []

    @property
    def free_bytes(self) -> int:
        return sum(piece.size for piece in self.free)

    def take(self, record_bytes: int) -> tuple[int, int] | None:
        """(slot, offset) of a place for `record_bytes`; None while there is none."""
        size = align(record_bytes, ALIGNMENT)
        slot = next((slot for slot in range(self.slots) if slot not in self.held), None)
        found = next((i for i, piece in enumerate(self.free) if piece.size >= size), None)
        if slot is None or found is None:
            return None
        start, end = self.free[found].start, self.free[found].end
        self.free[found : found + 1] = [Piece(start + size, end)] if start + size < end else []
        self.held[slot] = Piece(start, start + size)
        return slot, start

    def give_back(self, slot: int) -> None:
        """Free the place of `slot`, which must be held."""
        insort(self.free, self.held.pop(slot))
        merged = self.free[:1]
        for piece in self.free[1:]:
            if piece.start == merged[-1].end:
                merged[-1] = Piece(merged[-1].start, piece.end)
            else:
                merged.append(piece)
        self.free = merged
