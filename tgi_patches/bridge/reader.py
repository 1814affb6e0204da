"""Reads records out of a mapped arena without any lock, while its owner goes on writing.

A record is believed only when, after the copy has completed, the owner's epoch, its tail and the
slot's sequence still cover it, and every checksum matches what arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tgi_patches.bridge import Place, Planes, Record
from tgi_patches.bridge.blocks import checksum, copy_out, sizes
from tgi_patches.bridge.files import Mapping
from tgi_patches.bridge.layout import (
    HEADER_BYTES,
    KEY_BYTES,
    SLOT_BYTES,
    Body,
    Entry,
    Word,
    key_of,
    sequence_of,
    unpack_entry,
)
from tgi_patches.contract import BridgeMiss, MissReason


class ArenaReader:
    """One shard's records, of one rank; `digest` is the fingerprint that this side can use, `clock` in ns."""

    def __init__(
        self, mapping: Mapping, shard: str, digest: int, clock: Callable[[], int], rank: int = 0
    ) -> None:
        self._mapping = mapping
        self._shard = shard
        self._rank = rank
        self._digest = digest
        self._clock = clock

    def lookup(self, epoch: int, handle: str) -> Record:
        """The newest valid record of `handle`; BridgeMiss as in Bridge.lookup."""
        key = key_of(handle)
        self._check_owner(epoch)
        entry = self._find(key, epoch)
        if self._clock() >= entry.published_ns + entry.ttl_ns:
            raise BridgeMiss(MissReason.MISSING, "expired")
        described = bytes(self._mapping.record(entry.place, entry.body.described_bytes))
        self._check_current(epoch, entry.place, entry.sequence)
        if checksum(described) != entry.description_checksum:
            raise BridgeMiss(MissReason.CHECKSUM, "description")
        return entry.record(handle, self._shard, self._rank, entry.body.described(described))

    def read_into(self, record: Record, planes: Planes, tokens: int) -> None:
        """Copy and verify; BridgeMiss as in Bridge.read_into."""
        prompt_tokens = len(record.token_ids)
        if not 0 <= tokens <= prompt_tokens:
            raise BridgeMiss(MissReason.LAYOUT, f"{tokens} of {prompt_tokens} tokens")
        self.check(record)
        if not tokens:
            return
        if sizes(planes) != [row * tokens for row in record.rows]:
            raise BridgeMiss(MissReason.LAYOUT, f"not the record's {len(record.rows)} planes")
        checksums = copy_out(self.data_of(record), planes, [row * prompt_tokens for row in record.rows])
        self.check(record)
        if record.checksums and checksums != record.checksums:
            raise BridgeMiss(MissReason.CHECKSUM, "data")

    def data_of(self, record: Record) -> memoryview:
        """Where the record's data lies; see ArenaBridge.data_of."""
        body = Body(len(record.token_ids), len(record.rows), len(record.checksums), record.kv_bytes)
        return self._mapping.record(record.place, body.record_bytes)[body.data_offset :]

    def check(self, record: Record) -> None:
        """Raise BridgeMiss unless the record is still whole: call it after its bytes were used."""
        self._check_current(record.epoch, record.place, record.sequence)

    def _find(self, key: bytes, epoch: int) -> Entry:
        """The live slot with `key`; a slot that lost its record keeps the key under sequence 0."""
        reason = MissReason.MISSING
        for slot in self._slots_with(key):
            offset = self._mapping.layout.slot_offset(slot)
            raw = bytes(self._mapping.data[offset : offset + SLOT_BYTES])
            entry = unpack_entry(raw, slot)
            sequence = self._mapping.words[offset // 8]
            if not sequence or sequence != sequence_of(raw):
                reason = MissReason.OVERWRITTEN
            elif entry is None:
                reason = MissReason.CHECKSUM
            elif entry.epoch == epoch and entry.key == key:
                return entry
        raise BridgeMiss(reason)

    def _slots_with(self, key: bytes) -> Iterator[int]:
        found = self._mapping.find(key, HEADER_BYTES)
        while found >= 0:
            slot, off = divmod(found - HEADER_BYTES, KEY_BYTES)
            if not off:
                yield slot
            found = self._mapping.find(key, found + 1)

    def _check_owner(self, epoch: int) -> None:
        words = self._mapping.words
        if words[Word.EPOCH] != epoch:
            raise BridgeMiss(MissReason.EPOCH, f"{self._shard} is at {words[Word.EPOCH]}, not {epoch}")
        if words[Word.FINGERPRINT] != self._digest:
            raise BridgeMiss(MissReason.FINGERPRINT, f"{self._shard} has {words[Word.FINGERPRINT]:016x}")

    def _check_current(self, epoch: int, place: Place, sequence: int) -> None:
        """Nothing that covers the record has changed: call it after the bytes were copied."""
        self._check_owner(epoch)
        words = self._mapping.words
        current = words[self._mapping.layout.slot_offset(place.slot) // 8] == sequence
        if not current or (not place.pinned and words[Word.TAIL] > place.position):
            raise BridgeMiss(MissReason.OVERWRITTEN, f"by {self._shard}")
