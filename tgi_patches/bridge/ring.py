"""Where the next record goes: a pure ring over virtual offsets that only grow.

A record lies at `position % ring_bytes` and never wraps around the end.  Everything below `tail`
has been, or is about to be, overwritten.  Records leave in the order they came.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

ALIGNMENT = 64
"""Bytes; one cache line."""


def align(value: int, to: int) -> int:
    """`value` rounded up to a multiple of `to`."""
    return -(-value // to) * to


@dataclass(frozen=True, slots=True)
class Extent:
    """One record's place: its index slot and virtual offset."""

    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class Placement:
    """What must happen, in this order: publish `tail`, clear `evicted`, write `extent`."""

    extent: Extent
    tail: int
    evicted: tuple[Extent, ...]


@dataclass(slots=True)
class Ring:
    """Holds at most `index_slots` records; both the arena and the fake in memory place with it."""

    ring_bytes: int
    index_slots: int
    head: int = 0
    """Virtual offset after the newest record."""
    count: int = 0
    """Of all records ever placed: they take the index slots in turn, the first one slot 1."""
    live: deque[Extent] = field(default_factory=deque)

    def place(self, record_bytes: int) -> Placement:
        """Make room for a record of `record_bytes` (at most the ring) and say where it goes."""
        size = align(record_bytes, ALIGNMENT)
        assert 0 < size <= self.ring_bytes, "callers limit records to a part of the ring"
        position = self.head
        if position % self.ring_bytes + size > self.ring_bytes:
            position = align(position, self.ring_bytes)
        lowest = position + size - self.ring_bytes
        evicted = []
        while self.live and (self.live[0].position < lowest or len(self.live) >= self.index_slots):
            evicted.append(self.live.popleft())
        self.count += 1
        self.head = position + size
        extent = Extent(self.count % self.index_slots, position)
        self.live.append(extent)
        return Placement(extent, self.live[0].position, tuple(evicted))
