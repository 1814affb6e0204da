"""Pinned records: they outlive the ring and the clock, and their place comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.bridge.conftest import (
    FIRST,
    TTL_S,
    Bed,
    Interrupted,
    cut,
    export,
    handle,
    pattern,
    read,
    reason_of,
    runs_of,
)
from tgi_patches.bridge import Bridge, Record
from tgi_patches.bridge.pinned import PinnedRegion
from tgi_patches.contract import MissReason

PINNED_BYTES = 16384


def pin(bridge: Bridge, number: int, size: int = 2000) -> Record:
    data = runs_of(pattern(number, 2, size))
    return bridge.export(handle(number), range(4), FIRST, False, data, pinned=True)


def test_a_pinned_record_outlives_the_ring_and_its_time(bed: Bed) -> None:
    writer, reader = bed.open("p", pinned_bytes=PINNED_BYTES), bed.open("d", ring_bytes=0)
    pin(writer, 1)
    for number in range(100, 140):  # four rings' worth
        export(writer, number, size=4000)
    bed.clock.now_ns += int(100 * TTL_S * 1e9)
    record = reader.lookup("p", 1, handle(1))
    assert read(reader, record, 2, 2000) == pattern(1, 2, 2000)
    assert reason_of(reader.lookup, "p", 1, handle(139)) is MissReason.MISSING


def test_many_readers_share_one_pinned_record(bed: Bed) -> None:
    writer = bed.open("p", pinned_bytes=PINNED_BYTES)
    pin(writer, 1)
    for name in ("d0", "d1", "d2"):
        reader = bed.open(name, ring_bytes=0)
        assert read(reader, reader.lookup("p", 1, handle(1)), 2, 2000) == pattern(1, 2, 2000)


def test_a_released_record_is_gone_and_its_bytes_are_free_again(bed: Bed) -> None:
    writer = bed.open("p", pinned_bytes=PINNED_BYTES)
    assert writer.pinned_free_bytes == PINNED_BYTES
    pin(writer, 1)
    assert writer.pinned_free_bytes <= PINNED_BYTES - 4000
    assert writer.release(handle(1)) is True
    assert writer.pinned_free_bytes == PINNED_BYTES
    assert reason_of(writer.lookup, "p", 1, handle(1)) in (MissReason.MISSING, MissReason.OVERWRITTEN)
    assert writer.release(handle(1)) is False


def test_a_full_region_refuses_and_changes_nothing(bed: Bed) -> None:
    writer = bed.open("p", pinned_bytes=PINNED_BYTES)
    for number in (1, 2, 3, 6):
        pin(writer, number)
    assert reason_of(pin, writer, 4) is MissReason.PINNED_FULL
    for number in (1, 2, 3, 6):
        assert read(writer, writer.lookup("p", 1, handle(number)), 2, 2000) == pattern(number, 2, 2000)
    export(writer, 4, size=2000)  # unpinned there is room
    assert read(writer, writer.lookup("p", 1, handle(4)), 2, 2000) == pattern(4, 2, 2000)
    writer.release(handle(2))
    pin(writer, 5)
    assert read(writer, writer.lookup("p", 1, handle(5)), 2, 2000) == pattern(5, 2, 2000)


def test_without_a_region_pinning_is_unsupported(bed: Bed) -> None:
    assert reason_of(pin, bed.open("p"), 1) is MissReason.UNSUPPORTED


def test_exporting_a_pinned_handle_again_gives_the_first_place_back(bed: Bed) -> None:
    writer = bed.open("p", pinned_bytes=PINNED_BYTES)
    pin(writer, 1, size=2000)
    data = runs_of(pattern(9, 2, 400))
    writer.export(handle(1), range(4), FIRST, False, data)
    assert writer.pinned_free_bytes == PINNED_BYTES
    assert read(writer, writer.lookup("p", 1, handle(1)), 2, 400) == pattern(9, 2, 400)


def test_a_reader_notices_that_its_place_was_given_to_another(bed: Bed) -> None:
    writer, reader = bed.open("p", pinned_bytes=PINNED_BYTES), bed.open("d", ring_bytes=0)
    pin(writer, 1)
    record = reader.lookup("p", 1, handle(1))

    def reuse() -> None:
        writer.release(handle(1))
        pin(writer, 2)

    targets = [bytearray(2000) for _ in range(2)]
    planes = Interrupted([cut(target) for target in targets], 2, reuse)
    reason = reason_of(reader.read_into, record, planes, 4)
    assert reason in (MissReason.OVERWRITTEN, MissReason.CHECKSUM)
    assert reason_of(reader.read_into, record, [cut(target) for target in targets], 4) in (
        MissReason.OVERWRITTEN,
        MissReason.MISSING,
    )


def test_a_new_epoch_forgets_pinned_records(bed: Bed) -> None:
    first, reader = bed.open("p", 1, pinned_bytes=PINNED_BYTES), bed.open("d", ring_bytes=0)
    pin(first, 1)
    first.close()
    second = bed.open("p", 2, pinned_bytes=PINNED_BYTES)
    assert second.pinned_free_bytes == PINNED_BYTES
    assert reason_of(reader.lookup, "p", 1, handle(1)) is MissReason.EPOCH
    assert reason_of(reader.lookup, "p", 2, handle(1)) is MissReason.MISSING


@pytest.mark.parametrize("slots", [3, 64])
@given(data=st.data())
def test_the_region_conserves_its_bytes_and_never_gives_one_twice(slots: int, data: st.DataObject) -> None:
    region = PinnedRegion(4096, slots=slots)
    live: dict[int, tuple[int, int]] = {}
    for _ in range(data.draw(st.integers(0, 40))):
        if live and data.draw(st.booleans()):
            slot = data.draw(st.sampled_from(sorted(live)))
            del live[slot]
            region.give_back(slot)
        else:
            size = data.draw(st.integers(1, 1500))
            found = region.take(size)
            if found is None:
                longest = max((piece.size for piece in region.free), default=0)
                assert len(live) == slots or longest < -(-size // 64) * 64
                continue
            slot, offset = found
            assert slot not in live
            assert offset + size <= 4096
            assert all(offset >= end or offset + size <= start for start, end in live.values())
            live[slot] = (offset, offset + size)
        used = sum(-(-(end - start) // 64) * 64 for start, end in live.values())
        assert region.free_bytes == 4096 - used
        assert all(a.end < b.start for a, b in zip(region.free, region.free[1:], strict=False))
