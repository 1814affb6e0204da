"""The single writer of an arena file.

Publishing a record, in this order, so that a reader or a crash at any point sees a miss at worst:
tail up -> slots of overwritten records 0 -> bytes -> slot with sequence 0 -> sequence.
A new owner: epoch 0 -> index cleared, ring restarted -> the new epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tgi_patches.bridge import ArenaError, FirstToken, Planes
from tgi_patches.bridge.blocks import checked_kv_bytes, checksum, copy_in
from tgi_patches.bridge.files import Mapping, make_directories, open_for_writing, unlock
from tgi_patches.bridge.layout import (
    HEADER_BYTES,
    KEY_BYTES,
    KEY_OFFSET,
    MAGIC,
    PUBLISHED_OFFSET,
    SLOT_BYTES,
    VERSION,
    ArenaLayout,
    Body,
    Entry,
    Word,
    checked_body,
    pack_entry,
)
from tgi_patches.bridge.ring import Extent, Ring, align


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
        self._sequences: dict[bytes, int] = {}
        self._ring = self._take_over(layout, digest)

    def export(
        self, key: bytes, token_ids: Sequence[int], first: FirstToken, ended: bool, planes: Planes
    ) -> tuple[Entry, tuple[int, ...]]:
        """Write and publish one record; its entry and block checksums."""
        mapping = self.mapping
        kv_bytes = checked_kv_bytes(planes, len(token_ids))
        body = checked_body(token_ids, first, kv_bytes, mapping.layout.ring_bytes)
        extent = self._make_room(key, body)
        start = extent.position % mapping.layout.ring_bytes
        record = mapping.ring[start : start + body.record_bytes]
        checksums = copy_in(record[body.data_offset :], planes)
        described = body.describe(token_ids, checksums)
        record[: len(described)] = described
        entry = Entry(
            sequence=extent.sequence,
            key=key,
            epoch=self._epoch,
            position=extent.position,
            kv_bytes=kv_bytes,
            published_ns=self._clock(),
            ttl_ns=self._ttl_ns,
            description_checksum=checksum(described),
            prompt_tokens=len(token_ids),
            first=first,
            ended=ended,
        )
        self._publish(entry)
        return entry, checksums

    def close(self) -> None:
        """Unmap and unlock; what was published stays."""
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
        words[Word.HEARTBEAT_NS] = self._clock()
        for counter in (Word.EXPORTS, Word.EXPORTED_BYTES, Word.OVERWRITTEN):
            words[counter] = 0
        words[Word.VERSION] = VERSION
        words[Word.MAGIC] = MAGIC
        words[Word.EPOCH] = self._epoch
        return Ring(layout.ring_bytes, layout.index_slots, head=start)

    def _make_room(self, key: bytes, body: Body) -> Extent:
        """A place for the record, with everything that was there taken off the index."""
        placement = self._ring.place(body.record_bytes)
        words = self.mapping.words
        words[Word.TAIL] = placement.tail
        for old in placement.evicted:
            words[Word.OVERWRITTEN] += self._clear(old.sequence)
        if former := self._sequences.get(key):
            self._clear(former)
        words[Word.HEAD] = self._ring.head
        return placement.extent

    def _clear(self, sequence: int) -> bool:
        """Take a record off the index; True if it had not expired.  Its slot keeps the key."""
        words = self.mapping.words
        offset = self.mapping.layout.slot_offset(sequence)
        if words[offset // 8] != sequence:  # superseded, or its export broke off
            return False
        key = bytes(self.mapping.data[offset + KEY_OFFSET :][:KEY_BYTES])
        published_ns, ttl_ns = words[(offset + PUBLISHED_OFFSET) // 8 :][:2]
        words[offset // 8] = 0
        self._sequences.pop(key, None)
        return self._clock() < published_ns + ttl_ns

    def _publish(self, entry: Entry) -> None:
        words = self.mapping.words
        offset = self.mapping.layout.slot_offset(entry.sequence)
        key_offset = self.mapping.layout.key_offset(entry.sequence)
        self.mapping.data[key_offset : key_offset + KEY_BYTES] = entry.key
        self.mapping.data[offset : offset + SLOT_BYTES] = pack_entry(entry)
        words[offset // 8] = entry.sequence
        self._sequences[entry.key] = entry.sequence
        words[Word.HEARTBEAT_NS] = entry.published_ns
        words[Word.EXPORTS] += 1
        words[Word.EXPORTED_BYTES] += entry.kv_bytes
