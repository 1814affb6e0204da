"""Block allocator: conservation, no overlap, runs first."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.embedded.shard.blocks import Allocation, BlockAllocator, PrefixAllocator

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
            allocation = allocator.allocate(operation)
            blocks = allocation.blocks if allocation else None
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


def take(allocator: BlockAllocator, tokens: int, prompt: Sequence[int] = ()) -> tuple[int, ...]:
    allocation = allocator.allocate(tokens, prompt)
    assert allocation is not None
    return allocation.blocks


def test_a_run_is_preferred_over_scattered_blocks() -> None:
    allocator = BlockAllocator(count=8, block_size=4)
    first, second, third = (take(allocator, 8) for _ in range(3))
    assert (first, second, third) == ((0, 1), (2, 3), (4, 5))
    allocator.free(first)
    assert take(allocator, 4) == (0,)
    # free: 1, 6, 7; the run 6..7 fits two blocks, block 1 alone does not
    assert take(allocator, 8) == (6, 7)


def test_scattered_blocks_are_used_when_no_run_fits() -> None:
    allocator = BlockAllocator(count=5, block_size=1)
    one, _, three, _, five = (take(allocator, 1) for _ in range(5))
    for blocks in (one, three, five):
        allocator.free(blocks)
    assert take(allocator, 3) == (0, 2, 4)


def test_slots_follow_the_blocks_in_logical_order() -> None:
    allocator = BlockAllocator(count=10, block_size=4)
    assert allocator.slots((7, 2), 6) == (28, 29, 30, 31, 8, 9)


# --- shared prefixes ---


def test_a_computed_prefix_is_shared_and_one_token_is_left_to_compute() -> None:
    allocator = PrefixAllocator(count=8, block_size=2)
    prompt = [1, 2, 3, 4]
    first = take(allocator, 5, prompt)
    assert allocator.allocate(5, prompt) == Allocation((3, 4, 5), 0)  # not computed yet
    allocator.computed(first, prompt)
    again = allocator.allocate(5, prompt)
    # the second block would leave nothing to compute, so only the first is shared
    assert again == Allocation((first[0], 6, 7), 2)


def test_a_prefix_outlives_its_request_until_the_place_is_needed() -> None:
    allocator = PrefixAllocator(count=3, block_size=2)
    prompt = [1, 2, 3, 4, 5]
    blocks = take(allocator, 6, prompt)
    allocator.computed(blocks, prompt)
    allocator.free(blocks)
    assert allocator.used_tokens == 0
    shared = allocator.allocate(6, prompt)
    assert shared is not None
    assert shared.cached_tokens == 4
    allocator.free(shared.blocks)
    other = take(allocator, 6, [9, 9, 9, 9, 9])
    allocator.free(other)
    assert allocator.allocate(6, prompt) == Allocation((0, 1, 2), 0)


def test_a_prefix_that_was_never_computed_is_never_offered() -> None:
    allocator = PrefixAllocator(count=4, block_size=1)
    allocator.free(take(allocator, 2, [7, 8]))
    assert allocator.allocate(2, [7, 8]) == Allocation((0, 1), 0)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@given(st.lists(st.one_of(PROMPTS, st.just("free")), max_size=50), st.randoms(use_true_random=False))
def test_sharing_conserves_blocks_and_offers_only_what_was_written(
    operations: list[list[int] | str], random: object
) -> None:
    """A model pool holds, per slot, the prefix whose KV stands there; an offer must find it unharmed."""
    allocator = PrefixAllocator(count=6, block_size=2)
    held: list[tuple[int, ...]] = []
    content: dict[int, tuple[int, ...]] = {}
    for prompt in operations:
        if isinstance(prompt, str):
            if held:
                allocator.free(held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
            continue
        allocation = allocator.allocate(len(prompt) + 1, prompt)
        owned = {block for blocks in held for block in blocks}
        if allocation is None:
            assert -(-(len(prompt) + 1) // 2) > 6 - len(owned)
            continue
        assert allocation.cached_tokens < len(prompt)
        slots = allocator.slots(allocation.blocks, len(prompt))
        for p in range(allocation.cached_tokens):
            assert content[slots[p]] == tuple(prompt[: p + 1])
        for p in range(allocation.cached_tokens, len(prompt)):
            assert slots[p] // 2 not in owned
            content[slots[p]] = tuple(prompt[: p + 1])
        allocator.computed(allocation.blocks, prompt)
        held.append(allocation.blocks)
        owned |= set(allocation.blocks)
        assert allocator.used_tokens == 2 * len(owned)
        assert allocator.free_tokens == 2 * (6 - len(owned))
