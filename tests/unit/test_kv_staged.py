"""A paged pool of either order of dimensions, moved through a buffer: bytes survive, places are right.

What is expected is gathered by loops over blocks, heads and bytes; the code copies boxes and indexes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tgi_patches.bridge import Planes
from tgi_patches.kv.slots import Piece, pieces
from tgi_patches.kv.staged import StagedPool

Pools = list[tuple[Tensor, Tensor]]

HEADS = 3
ODD_BITS = {
    torch.float16: (0x7E01, 0xFC01, 0x8000, 0x0001),
    torch.bfloat16: (0x7FC1, 0xFF81, 0x8000, 0x0001),
    torch.float32: (0x7FC00001, 0xFF800001, 0x80000000, 0x00000001),
    torch.float8_e5m2: (0x7D, 0xFF, 0x80, 0x01),
    torch.float8_e4m3fn: (0x7F, 0xFF, 0x80, 0x01),
}
"""NaNs with a payload, quiet and signalling, minus zero, the smallest denormal."""
DTYPES = list(ODD_BITS)
BOTH_ORDERS = pytest.mark.parametrize("heads_first", [False, True])
AT_THE_EDGES = [6, 7, 8, 9, 10, 11, 12, 13, 20, 3]
"""Of blocks of 4: it begins inside a block, fills one, ends inside the next, and two slots stand apart."""


def pool_of(dtype: torch.dtype, blocks: int, block: int, dim: int, *, heads_first: bool, seed: int) -> Tensor:
    """Random bytes, with odd patterns at the first and the last elements of every block."""
    shape = (blocks, HEADS, block, dim) if heads_first else (blocks, block, HEADS, dim)
    size = dtype.itemsize
    raw = bytearray(random.Random(seed).randbytes(blocks * HEADS * block * dim * size))
    odd = b"".join(bits.to_bytes(size, "little") for bits in ODD_BITS[dtype])
    for start in range(0, len(raw), len(raw) // blocks):
        raw[start : start + len(odd)] = odd
        end = start + len(raw) // blocks
        raw[end - len(odd) : end] = odd
    return torch.frombuffer(raw, dtype=torch.uint8).clone().view(dtype).view(shape)


def pools_of(
    dtype: torch.dtype = torch.bfloat16,
    blocks: int = 6,
    block: int = 4,
    dim: int = 16,
    *,
    heads_first: bool,
    seed: int = 1,
) -> Pools:
    """Two layers."""
    key_1, value_1, key_2, value_2 = (
        pool_of(dtype, blocks, block, dim, heads_first=heads_first, seed=seed + plane) for plane in range(4)
    )
    return [(key_1, value_1), (key_2, value_2)]


def rows(pools: Pools, *, heads_first: bool) -> list[list[bytes]]:
    """`[layer][k|v]` -> slot -> the bytes `[head][dim]` of that slot."""
    return [_rows_of(pool, heads_first=heads_first) for pair in pools for pool in pair]


def _rows_of(pool: Tensor, *, heads_first: bool) -> list[bytes]:
    block_size = pool.shape[2 if heads_first else 1]
    raw = pool.view(torch.uint8).tolist()
    found = []
    for slot in range(len(raw) * block_size):
        block, offset = raw[slot // block_size], slot % block_size
        heads = [block[head][offset] if heads_first else block[offset][head] for head in range(HEADS)]
        found.append(bytes(byte for head in heads for byte in head))
    return found


def expected(pools: Pools, slots: Sequence[int], *, heads_first: bool) -> list[bytes]:
    return [b"".join(plane[slot] for slot in slots) for plane in rows(pools, heads_first=heads_first)]


def held(planes: Planes) -> list[bytes]:
    return [b"".join(plane) for plane in planes]


def fill(planes: Planes, contents: Sequence[bytes]) -> None:
    for (run,), content in zip(planes, contents, strict=True):
        run[:] = content


@BOTH_ORDERS
@pytest.mark.parametrize("dim", [16, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_outbox_holds_the_bytes_of_its_slots_in_order(
    dtype: torch.dtype, dim: int, heads_first: bool
) -> None:
    """A dim of 3 makes rows of 3, 6 and 12 bytes: no multiple of 8."""
    pools = pools_of(dtype, dim=dim, heads_first=heads_first)
    outbox = StagedPool(pools, heads_first=heads_first).outbox(AT_THE_EDGES)
    assert held(outbox) == expected(pools, AT_THE_EDGES, heads_first=heads_first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_bit_patterns_are_in_what_is_compared(dtype: torch.dtype) -> None:
    (key, _), *_ = pools_of(dtype, heads_first=False)
    values = key.float()
    assert values.isnan().any()
    assert ((values == 0) & values.signbit()).any()


@BOTH_ORDERS
@pytest.mark.parametrize("count", [31, 32, 33, 40])
def test_slots_that_are_all_apart_are_found_too(count: int, heads_first: bool) -> None:
    """Up to 32 pieces are copied one by one, more by an index."""
    pools = pools_of(blocks=24, heads_first=heads_first)
    slots = random.Random(count).sample(range(0, 96, 2), count)
    assert len(pieces(slots, 4)) == count
    staged = StagedPool(pools, heads_first=heads_first)
    assert held(staged.outbox(slots)) == expected(pools, slots, heads_first=heads_first)


@BOTH_ORDERS
@pytest.mark.parametrize("slots", [AT_THE_EDGES, list(range(95, 15, -2))], ids=["pieces", "index"])
def test_an_inbox_writes_its_slots_and_nothing_else(slots: list[int], heads_first: bool) -> None:
    pools = pools_of(blocks=24, heads_first=heads_first)
    contents = [random.Random(plane).randbytes(len(slots) * HEADS * 32) for plane in range(4)]
    wanted = rows(pools, heads_first=heads_first)
    for plane, content in zip(wanted, contents, strict=True):
        for position, slot in enumerate(slots):
            plane[slot] = content[position * HEADS * 32 : (position + 1) * HEADS * 32]

    inbox = StagedPool(pools, heads_first=heads_first).inbox(slots)
    fill(inbox.planes, contents)
    inbox.commit()

    assert rows(pools, heads_first=heads_first) == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 3])
@pytest.mark.parametrize(("source_first", "target_first"), [(True, False), (False, True), (True, True)])
def test_kv_travels_between_orders_and_block_sizes(
    source_first: bool, target_first: bool, dim: int, dtype: torch.dtype
) -> None:
    source = pools_of(dtype, blocks=6, block=4, dim=dim, heads_first=source_first)
    target = pools_of(dtype, blocks=3, block=16, dim=dim, heads_first=target_first, seed=50)
    arrived_at = [30, 31, 32, 33, 34, 2, 3, 9, 10, 47]

    inbox = StagedPool(target, heads_first=target_first).inbox(arrived_at)
    fill(inbox.planes, held(StagedPool(source, heads_first=source_first).outbox(AT_THE_EDGES)))
    inbox.commit()

    sent = expected(source, AT_THE_EDGES, heads_first=source_first)
    assert expected(target, arrived_at, heads_first=target_first) == sent


@BOTH_ORDERS
@pytest.mark.parametrize("slots", [AT_THE_EDGES, list(range(0, 80, 2))], ids=["pieces", "index"])
def test_positions_before_the_first_are_left_alone(slots: list[int], heads_first: bool) -> None:
    pools = pools_of(blocks=24, heads_first=heads_first)
    wanted = rows(pools, heads_first=heads_first)
    for plane in wanted:
        for slot in slots[3:]:
            plane[slot] = b"\x07" * (HEADS * 32)

    inbox = StagedPool(pools, heads_first=heads_first).inbox(slots, first=3)
    fill(inbox.planes, [b"\x07" * (HEADS * 32 * len(slots))] * 4)
    inbox.commit()

    assert rows(pools, heads_first=heads_first) == wanted


@BOTH_ORDERS
def test_nothing_reaches_the_pool_before_the_commit(heads_first: bool) -> None:
    pools = pools_of(heads_first=heads_first)
    before = rows(pools, heads_first=heads_first)
    inbox = StagedPool(pools, heads_first=heads_first).inbox(AT_THE_EDGES)
    fill(inbox.planes, [bytes(HEADS * 32 * len(AT_THE_EDGES))] * 4)
    assert rows(pools, heads_first=heads_first) == before
    inbox.commit()
    assert rows(pools, heads_first=heads_first) != before


@BOTH_ORDERS
def test_a_repair_restores_the_last_position_and_no_other(heads_first: bool) -> None:
    """Also when the buffer was used for other records since the commit."""
    pools = pools_of(heads_first=heads_first)
    staged = StagedPool(pools, heads_first=heads_first)
    staged.outbox(list(range(24)))  # the buffer is as large as it will be, and is used again from here on
    contents = [bytes([plane + 1]) * (HEADS * 32 * 5) for plane in range(4)]
    inbox = staged.inbox([1, 2, 3, 4, 18])
    fill(inbox.planes, contents)
    inbox.commit()

    for pair in pools:
        for pool in pair:
            pool.view(torch.uint8).fill_(0xAA)
    staged.outbox(list(range(24)))
    other = staged.inbox(list(range(5, 15)))
    fill(other.planes, [b"\xbb" * (HEADS * 32 * 10)] * 4)
    inbox.repair()

    for plane, found in enumerate(rows(pools, heads_first=heads_first)):
        assert found[18] == bytes([plane + 1]) * (HEADS * 32)
        assert found[:18] + found[19:] == [b"\xaa" * (HEADS * 32)] * 23


def test_a_shorter_record_after_a_longer_one_holds_its_own_slots() -> None:
    pools = pools_of(heads_first=True)
    staged = StagedPool(pools, heads_first=True)
    for slots in ([*range(2, 22)], [23], [5, 6, 7], [*range(24)]):
        assert held(staged.outbox(slots)) == expected(pools, slots, heads_first=True)


def test_a_record_of_one_token_is_repaired_like_any() -> None:
    pools = pools_of(heads_first=False)
    inbox = StagedPool(pools, heads_first=False).inbox([9])
    fill(inbox.planes, [b"\x05" * (HEADS * 32)] * 4)
    inbox.commit()
    pools[1][1].zero_()
    inbox.repair()
    assert expected(pools, [9], heads_first=False) == [b"\x05" * (HEADS * 32)] * 4


@BOTH_ORDERS
def test_pools_made_for_inference_are_moved_too(heads_first: bool) -> None:
    """As TGI does on a GPU: cache, commit and repair in one inference mode."""
    with torch.inference_mode():
        pools = pools_of(heads_first=heads_first)
        inbox = StagedPool(pools, heads_first=heads_first).inbox([3, 4])
        fill(inbox.planes, [b"\x09" * (HEADS * 64)] * 4)
        inbox.commit()
        inbox.repair()
        assert expected(pools, [3, 4], heads_first=heads_first) == [b"\x09" * (HEADS * 64)] * 4


def test_whole_blocks_in_a_row_are_one_piece() -> None:
    assert pieces([6, 7, *range(8, 20), 20, 30], 4) == [
        Piece(token=0, block=1, blocks=1, offset=2, length=2),
        Piece(token=2, block=2, blocks=3, offset=0, length=4),
        Piece(token=14, block=5, blocks=1, offset=0, length=1),
        Piece(token=15, block=7, blocks=1, offset=2, length=1),
    ]


STRETCHES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 25)), max_size=6)


@given(stretches=STRETCHES, block_size=st.sampled_from([1, 2, 5, 16]))
def test_pieces_hold_every_token_once_and_in_order(stretches: list[tuple[int, int]], block_size: int) -> None:
    slots = [slot for start, length in stretches for slot in range(start, start + length)]
    cut = pieces(slots, block_size)
    found = [
        (piece.token + block * piece.length + i, (piece.block + block) * block_size + piece.offset + i)
        for piece in cut
        for block in range(piece.blocks)
        for i in range(piece.length)
    ]
    assert found == list(enumerate(slots))
    assert all(piece.offset + piece.length <= block_size for piece in cut)
    assert all(piece.length == block_size for piece in cut if piece.blocks > 1)
    assert all(a.token < b.token for a, b in pairwise(cut))


def test_keys_and_values_of_unlike_width_share_the_buffer() -> None:
    """One head of 3 and of 4 in bfloat16: rows of 6 and of 8 bytes, read as words of 2 and of 8."""
    key = torch.arange(12, dtype=torch.bfloat16).reshape(2, 2, 1, 3)
    value = torch.arange(16, dtype=torch.bfloat16).reshape(2, 2, 1, 4)
    pool = StagedPool([(key, value)], heads_first=False)
    planes = pool.outbox([3])
    assert [bytes(run) for (run,) in planes] == [
        bytes(tensor[1, 1].view(torch.uint8).numpy().tobytes()) for tensor in (key, value)
    ]
