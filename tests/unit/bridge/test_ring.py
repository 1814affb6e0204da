"""The pure ring against a list of byte ranges."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tgi_patches.bridge.ring import Ring


@given(
    ring_lines=st.integers(32, 40),
    slots=st.integers(1, 20),
    sizes=st.lists(st.integers(1, 1024), min_size=1, max_size=60),
)
def test_a_ring_never_gives_away_live_bytes(ring_lines: int, slots: int, sizes: list[int]) -> None:
    """Against a list of byte ranges, in virtual offsets and in the ring."""
    ring_bytes = ring_lines * 64
    ring = Ring(ring_bytes, slots)
    live: dict[int, tuple[int, int]] = {}
    for number, size in enumerate(sizes, start=1):
        placement = ring.place(size)
        start = placement.extent.position
        assert placement.extent.slot == number % slots
        assert start % 64 == 0
        assert start % ring_bytes + size <= ring_bytes
        for old in placement.evicted:
            assert live.pop(old.slot)[0] < placement.tail
        assert placement.extent.slot not in live
        live[placement.extent.slot] = (start, start + size)
        assert min(span[0] for span in live.values()) == placement.tail
        assert len(live) <= slots
        places = sorted((a % ring_bytes, a % ring_bytes + b - a) for a, b in live.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
