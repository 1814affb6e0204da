"""Both sides cut a record alike, at the edges of its own blocks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tgi_patches.pull.chunks import Chunk, chunks, pieces

KIB = 1024
plane_sizes = st.lists(st.integers(1, 2**21), min_size=1, max_size=12)


def test_blocks_start_anew_with_every_plane() -> None:
    """Planes of 300 and 100 KiB: blocks end at 256, 300 and 400 KiB."""
    assert chunks([300 * KIB, 100 * KIB], 1024 * KIB) == [Chunk(0, (256 * KIB, 300 * KIB, 400 * KIB), 0)]
    assert chunks([300 * KIB, 100 * KIB], 300 * KIB) == [
        Chunk(0, (256 * KIB, 300 * KIB), 0),
        Chunk(300 * KIB, (400 * KIB,), 2),
    ]


@given(sizes=plane_sizes, chunk_bytes=st.integers(256 * KIB, 4096 * KIB))
def test_chunks_are_the_whole_record_in_order(sizes: list[int], chunk_bytes: int) -> None:
    plan = chunks(sizes, chunk_bytes)
    assert (plan[0].start, plan[-1].end) == (0, sum(sizes))
    assert all(before.end == after.start for before, after in pairwise(plan))
    assert all(before.first_block + before.blocks == after.first_block for before, after in pairwise(plan))
    assert all(chunk.end - chunk.start <= chunk_bytes for chunk in plan)
    assert sum(chunk.blocks for chunk in plan) == sum(-(-size // (256 * KIB)) for size in sizes)


@given(sizes=plane_sizes, chunk_bytes=st.integers(256 * KIB, 4096 * KIB))
def test_a_chunk_is_received_in_pieces_of_a_block_at_most(sizes: list[int], chunk_bytes: int) -> None:
    for chunk in chunks(sizes, chunk_bytes):
        found = list(pieces(chunk))
        assert (found[0][0], found[-1][1]) == (chunk.start, chunk.end)
        assert all(before[1] == after[0] for before, after in pairwise(found))
        assert [end for _, _, ends in found for end in ends] == list(chunk.ends)
        assert all(0 < end - start <= 256 * KIB and ends[-1] == end for start, end, ends in found)


def test_a_frame_never_holds_more_than_4096_checksums() -> None:
    plan = chunks([1] * 5000, 2**20)
    assert [chunk.blocks for chunk in plan] == [4096, 904]
