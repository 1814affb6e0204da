"""Pinned records: what the ring cannot take before their time is over, on files and in memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.bridge.conftest import (
    FIRST,
    RING_BYTES,
    TTL_S,
    Bed,
    Interrupted,
    export,
    handle,
    pattern,
    read,
    reason_of,
    runs_of,
)
from tgi_patches.bridge import Bridge, Record
from tgi_patches.bridge.pinned import PINNED_SLOTS, PinnedRegion
from tgi_patches.contract import BridgeMiss, MissReason

PINNED_BYTES = 32768
"""Room for three records of two planes of 4,096 bytes: each takes 64 + 8,192 bytes."""
RECORD_BYTES = 8256


def pin(bridge: Bridge, number: int, size: int = 4096) -> Record:
    data = runs_of(pattern(number, 2, size))
    return bridge.export(handle(number), range(4), FIRST, False, data, pinned=True)


def lap(bridge: Bridge) -> None:
    """More than the whole ring is written anew."""
    for number in range(100, 106):
        export(bridge, number, size=8192)


def expire(bed: Bed) -> None:
    bed.clock.now_ns += round(TTL_S * 1e9)


def test_a_pinned_record_outlives_the_ring(bed: Bed) -> None:
    prefill, decode = bed.open("p", pinned_bytes=PINNED_BYTES), bed.open("d")
    exported = pin(prefill, 1)
    export(prefill, 2)
    bed.clock.now_ns += round(TTL_S * 1e9) - 1
    lap(prefill)

    assert reason_of(decode.lookup, "p", 1, handle(2)) == MissReason.OVERWRITTEN
    found = decode.lookup("p", 1, handle(1))
    assert found == exported
    assert read(decode, found, 2, 4096) == pattern(1, 2, 4096)


def test_a_pinned_record_is_a_miss_once_its_time_is_over(bed: Bed) -> None:
    prefill, decode = bed.open("p", pinned_bytes=PINNED_BYTES), bed.open("d")
    pin(prefill, 1)
    record = decode.lookup("p", 1, handle(1))
    expire(bed)
    assert reason_of(decode.lookup, "p", 1, handle(1)) == MissReason.MISSING
    assert reason_of(prefill.own_lookup, handle(1)) == MissReason.MISSING
    assert read(decode, record, 2, 4096) == pattern(1, 2, 4096)  # who has begun may end


def test_places_of_expired_records_are_taken_once_they_are_needed(bed: Bed) -> None:
    prefill, decode = bed.open("p", pinned_bytes=PINNED_BYTES), bed.open("d")
    early = [pin(prefill, number) for number in (1, 2)]
    bed.clock.now_ns += 1
    pin(prefill, 3)
    bed.clock.now_ns += round(TTL_S * 1e9) - 1
    assert prefill.pinned_free_bytes == PINNED_BYTES - 3 * RECORD_BYTES

    assert pin(prefill, 4).place.pinned is True

    assert prefill.pinned_free_bytes == PINNED_BYTES - 2 * RECORD_BYTES
    for record in early:
        assert reason_of(read, decode, record, 2, 4096) in (MissReason.OVERWRITTEN, MissReason.MISSING)
    for number in (3, 4):
        found = prefill.own_lookup(handle(number))
        assert read(prefill, found, 2, 4096) == pattern(number, 2, 4096)
    pin(prefill, 5)
    assert reason_of(pin, prefill, 6) == MissReason.PINNED_FULL


def test_a_slot_is_taken_from_an_expired_record_too(bed: Bed) -> None:
    prefill = bed.open("p", pinned_bytes=PINNED_BYTES)
    for number in range(PINNED_SLOTS):
        pin(prefill, number, size=16)
    expire(bed)
    pin(prefill, 99, size=16)
    assert read(prefill, prefill.own_lookup(handle(99)), 2, 16) == pattern(99, 2, 16)


@pytest.mark.parametrize("visit", [1, 2])
def test_an_expired_records_place_that_is_reused_during_a_copy_is_a_miss(bed: Bed, visit: int) -> None:
    prefill, decode = bed.open("p", pinned_bytes=RECORD_BYTES), bed.open("d")
    pin(prefill, 1)
    record = decode.lookup("p", 1, handle(1))

    def reuse() -> None:
        expire(bed)
        assert pin(prefill, 1).place.position == record.place.position

    planes = Interrupted([[memoryview(bytearray(4096))] for _ in range(2)], visit, reuse)
    assert reason_of(decode.read_into, record, planes, 4) == MissReason.OVERWRITTEN


def test_pinned_records_leave_the_ring_its_room(bed: Bed) -> None:
    """Three of 16 KiB fit into 64 KiB, whatever is pinned beside them."""
    prefill = bed.open("p", pinned_bytes=PINNED_BYTES)
    for number in (1, 2, 3):
        export(prefill, number, size=8192)
        pin(prefill, 10 + number)
    for number in (1, 2, 3):
        assert read(prefill, prefill.own_lookup(handle(number)), 2, 8192) == pattern(number, 2, 8192)


def test_pinned_records_leave_the_index_its_slots(bed: Bed) -> None:
    prefill = bed.open("p", pinned_bytes=PINNED_BYTES, index_slots=4)
    for number in (1, 2, 3, 4):
        export(prefill, number, size=16)
        pin(prefill, 10 + number, size=16)
        prefill.release(handle(10 + number))
    pin(prefill, 20, size=16)
    assert [prefill.own_lookup(handle(number)).sequence for number in (1, 2, 3, 4, 20)] == [1, 3, 5, 7, 9]


def test_a_released_record_is_gone_and_its_place_is_free(bed: Bed) -> None:
    prefill, decode = bed.open("p", pinned_bytes=PINNED_BYTES), bed.open("d")
    pin(prefill, 1)
    record = decode.lookup("p", 1, handle(1))
    assert prefill.pinned_free_bytes == PINNED_BYTES - RECORD_BYTES

    assert prefill.release(handle(1)) is True

    assert prefill.pinned_free_bytes == PINNED_BYTES
    assert reason_of(decode.lookup, "p", 1, handle(1)) == MissReason.OVERWRITTEN
    assert reason_of(read, decode, record, 2, 4096) == MissReason.OVERWRITTEN


def test_only_what_is_pinned_is_released(bed: Bed) -> None:
    prefill = bed.open("p", pinned_bytes=PINNED_BYTES)
    export(prefill, 1)
    pin(prefill, 2)
    assert [prefill.release(handle(number)) for number in (1, 2, 2, 3)] == [False, True, False, False]
    assert prefill.own_lookup(handle(1)).sequence == 1
    assert bed.open("d", ring_bytes=0).release(handle(1)) is False


def test_a_full_region_says_so_and_changes_nothing(bed: Bed) -> None:
    prefill = bed.open("p", pinned_bytes=PINNED_BYTES)
    for number in (1, 2, 3):
        pin(prefill, number)
    with pytest.raises(BridgeMiss, match=r"8000 .* free") as caught:
        pin(prefill, 1)
    assert caught.value.reason == MissReason.PINNED_FULL
    for number in (1, 2, 3):
        assert prefill.own_lookup(handle(number)).sequence == number

    assert export(prefill, 4, size=4096).place.pinned is False
    prefill.release(handle(2))
    assert pin(prefill, 5).place.pinned is True
    assert read(prefill, prefill.own_lookup(handle(5)), 2, 4096) == pattern(5, 2, 4096)


def test_a_region_without_free_slots_is_full_too(bed: Bed) -> None:
    prefill = bed.open("p", pinned_bytes=PINNED_BYTES)
    for number in range(PINNED_SLOTS):
        pin(prefill, number, size=16)
    assert reason_of(pin, prefill, 99, size=16) == MissReason.PINNED_FULL
    prefill.release(handle(7))
    pin(prefill, 99, size=16)
    assert read(prefill, prefill.own_lookup(handle(99)), 2, 16) == pattern(99, 2, 16)


def test_what_can_never_be_pinned_is_refused(bed: Bed) -> None:
    plain, prefill = bed.open("q"), bed.open("p", pinned_bytes=PINNED_BYTES)
    assert (plain.pinned_bytes, prefill.pinned_bytes) == (0, PINNED_BYTES)
    assert reason_of(pin, plain, 1) == MissReason.UNSUPPORTED
    assert reason_of(pin, bed.open("d", ring_bytes=0, pinned_bytes=PINNED_BYTES), 1) == MissReason.UNSUPPORTED
    assert reason_of(pin, prefill, 1, size=16384) == MissReason.LAYOUT
    assert prefill.pinned_free_bytes == PINNED_BYTES


def test_the_limit_of_a_pinned_record_is_its_region_not_a_quarter_of_the_ring(bed: Bed) -> None:
    prefill = bed.open("p", pinned_bytes=PINNED_BYTES)
    assert prefill.record_limit_bytes == RING_BYTES // 4
    pin(prefill, 1, size=16000)
    assert read(prefill, prefill.own_lookup(handle(1)), 2, 16000) == pattern(1, 2, 16000)


@pytest.mark.parametrize("pinned", [(True, False), (False, True), (True, True)])
def test_of_two_exports_of_a_handle_the_later_counts(bed: Bed, pinned: tuple[bool, bool]) -> None:
    prefill = bed.open("p", pinned_bytes=PINNED_BYTES)
    early, late = (
        prefill.export(handle(1), range(4), FIRST, False, runs_of(pattern(seed, 2, 4096)), pinned=pin)
        for seed, pin in zip((8, 9), pinned, strict=True)
    )
    found = prefill.own_lookup(handle(1))
    assert found == late
    assert read(prefill, found, 2, 4096) == pattern(9, 2, 4096)
    assert reason_of(read, prefill, early, 2, 4096) == MissReason.OVERWRITTEN
    assert prefill.pinned_free_bytes == PINNED_BYTES - RECORD_BYTES * pinned[1]


@pytest.mark.parametrize("visit", [1, 2])
def test_a_release_and_reuse_during_a_copy_is_a_miss(bed: Bed, visit: int) -> None:
    """The same bytes lie there again afterwards, so no checksum could tell."""
    prefill, decode = bed.open("p", pinned_bytes=PINNED_BYTES), bed.open("d")
    pin(prefill, 1)
    record = decode.lookup("p", 1, handle(1))

    def reuse() -> None:
        prefill.release(handle(1))
        assert pin(prefill, 1).place == record.place

    planes = Interrupted([[memoryview(bytearray(4096))] for _ in range(2)], visit, reuse)
    assert reason_of(decode.read_into, record, planes, 4) == MissReason.OVERWRITTEN


def test_a_pinned_export_that_breaks_off_gives_its_place_back(bed: Bed) -> None:
    prefill = bed.open("p", pinned_bytes=PINNED_BYTES)

    def fail() -> None:
        raise MemoryError

    planes = Interrupted(runs_of(pattern(1, 2, 4096)), 2, fail)
    with pytest.raises(MemoryError):
        prefill.export(handle(1), range(4), FIRST, False, planes, pinned=True)
    assert reason_of(prefill.own_lookup, handle(1)) == MissReason.MISSING
    assert prefill.pinned_free_bytes == PINNED_BYTES
    for number in (1, 2, 3):
        pin(prefill, number)


def test_a_restart_frees_everything_that_was_pinned(bed: Bed) -> None:
    prefill, decode = bed.open("p", pinned_bytes=PINNED_BYTES), bed.open("d")
    pin(prefill, 1)
    record = decode.lookup("p", 1, handle(1))
    prefill.close()
    assert prefill.release(handle(1)) is False
    again = bed.open("p", epoch=2, pinned_bytes=PINNED_BYTES)

    assert again.pinned_free_bytes == PINNED_BYTES
    assert reason_of(read, decode, record, 2, 4096) == MissReason.EPOCH
    assert reason_of(decode.lookup, "p", 2, handle(1)) == MissReason.MISSING
    assert again.release(handle(1)) is False


def test_a_damaged_pinned_byte_is_noticed(bed: Bed) -> None:
    prefill = bed.open("p", pinned_bytes=PINNED_BYTES)
    record = pin(prefill, 1)
    bed.damage(record, b"".join(pattern(1, 2, 4096)), 8191)
    assert reason_of(read, prefill, prefill.own_lookup(handle(1)), 2, 4096) == MissReason.CHECKSUM


@given(
    lines=st.integers(0, 12),
    slots=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9)), max_size=60),
)
def test_a_region_neither_overlaps_nor_loses_a_byte(
    lines: int, slots: int, steps: list[tuple[int, int]]
) -> None:
    """Against a map of its cache lines; `None` is right only where first fit finds nothing."""
    region = PinnedRegion(64 * lines, slots)
    owner: list[int | None] = [None] * lines
    for size, choice in steps:
        held = sorted({slot for slot in owner if slot is not None})
        if choice < len(held):
            region.give_back(held[choice])
            owner = [None if slot == held[choice] else slot for slot in owner]
        needed = -(-size // 64)
        fits = [i for i in range(lines - needed + 1) if not any(s is not None for s in owner[i : i + needed])]
        found = region.take(size)
        if fits and len({s for s in owner if s is not None}) < slots:
            assert found is not None
            slot, offset = found
            assert offset == 64 * fits[0]
            assert slot not in owner
            assert 0 <= slot < slots
            owner[fits[0] : fits[0] + needed] = [slot] * needed
        else:
            assert found is None
        assert region.free_bytes == 64 * owner.count(None)
        assert all(a.end < b.start for a, b in pairwise(region.free))
        assert all(piece.size > 0 for piece in region.free)
