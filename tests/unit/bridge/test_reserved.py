"""A record's place that somebody else fills: a socket, or a GPU's copy engine."""

from __future__ import annotations

import pytest
from xxhash import xxh3_64_intdigest

from tests.unit.bridge.conftest import FIRST, Bed, export, handle, pattern, read, reason_of
from tgi_patches.bridge import Bridge, FirstToken, Reservation
from tgi_patches.contract import MissReason

SIZE = 400
BLOCK = 256 * 1024


def reserve(
    bridge: Bridge, number: int, size: int = SIZE, *, checked: bool = True, ranks: int | None = None
) -> Reservation:
    return bridge.reserve(handle(number), range(4), FIRST, False, [size, size], ranks=ranks, checked=checked)


def fill(reservation: Reservation, number: int, size: int = SIZE) -> list[int]:
    """The bytes that `export` would have put there; their checksums."""
    planes = pattern(number, 2, size)
    reservation.data[:] = b"".join(planes)
    return [
        xxh3_64_intdigest(plane[start : start + BLOCK]) for plane in planes for start in range(0, size, BLOCK)
    ]


def test_what_was_filled_is_read_as_if_it_had_been_exported(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    first = FirstToken(7, -1.5, ((7, -1.5), (9, -2.0)))
    reservation = prefill.reserve(handle(1), [5, 6, 7, 8], first, True, [400, 800], ranks=2)
    data = pattern(1, 1, 1200)[0]
    assert (len(reservation.data), reservation.valid) == (1200, True)
    reservation.data[:] = data
    sums = [xxh3_64_intdigest(data[:400]), xxh3_64_intdigest(data[400:])]
    published = reservation.publish(sums)

    found = decode.lookup("p", 1, handle(1))
    assert found == published
    assert (found.token_ids, found.first, found.ended, found.ranks) == ((5, 6, 7, 8), first, True, 2)
    assert (found.rows, found.checksums, found.kv_bytes, found.sequence) == ((100, 200), tuple(sums), 1200, 1)
    targets = [bytearray(400), bytearray(800)]
    decode.read_into(found, [[memoryview(target)] for target in targets], 4)
    assert b"".join(targets) == data


def test_nothing_is_seen_before_it_is_published(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    reservation = reserve(prefill, 1)
    sums = fill(reservation, 1)
    assert reason_of(decode.lookup, "p", 1, handle(1)) == MissReason.MISSING
    reservation.publish(sums)
    assert read(decode, decode.lookup("p", 1, handle(1)), 2, SIZE) == pattern(1, 2, SIZE)


def test_several_are_filled_at_a_time_and_published_in_any_order(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    opened = {number: reserve(prefill, number) for number in (1, 2, 3)}
    export(prefill, 4, SIZE)
    sums = {number: fill(reservation, number) for number, reservation in opened.items()}
    for number in (3, 1, 2):
        opened[number].publish(sums[number])

    for number, sequence in ((4, 1), (3, 2), (1, 3), (2, 4)):
        found = decode.lookup("p", 1, handle(number))
        assert (found.sequence, read(decode, found, 2, SIZE)) == (sequence, pattern(number, 2, SIZE))


def test_the_ring_goes_past_one_that_takes_too_long(bed: Bed) -> None:
    """64 KiB hold three records of 16 KiB and their descriptions, not four."""
    prefill, decode = bed.open("p"), bed.open("d")
    late = reserve(prefill, 1, 8192)
    sums = fill(late, 1, 8192)
    for number in (2, 3):
        export(prefill, number, 8192)
    assert late.valid
    export(prefill, 4, 8192)

    assert not late.valid
    assert reason_of(late.publish, sums) == MissReason.OVERWRITTEN
    assert reason_of(decode.lookup, "p", 1, handle(1)) == MissReason.MISSING
    for number in (2, 3, 4):
        assert read(decode, decode.lookup("p", 1, handle(number)), 2, 8192) == pattern(number, 2, 8192)


def test_a_full_index_goes_past_the_oldest_reservation(bed: Bed) -> None:
    prefill, decode = bed.open("p", index_slots=4), bed.open("d")
    late = reserve(prefill, 1)
    sums = fill(late, 1)
    for number in range(2, 5):
        export(prefill, number, SIZE)
    assert late.valid
    export(prefill, 5, SIZE)
    assert not late.valid
    assert reason_of(late.publish, sums) == MissReason.OVERWRITTEN
    assert decode.lookup("p", 1, handle(5)).sequence == 4


def test_a_reservation_leaves_the_handles_record_alone_until_it_is_published(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    early = export(prefill, 1, SIZE)
    again = reserve(prefill, 1)
    fill(again, 8)
    assert decode.lookup("p", 1, handle(1)) == early
    again.abandon()
    assert read(decode, decode.lookup("p", 1, handle(1)), 2, SIZE) == pattern(1, 2, SIZE)


def test_of_two_reservations_of_a_handle_the_one_published_later_counts(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    one, other = reserve(prefill, 1), reserve(prefill, 1)
    sums, other_sums = fill(one, 8), fill(other, 9)
    early = other.publish(other_sums)
    late = one.publish(sums)

    found = decode.lookup("p", 1, handle(1))
    assert (found, found.sequence) == (late, 2)
    assert read(decode, found, 2, SIZE) == pattern(8, 2, SIZE)
    assert reason_of(read, decode, early, 2, SIZE) == MissReason.OVERWRITTEN


def test_an_export_of_the_same_handle_in_between_counts_until_the_reservation_is_published(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    reservation = reserve(prefill, 1)
    sums = fill(reservation, 9)
    export(prefill, 1, SIZE)
    assert read(decode, decode.lookup("p", 1, handle(1)), 2, SIZE) == pattern(1, 2, SIZE)
    reservation.publish(sums)
    assert read(decode, decode.lookup("p", 1, handle(1)), 2, SIZE) == pattern(9, 2, SIZE)


def test_a_pinned_record_of_the_handle_gives_way_to_the_published_one(bed: Bed) -> None:
    prefill = bed.open("p", pinned_bytes=8192)
    data = [[memoryview(bytearray(plane))] for plane in pattern(1, 2, SIZE)]
    prefill.export(handle(1), range(4), FIRST, False, data, pinned=True)
    reservation = reserve(prefill, 1)
    sums = fill(reservation, 9)
    assert prefill.pinned_free_bytes < 8192
    reservation.publish(sums)
    assert prefill.pinned_free_bytes == 8192
    assert not prefill.own_lookup(handle(1)).place.pinned


def test_an_unchecked_record_has_no_checksums_and_is_read_as_it_stands(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    reservation = reserve(prefill, 1, checked=False)
    fill(reservation, 1)
    assert reason_of(reservation.publish, [1, 2]) == MissReason.LAYOUT
    reservation.publish()

    found = decode.lookup("p", 1, handle(1))
    assert (found.checksums, read(decode, found, 2, SIZE)) == ((), pattern(1, 2, SIZE))
    bed.damage(found, pattern(1, 2, SIZE)[0], 3)
    assert read(decode, found, 2, SIZE) != pattern(1, 2, SIZE)


def test_a_checked_record_that_was_damaged_is_refused(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    reservation = reserve(prefill, 1)
    record = reservation.publish(fill(reservation, 1))
    bed.damage(record, pattern(1, 2, SIZE)[0], 3)
    assert reason_of(read, decode, decode.lookup("p", 1, handle(1)), 2, SIZE) == MissReason.CHECKSUM


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_checksums_is_refused_and_the_right_one_still_taken(bed: Bed, count: int) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    reservation = reserve(prefill, 1)
    sums = fill(reservation, 1)
    assert reason_of(reservation.publish, [7] * count) == MissReason.LAYOUT
    assert reason_of(decode.lookup, "p", 1, handle(1)) == MissReason.MISSING
    assert reservation.valid
    reservation.publish(sums)
    assert read(decode, decode.lookup("p", 1, handle(1)), 2, SIZE) == pattern(1, 2, SIZE)


def test_a_plane_over_256_kib_has_a_checksum_for_each(bed: Bed) -> None:
    """Two planes of 300,000 bytes: a block of 262,144 and one of 37,856 each."""
    prefill, decode = bed.open("p", ring_bytes=4 * 2**20), bed.open("d")
    reservation = reserve(prefill, 1, 300_000)
    sums = fill(reservation, 1, 300_000)
    assert len(sums) == 4
    reservation.publish(sums)
    assert read(decode, decode.lookup("p", 1, handle(1)), 2, 300_000) == pattern(1, 2, 300_000)


def test_what_was_given_up_or_published_is_closed(bed: Bed) -> None:
    prefill = bed.open("p")
    given_up, published = reserve(prefill, 1), reserve(prefill, 2)
    sums = fill(given_up, 1), fill(published, 2)
    given_up.abandon()
    given_up.abandon()
    published.publish(sums[1])
    for closed, known in zip((given_up, published), sums, strict=True):
        assert not closed.valid
        assert reason_of(closed.publish, known) == MissReason.OVERWRITTEN
        with pytest.raises(ValueError, match="released"):
            closed.data[0] = 1
    published.abandon()
    assert prefill.own_lookup(handle(2)).sequence == 1
    assert reason_of(prefill.own_lookup, handle(1)) == MissReason.MISSING


def test_a_reservation_ends_with_its_bridge(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    reservation = reserve(prefill, 1)
    sums = fill(reservation, 1)
    prefill.close()
    assert not reservation.valid
    later = bed.open("p", epoch=2)
    export(later, 2, SIZE)
    assert not reservation.valid
    assert reason_of(reservation.publish, sums) == MissReason.OVERWRITTEN
    assert reason_of(decode.lookup, "p", 2, handle(1)) == MissReason.MISSING
    assert read(decode, decode.lookup("p", 2, handle(2)), 2, SIZE) == pattern(2, 2, SIZE)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ([8200, 8200], MissReason.LAYOUT),
        ([401, 400], MissReason.LAYOUT),
        ([400, 0], MissReason.LAYOUT),
        ([], MissReason.LAYOUT),
    ],
)
def test_planes_that_could_not_be_exported_cannot_be_reserved(
    bed: Bed, sizes: list[int], reason: MissReason
) -> None:
    """A quarter of 64 KiB is 16,384 bytes."""
    prefill = bed.open("p")
    assert reason_of(prefill.reserve, handle(1), range(4), FIRST, False, sizes) == reason
    assert prefill.reserve(handle(1), range(4), FIRST, False, [8192, 8192]).valid


def test_a_shard_without_a_ring_reserves_nothing(bed: Bed) -> None:
    decode = bed.open("d", ring_bytes=0)
    assert reason_of(decode.reserve, handle(1), range(4), FIRST, False, [4]) == MissReason.UNSUPPORTED


def test_ranks_are_the_shards_own_where_none_are_named(bed: Bed) -> None:
    prefill = bed.open("p")
    one, two = reserve(prefill, 1), reserve(prefill, 2, ranks=4)
    assert one.publish(fill(one, 1)).ranks == 1
    assert two.publish(fill(two, 2)).ranks == 4


# --- pinned --------------------------------------------------------------------------------------


def reserve_pinned(bridge: Bridge, number: int, size: int = SIZE) -> Reservation:
    return bridge.reserve(handle(number), range(4), FIRST, False, [size, size], checked=False, pinned=True)


def test_a_pinned_reservation_is_filled_and_outlives_the_ring(bed: Bed) -> None:
    prefill, decode = bed.open("p", pinned_bytes=8192), bed.open("d")
    reservation = reserve_pinned(prefill, 1)
    for number in range(2, 12):
        export(prefill, number, 8192)
    assert reservation.valid
    fill(reservation, 1)
    published = reservation.publish()
    for number in range(2, 12):
        export(prefill, number, 8192)
    found = decode.lookup("p", 1, handle(1))
    assert (found, found.place.pinned) == (published, True)
    assert read(decode, found, 2, SIZE) == pattern(1, 2, SIZE)
    assert prefill.release(handle(1)) is True
    assert prefill.pinned_free_bytes == 8192


def test_a_pinned_reservation_keeps_its_place_however_late_it_is(bed: Bed) -> None:
    prefill = bed.open("p", pinned_bytes=4096)
    late = reserve_pinned(prefill, 1, 1024)
    bed.clock.now_ns += 10**15
    assert reason_of(reserve_pinned, prefill, 2, 1024) == MissReason.PINNED_FULL
    fill(late, 1, 1024)
    late.publish()
    assert read(prefill, prefill.own_lookup(handle(1)), 2, 1024) == pattern(1, 2, 1024)


def test_a_pinned_reservation_that_is_given_up_gives_its_place_back_once(bed: Bed) -> None:
    prefill = bed.open("p", pinned_bytes=4096)
    given_up = reserve_pinned(prefill, 1)
    given_up.abandon()
    other = reserve_pinned(prefill, 2)
    given_up.abandon()
    assert prefill.pinned_free_bytes == 4096 - 896  # 800 bytes, and 24 in front of them, in lines of 64
    fill(other, 2)
    other.publish()
    other.abandon()
    assert read(prefill, prefill.own_lookup(handle(2)), 2, SIZE) == pattern(2, 2, SIZE)


def test_a_reservation_cannot_be_pinned_where_there_is_no_room(bed: Bed) -> None:
    plain, prefill = bed.open("q"), bed.open("p", pinned_bytes=4096)
    assert reason_of(reserve_pinned, plain, 1) == MissReason.UNSUPPORTED
    assert reason_of(reserve_pinned, prefill, 1, 4096) == MissReason.LAYOUT
    late = reserve_pinned(prefill, 1)
    prefill.close()
    assert not late.valid
    late.abandon()
