"""The fake: the arena's semantics within one process, for tests that need no files.

Bridges that share a MemoryHost see each other as shards of one host do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tgi_patches.bridge import ArenaError, FirstToken, Place, Planes, Record, Reservation
from tgi_patches.bridge.blocks import copy_in, copy_out, sizes
from tgi_patches.bridge.layout import (
    INDEX_SLOTS,
    PAGE_BYTES,
    RECORD_SHARE,
    Body,
    Described,
    check_fits,
    key_of,
    measure,
    measure_sizes,
)
from tgi_patches.bridge.pinned import PinnedRegion
from tgi_patches.bridge.ring import Ring, align
from tgi_patches.contract import BridgeMiss, Fingerprint, MissReason


@dataclass(slots=True)
class _Published:
    """A slot: the record, its data, and until when (ns); `live` ends when its place is taken back."""

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
    pinned: PinnedRegion
    open: bool = True
    tail: int = 0
    """Lowest virtual offset of the ring that is still valid."""
    sequence: int = 0
    slots: dict[int, _Published] = field(default_factory=dict)
    """By index slot, as in the file: the ring's, then the pinned ones."""


@dataclass(slots=True)
class _Reserved:
    """A Reservation; bytes of its own, so that a late write harms nobody."""

    arena: _Arena
    place: Place
    blocks: int
    made: Callable[[tuple[int, ...], bytearray], Record]
    """Publishes the record with these checksums and this data."""
    filled: bytearray
    data: memoryview
    open: bool = True

    @property
    def valid(self) -> bool:
        in_place = self.place.pinned or self.arena.tail <= self.place.position
        return self.open and self.arena.open and in_place

    def publish(self, checksums: Sequence[int] = ()) -> Record:
        if not self.valid:
            raise BridgeMiss(MissReason.OVERWRITTEN, "the place is not this record's any more")
        if len(checksums) != self.blocks:
            raise BridgeMiss(MissReason.LAYOUT, f"{len(checksums)} checksums for {self.blocks} blocks")
        record = self.made(tuple(checksums), self.filled)
        self._close()
        return record

    def abandon(self) -> None:
        if self.open:
            self._close()
            if self.place.pinned:
                _unpin(self.arena, self.place.slot)

    def _close(self) -> None:
        self.open = False
        self.data.release()


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
        pinned_bytes: int = 0,
        index_slots: int = INDEX_SLOTS,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._host = host
        self._shard = shard
        self._epoch = epoch
        self._digest = fingerprint.digest()
        self._ranks = fingerprint.tensor_parallel
        self._ttl_ns = round(record_ttl_s * 1e9)
        self._clock = clock
        self._own: _Arena | None = None
        self.ring_bytes = arena_bytes
        self.pinned_bytes = align(pinned_bytes, PAGE_BYTES) if arena_bytes else 0
        if not arena_bytes:
            return
        former = host.arenas.get(shard)
        if former is not None and former.open:
            raise ArenaError(f"Another bridge writes the arena of {shard}.")
        self._own = _Arena(
            epoch, self._digest, Ring(arena_bytes, index_slots), PinnedRegion(self.pinned_bytes)
        )
        host.arenas[shard] = self._own

    @property
    def record_limit_bytes(self) -> int:
        """A quarter of the ring."""
        return self.ring_bytes // RECORD_SHARE

    @property
    def pinned_free_bytes(self) -> int:
        """See Bridge.pinned_free_bytes."""
        return 0 if self._own is None else self._own.pinned.free_bytes

    def export(
        self,
        handle: str,
        token_ids: Sequence[int],
        first: FirstToken,
        ended: bool,
        planes: Planes,
        *,
        pinned: bool = False,
    ) -> Record:
        """See Bridge.export."""
        arena = self._own
        if arena is None:
            raise BridgeMiss(MissReason.UNSUPPORTED, "this shard has no ring")
        key_of(handle)
        body, rows = measure(planes, len(token_ids))
        place = self._place(arena, body, first, pinned=pinned)
        _take_off(arena, handle)
        data = bytearray(body.kv_bytes)
        try:
            checksums = copy_in(memoryview(data), planes)
        except BaseException:
            if pinned:
                _unpin(arena, place.slot)
            raise
        known = Described(tuple(token_ids), rows, checksums)
        return self._publish(arena, handle, place, known, first, ended, data, self._ranks)

    def reserve(
        self,
        handle: str,
        token_ids: Sequence[int],
        first: FirstToken,
        ended: bool,
        plane_bytes: Sequence[int],
        *,
        ranks: int | None = None,
        checked: bool = True,
        pinned: bool = False,
    ) -> Reservation:
        """See Bridge.reserve."""
        arena = self._own
        if arena is None:
            raise BridgeMiss(MissReason.UNSUPPORTED, "this shard has no ring")
        key_of(handle)
        body, rows = measure_sizes(plane_bytes, len(token_ids), checked=checked)
        place = self._place(arena, body, first, pinned=pinned)

        def made(checksums: tuple[int, ...], data: bytearray) -> Record:
            _take_off(arena, handle)
            known = Described(tuple(token_ids), rows, checksums)
            return self._publish(arena, handle, place, known, first, ended, data, ranks or self._ranks)

        filled = bytearray(body.kv_bytes)
        return _Reserved(arena, place, body.blocks, made, filled, memoryview(filled))

    def _place(self, arena: _Arena, body: Body, first: FirstToken, *, pinned: bool) -> Place:
        check_fits(body, first, self.pinned_bytes if pinned else self.ring_bytes, pinned=pinned)
        if pinned:
            return _pin(arena, body.record_bytes, self._clock())
        return _make_room(arena, body.record_bytes)

    def _publish(
        self,
        arena: _Arena,
        handle: str,
        place: Place,
        known: Described,
        first: FirstToken,
        ended: bool,
        data: bytearray,
        ranks: int,
    ) -> Record:
        arena.sequence += 1
        record = Record(
            handle=handle,
            shard=self._shard,
            epoch=self._epoch,
            sequence=arena.sequence,
            token_ids=known.token_ids,
            first=first,
            ended=ended,
            kv_bytes=len(data),
            place=place,
            rows=known.rows,
            checksums=known.checksums,
            ranks=ranks,
        )
        arena.slots[place.slot] = _Published(record, data, self._clock() + self._ttl_ns)
        return record

    def release(self, handle: str) -> bool:
        """See Bridge.release."""
        key_of(handle)
        return self._own is not None and _take_off(self._own, handle, only_pinned=True)

    def lookup(self, shard: str, epoch: int, handle: str, rank: int | None = None) -> Record:
        """See Bridge.lookup; every shard of this fake has one rank."""
        key_of(handle)
        if rank:
            raise BridgeMiss(MissReason.MISSING, f"no rank {rank} of {shard}")
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
        if sizes(planes) != [row * tokens for row in record.rows]:
            raise BridgeMiss(MissReason.LAYOUT, f"not the record's {len(record.rows)} planes")
        checksums = copy_out(data, planes, [row * prompt_tokens for row in record.rows])
        self._current(record)
        if record.checksums and checksums != record.checksums:
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
        found = arena.slots.get(record.place.slot)
        if found is None or not found.live or found.record.sequence != record.sequence:
            raise BridgeMiss(MissReason.OVERWRITTEN, f"by {record.shard}")
        return found


def _make_room(arena: _Arena, record_bytes: int) -> Place:
    """A place in the ring, with what it overwrites taken off the index."""
    placement = arena.ring.place(record_bytes)
    arena.tail = placement.tail
    for old in placement.evicted:
        if old.slot in arena.slots:  # its export may have broken off
            arena.slots[old.slot].live = False
    return Place(placement.extent.slot, placement.extent.position, pinned=False)


def _pin(arena: _Arena, record_bytes: int, now_ns: int) -> Place:
    found = arena.pinned.take(record_bytes)
    if found is None:
        _clear_expired_pins(arena, now_ns)
        found = arena.pinned.take(record_bytes)
    if found is None:
        raise BridgeMiss(MissReason.PINNED_FULL, f"{arena.pinned.free_bytes} bytes are free")
    slot, offset = found
    return Place(arena.ring.index_slots + slot, offset, pinned=True)


def _clear_expired_pins(arena: _Arena, now_ns: int) -> None:
    for slot, found in arena.slots.items():
        if found.live and found.record.place.pinned and now_ns >= found.expires_ns:
            found.live = False
            _unpin(arena, slot)


def _unpin(arena: _Arena, slot: int) -> None:
    arena.pinned.give_back(slot - arena.ring.index_slots)


def _take_off(arena: _Arena, handle: str, *, only_pinned: bool = False) -> bool:
    """Take the live record of `handle` off the index; False where there is none."""
    for slot, found in arena.slots.items():
        pinned = found.record.place.pinned
        if found.live and found.record.handle == handle and (pinned or not only_pinned):
            found.live = False
            if pinned:
                _unpin(arena, slot)
            return True
    return False
