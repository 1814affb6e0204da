"""What every bridge refuses, on files and in memory, and the reason it gives."""

from __future__ import annotations

import pytest

from tests.unit.bridge.conftest import (
    FIRST,
    GUARD,
    RING_BYTES,
    Bed,
    cut,
    export,
    handle,
    pattern,
    read,
    reason_of,
    runs_of,
)
from tgi_patches.bridge import ArenaError, FirstToken
from tgi_patches.contract import Fingerprint, MissReason


def test_what_was_never_there_is_missing(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    export(prefill, 1)
    assert reason_of(decode.lookup, "p", 1, handle(2)) == MissReason.MISSING
    assert reason_of(decode.lookup, "nobody", 1, handle(1)) == MissReason.MISSING
    assert reason_of(decode.lookup, "p", 1, "no handle") == MissReason.MISSING
    assert reason_of(decode.lookup, "p", 1, handle(1)[:-2]) == MissReason.MISSING
    assert reason_of(decode.own_lookup, handle(1)) == MissReason.MISSING


def test_a_record_expires_with_its_time_to_live(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    export(prefill, 1)
    bed.clock.now_ns += 9_999_999_999
    assert decode.lookup("p", 1, handle(1)).handle == handle(1)
    bed.clock.now_ns += 1
    assert reason_of(decode.lookup, "p", 1, handle(1)) == MissReason.MISSING


def test_another_epoch_than_the_owners_is_refused(bed: Bed) -> None:
    prefill, decode = bed.open("p", epoch=2), bed.open("d")
    export(prefill, 1)
    assert reason_of(decode.lookup, "p", 1, handle(1)) == MissReason.EPOCH
    assert decode.lookup("p", 2, handle(1)).epoch == 2


def test_a_restart_invalidates_everything_before_it(bed: Bed) -> None:
    prefill, decode = bed.open("p", epoch=1), bed.open("d")
    export(prefill, 1)
    record = decode.lookup("p", 1, handle(1))
    prefill.close()
    again = bed.open("p", epoch=2)

    assert reason_of(read, decode, record, 2, 400) == MissReason.EPOCH
    assert reason_of(decode.lookup, "p", 1, handle(1)) == MissReason.EPOCH
    assert reason_of(decode.lookup, "p", 2, handle(1)) == MissReason.MISSING
    export(again, 2)
    assert read(decode, decode.lookup("p", 2, handle(2)), 2, 400) == pattern(2, 2, 400)


def test_records_outlive_an_owner_that_stopped(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    export(prefill, 1)
    prefill.close()
    assert read(decode, decode.lookup("p", 1, handle(1)), 2, 400) == pattern(1, 2, 400)


def test_another_fingerprint_is_refused_but_other_geometry_is_not(bed: Bed) -> None:
    export(bed.open("p"), 1)
    other = bed.open("d1", fingerprint=Fingerprint("smol", "r2", "tok", "float32", "float32", 2, 3, 64))
    blocks = bed.open(
        "d2", fingerprint=Fingerprint("smol", "r1", "tok", "float32", "float32", 2, 3, 64, block_size=256)
    )
    assert reason_of(other.lookup, "p", 1, handle(1)) == MissReason.FINGERPRINT
    assert read(blocks, blocks.lookup("p", 1, handle(1)), 2, 400) == pattern(1, 2, 400)


def test_only_a_quarter_of_the_ring_may_be_exported(bed: Bed) -> None:
    prefill = bed.open("p")
    assert prefill.record_limit_bytes == 16384
    export(prefill, 1, size=8192)
    assert reason_of(export, prefill, 2, size=8196) == MissReason.LAYOUT
    assert read(prefill, prefill.own_lookup(handle(1)), 2, 8192) == pattern(1, 2, 8192)


def test_a_record_with_more_ids_than_the_ring_holds_is_refused(bed: Bed) -> None:
    prefill = bed.open("p")
    planes = runs_of(pattern(1, 1, 16384))
    ids = range(16384)
    assert reason_of(prefill.export, handle(1), ids, FIRST, False, planes) == MissReason.LAYOUT


@pytest.mark.parametrize("sizes", [[], [400, 0], [400, 402]])
def test_planes_that_do_not_hold_whole_tokens_are_refused(bed: Bed, sizes: list[int]) -> None:
    prefill = bed.open("p")
    planes = [[memoryview(bytes(size))] for size in sizes]
    assert reason_of(prefill.export, handle(1), range(4), FIRST, False, planes) == MissReason.LAYOUT
    assert reason_of(prefill.own_lookup, handle(1)) == MissReason.MISSING


def test_a_prompt_without_tokens_is_refused(bed: Bed) -> None:
    prefill = bed.open("p")
    planes = runs_of(pattern(1, 1, 8))
    assert reason_of(prefill.export, handle(1), [], FIRST, False, planes) == MissReason.LAYOUT


def test_more_top_tokens_than_a_slot_holds_are_refused(bed: Bed) -> None:
    prefill, planes = bed.open("p"), runs_of(pattern(1, 1, 8))
    eleven = tuple((token, -float(token)) for token in range(11))
    prefill.export(handle(1), [1], FirstToken(1, 0.0, eleven), False, planes)
    assert prefill.own_lookup(handle(1)).first.top == eleven
    twelve = FirstToken(1, 0.0, (*eleven, (11, -11.0)))
    assert reason_of(prefill.export, handle(2), [1], twelve, False, planes) == MissReason.LAYOUT


@pytest.mark.parametrize(("planes", "size", "tokens"), [(1, 400, 4), (3, 400, 4), (2, 396, 4), (2, 500, 5)])
def test_targets_of_another_shape_are_refused_untouched(
    bed: Bed, planes: int, size: int, tokens: int
) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    export(prefill, 1, size=400, tokens=4)
    record = decode.lookup("p", 1, handle(1))
    targets = [bytearray([GUARD]) * size for _ in range(planes)]
    views = [cut(target) for target in targets]
    assert reason_of(decode.read_into, record, views, tokens) == MissReason.LAYOUT
    assert all(set(target) == {GUARD} for target in targets)


def test_planes_in_another_order_are_refused(bed: Bed) -> None:
    """Their bytes add up, and no checksum would be wrong in every case."""
    prefill = bed.open("p")
    record = prefill.export(handle(1), range(2), FIRST, False, [cut(bytearray(20)), cut(bytearray(500))])
    targets = [cut(bytearray(500)), cut(bytearray(20))]
    assert reason_of(prefill.read_into, record, targets, 2) == MissReason.LAYOUT


def test_a_shard_without_a_ring_exports_nothing(bed: Bed) -> None:
    decode = bed.open("d", ring_bytes=0)
    assert (decode.ring_bytes, decode.record_limit_bytes) == (0, 0)
    assert reason_of(export, decode, 1) == MissReason.UNSUPPORTED
    assert reason_of(decode.own_lookup, handle(1)) == MissReason.MISSING


def test_a_second_writer_is_refused_until_the_first_one_stops(bed: Bed) -> None:
    first = bed.open("p")
    with pytest.raises(ArenaError, match="Another"):
        bed.open("p", epoch=2)
    export(first, 1)  # still the owner
    first.close()
    export(bed.open("p", epoch=2), 2)


@pytest.mark.parametrize("offset", [0, 399, 799])
def test_a_damaged_byte_is_noticed(bed: Bed, offset: int) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    record = export(prefill, 1)
    bed.damage(record, b"".join(pattern(1, 2, 400)), offset)
    found = decode.lookup("p", 1, handle(1))
    assert reason_of(read, decode, found, 2, 400) == MissReason.CHECKSUM


@pytest.mark.parametrize("offset", [0, 262_143, 262_144, 1_435_199])
def test_a_damaged_byte_is_noticed_in_every_block(bed: Bed, offset: int) -> None:
    prefill, decode = bed.open("p", ring_bytes=128 * RING_BYTES), bed.open("d")
    record = export(prefill, 1, size=717_600, tokens=100)
    bed.damage(record, b"".join(pattern(1, 2, 717_600)), offset)
    found = decode.lookup("p", 1, handle(1))
    assert reason_of(read, decode, found, 2, 717_600) == MissReason.CHECKSUM


def test_a_damaged_byte_of_a_token_that_is_not_asked_for_is_noticed_too(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    record = export(prefill, 1, size=400, tokens=4)
    bed.damage(record, b"".join(pattern(1, 2, 400)), 399)
    found = decode.lookup("p", 1, handle(1))
    views = [[memoryview(bytearray(300))] for _ in range(2)]
    assert reason_of(decode.read_into, found, views, 3) == MissReason.CHECKSUM
