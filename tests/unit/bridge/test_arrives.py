"""What every bridge delivers, on files and in memory."""

from __future__ import annotations

import random

import pytest
import xxhash

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
    runs_of,
)
from tgi_patches.bridge import FirstToken


def test_a_record_arrives_whole_in_differently_cut_runs(bed: Bed) -> None:
    first = FirstToken(7, -1.5, ((7, -1.5), (9, -2.25), (4, -3.0)))
    planes = pattern(1, planes=4, size=7 * 96)
    prefill, decode = bed.open("p"), bed.open("d")
    prefill.export(handle(1), [5, 0, 2**32 - 1, 8, 1, 2, 3], first, True, runs_of(planes, [96, 97 * 5]))

    record = decode.lookup("p", 1, handle(1))

    assert record.token_ids == (5, 0, 2**32 - 1, 8, 1, 2, 3)
    assert (record.first, record.ended, record.kv_bytes) == (first, True, 4 * 7 * 96)
    assert (record.handle, record.shard, record.epoch, record.sequence) == (handle(1), "p", 1, 1)
    assert read(decode, record, 4, 7 * 96, cuts=[96 * 2, 96 * 2 + 1, 500]) == planes


def test_planes_may_differ_in_bytes_per_token(bed: Bed) -> None:
    data = [random.Random(1).randbytes(3 * 10), random.Random(2).randbytes(3 * 250)]
    prefill, decode = bed.open("p"), bed.open("d")
    prefill.export(handle(1), [1, 2, 3], FIRST, False, runs_of(data))

    targets = [bytearray(30), bytearray(750)]
    decode.read_into(decode.lookup("p", 1, handle(1)), [cut(target) for target in targets], 3)

    assert [bytes(target) for target in targets] == data


@pytest.mark.parametrize("tokens", [1, 5, 6])
def test_a_part_of_the_tokens_arrives_and_nothing_behind_it_is_touched(bed: Bed, tokens: int) -> None:
    planes = pattern(2, planes=3, size=7 * 33)
    prefill, decode = bed.open("p"), bed.open("d")
    prefill.export(handle(2), range(7), FIRST, False, runs_of(planes))
    targets = [bytearray([GUARD]) * (7 * 33) for _ in planes]

    views = [cut(target)[0][: tokens * 33] for target in targets]
    decode.read_into(decode.lookup("p", 1, handle(2)), [[view] for view in views], tokens)

    for target, plane in zip(targets, planes, strict=True):
        assert target[: tokens * 33] == plane[: tokens * 33]
        assert set(target[tokens * 33 :]) == {GUARD}


def test_no_tokens_are_read_as_nothing(bed: Bed) -> None:
    prefill, decode = bed.open("p"), bed.open("d")
    prefill.export(handle(1), [3], FIRST, False, runs_of(pattern(1, 2, 64)))
    decode.read_into(decode.lookup("p", 1, handle(1)), [[], []], 0)


def test_a_record_of_many_blocks_arrives_from_many_runs(bed: Bed) -> None:
    tokens, row = 100, 7 * 1024 + 8
    planes = pattern(3, planes=2, size=tokens * row)
    prefill, decode = bed.open("p", ring_bytes=128 * RING_BYTES), bed.open("d")
    cuts = [row, 3 * row, 50 * row, 51 * row]
    record = prefill.export(handle(3), range(tokens), FIRST, False, runs_of(planes, cuts))

    assert len(record.checksums) == 6  # 1,435,200 bytes in blocks of 262,144
    found = decode.lookup("p", 1, handle(3))
    assert read(decode, found, 2, tokens * row, cuts=[10 * row, 90 * row]) == planes


@pytest.mark.parametrize(
    ("size", "cuts"),
    [
        (2**18, []),
        (2**18 + 1, []),
        (2**20, []),
        (2**20, [1]),
        (1_300_000, [2**18, 2**18 + 12_288]),
        (1_300_000, [100_000, 700_000]),
        (600_000, [12_288 * n for n in range(1, 48)]),
    ],
)
def test_every_plane_is_hashed_in_blocks_of_its_own(bed: Bed, size: int, cuts: list[int]) -> None:
    """Whatever the runs are, on both sides."""
    planes = [random.Random(1).randbytes(size), random.Random(2).randbytes(100)]
    wanted = [planes[0][start : start + 262_144] for start in range(0, size, 262_144)] + [planes[1]]
    prefill, decode = bed.open("p", ring_bytes=128 * RING_BYTES), bed.open("d")
    source = [cut(bytearray(planes[0]), cuts), cut(bytearray(planes[1]))]
    record = prefill.export(handle(1), [1], FIRST, False, source)
    assert list(record.checksums) == [xxhash.xxh3_64_intdigest(block) for block in wanted]
    for other in ([], cuts):
        targets = [bytearray(size), bytearray(100)]
        found = decode.lookup("p", 1, handle(1))
        decode.read_into(found, [cut(targets[0], other), cut(targets[1])], 1)
        assert [bytes(target) for target in targets] == planes


def test_several_shards_read_the_same_record(bed: Bed) -> None:
    export(bed.open("p"), 1, size=4096)
    readers = [bed.open(f"d{number}", ring_bytes=0) for number in range(3)]
    records = [reader.lookup("p", 1, handle(1)) for reader in readers]
    for reader, record in zip(readers, records, strict=True):
        assert read(reader, record, 2, 4096) == pattern(1, 2, 4096)


def test_a_shard_reads_its_own_records(bed: Bed) -> None:
    mixed = bed.open("m")
    exported = export(mixed, 1)
    assert mixed.own_lookup(handle(1)) == exported
    assert mixed.lookup("m", 1, handle(1)) == exported
    assert read(mixed, exported, 2, 400) == pattern(1, 2, 400)


def test_an_exported_record_equals_the_one_looked_up(bed: Bed) -> None:
    exported = export(bed.open("p"), 1)
    assert bed.open("d").lookup("p", 1, handle(1)) == exported
