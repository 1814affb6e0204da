"""A paged cache moved by streams: right bytes in right places, in the right order, over a real arena.

The device is the stand-in whose copies happen only when the test lets them: what is used too early is seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.bridge.one_file import handle
from tests.unit.device.bed import FIRST, SLOTS, Bed, Pools, noise, pools, rows
from tgi_patches.bridge import Record, Reservation
from tgi_patches.contract import BridgeMiss, MissReason
from tgi_patches.device.memory import address_of
from tgi_patches.device.pool import Limits
from tgi_patches.heads import Share, shares
from tgi_patches.kv.staged import StagedPool
from tgi_patches.transport.exchange import Offer, hash_of, packed

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    made = Bed(tmp_path / "arenas")
    yield made
    made.writer.close()
    made.reader.close()


DIRECT = pytest.mark.parametrize("direct", [True, False], ids=["into the ring", "through a buffer"])


@DIRECT
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_export_holds_the_bytes_of_its_slots(bed: Bed, dtype: torch.dtype, direct: bool) -> None:
    cache = pools(dtype)
    pool = bed.pool(cache, direct=direct)
    bed.export(pool)
    bed.streams.step()
    pool.poll()
    assert bed.outcomes == ["published"]
    assert bed.read() == rows(cache, SLOTS)
    assert bed.record().checksums == ()


@DIRECT
def test_nothing_is_published_before_the_copy_has_ended(bed: Bed, direct: bool) -> None:
    pool = bed.pool(pools(), direct=direct)
    bed.export(pool)
    pool.poll()
    assert bed.outcomes == []
    with pytest.raises(BridgeMiss) as caught:
        bed.record()
    assert caught.value.reason is MissReason.MISSING
    assert "follow" not in bed.streams.calls  # the compute stream goes on beside it


def test_the_slots_are_free_as_soon_as_export_returns(bed: Bed) -> None:
    """TGI's router gives them to somebody else before the copy is done."""
    cache = pools()
    wanted = rows(cache, SLOTS)
    pool = bed.pool(cache)
    bed.export(pool)
    for pair in cache:
        for plane in pair:
            plane.zero_()
    bed.streams.step()
    pool.poll()
    assert bed.read() == wanted


@DIRECT
def test_records_are_published_in_their_order_each_with_its_own_bytes(bed: Bed, direct: bool) -> None:
    cache = pools()
    pool = bed.pool(cache, direct=direct)
    groups = {1: [0, 1, 2], 2: [5], 3: [9, 8, 7, 6]}
    for number, slots in groups.items():
        bed.export(pool, number, slots)
    for _ in groups:
        bed.streams.step()
    pool.poll()
    assert bed.outcomes == ["published"] * 3
    for number, slots in groups.items():
        assert bed.read(number) == rows(cache, slots)
    sequences = [bed.record(number).sequence for number in groups]
    assert sequences == sorted(sequences)


@DIRECT
def test_a_late_copy_is_told_as_failed_and_blocks_the_ring_until_it_ends(bed: Bed, direct: bool) -> None:
    pool = bed.pool(pools(), direct=direct)
    bed.export(pool)
    bed.now_s = 5.0
    pool.poll()
    assert bed.outcomes == ["error"]
    with pytest.raises(BridgeMiss, match="never ended"):
        bed.export(pool, 2)
    with pytest.raises(BridgeMiss, match="never ended"):
        pool.outbox(SLOTS)
    bed.streams.step()
    bed.export(pool, 3)
    bed.streams.step()
    pool.poll()
    assert bed.outcomes == ["error", "published"]
    with pytest.raises(BridgeMiss):
        bed.record(1)


class Refusing:
    """A place whose record cannot be published."""

    valid = True
    abandoned = False

    def __init__(self, size_bytes: int) -> None:
        self.data = memoryview(bytearray(size_bytes))

    def publish(self, checksums: Sequence[int] = ()) -> Record:
        raise BridgeMiss(MissReason.LAYOUT)

    def abandon(self) -> None:
        self.abandoned = True


@DIRECT
def test_a_place_whose_record_cannot_be_published_is_given_back(bed: Bed, direct: bool) -> None:
    pool = bed.pool(pools(), direct=direct)
    place = Refusing(sum(pool.row_bytes) * len(SLOTS))
    pool.export(SLOTS, lambda sizes: place, bed.done)
    bed.streams.step()
    pool.poll()
    assert (bed.outcomes, place.abandoned) == (["layout"], True)


@DIRECT
def test_a_record_is_copied_into_the_pinned_region(bed: Bed, direct: bool) -> None:
    cache = pools()
    pool = bed.pool(cache, direct=direct)
    bed.export(pool, pinned=True)
    bed.streams.step()
    pool.poll()
    assert bed.outcomes == ["published"]
    assert bed.record().place.pinned
    assert bed.read() == rows(cache, SLOTS)


@DIRECT
def test_the_pinned_place_of_a_late_copy_is_free_and_not_written_until_the_copy_ends(
    bed: Bed, direct: bool
) -> None:
    cache = pools()
    pool = bed.pool(cache, direct=direct)
    bed.export(pool, pinned=True)
    held = bed.writer.pinned_free_bytes
    bed.now_s = 5.0
    pool.poll()
    assert bed.outcomes == ["error"]
    assert bed.writer.pinned_free_bytes == 4096 > held
    with pytest.raises(BridgeMiss, match="never ended"):
        bed.export(pool, 2, pinned=True)
    assert bed.writer.pinned_free_bytes == 4096
    bed.streams.step()
    bed.export(pool, 3, pinned=True)
    bed.streams.step()
    pool.poll()
    assert bed.outcomes == ["error", "published"]
    assert bed.read(3) == rows(cache, SLOTS)


def test_a_buffer_that_the_device_may_still_write_to_is_not_used_again(bed: Bed) -> None:
    pool = bed.pool(pools(), direct=False)
    bed.export(pool)
    late = bed.streams.queued[0][0].data_ptr()
    bed.now_s = 5.0
    pool.poll()
    assert pool.copies.counts == {"abandoned": 1}
    assert address_of(pool.inbox(SLOTS).planes[0][0]) != late


def test_one_buffer_serves_exports_that_follow_each_other(bed: Bed) -> None:
    pool = bed.pool(pools(), direct=False)
    for number in (1, 2, 3):
        bed.export(pool, number)
        bed.streams.step()
        pool.poll()
    assert bed.streams.calls.count("pinned") == 1


def test_a_buffer_that_the_device_still_reads_is_not_filled_again(bed: Bed) -> None:
    """On a real device the host goes on while the compute stream waits."""
    exported(bed, pools())
    pool = bed.pool(pools(seed=50))
    first = pool.inbox(SLOTS)
    arrive(bed, first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(bed.streams), "follow", lambda streams, event: None)
        first.commit()
    reading = bed.streams.queued[0][1].data_ptr()
    assert address_of(pool.inbox(SLOTS).planes[0][0]) != reading
    bed.streams.step()
    assert address_of(pool.inbox(SLOTS).planes[0][0]) == reading


def test_a_copy_that_cannot_begin_gives_its_place_up(bed: Bed) -> None:
    pool = bed.pool(pools())
    places: list[Reservation] = []

    def reserve(sizes: Sequence[int]) -> Reservation:
        places.append(bed.reserve(1, len(SLOTS))(sizes))
        return places[-1]

    def refuse(*args: object) -> None:
        raise RuntimeError("CUDA error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(bed.streams), "copy", refuse)
        with pytest.raises(RuntimeError, match="CUDA error"):
            pool.export(SLOTS, reserve, bed.done)
    with pytest.raises(ValueError, match="released"):
        places[0].data[0] = 1
    assert (len(pool.copies), bed.outcomes) == (0, [])


def test_more_bytes_than_the_bound_wait_for_the_oldest_copy(bed: Bed) -> None:
    cache = pools()
    record_bytes = len(SLOTS) * 4 * 2 * 8 * 2
    pool = bed.pool(cache, limits=Limits(bytes_max=2 * record_bytes))
    for number in (1, 2):
        bed.export(pool, number)
    assert bed.outcomes == []
    bed.export(pool, 3)
    assert bed.outcomes == ["published"]
    assert bed.read(1) == rows(cache, SLOTS)


def test_a_place_that_cannot_be_had_raises_and_nothing_is_under_way(bed: Bed) -> None:
    pool = bed.pool(pools())

    def refused(sizes: Sequence[int]) -> Reservation:
        raise BridgeMiss(MissReason.LAYOUT, "too large")

    with pytest.raises(BridgeMiss, match="too large"):
        pool.export(SLOTS, refused, bed.done)
    assert (len(pool.copies), bed.streams.queued, bed.outcomes) == (0, [], [])


@DIRECT
def test_a_record_whose_place_was_overtaken_is_a_counted_miss(bed: Bed, direct: bool) -> None:
    pool = bed.pool(pools(), direct=direct)
    bed.export(pool)
    for number in range(2, 8):  # each a fifth of the ring
        bed.writer.export(handle(number), [1], FIRST, False, [[memoryview(bytes(200_000))]])
    bed.streams.step()
    pool.poll()
    assert bed.outcomes == ["overwritten"]
    if not direct:  # and nothing was written where others are now
        for number in (5, 6, 7):
            assert bed.read(number, planes=1) == [bytes(200_000)]


def test_the_end_publishes_what_is_under_way(bed: Bed) -> None:
    cache = pools()
    pool = bed.pool(cache)
    bed.export(pool)
    pool.close()
    assert bed.outcomes == ["published"]
    assert bed.read() == rows(cache, SLOTS)


# --- import ---


def arrive(bed: Bed, inbox: object, number: int = 1) -> None:
    record = bed.record(number)
    bed.reader.read_into(record, inbox.planes, len(record.token_ids))  # type: ignore[attr-defined]


def exported(bed: Bed, cache: Pools, slots: Sequence[int] = SLOTS, number: int = 1) -> None:
    planes = StagedPool(cache, heads_first=False).outbox(slots)
    bed.writer.export(handle(number), range(len(slots)), FIRST, False, planes)


@pytest.mark.parametrize("block", [1, 4, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_import_fills_its_slots_and_nothing_else(bed: Bed, dtype: torch.dtype, block: int) -> None:
    source = pools(dtype)
    target = pools(dtype, blocks=max(2, 24 // block), block=block, seed=50)
    everything = range(len(target[0][0]) * block)
    wanted = {slot: rows(target, [slot]) for slot in everything}
    places = [0, 1, 17, 5, 4, 20]
    wanted |= {place: rows(source, [slot]) for place, slot in zip(places, SLOTS, strict=True)}
    exported(bed, source)
    inbox = bed.pool(target).inbox(places)
    arrive(bed, inbox)
    inbox.commit()
    assert {slot: rows(target, [slot]) for slot in everything} == wanted


def test_nothing_reaches_the_cache_before_the_commit_and_positions_before_the_first_never(bed: Bed) -> None:
    source, target = pools(), pools(seed=50)
    before, kept = rows(target, range(24)), rows(target, SLOTS[:2])
    exported(bed, source)
    inbox = bed.pool(target).inbox(SLOTS, first=2)
    arrive(bed, inbox)
    assert rows(target, range(24)) == before
    inbox.commit()
    assert rows(target, SLOTS[:2]) == kept
    assert rows(target, SLOTS[2:]) == rows(source, SLOTS[2:])


def test_the_scatter_waits_for_the_copy_and_the_host_does_not(bed: Bed) -> None:
    exported(bed, pools())
    inbox = bed.pool(pools(seed=50)).inbox(SLOTS)
    arrive(bed, inbox)
    bed.streams.calls.clear()
    inbox.commit()
    assert bed.streams.calls == ["mark", "copy", "follow"]


def test_what_a_repair_needs_is_all_that_is_kept(bed: Bed) -> None:
    exported(bed, pools())
    inbox = bed.pool(pools(seed=50)).inbox(SLOTS)
    arrive(bed, inbox)
    inbox.commit()
    assert inbox.last_kv is not None
    assert sum(row.untyped_storage().nbytes() for row in inbox.last_kv) == 4 * 32


def test_a_repair_restores_the_last_slot_whatever_came_since(bed: Bed) -> None:
    source, target = pools(), pools(seed=50)
    exported(bed, source)
    pool = bed.pool(target)
    inbox = pool.inbox(SLOTS)
    arrive(bed, inbox)
    inbox.commit()
    for pair in target:
        for plane in pair:
            plane.view(torch.uint8).fill_(0xAA)
    other = pool.inbox([10, 11, 12, 13, 14, 15])
    arrive(bed, other)
    inbox.repair()
    assert rows(target, SLOTS[-1:]) == rows(source, SLOTS[-1:])
    assert rows(target, SLOTS[:-1]) == [b"\xaa" * (16 * 2 * 5)] * 4


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_heads_come_from_the_ranks_that_hold_them(bed: Bed, writers: int, readers: int) -> None:
    """A model of 4 KV heads, split over other numbers of ranks on either side."""
    whole = pools(heads=4)
    for writer in range(writers):
        each = 4 // writers
        part = [
            (
                k[:, :, writer * each :][:, :, :each].contiguous(),
                v[:, :, writer * each :][:, :, :each].contiguous(),
            )
            for k, v in whole
        ]
        exported(bed, part, number=10 + writer)
    for rank in range(readers):
        each = 4 // readers
        target = pools(heads=each, seed=90)
        pool = bed.pool(target)
        inboxes = []
        for share in shares(4, writers, rank, readers):
            inbox = pool.inbox(SLOTS, 0, share)
            arrive(bed, inbox, 10 + share.rank)
            inboxes.append(inbox)
        for inbox in inboxes:
            inbox.commit()
        own = [(k[:, :, rank * each :][:, :, :each], v[:, :, rank * each :][:, :, :each]) for k, v in whole]
        wanted = rows([(k.contiguous(), v.contiguous()) for k, v in own], SLOTS)
        assert rows(target, SLOTS) == wanted
        for pair in target:
            for plane in pair:
                plane.zero_()
        for inbox in inboxes:
            inbox.repair()
        assert rows(target, SLOTS[-1:]) == [plane[-each * 16 :] for plane in wanted]


def test_a_record_is_taken_straight_from_memory_once_it_was_checked_after_the_copy(bed: Bed) -> None:
    source, target = pools(), pools(seed=50)
    reservation = bed.reserve(1, len(SLOTS))([len(SLOTS) * 32] * 4)
    reservation.data[:] = b"".join(rows(source, SLOTS))
    data = memoryview(bytes(reservation.data))
    reservation.publish()
    record = bed.record()
    asked: list[int] = []

    def check() -> None:
        asked.append(len(bed.streams.queued))
        bed.reader.read_into(record, [], 0)

    bed.pool(target).inbox(SLOTS).fetch(data, check)
    assert asked == [0]  # no copy was under way any more
    assert rows(target, SLOTS) == rows(source, SLOTS)


def test_a_record_that_was_overwritten_during_the_copy_leaves_the_cache_alone(bed: Bed) -> None:
    exported(bed, pools())
    target = pools(seed=50)
    before = rows(target, range(24))
    record = bed.record()
    for number in range(2, 8):
        bed.writer.export(handle(number), [1], FIRST, False, [[memoryview(bytes(200_000))]])
    inbox = bed.pool(target).inbox(SLOTS)
    with pytest.raises(BridgeMiss) as caught:
        inbox.fetch(memoryview(bytes(record.kv_bytes)), lambda: bed.reader.read_into(record, [], 0))
    assert caught.value.reason is MissReason.OVERWRITTEN
    assert rows(target, range(24)) == before
    inbox.repair()
    assert rows(target, range(24)) == before


def test_a_record_of_another_size_is_not_taken(bed: Bed) -> None:
    with pytest.raises(BridgeMiss) as caught:
        bed.pool(pools()).inbox(SLOTS).fetch(memoryview(bytes(100)), lambda: None)
    assert caught.value.reason is MissReason.LAYOUT


def test_a_record_that_a_link_brought_goes_from_device_to_device(bed: Bed) -> None:
    source, target = pools(), pools(seed=50)
    made = Offer(
        handle(1),
        1,
        1,
        0,
        1,
        len(SLOTS),
        (32,) * 4,
        hash_of(range(len(SLOTS))),
        first_id=5,
        first_logprob=-0.5,
    )
    payload = packed(bed.pool(source).gathered(SLOTS), made)
    inbox = bed.pool(target).inbox(SLOTS, first=1)
    before = rows(target, SLOTS[:1])
    with pytest.raises(BridgeMiss, match="layout"):
        inbox.accept(payload)
    inbox.accept(payload[: made.kv_bytes])
    assert rows(target, SLOTS[:1]) == before
    assert rows(target, SLOTS[1:]) == rows(source, SLOTS[1:])
    assert "pinned" not in bed.streams.calls


def test_an_outbox_is_what_the_pool_on_the_cpu_gives(bed: Bed) -> None:
    cache = pools(torch.bfloat16)
    planes = bed.pool(cache).outbox(SLOTS)
    assert [b"".join(plane) for plane in planes] == rows(cache, SLOTS)


def test_keys_and_values_of_unlike_width_follow_each_other_without_gaps(bed: Bed) -> None:
    """Rows of 6 and of 8 bytes: both are moved as words of 2."""
    cache = [(noise(torch.float16, 3, 2, 1, 3, seed=1), noise(torch.float16, 3, 2, 1, 4, seed=2))]
    pool = bed.pool(cache)
    bed.export(pool, slots=[5, 1, 2])
    pool.close()
    assert bed.read(planes=2) == rows(cache, [5, 1, 2])


@pytest.mark.parametrize(
    "cache",
    [torch.zeros(2, 3, 4), torch.zeros(2, 4, 3, 8).transpose(1, 2)],
    ids=["three dimensions", "heads before tokens"],
)
def test_a_cache_of_another_order_is_refused(bed: Bed, cache: Tensor) -> None:
    with pytest.raises(BridgeMiss) as caught:
        bed.pool([(cache, cache)])
    assert caught.value.reason is MissReason.LAYOUT


def test_a_cache_made_for_inference_is_moved_and_published_outside_of_it(bed: Bed) -> None:
    """TGI computes in inference mode; its event loop polls."""
    with torch.inference_mode():
        cache = pools()
        pool = bed.pool(cache, direct=False)
        bed.export(pool)
    bed.streams.step()
    pool.poll()
    assert bed.read() == rows(cache, SLOTS)


def test_whole_shares_are_taken_as_no_share(bed: Bed) -> None:
    source, target = pools(), pools(seed=50)
    exported(bed, source)
    inbox = bed.pool(target).inbox(SLOTS, 0, Share(0, 2, 0, 0, 2, whole=True))
    arrive(bed, inbox)
    inbox.commit()
    assert rows(target, SLOTS) == rows(source, SLOTS)
