"""Records that the ring takes back, before, while and after somebody reads them."""

from __future__ import annotations

import pytest

from tests.unit.bridge.conftest import (
    FIRST,
    Bed,
    Interrupted,
    export,
    handle,
    pattern,
    read,
    reason_of,
    runs_of,
)
from tgi_patches.contract import MissReason


def test_a_full_ring_overwrites_the_oldest(bed: Bed) -> None:
    """64 KiB hold three records of 16 KiB and their descriptions, not four."""
    prefill, decode = bed.open("p"), bed.open("d")
    for number in range(1, 4):
        export(prefill, number, size=8192)
    early = decode.lookup("p", 1, handle(1))
    export(prefill, 4, size=8192)

    assert reason_of(decode.lookup, "p", 1, handle(1)) == MissReason.OVERWRITTEN
    assert reason_of(read, decode, early, 2, 8192) == MissReason.OVERWRITTEN
    for number in (2, 3, 4):
        found = decode.lookup("p", 1, handle(number))
        assert read(decode, found, 2, 8192) == pattern(number, 2, 8192)


def test_a_full_index_drops_the_oldest(bed: Bed) -> None:
    prefill, decode = bed.open("p", index_slots=4), bed.open("d")
    first = [export(prefill, number, size=16) for number in range(1, 3)]
    for number in range(3, 7):
        export(prefill, number, size=16)

    for number in range(3, 7):
        found = decode.lookup("p", 1, handle(number))
        assert (found.sequence, read(decode, found, 2, 16)) == (number, pattern(number, 2, 16))
    for number, record in enumerate(first, start=1):
        assert reason_of(decode.lookup, "p", 1, handle(number)) == MissReason.MISSING
        assert reason_of(read, prefill, record, 2, 16) == MissReason.OVERWRITTEN


def test_of_two_exports_of_a_handle_the_later_counts(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    prefill.export(handle(1), [1], FIRST, False, runs_of(pattern(8, 2, 64)))
    early = decode.lookup("p", 1, handle(1))
    prefill.export(handle(1), [2], FIRST, True, runs_of(pattern(9, 2, 64)))

    found = decode.lookup("p", 1, handle(1))
    assert (found.token_ids, found.ended, read(decode, found, 2, 64)) == ((2,), True, pattern(9, 2, 64))
    assert reason_of(read, decode, early, 2, 64) == MissReason.OVERWRITTEN


@pytest.mark.parametrize("visit", [1, 2])
def test_a_reader_that_is_overtaken_while_it_copies_gets_a_miss(bed: Bed, visit: int) -> None:
    """The same bytes lie there again afterwards, so no checksum could tell."""
    prefill, decode = bed.open("p"), bed.open("d")
    data = pattern(1, 2, 8192)
    prefill.export(handle(1), range(4), FIRST, False, runs_of(data))
    record = decode.lookup("p", 1, handle(1))

    def lap() -> None:
        for number in range(2, 7):
            prefill.export(handle(number), range(4), FIRST, False, runs_of(data))

    targets = [[memoryview(bytearray(8192))] for _ in data]
    planes = Interrupted(targets, visit, lap)
    assert reason_of(decode.read_into, record, planes, 4) == MissReason.OVERWRITTEN


@pytest.mark.parametrize("visit", [1, 2])
def test_a_restart_of_the_owner_during_a_copy_is_a_miss(bed: Bed, visit: int) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    export(prefill, 1)
    record = decode.lookup("p", 1, handle(1))

    def restart() -> None:
        prefill.close()
        bed.open("p", epoch=2)

    planes = Interrupted([[memoryview(bytearray(400))] for _ in range(2)], visit, restart)
    assert reason_of(decode.read_into, record, planes, 4) == MissReason.EPOCH


def test_an_export_in_progress_is_invisible_and_what_it_overwrites_is_gone(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    for number in range(1, 4):
        export(prefill, number, size=8192)
    seen: list[MissReason] = []

    def look() -> None:
        seen.extend(reason_of(decode.lookup, "p", 1, handle(n)) for n in (1, 4))
        assert decode.lookup("p", 1, handle(2)).sequence == 2

    planes = Interrupted(runs_of(pattern(4, 2, 8192)), 2, look)
    prefill.export(handle(4), range(4), FIRST, False, planes)
    assert seen == [MissReason.OVERWRITTEN, MissReason.MISSING]
    assert decode.lookup("p", 1, handle(4)).sequence == 4


def test_an_export_that_breaks_off_leaves_nothing_behind(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    export(prefill, 1)

    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        prefill.export(handle(2), range(4), FIRST, False, Interrupted(runs_of(pattern(2, 2, 400)), 2, fail))

    assert reason_of(decode.lookup, "p", 1, handle(2)) == MissReason.MISSING
    assert read(decode, decode.lookup("p", 1, handle(1)), 2, 400) == pattern(1, 2, 400)
    export(prefill, 3)
    assert read(decode, decode.lookup("p", 1, handle(3)), 2, 400) == pattern(3, 2, 400)


def test_closing_twice_is_closing_once(bed: Bed) -> None:
    bridge = bed.open("p")
    bridge.close()
    bridge.close()
