"""The bytes of an arena file: header, key table, index of fixed slots, ring, pinned.

Every number is native 64-bit: all readers share the host.  A chain of checksums makes torn reads
visible whatever the CPU reorders: the slot's own covers the record's place and description, that
one the token ids, planes and block checksums, those the data.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from tgi_patches.bridge import FirstToken, Place, Planes, Record
from tgi_patches.bridge.blocks import block_count, bytes_per_token, checksum, sizes
from tgi_patches.bridge.pinned import PINNED_SLOTS
from tgi_patches.bridge.ring import ALIGNMENT, align
from tgi_patches.contract import TOP_TOKENS_MAX, BridgeMiss, MissReason

MAGIC = int.from_bytes(b"TGIARENA", "little")
VERSION = 4
PAGE_BYTES = 4096
HEADER_BYTES = PAGE_BYTES
SLOT_BYTES = 256
KEY_BYTES = 16
INDEX_SLOTS = 1024
RING_MIN_BYTES = 16 * PAGE_BYTES
_U64 = 8
RECORD_SHARE = 4
"""A record's data may fill one part in so many of the ring."""


class Word(IntEnum):
    """The header, as indices of 64-bit words.

    Written one word at a time through a memoryview, which is one store; `struct.pack_into` zeroes
    its target first, and a reader could see that zero.
    """

    MAGIC = 0
    VERSION = 1
    EPOCH = 2
    """0 while the file belongs to nobody."""
    FINGERPRINT = 3
    INDEX_SLOTS = 4
    RING_BYTES = 5
    PINNED_BYTES = 6
    """Size of the region behind the ring; 0, none."""
    PINNED_FREE_BYTES = 7
    HEAD = 8
    TAIL = 9
    """Lowest virtual offset that is still valid; raised before bytes are overwritten."""
    HEARTBEAT_NS = 10
    """CLOCK_MONOTONIC of the last export, or of the start."""
    EXPORTS = 11
    EXPORTED_BYTES = 12
    OVERWRITTEN = 13
    """Records that were overwritten before they expired: the ring is too small."""


_DERIVED = ("slots", "slots_offset", "ring_offset", "pinned_offset", "file_bytes")


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Where the parts of one arena file lie, in bytes."""

    ring_bytes: int
    index_slots: int
    """Of the ring's records; those of pinned ones follow."""
    pinned_bytes: int = 0
    slots: int = field(init=False)
    slots_offset: int = field(init=False)
    ring_offset: int = field(init=False)
    pinned_offset: int = field(init=False)
    file_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        slots = self.index_slots + (PINNED_SLOTS if self.pinned_bytes else 0)
        slots_offset = align(HEADER_BYTES + slots * KEY_BYTES, SLOT_BYTES)
        ring_offset = align(slots_offset + slots * SLOT_BYTES, PAGE_BYTES)
        pinned_offset = ring_offset + self.ring_bytes
        derived = (slots, slots_offset, ring_offset, pinned_offset, pinned_offset + self.pinned_bytes)
        for name, value in zip(_DERIVED, derived, strict=True):
            object.__setattr__(self, name, value)

    def key_offset(self, slot: int) -> int:
        """Of the handle in the key table, which says where to look and nothing more."""
        return HEADER_BYTES + slot * KEY_BYTES

    def slot_offset(self, slot: int) -> int:
        return self.slots_offset + slot * SLOT_BYTES


@dataclass(frozen=True, slots=True)
class Described:
    """What stands in front of a record's data; fields as Record's."""

    token_ids: tuple[int, ...]
    rows: tuple[int, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Body:
    """Offsets within a record: token ids and rows (u32), block checksums (u64), then the data."""

    prompt_tokens: int
    planes: int
    blocks: int
    kv_bytes: int

    @property
    def sums_offset(self) -> int:
        return align(4 * (self.prompt_tokens + self.planes), _U64)

    @property
    def described_bytes(self) -> int:
        return self.sums_offset + _U64 * self.blocks

    @property
    def data_offset(self) -> int:
        return align(self.described_bytes, ALIGNMENT)

    @property
    def record_bytes(self) -> int:
        return self.data_offset + self.kv_bytes

    def describe(self, known: Described) -> bytes:
        """The bytes in front of the data."""
        words = array("I", known.token_ids)
        words.extend(known.rows)
        return words.tobytes().ljust(self.sums_offset, b"\0") + array("Q", known.checksums).tobytes()

    def described(self, raw: bytes) -> Described:
        """What `describe` made these bytes of."""
        tokens = self.prompt_tokens
        words = memoryview(raw)[: self.sums_offset].cast("I").tolist()
        sums = memoryview(raw)[self.sums_offset :].cast("Q").tolist()
        return Described(tuple(words[:tokens]), tuple(words[tokens : tokens + self.planes]), tuple(sums))


def measure(planes: Planes, tokens: int) -> tuple[Body, tuple[int, ...]]:
    """The layout of a record of these planes, and their rows; LAYOUT unless they hold whole tokens."""
    return measure_sizes(sizes(planes), tokens)


def measure_sizes(
    plane_bytes: Sequence[int], tokens: int, *, checked: bool = True
) -> tuple[Body, tuple[int, ...]]:
    """The same of planes of these sizes, perhaps without checksums."""
    rows = bytes_per_token(plane_bytes, tokens)
    blocks = block_count(plane_bytes) if checked else 0
    return Body(tokens, len(rows), blocks, sum(plane_bytes)), rows


@dataclass(frozen=True, slots=True)
class Entry:
    """One index slot: what a reader must know before it touches the record.  Times in ns."""

    sequence: int
    key: bytes
    epoch: int
    place: Place
    published_ns: int
    ttl_ns: int
    description_checksum: int
    body: Body
    first: FirstToken
    ended: bool
    ranks: int = 1

    def record(self, handle: str, shard: str, rank: int, known: Described) -> Record:
        """What the bridge hands out for this entry."""
        return Record(
            handle=handle,
            shard=shard,
            epoch=self.epoch,
            sequence=self.sequence,
            token_ids=known.token_ids,
            first=self.first,
            ended=self.ended,
            kv_bytes=self.body.kv_bytes,
            place=self.place,
            rows=known.rows,
            checksums=known.checksums,
            rank=rank,
            ranks=self.ranks,
        )


_SLOT = struct.Struct(f"=QQ16sQQQQQQIIIIIId{TOP_TOKENS_MAX}II{TOP_TOKENS_MAX}d")
_SEALED_FROM = 16
"""The sequence, which is written last, stands at 0 and the checksum of what follows at 8."""
_ENDED, _PINNED = 1, 2


def pack_entry(entry: Entry) -> bytes:
    """A slot's bytes with the sequence still 0."""
    top = entry.first.top
    blank = TOP_TOKENS_MAX - len(top)
    packed = _SLOT.pack(
        0,
        0,
        entry.key,
        entry.epoch,
        entry.place.position,
        entry.body.kv_bytes,
        entry.published_ns,
        entry.ttl_ns,
        entry.description_checksum,
        entry.body.prompt_tokens,
        entry.body.planes,
        entry.body.blocks,
        entry.first.id,
        _ENDED * entry.ended | _PINNED * entry.place.pinned,
        len(top),
        entry.first.logprob,
        *(token for token, _ in top),
        *(0,) * blank,
        entry.ranks,
        *(logprob for _, logprob in top),
        *(0.0,) * blank,
    ).ljust(SLOT_BYTES, b"\0")
    seal = checksum(packed[_SEALED_FROM:], entry.sequence)
    return packed[:_U64] + struct.pack("=Q", seal) + packed[_SEALED_FROM:]


def sequence_of(raw: bytes) -> int:
    """The sequence in a slot's bytes; 0 while it is being written and once its record is gone."""
    (sequence,) = struct.unpack_from("=Q", raw)
    return int(sequence)


def unpack_entry(raw: bytes, slot: int) -> Entry | None:
    """The entry in `slot`'s bytes; None where they do not fit together (torn or damaged)."""
    sequence, seal, key, epoch, position, kv_bytes, published, ttl, described, *rest = _SLOT.unpack_from(raw)
    if seal != checksum(raw[_SEALED_FROM:], sequence):
        return None
    tokens, planes, blocks, token, flags, count, logprob, *top = rest
    ids, ranks, logprobs = top[:TOP_TOKENS_MAX], top[TOP_TOKENS_MAX], top[TOP_TOKENS_MAX + 1 :]
    return Entry(
        sequence=sequence,
        key=key,
        epoch=epoch,
        place=Place(slot, position, bool(flags & _PINNED)),
        published_ns=published,
        ttl_ns=ttl,
        description_checksum=described,
        body=Body(tokens, planes, blocks, kv_bytes),
        first=FirstToken(token, logprob, tuple(zip(ids[:count], logprobs, strict=False))),
        ended=bool(flags & _ENDED),
        ranks=ranks,
    )


def key_of(handle: str) -> bytes:
    """The 16 bytes of a handle; a text that is no handle names no record."""
    try:
        key = bytes.fromhex(handle)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise BridgeMiss(MissReason.MISSING, "not a handle")
    return key


def check_fits(body: Body, first: FirstToken, room_bytes: int, *, pinned: bool) -> None:
    """Raise BridgeMiss for what can never be exported into so large a ring, or pinned region."""
    region, share = ("pinned region", 1) if pinned else ("ring", RECORD_SHARE)
    if not room_bytes:
        raise BridgeMiss(MissReason.UNSUPPORTED, f"this shard has no {region}")
    if body.kv_bytes > room_bytes // share or body.record_bytes > room_bytes:
        raise BridgeMiss(MissReason.LAYOUT, f"{body.kv_bytes} bytes are over 1/{share} of the {region}")
    if len(first.top) > TOP_TOKENS_MAX:
        raise BridgeMiss(MissReason.LAYOUT, f"{len(first.top)} top tokens are more than {TOP_TOKENS_MAX}")
