"""Block allocator: conservation, no overlap, runs first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.embedded.shard.blocks import BlockAllocator

OPERATIONS = st.lists(st.one_of(st.integers(1, 70), st.just("free")), max_size=60)


@given(OPERATIONS, st.randoms(use_true_random=False))
def test_blocks_are_conserved_and_never_shared(operations: list[int | str], random: object) -> None:
    allocator = BlockAllocator(count=12, block_size=8)
    held: list[tuple[int, ...]] = []
    for operation in operations:
        if operation == "free":
            if held:
                allocator.free(held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
        else:
            assert isinstance(operation, int)
            blocks = allocator.allocate(operation)
            owned = sum(map(len, held))
            if blocks is None:
                assert -(-operation // 8) > 12 - owned
            else:
                assert len(blocks) == -(-operation // 8)
                held.append(blocks)
        flat = [block for blocks in held for block in blocks]
        assert len(flat) == len(set(flat))
        assert all(0 <= block < 12 for block in flat)
        assert allocator.free_tokens == (12 - len(flat)) * 8
        assert allocator.used_tokens == len(flat) * 8


def test_a_run_is_preferred_over_scattered_blocks() -> None:
    allocator = BlockAllocator(count=8, block_size=4)
    first, second, third = (allocator.allocate(8) for _ in range(3))
    assert (first, second, third) == ((0, 1), (2, 3), (4, 5))
    allocator.free(first)
    assert allocator.allocate(4) == (0,)
    # free: 1, 6, 7; the run 6..7 fits two blocks, block 1 alone does not
    assert allocator.allocate(8) == (6, 7)


def test_scattered_blocks_are_used_when_no_run_fits() -> None:
    allocator = BlockAllocator(count=5, block_size=1)
    one, _, three, _, five = (allocator.allocate(1) for _ in range(5))
    for blocks in (one, three, five):
        assert blocks is not None
        allocator.free(blocks)
    assert allocator.allocate(3) == (0, 2, 4)


def test_slots_follow_the_blocks_in_logical_order() -> None:
    allocator = BlockAllocator(count=10, block_size=4)
    assert allocator.slots((7, 2), 6) == (28, 29, 30, 31, 8, 9)
