"""The single writer of an arena file.

Publishing a record, in this order, so that a reader or a crash at any point sees a miss at worst:
tail up -> slots of overwritten records 0 -> bytes -> slot with sequence 0 -> sequence.
Releasing a pinned record, or taking an expired one's place: slot 0, then its bytes are free.
A new owner: epoch 0 -> index cleared, ring restarted -> the new epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tgi_patches.bridge import ArenaError, FirstToken, Place, Planes
from tgi_patches.bridge.blocks import checksum, copy_in
from tgi_patches.bridge.files import Mapping, make_directories, open_for_writing, unlock
from tgi_patches.bridge.layout import (
    HEADER_BYTES,
    KEY_BYTES,
    MAGIC,
    SLOT_BYTES,
    VERSION,
    ArenaLayout,
    Body,
    Described,
    Entry,
    Word,
    check_fits,
    measure,
    measure_sizes,
    pack_entry,
)
from tgi_patches.bridge.pinned import PinnedRegion
from tgi_patches.bridge.ring import Ring, align
from tgi_patches.contract import BridgeMiss, MissReason


class Reserved:
    """A place in the ring, or the pinned region, until it is published or given up."""

    __slots__ = ("_finish", "_open", "_place", "_writer", "data")

    def __init__(
        self,
        writer: ArenaWriter,
        place: Place,
        body: Body,
        finish: Callable[[tuple[int, ...]], tuple[Entry, Described]],
    ) -> None:
        self._writer = writer
        self._place = place
        self._finish = finish
        self._open = True
        self.data = writer.mapping.record(place, body.record_bytes)[body.data_offset :]

    @property
    def valid(self) -> bool:
        """See Reservation.valid."""
        return self._open and self._writer.covers(self._place)

    def finish(self, checksums: Sequence[int]) -> tuple[Entry, Described]:
        """Publish, once; see Reservation.publish."""
        if not self.valid:
            raise BridgeMiss(MissReason.OVERWRITTEN, "the place is not this record's any more")
        finished = self._finish(tuple(checksums))
        self._close()
        return finished

    def abandon(self) -> None:
        """See Reservation.abandon."""
        if self._open:
            self._close()
            self._writer.give_up(self._place)

    def _close(self) -> None:
        self._open = False
        self.data.release()


class ArenaWriter:
    """The single writer of one arena file; holds its lock until closed.  Not thread-safe."""

    def __init__(
        self, path: Path, layout: ArenaLayout, epoch: int, digest: int, ttl_ns: int, clock: Callable[[], int]
    ) -> None:
        make_directories(path)
        self._fd = open_for_writing(path, layout)
        try:
            self.mapping = Mapping(self._fd, layout, writable=True)
        except OSError as error:
            unlock(self._fd)
            raise ArenaError(f"The arena {path} cannot be mapped: {error.strerror}.") from None
        self._epoch = epoch
        self._ttl_ns = ttl_ns
        self._clock = clock
        self._open = True
        self._sequence = 0
        self._slots: dict[bytes, int] = {}
        """Where each handle's record is, of those that are on the index."""
        self._live: dict[int, tuple[bytes, int]] = {}
        """The same by slot: the handle and when it expires (ns)."""
        self._pinned = PinnedRegion(layout.pinned_bytes)
        self._ring = self._take_over(layout, digest)

    def export(
        self,
        key: bytes,
        token_ids: Sequence[int],
        first: FirstToken,
        ended: bool,
        planes: Planes,
        *,
        pinned: bool,
        ranks: int = 1,
    ) -> tuple[Entry, Described]:
        """Write and publish one record; its entry and what stands in front of its data."""
        body, rows = measure(planes, len(token_ids))
        place = self._place(body, first, pinned=pinned)
        self._supersede(key)
        try:
            data = self.mapping.record(place, body.record_bytes)[body.data_offset :]
            known = Described(tuple(token_ids), rows, copy_in(data, planes))
            entry = self._described(key, place, body, known, first, ended, ranks)
        except BaseException:
            self.give_up(place)
            raise
        self._publish(entry)
        return entry, known

    def reserve(
        self,
        key: bytes,
        token_ids: Sequence[int],
        first: FirstToken,
        ended: bool,
        plane_bytes: Sequence[int],
        *,
        ranks: int,
        checked: bool,
        pinned: bool = False,
    ) -> Reserved:
        """Room for a record that somebody else writes; see Bridge.reserve."""
        body, rows = measure_sizes(plane_bytes, len(token_ids), checked=checked)
        place = self._place(body, first, pinned=pinned)

        def finish(checksums: tuple[int, ...]) -> tuple[Entry, Described]:
            if len(checksums) != body.blocks:
                raise BridgeMiss(MissReason.LAYOUT, f"{len(checksums)} checksums for {body.blocks} blocks")
            known = Described(tuple(token_ids), rows, checksums)
            entry = self._described(key, place, body, known, first, ended, ranks)
            self._supersede(key)
            self._publish(entry)
            return entry, known

        return Reserved(self, place, body, finish)

    def covers(self, place: Place) -> bool:
        """True until the ring has gone past `place`; False once closed."""
        return self._open and (place.pinned or self.mapping.words[Word.TAIL] <= place.position)

    def give_up(self, place: Place) -> None:
        """Nothing will be published there; the ring takes its own places back by itself."""
        if self._open and place.pinned:
            self._unpin(place.slot)

    def _described(
        self,
        key: bytes,
        place: Place,
        body: Body,
        known: Described,
        first: FirstToken,
        ended: bool,
        ranks: int,
    ) -> Entry:
        """The entry of a record whose data is there; what stands in front of the data is written."""
        described = body.describe(known)
        self.mapping.record(place, len(described))[:] = described
        self._sequence += 1
        return Entry(
            sequence=self._sequence,
            key=key,
            epoch=self._epoch,
            place=place,
            published_ns=self._clock(),
            ttl_ns=self._ttl_ns,
            description_checksum=checksum(described),
            body=body,
            first=first,
            ended=ended,
            ranks=ranks,
        )

    @property
    def pinned_free_bytes(self) -> int:
        """See Bridge.pinned_free_bytes."""
        return self._pinned.free_bytes

    def release(self, key: bytes) -> bool:
        """Take a pinned record off the index and give its place back; False if there is none."""
        slot = self._slots.get(key, 0)
        if slot < self.mapping.layout.index_slots:
            return False
        self._clear(slot)
        return True

    def close(self) -> None:
        """Unmap and unlock; what was published stays."""
        self._open = False
        self.mapping.close()
        unlock(self._fd)

    def _take_over(self, layout: ArenaLayout, digest: int) -> Ring:
        """Make the file this epoch's; virtual offsets go on above everything ever used in it."""
        words = self.mapping.words
        words[Word.EPOCH] = 0
        self.mapping.data[HEADER_BYTES : layout.ring_offset] = bytes(layout.ring_offset - HEADER_BYTES)
        used = max(words[Word.HEAD], words[Word.TAIL])
        start = align(used, layout.ring_bytes) + layout.ring_bytes
        words[Word.TAIL] = words[Word.HEAD] = start
        words[Word.FINGERPRINT] = digest
        words[Word.INDEX_SLOTS] = layout.index_slots
        words[Word.RING_BYTES] = layout.ring_bytes
        words[Word.PINNED_BYTES] = words[Word.PINNED_FREE_BYTES] = layout.pinned_bytes
        words[Word.HEARTBEAT_NS] = self._clock()
        for counter in (Word.EXPORTS, Word.EXPORTED_BYTES, Word.OVERWRITTEN):
            words[counter] = 0
        words[Word.VERSION] = VERSION
        words[Word.MAGIC] = MAGIC
        words[Word.EPOCH] = self._epoch
        return Ring(layout.ring_bytes, layout.index_slots, head=start)

    def _place(self, body: Body, first: FirstToken, *, pinned: bool) -> Place:
        """Room for a record; BridgeMiss as in Bridge.export."""
        layout = self.mapping.layout
        check_fits(body, first, layout.pinned_bytes if pinned else layout.ring_bytes, pinned=pinned)
        return self._pin(body) if pinned else self._make_room(body)

    def _make_room(self, body: Body) -> Place:
        """A place in the ring, with everything that was there taken off the index."""
        placement = self._ring.place(body.record_bytes)
        words = self.mapping.words
        words[Word.TAIL] = placement.tail
        for old in placement.evicted:
            words[Word.OVERWRITTEN] += self._clear(old.slot)
        words[Word.HEAD] = self._ring.head
        return Place(placement.extent.slot, placement.extent.position, pinned=False)

    def _pin(self, body: Body) -> Place:
        """A place in the pinned region, beside that of a former record of the same handle."""
        found = self._pinned.take(body.record_bytes)
        if found is None and self._clear_expired_pins():
            found = self._pinned.take(body.record_bytes)
        if found is None:
            free = f"{self._pinned.free_bytes} of {self._pinned.region_bytes} bytes are free"
            raise BridgeMiss(MissReason.PINNED_FULL, f"{free}, {len(self._pinned.held)} records are held")
        self.mapping.words[Word.PINNED_FREE_BYTES] = self._pinned.free_bytes
        slot, offset = found
        return Place(self.mapping.layout.index_slots + slot, offset, pinned=True)

    def _unpin(self, slot: int) -> None:
        self._pinned.give_back(slot - self.mapping.layout.index_slots)
        self.mapping.words[Word.PINNED_FREE_BYTES] = self._pinned.free_bytes

    def _clear_expired_pins(self) -> bool:
        """Free the places of pinned records that are a miss for every reader; False if there were none."""
        now_ns, pinned_from = self._clock(), self.mapping.layout.index_slots
        expired = [
            slot
            for slot, (_, expires_ns) in self._live.items()
            if slot >= pinned_from and now_ns >= expires_ns
        ]
        for slot in expired:
            self._clear(slot)
        return bool(expired)

    def _supersede(self, key: bytes) -> None:
        former = self._slots.get(key)
        if former is not None:
            self._clear(former)

    def _clear(self, slot: int) -> bool:
        """Take a record off the index; True if it had not expired.  Its slot keeps the key."""
        if slot not in self._live:  # superseded, or its export broke off
            return False
        key, expires_ns = self._live.pop(slot)
        del self._slots[key]
        layout = self.mapping.layout
        self.mapping.words[layout.slot_offset(slot) // 8] = 0
        if slot >= layout.index_slots:
            self._unpin(slot)
        return self._clock() < expires_ns

    def _publish(self, entry: Entry) -> None:
        words = self.mapping.words
        slot = entry.place.slot
        offset = self.mapping.layout.slot_offset(slot)
        key_offset = self.mapping.layout.key_offset(slot)
        self.mapping.data[key_offset : key_offset + KEY_BYTES] = entry.key
        self.mapping.data[offset : offset + SLOT_BYTES] = pack_entry(entry)
        self._slots[entry.key] = slot
        self._live[slot] = entry.key, entry.published_ns + entry.ttl_ns
        words[offset // 8] = entry.sequence
        words[Word.HEARTBEAT_NS] = entry.published_ns
        words[Word.EXPORTS] += 1
        words[Word.EXPORTED_BYTES] += entry.body.kv_bytes
