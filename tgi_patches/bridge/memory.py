"""The fake: the arena's semantics within one process, for tests that need no files.

Bridges that share a MemoryHost see each other as shards of one host do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tgi_patches.bridge import ArenaError, FirstToken, Planes, Record
from tgi_patches.bridge.blocks import checked_kv_bytes, copy_in, copy_out
from tgi_patches.bridge.layout import INDEX_SLOTS, RECORD_SHARE, checked_body, key_of
from tgi_patches.bridge.ring import Ring
from tgi_patches.contract import BridgeMiss, Fingerprint, MissReason


@dataclass(slots=True)
class _Published:
    """A slot: the record, its data, and until when (ns); `live` ends when the ring takes it back."""

    record: Record
    data: bytearray
    expires_ns: int
    live: bool = True


@dataclass(slots=True)
class _Arena:
    """What one shard shows its host."""

    epoch: int
    digest: str
    ring: Ring
    open: bool = True
    slots: dict[int, _Published] = field(default_factory=dict)
    """By sequence modulo the index size, as in the file."""


@dataclass(slots=True)
class MemoryHost:
    """All arenas of one host, by shard name."""

    arenas: dict[str, _Arena] = field(default_factory=dict)


class MemoryBridge:
    """The Bridge over a MemoryHost; arguments as ArenaBridge's."""

    def __init__(
        self,
        host: MemoryHost,
        shard: str,
        epoch: int,
        fingerprint: Fingerprint,
        arena_bytes: int,
        record_ttl_s: float,
        *,
        index_slots: int = INDEX_SLOTS,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._host = host
        self._shard = shard
        self._epoch = epoch
        self._digest = fingerprint.digest()
        self._ttl_ns = round(record_ttl_s * 1e9)
        self._clock = clock
        self._own: _Arena | None = None
        self.ring_bytes = arena_bytes
        if not arena_bytes:
            return
        former = host.arenas.get(shard)
        if former is not None and former.open:
            raise ArenaError(f"Another bridge writes the arena of {shard}.")
        self._own = _Arena(epoch, self._digest, Ring(arena_bytes, index_slots))
        host.arenas[shard] = self._own

    @property
    def record_limit_bytes(self) -> int:
        """A quarter of the ring."""
        return self.ring_bytes // RECORD_SHARE

    def export(
        self, handle: str, token_ids: Sequence[int], first: FirstToken, ended: bool, planes: Planes
    ) -> Record:
        """See Bridge.export."""
        if self._own is None:
            raise BridgeMiss(MissReason.UNSUPPORTED, "this shard has no ring")
        key_of(handle)
        kv_bytes = checked_kv_bytes(planes, len(token_ids))
        body = checked_body(token_ids, first, kv_bytes, self.ring_bytes)
        sequence = self._make_room(self._own, handle, body.record_bytes)
        data = bytearray(kv_bytes)
        checksums = copy_in(memoryview(data), planes)
        record = Record(
            handle=handle,
            shard=self._shard,
            epoch=self._epoch,
            sequence=sequence,
            token_ids=tuple(token_ids),
            first=first,
            ended=ended,
            kv_bytes=kv_bytes,
            position=0,
            checksums=checksums,
        )
        slot = sequence % self._own.ring.index_slots
        self._own.slots[slot] = _Published(record, data, self._clock() + self._ttl_ns)
        return record

    def lookup(self, shard: str, epoch: int, handle: str) -> Record:
        """See Bridge.lookup."""
        key_of(handle)
        arena = self._arena(shard, epoch)
        named = [found for found in arena.slots.values() if found.record.handle == handle]
        live = next((found for found in named if found.live), None)
        if live is None:
            raise BridgeMiss(MissReason.OVERWRITTEN if named else MissReason.MISSING)
        if self._clock() >= live.expires_ns:
            raise BridgeMiss(MissReason.MISSING, "expired")
        return live.record

    def own_lookup(self, handle: str) -> Record:
        """See Bridge.own_lookup."""
        if self._own is None:
            raise BridgeMiss(MissReason.MISSING, "this shard has no ring")
        return self.lookup(self._shard, self._epoch, handle)

    def read_into(self, record: Record, planes: Planes, tokens: int) -> None:
        """See Bridge.read_into."""
        prompt_tokens = len(record.token_ids)
        if not 0 <= tokens <= prompt_tokens:
            raise BridgeMiss(MissReason.LAYOUT, f"{tokens} of {prompt_tokens} tokens")
        data = memoryview(self._current(record).data)
        if not tokens:
            return
        if checked_kv_bytes(planes, tokens) * prompt_tokens != record.kv_bytes * tokens:
            raise BridgeMiss(MissReason.LAYOUT, f"the planes do not add up to {record.kv_bytes} bytes")
        checksums = copy_out(data, planes, tokens, prompt_tokens)
        self._current(record)
        if checksums != record.checksums:
            raise BridgeMiss(MissReason.CHECKSUM, "data")

    def close(self) -> None:
        """See Bridge.close."""
        if self._own is not None:
            self._own.open = False
            self._own = None

    def damage(self, handle: str, offset: int) -> None:
        """Flip one bit of the data of every record named `handle`."""
        for arena in self._host.arenas.values():
            for found in arena.slots.values():
                if found.record.handle == handle:
                    found.data[offset] ^= 1

    def _make_room(self, arena: _Arena, handle: str, record_bytes: int) -> int:
        """The new record's sequence, with what it overwrites or supersedes taken off the index."""
        placement = arena.ring.place(record_bytes)
        gone = {old.sequence for old in placement.evicted}
        for found in arena.slots.values():
            if found.record.sequence in gone or found.record.handle == handle:
                found.live = False
        return placement.extent.sequence

    def _arena(self, shard: str, epoch: int) -> _Arena:
        arena = self._host.arenas.get(shard)
        if arena is None:
            raise BridgeMiss(MissReason.MISSING, f"no arena of {shard}")
        if arena.epoch != epoch:
            raise BridgeMiss(MissReason.EPOCH, f"{shard} is at {arena.epoch}, not {epoch}")
        if arena.digest != self._digest:
            raise BridgeMiss(MissReason.FINGERPRINT, f"{shard} has {arena.digest}")
        return arena

    def _current(self, record: Record) -> _Published:
        arena = self._arena(record.shard, record.epoch)
        found = arena.slots.get(record.sequence % arena.ring.index_slots)
        if found is None or not found.live or found.record.sequence != record.sequence:
            raise BridgeMiss(MissReason.OVERWRITTEN, f"by {record.shard}")
        return found
