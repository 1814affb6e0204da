"""The bytes of an arena file: header, key table, index of fixed slots, ring.

Every number is native 64-bit: all readers share the host.  A chain of checksums makes torn reads
visible whatever the CPU reorders: the slot's own covers the record's place and description, that
one the token ids and block checksums, those the data.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tgi_patches.bridge import FirstToken, Record
from tgi_patches.bridge.blocks import block_count, checksum
from tgi_patches.bridge.ring import ALIGNMENT, align
from tgi_patches.contract import TOP_TOKENS_MAX, BridgeMiss, MissReason

MAGIC = int.from_bytes(b"TGIARENA", "little")
VERSION = 1
PAGE_BYTES = 4096
HEADER_BYTES = PAGE_BYTES
SLOT_BYTES = 256
KEY_BYTES = 16
INDEX_SLOTS = 1024
RING_MIN_BYTES = 16 * PAGE_BYTES
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
    PINNED_OFFSET = 6
    """The place of hot records with explicit release; 0, none."""
    PINNED_BYTES = 7
    HEAD = 8
    TAIL = 9
    """Lowest virtual offset that is still valid; raised before bytes are overwritten."""
    HEARTBEAT_NS = 10
    """CLOCK_MONOTONIC of the last export, or of the start."""
    EXPORTS = 11
    EXPORTED_BYTES = 12
    OVERWRITTEN = 13
    """Records that were overwritten before they expired: the ring is too small."""


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Where the parts of one arena file lie, in bytes."""

    ring_bytes: int
    index_slots: int

    @property
    def slots_offset(self) -> int:
        return align(HEADER_BYTES + self.index_slots * KEY_BYTES, SLOT_BYTES)

    @property
    def ring_offset(self) -> int:
        return align(self.slots_offset + self.index_slots * SLOT_BYTES, PAGE_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.ring_offset + self.ring_bytes

    def key_offset(self, sequence: int) -> int:
        """Of the handle in the key table, which says where to look and nothing more."""
        return HEADER_BYTES + sequence % self.index_slots * KEY_BYTES

    def slot_offset(self, sequence: int) -> int:
        return self.slots_offset + sequence % self.index_slots * SLOT_BYTES


@dataclass(frozen=True, slots=True)
class Entry:
    """One index slot: what a reader must know before it touches the ring.  Times in ns."""

    sequence: int
    key: bytes
    epoch: int
    position: int
    kv_bytes: int
    published_ns: int
    ttl_ns: int
    description_checksum: int
    prompt_tokens: int
    first: FirstToken
    ended: bool

    def record(self, handle: str, shard: str, token_ids: Sequence[int], checksums: tuple[int, ...]) -> Record:
        """What the bridge hands out for this entry."""
        return Record(
            handle=handle,
            shard=shard,
            epoch=self.epoch,
            sequence=self.sequence,
            token_ids=tuple(token_ids),
            first=self.first,
            ended=self.ended,
            kv_bytes=self.kv_bytes,
            position=self.position,
            checksums=checksums,
        )


_SLOT = struct.Struct(f"=QQ16sQQQQQQIIIId{TOP_TOKENS_MAX}I4x{TOP_TOKENS_MAX}d")
_U64 = 8
KEY_OFFSET = 16
"""Of the handle's bytes within a slot; the sequence, which is written last, stands at 0."""
PUBLISHED_OFFSET = 56
"""Of `published_ns` within a slot; `ttl_ns` follows."""


def pack_entry(entry: Entry) -> bytes:
    """A slot's bytes with the sequence still 0."""
    top = entry.first.top
    blank = TOP_TOKENS_MAX - len(top)
    packed = _SLOT.pack(
        0,
        0,
        entry.key,
        entry.epoch,
        entry.position,
        entry.kv_bytes,
        entry.published_ns,
        entry.ttl_ns,
        entry.description_checksum,
        entry.prompt_tokens,
        entry.first.id,
        entry.ended,
        len(top),
        entry.first.logprob,
        *(token for token, _ in top),
        *(0,) * blank,
        *(logprob for _, logprob in top),
        *(0.0,) * blank,
    ).ljust(SLOT_BYTES, b"\0")
    seal = checksum(packed[KEY_OFFSET:], entry.sequence)
    return packed[:_U64] + struct.pack("=Q", seal) + packed[KEY_OFFSET:]


def sequence_of(raw: bytes) -> int:
    """The sequence in a slot's bytes; 0 while it is being written and once its record is gone."""
    (sequence,) = struct.unpack_from("=Q", raw)
    return int(sequence)


def unpack_entry(raw: bytes) -> Entry | None:
    """The slot's entry; None where the bytes do not fit together (torn or damaged)."""
    sequence, seal, key, epoch, position, kv_bytes, published, ttl, described, tokens, *rest = (
        _SLOT.unpack_from(raw)
    )
    if seal != checksum(raw[KEY_OFFSET:], sequence):
        return None
    token, ended, count, logprob, *top = rest
    return Entry(
        sequence=sequence,
        key=key,
        epoch=epoch,
        position=position,
        kv_bytes=kv_bytes,
        published_ns=published,
        ttl_ns=ttl,
        description_checksum=described,
        prompt_tokens=tokens,
        first=FirstToken(token, logprob, tuple(zip(top[:count], top[TOP_TOKENS_MAX:], strict=False))),
        ended=bool(ended),
    )


@dataclass(frozen=True, slots=True)
class Body:
    """Offsets within a record: token ids (u32), block checksums (u64), then the data."""

    prompt_tokens: int
    kv_bytes: int

    @property
    def sums_offset(self) -> int:
        return align(4 * self.prompt_tokens, _U64)

    @property
    def described_bytes(self) -> int:
        return self.sums_offset + _U64 * block_count(self.kv_bytes)

    @property
    def data_offset(self) -> int:
        return align(self.described_bytes, ALIGNMENT)

    @property
    def record_bytes(self) -> int:
        return self.data_offset + self.kv_bytes

    def describe(self, token_ids: Sequence[int], sums: Sequence[int]) -> bytes:
        """The bytes in front of the data."""
        return array("I", token_ids).tobytes().ljust(self.sums_offset, b"\0") + array("Q", sums).tobytes()

    def described(self, raw: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids and block checksums out of `describe`'s bytes."""
        ids = memoryview(raw)[: 4 * self.prompt_tokens].cast("I")
        return tuple(ids), tuple(memoryview(raw)[self.sums_offset :].cast("Q"))


def key_of(handle: str) -> bytes:
    """The 16 bytes of a handle; a text that is no handle names no record."""
    try:
        key = bytes.fromhex(handle)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise BridgeMiss(MissReason.MISSING, "not a handle")
    return key


def checked_body(token_ids: Sequence[int], first: FirstToken, kv_bytes: int, ring_bytes: int) -> Body:
    """The layout of a record to be exported; UNSUPPORTED without a ring, LAYOUT if it is too large."""
    if not ring_bytes:
        raise BridgeMiss(MissReason.UNSUPPORTED, "this shard has no ring")
    body = Body(len(token_ids), kv_bytes)
    if kv_bytes > ring_bytes // RECORD_SHARE or body.record_bytes > ring_bytes:
        raise BridgeMiss(MissReason.LAYOUT, f"{kv_bytes} bytes are over 1/{RECORD_SHARE} of the ring")
    if len(first.top) > TOP_TOKENS_MAX:
        raise BridgeMiss(MissReason.LAYOUT, f"{len(first.top)} top tokens are more than {TOP_TOKENS_MAX}")
    return body
