"""The bridge of one host: an own ring to write, the rings of all peers to read.

Peers are mapped when first asked for and again when another file stands at their path.  Export,
release and lookup belong to one thread; `own_lookup` may be called from any, until `close`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tgi_patches.bridge import ArenaError, FirstToken, Planes, Record, Reservation
from tgi_patches.bridge.files import Mapping, arena_path, open_for_reading, read_layout
from tgi_patches.bridge.layout import (
    INDEX_SLOTS,
    PAGE_BYTES,
    RECORD_SHARE,
    RING_MIN_BYTES,
    ArenaLayout,
    key_of,
)
from tgi_patches.bridge.reader import ArenaReader
from tgi_patches.bridge.ring import align
from tgi_patches.bridge.writer import ArenaWriter, Reserved
from tgi_patches.contract import BridgeMiss, Fingerprint, MissReason


@dataclass(frozen=True, slots=True)
class _Peer:
    """A mapped arena and the file it came from (device, inode)."""

    path: Path
    file: tuple[int, int]
    mapping: Mapping
    reader: ArenaReader


@dataclass(frozen=True, slots=True)
class _Reservation:
    """A Reservation in the own arena."""

    reserved: Reserved
    handle: str
    shard: str
    rank: int

    @property
    def data(self) -> memoryview:
        return self.reserved.data

    @property
    def valid(self) -> bool:
        return self.reserved.valid

    def publish(self, checksums: Sequence[int] = ()) -> Record:
        entry, known = self.reserved.finish(checksums)
        return entry.record(self.handle, self.shard, self.rank, known)

    def abandon(self) -> None:
        self.reserved.abandon()


class ArenaBridge:
    """The Bridge over files in `directory`; `arena_bytes` of own ring, 0 for a shard that only reads.

    `pinned_bytes` come beside the ring, and only with one.
    `clock` is CLOCK_MONOTONIC in ns and must be the same for all shards of the host.
    Raises ArenaError when the own ring cannot be set up.
    """

    def __init__(
        self,
        directory: Path,
        deployment: str,
        shard: str,
        rank: int,
        epoch: int,
        fingerprint: Fingerprint,
        arena_bytes: int,
        record_ttl_s: float,
        *,
        pinned_bytes: int = 0,
        index_slots: int = INDEX_SLOTS,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._directory = directory
        self._deployment = deployment
        self._shard = shard
        self._rank = rank
        self._epoch = epoch
        self._ranks = fingerprint.tensor_parallel
        self._digest = int(fingerprint.digest(), 16)
        self._clock = clock
        self._peers: dict[tuple[str, int], _Peer] = {}
        """By shard and rank."""
        self._writer: ArenaWriter | None = None
        self._own: ArenaReader | None = None
        self.ring_bytes = align(arena_bytes, PAGE_BYTES)
        self.pinned_bytes = align(pinned_bytes, PAGE_BYTES) if arena_bytes else 0
        if not arena_bytes:
            return
        if arena_bytes < RING_MIN_BYTES:
            raise ArenaError(f"An arena needs at least {RING_MIN_BYTES} bytes, not {arena_bytes}.")
        path = arena_path(directory, deployment, shard, rank)
        layout = ArenaLayout(self.ring_bytes, index_slots, self.pinned_bytes)
        ttl_ns = round(record_ttl_s * 1e9)
        self._writer = ArenaWriter(path, layout, epoch, self._digest, ttl_ns, clock)
        self._own = ArenaReader(self._writer.mapping, shard, self._digest, clock, rank)

    @property
    def memory(self) -> memoryview | None:
        """The own arena as it is mapped: what a device may register, to write records itself."""
        return None if self._writer is None else self._writer.mapping.data

    @property
    def record_limit_bytes(self) -> int:
        """The largest `kv_bytes` of a record: a quarter of the ring."""
        return self.ring_bytes // RECORD_SHARE

    @property
    def pinned_free_bytes(self) -> int:
        """See Bridge.pinned_free_bytes."""
        return 0 if self._writer is None else self._writer.pinned_free_bytes

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
        if self._writer is None:
            raise BridgeMiss(MissReason.UNSUPPORTED, "this shard has no ring")
        entry, known = self._writer.export(
            key_of(handle), token_ids, first, ended, planes, pinned=pinned, ranks=self._ranks
        )
        return entry.record(handle, self._shard, self._rank, known)

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
        if self._writer is None:
            raise BridgeMiss(MissReason.UNSUPPORTED, "this shard has no ring")
        reserved = self._writer.reserve(
            key_of(handle),
            token_ids,
            first,
            ended,
            plane_bytes,
            ranks=ranks or self._ranks,
            checked=checked,
            pinned=pinned,
        )
        return _Reservation(reserved, handle, self._shard, self._rank)

    def release(self, handle: str) -> bool:
        """See Bridge.release."""
        return self._writer is not None and self._writer.release(key_of(handle))

    def lookup(self, shard: str, epoch: int, handle: str, rank: int | None = None) -> Record:
        """See Bridge.lookup."""
        return self._reader(shard, self._rank if rank is None else rank).lookup(epoch, handle)

    def own_lookup(self, handle: str) -> Record:
        """See Bridge.own_lookup."""
        if self._own is None:
            raise BridgeMiss(MissReason.MISSING, "this shard has no ring")
        return self._own.lookup(self._epoch, handle)

    def read_into(self, record: Record, planes: Planes, tokens: int) -> None:
        """See Bridge.read_into."""
        self._known_reader(record).read_into(record, planes, tokens)

    def data_of(self, record: Record) -> memoryview:
        """A looked-up record's bytes where they lie, all planes; believe nothing of it before `check`."""
        return self._known_reader(record).data_of(record)

    def check(self, record: Record) -> None:
        """What was read of `data_of` up to now was the record.  Raises BridgeMiss: EPOCH, OVERWRITTEN."""
        self._known_reader(record).check(record)

    def close(self) -> None:
        """See Bridge.close."""
        for peer in self._peers.values():
            peer.mapping.close()
        self._peers.clear()
        self._own = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _known_reader(self, record: Record) -> ArenaReader:
        if (record.shard, record.rank) == (self._shard, self._rank) and self._own is not None:
            return self._own
        peer = self._peers.get((record.shard, record.rank))
        if peer is None:
            raise BridgeMiss(MissReason.MISSING, f"no arena of {record.shard}")
        return peer.reader

    def _reader(self, shard: str, rank: int) -> ArenaReader:
        """A reader of the file that stands at the shard's path now."""
        if (shard, rank) == (self._shard, self._rank) and self._own is not None:
            return self._own
        peer = self._peers.get((shard, rank))
        if peer is None or peer.file != _file_at(peer.path):
            self._forget_replaced()
            peer = self._peers[shard, rank] = self._map(shard, rank)
        return peer.reader

    def _map(self, shard: str, rank: int) -> _Peer:
        path = arena_path(self._directory, self._deployment, shard, rank)
        fd = open_for_reading(path)
        try:
            layout = read_layout(fd)
            if layout is None:
                raise BridgeMiss(MissReason.LAYOUT, f"the arena of {shard} is of another version")
            found = os.fstat(fd)
            mapping = Mapping(fd, layout, writable=False)
        except OSError as error:
            raise BridgeMiss(MissReason.ERROR, f"the arena of {shard}: {error.strerror}") from None
        finally:
            os.close(fd)
        reader = ArenaReader(mapping, shard, self._digest, self._clock, rank)
        return _Peer(path, (found.st_dev, found.st_ino), mapping, reader)

    def _forget_replaced(self) -> None:
        """Unmap every file that was unlinked: a mapping keeps its memory from being freed."""
        for place, peer in list(self._peers.items()):
            if peer.file != _file_at(peer.path):
                del self._peers[place]
                peer.mapping.close()


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
